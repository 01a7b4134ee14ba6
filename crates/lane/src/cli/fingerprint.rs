//! `lane fingerprint`.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::Context as _;
use lane::loading::read_matrix;
use q4k_soa::{PackedLayout, Shape, fingerprint};

use super::{open_model, print, read_text};

#[derive(clap::Args)]
pub(super) struct Args {
    /// GGUF file
    file: PathBuf,
    /// Compare with lines that this command printed before
    #[arg(long, value_name = "MANIFEST")]
    check: Option<PathBuf>,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let expected = args.check.as_ref().map(read_manifest).transpose()?;
    let file = open_model(Some(&args.file))?;
    let (mut differing, mut checked) = (Vec::new(), 0);
    for matrix in file.model.matrices() {
        let info = matrix.info(&file.gguf);
        let shape = Shape { n_out: matrix.n_out, n_in: matrix.n_in };
        let layout = PackedLayout::planes(matrix.ty, shape)?;
        let key = fingerprint(&layout, &read_matrix(&file.gguf, &matrix)?)?;
        let line =
            format!("{key} {} {}x{} {}", matrix.ty.name(), matrix.n_out, matrix.n_in, info.name());
        match &expected {
            None => print(&(line + "\n"))?,
            Some(manifest) => {
                checked += 1;
                if manifest.get(info.name()) != Some(&line) {
                    differing.push(info.name().to_owned());
                }
            }
        }
    }
    let Some(manifest) = expected else { return Ok(()) };
    anyhow::ensure!(
        differing.is_empty(),
        "{} of {checked} matrices differ from the manifest or are not in it: {}{}",
        differing.len(),
        differing[..differing.len().min(5)].join(", "),
        if differing.len() > 5 { ", …" } else { "" }
    );
    anyhow::ensure!(
        manifest.len() == checked,
        "the manifest has {} matrices, the file {checked}",
        manifest.len()
    );
    print(&format!("{checked} matrices match\n"))
}

/// Lines by matrix name, which is the last word.
fn read_manifest(path: &PathBuf) -> anyhow::Result<HashMap<String, String>> {
    let name = path.display().to_string();
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {name}"))?;
    let text = read_text(file, &name)?;
    anyhow::ensure!(!text.trim().is_empty(), "{name} is empty");
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let name = line.split_whitespace().nth(3).with_context(|| {
                format!("{}: not a line of `lane fingerprint`: {line}", path.display())
            })?;
            Ok((name.to_owned(), line.to_owned()))
        })
        .collect()
}
