//! `lane perplexity`.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;
use decode_graph::Numerics;
use lane::ContextSize;
use lane::model::Model;
use lane::perplexity::{Chunks, Divergence, Measurement, Tally};
use serde::Serialize;

use super::{LoadArgs, NumericsArg, open_model, print, print_json, progress, read_text};

/// What llama.cpp takes where nothing is asked for.
const DEFAULT_CHUNK_TOKENS: u32 = 512;

/// `--kl exact`: the same file in exact numerics.
const EXACT: &str = "exact";

#[derive(clap::Args)]
pub(super) struct Args {
    /// Text to predict; `-` reads it from stdin
    #[arg(value_name = "FILE")]
    text: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
    /// Compare the predictions with those of another file, or of the same one in `exact` numerics:
    /// Kullback–Leibler divergence and how often the likeliest token is the same
    #[arg(long, value_name = "FILE|exact")]
    kl: Option<PathBuf>,
    /// Measure this many chunks of the text at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

impl Args {
    fn text(&self) -> anyhow::Result<String> {
        if self.text.as_os_str() == "-" {
            return read_text(io::stdin(), "the text from stdin");
        }
        let name = format!("the text from {}", self.text.display());
        read_text(File::open(&self.text).with_context(|| format!("cannot read {name}"))?, &name)
    }

    /// How the model is loaded: its context is one chunk, and its numerics are another's too.
    fn load(&self, model: &Model) -> LoadArgs {
        let mut load = self.load.clone();
        load.numerics = match load.numerics.of(model, load.fusion) {
            Numerics::Q8 => NumericsArg::Q8,
            Numerics::Exact => NumericsArg::Exact,
        };
        if load.ctx == ContextSize::Auto {
            let trained = model.config.context_length;
            load.ctx = ContextSize::Tokens(trained.min(DEFAULT_CHUNK_TOKENS));
        }
        load
    }

    fn kl_name(&self) -> String {
        self.kl.as_ref().map(|kl| kl.display().to_string()).unwrap_or_default()
    }

