//! `lane logits`.

use lane::tokenizer::Special;
use serde::Serialize;

use super::{LoadArgs, print_json};

#[derive(clap::Args)]
#[group(id = "input", required = true, multiple = false, args = ["prompt", "ids"])]
pub(super) struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// Text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Token ids, used as they are
    #[arg(long, value_name = "ID,ID…", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// JSON is the only form there is
    #[arg(long)]
    json: bool,
}

/// The same fields as a case of the reference files.
#[derive(Serialize)]
struct Logits {
    ids: Vec<u32>,
    /// Mean negative log-likelihood of `ids[1..]`, nats.
    nll_mean: Option<f64>,
    /// L2 norm of the logits behind the last token.
    logits_l2: f64,
    /// The 16 largest.
    top: Vec<(u32, f32)>,
    /// Every n_vocab/64-th.
    probe: Vec<(u32, f32)>,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.json;
    let (lane, _) = args.load.load()?;
    let ids = match (args.prompt, args.ids) {
        (Some(text), _) => {
            anyhow::ensure!(!text.is_empty(), "the prompt is empty");
            lane.tokenizer().encode_prompt(&text, Special::AsText)?
        }
        (None, ids) => ids.unwrap_or_default(),
    };
    let evaluation = lane.evaluate(&ids)?;
    let step = (evaluation.logits.len() / 64).max(1);
    let logits = &evaluation.logits;
    let pair = |id: usize| (id as u32, logits[id]);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    print_json(&Logits {
        nll_mean: evaluation.nll_mean,
        logits_l2: logits.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt(),
        top: order.iter().take(16).map(|&id| pair(id)).collect(),
        probe: (0..logits.len()).step_by(step).map(pair).collect(),
        ids,
    })
}
