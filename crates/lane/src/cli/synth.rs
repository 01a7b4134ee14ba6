//! `lane synth`.

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use lane::synth::{Mix, Shape};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Model whose shape is taken
    #[arg(long, value_name = "NAME", value_parser = names(Shape::ALL.map(Shape::name)))]
    shape: String,
    /// Quantisation mix
    #[arg(long, value_name = "MIX", default_value = "q4_k_m", value_parser = names(Mix::ALL.map(Mix::name)))]
    mix: String,
    /// Equal seeds write equal files
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace a file that is there
    #[arg(long)]
    force: bool,
}

fn names<const N: usize>(names: [&'static str; N]) -> clap::builder::PossibleValuesParser {
    names.into()
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let shape = Shape::from_name(&args.shape).context("unknown shape")?;
    let mix = Mix::from_name(&args.mix).context("unknown mix")?;
    let path = || format!("cannot write {}", args.out.display());
    match std::fs::metadata(&args.out) {
        // Renaming would put a file in the place of a device.
        Ok(there) if !there.is_file() => bail!("{} is not a regular file", args.out.display()),
        Ok(_) if !args.force => bail!("{} exists; --force replaces it", args.out.display()),
        _ => {}
    }
    // Under another name until it is whole.
    let partial = PathBuf::from(format!("{}.partial", args.out.display()));
    let out = BufWriter::new(File::create(&partial).with_context(path)?);
    let total_bytes = lane::synth::file_bytes(shape, mix, args.seed);
    let bar = super::progress::Bar::bytes("writing");
    let progress = |done_bytes| bar.show(done_bytes, total_bytes);
    let written = lane::synth::write(shape, mix, args.seed, out, progress)
        .and_then(|()| std::fs::rename(&partial, &args.out));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(path)
}