    /// How the reference is loaded.
    fn reference(&self, load: &LoadArgs) -> Option<LoadArgs> {
        let kl = self.kl.as_ref()?;
        let mut reference = load.clone();
        if kl.as_os_str() == EXACT {
            reference.numerics = NumericsArg::Exact;
            reference.fusion = super::FusionArg::Auto;
        } else {
            reference.model = Some(kl.clone());
        }
        Some(reference)
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let text = args.text()?;
    let file = open_model(args.load.model.as_deref())?;
    let load = args.load(&file.model);
    let (lane, model) = load.load_opened(&file)?;
    let n_ctx = lane.kv()?.max_context_tokens();
    let chunks = Chunks::new(lane.tokenizer(), &text, n_ctx)?;
    let n_chunks = chunks.count().min(args.chunks.map_or(usize::MAX, |n| n as usize));
    let reference = args.reference(&load).map(|load| load.load()).transpose()?;
    let reference_lane = reference.as_ref().map(|(lane, _)| lane);

    let backend = lane.backend()?;
    let device = lane.device()?;
    if !args.json {
        let what = format!("[{model} on {device}: {n_chunks} chunks of {n_ctx} tokens]");
        super::say(&super::visible(&what));
    }
    let mut measurement = Measurement::new(&lane, reference_lane)?;
    let bar = progress::Bar::tokens("measuring");
    let fed_per_chunk = u64::from(n_ctx) - 1;
    let total = n_chunks as u64 * fed_per_chunk;
    let (mut done, mut found) = (0, Vec::new());
    for ids in chunks.iter().take(n_chunks) {
        measurement.chunk(&ids, || {
            done += 1;
            bar.show(done, total);
        })?;
        let so_far = ChunkSummary::new(measurement.tally());
        if !args.json {
            progress::suspended(|| print(&so_far.line(found.len() + 1)))?;
        }
        found.push(so_far);
    }
    drop(bar);
    let tally = measurement.tally().clone();
    drop(measurement);
    let (ppl, ppl_error) = tally.perplexity();
    let summary = Summary {
        model,
        numerics: name_of(load.numerics),
        backend,
        device,
        n_ctx,
        n_chunks,
        n_scored: tally.nll().count(),
        ppl,
        ppl_error,
        nll_mean: tally.nll().value(),
        chunks: found,
        kl: tally.divergence().map(|found| KlSummary::new(args.kl_name(), found)),
    };
    if args.json { print_json(&summary) } else { print(&summary.text()) }
}

fn name_of(numerics: NumericsArg) -> String {
    numerics.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// What `--json` prints.
#[derive(Serialize)]
struct Summary {
    model: String,
    numerics: String,
    backend: &'static str,
    device: String,
    n_ctx: u32,
    n_chunks: usize,
    /// Predictions that count.
    n_scored: u64,
    ppl: f64,
    ppl_error: f64,
    /// Nats.
    nll_mean: f64,
    chunks: Vec<ChunkSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kl: Option<KlSummary>,
}

/// Everything up to and with a chunk.
#[derive(Serialize)]
struct ChunkSummary {
    ppl: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_mean: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    same_top: Option<f64>,
}

impl ChunkSummary {
    fn new(tally: &Tally) -> Self {
        let divergence = tally.divergence();
        Self {
            ppl: tally.perplexity().0,
            kl_mean: divergence.map(|found| found.kl().value()),
            same_top: divergence.map(|found| found.same_top().value()),
        }
    }

    fn line(&self, number: usize) -> String {
        match (self.kl_mean, self.same_top) {
            (Some(kl), Some(top)) => format!(
                "[{number}] PPL {:.4}, KL divergence {kl:.6}, same top token {:.2} %\n",
                self.ppl,
                100.0 * top
            ),
            _ => format!("[{number}] {:.4}\n", self.ppl),
        }
    }
}

/// Divergences in nats, shares and probabilities from 0 to 1.
#[derive(Serialize)]
struct KlSummary {
    reference: String,
    reference_ppl: f64,
    reference_ppl_error: f64,
    mean: f64,
    error: f64,
    median: f32,
    p90: f32,
    p99: f32,
    max: f32,
    same_top: f64,
    same_top_error: f64,
    /// Of the probability of the text's own token.
    rms_probability_change: f64,
}

impl KlSummary {
    fn new(reference: String, found: &Divergence) -> Self {
        let (reference_ppl, reference_ppl_error) = found.reference_perplexity();
        Self {
            reference,
            reference_ppl,
            reference_ppl_error,
            mean: found.kl().value(),
            error: found.kl().error(),
            median: found.kl_quantile(0.5),
            p90: found.kl_quantile(0.9),
            p99: found.kl_quantile(0.99),
            max: found.kl_quantile(1.0),
            same_top: found.same_top().value(),
            same_top_error: found.same_top().error(),
            rms_probability_change: found.rms_change(),
        }
    }
}

impl Summary {
    fn text(&self) -> String {
        let mut text = format!("Final estimate: PPL = {:.4} +/- {:.5}\n", self.ppl, self.ppl_error);
        if let Some(kl) = &self.kl {
            text += &format!(
                "Of {}: PPL = {:.4} +/- {:.5}\n\
                 KL divergence: mean {:.6} +/- {:.6}, median {:.6}, 90 % {:.6}, 99 % {:.6}, \
                 maximum {:.6}\n\
                 Same top token: {:.3} +/- {:.3} %\n\
                 Probability of the text's token: changed by {:.3} % (RMS)\n",
                super::visible(&kl.reference),
                kl.reference_ppl,
                kl.reference_ppl_error,
                kl.mean,
                kl.error,
                kl.median,
                kl.p90,
                kl.p99,
                kl.max,
                100.0 * kl.same_top,
                100.0 * kl.same_top_error,
                100.0 * kl.rms_probability_change,
            );
        }
        text
    }
}
