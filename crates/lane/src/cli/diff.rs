//! `lane diff`.

use anyhow::Context as _;
use lane::tokenizer::Special;

use super::{LoadArgs, open_model, print};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The text whose last token's step is compared
    prompt: String,
    #[command(flatten)]
    load: LoadArgs,
    /// The two backends
    #[arg(long, value_name = "A,B", default_value = "host,cuda", value_parser = ["host,cuda"])]
    backends: String,
    /// Compare the step of this token of the prompt, from 0 [default: the last]
    #[arg(long, value_name = "N")]
    token: Option<usize>,
    /// How far f32 results may be apart, relative to the largest value of their buffer
    #[arg(long, default_value_t = 1e-4)]
    tolerance: f64,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let file = open_model(args.load.model.as_deref())?;
    let mut ids = file.tokenizer()?.encode_prompt(&args.prompt, Special::AsText)?;
    let n_tokens = ids.len();
    if let Some(token) = args.token {
        anyhow::ensure!(token < n_tokens, "--token {token}: the prompt has {n_tokens} tokens");
        ids.truncate(token + 1);
    }
    anyhow::ensure!(!ids.is_empty(), "the prompt is empty");
    print(&compare(&args, &file, &ids).context("cannot compare the backends")?)
}

#[cfg(cuda_backend)]
fn compare(args: &Args, file: &lane::ModelFile, ids: &[u32]) -> anyhow::Result<String> {
    let mut options = args.load.options(&file.model);
    // Inside one kernel for the whole step there is nothing to compare launch by launch.
    options.plan.fusion = lane::FusionChoice::Ops;
    let backend = lane::open_cuda::open(options.device)?;
    // One plan, so that both memories are laid out alike.
    let plan = file.plan_cuda(&backend, &options)?;
    let mut cuda = file.load_cuda_as_planned(backend, &plan, &mut |_| {})?;
    let mut host = file.load_host_as_planned(&plan, &mut |_| {})?;
    let found = lane::diff::diff(&mut host, &mut cuda, ids, args.tolerance)?;
    if let Some(first) = found.first {
        anyhow::bail!("host and cuda differ: {first}");
    }
    Ok(format!(
        "{} launches agree, f32 within {:.1e} of the largest value\n",
        found.launches, found.worst
    ))
}

#[cfg(not(cuda_backend))]
fn compare(_: &Args, _: &lane::ModelFile, _: &[u32]) -> anyhow::Result<String> {
    anyhow::bail!("this build has no CUDA backend")
}
