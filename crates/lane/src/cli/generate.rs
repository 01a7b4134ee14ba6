//! `lane generate`.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use lane::chat::{ChatTemplate, Conversation, Role};
use lane::residency::Telemetry;
use lane::saved_state::SavedState;
use lane::tokenizer::Special;
use lane::{GenerateOptions, Lane, LaneError, Logprob, Logprobs, Sampling, StopReason, Timing};
use serde::Serialize;

use super::generation::GenerationArgs;
use super::{INTERRUPTED, LoadArgs, end_on_interrupt, print, print_json, read_text};

/// A prompt for which it pays to load weights in a second layout, if the step of a token reads
/// another than prompt chunks do: about a thousand tokens.
const LONG_PROMPT_BYTES: usize = 4096;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The text to go on from; `-` reads it from stdin
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the text from a file; its last newline, like stdin's, is not part of it
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens to generate at most
    #[arg(short, long = "tokens", alias = "n-predict", default_value_t = 128, value_name = "N")]
    n: u32,
    #[command(flatten)]
    generation: GenerationArgs,
    /// Treat the prompt as a chat message: apply the model's chat template
    #[arg(long)]
    chat: bool,
    /// Instructions before the chat message
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// Recognise special tokens written in the prompt
    #[arg(long, conflicts_with = "chat")]
    special: bool,
    /// Begin with the state in this file: what it holds of the prompt is not computed again
    #[arg(long, value_name = "FILE")]
    load_state: Option<PathBuf>,
    /// Write what the cache holds in the end, the prompt and the answer, to this file
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Print one JSON object at the end instead of the text
    #[arg(long)]
    json: bool,
    /// Tell with each token how likely it and the N likeliest were. All logits are read back for
    /// it, as for penalties
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
}

impl Args {
    fn prompt_text(&self) -> anyhow::Result<String> {
        let mut text = match (&self.file, self.prompt.as_deref()) {
            (Some(path), _) => {
                let name = format!("the prompt from {}", path.display());
                let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
                read_text(file, &name)?
            }
            (None, Some("-")) => read_text(io::stdin(), "the prompt from stdin")?,
            (None, given) => return Ok(given.unwrap_or_default().to_owned()),
        };
        if text.ends_with('\n') {
            text.pop();
        }
        Ok(text)
    }

    /// The prompt's ids, and the text that ends an answer to it.
    fn prompt_ids(
        &self,
        prompt: &str,
        lane: &Lane,
    ) -> anyhow::Result<(Vec<u32>, Option<&'static str>)> {
        let tokenizer = lane.tokenizer();
        if self.chat {
            let template = ChatTemplate::for_tokenizer(tokenizer)?;
            if let Some(fallback) = template.fallback() {
                log::warn!(target: "lane", "{fallback}");
            }
            let mut conversation = Conversation::default();
            if let Some(system) = &self.system {
                conversation.push(Role::System, system.as_str());
            }
            conversation.push(Role::User, prompt);
            let ids = template.encode(tokenizer, &conversation, true)?;
            return Ok((ids, template.stop_text()));
        }
        let special = if self.special { Special::Parse } else { Special::AsText };
        Ok((tokenizer.encode_prompt(prompt, special)?, None))
    }
}

pub(super) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let generation = args.generation.options(args.n, Sampling::default().temperature);
    let options = GenerateOptions { logprobs: args.logprobs, ..generation };
    options.check()?;
    let prompt = args.prompt_text()?;
    anyhow::ensure!(!prompt.is_empty(), "the prompt is empty: give some text to go on from");
    let started = Instant::now();
    let two_layouts = prompt.len() >= LONG_PROMPT_BYTES;
    let (lane, model) = LoadArgs { two_layouts, ..args.load.clone() }.load()?;
    let load = started.elapsed();
    let (prompt_ids, stop_text) = args.prompt_ids(&prompt, &lane)?;
    if let Some(path) = &args.load_state {
        load_state(&lane, path, &prompt_ids)?;
    }
    end_on_interrupt(options.cancel.clone())?;

    let mut generation = lane.generate(&prompt_ids, options.stopping_at(stop_text))?;
    let (mut ids, mut text, mut logprobs) = (Vec::new(), String::new(), Vec::new());
    for token in generation.by_ref() {
        let token = token?;
        ids.push(token.id);
        logprobs.extend(token.logprobs.map(|found| TokenLogprobs::new(&lane, &found)));
        if args.json { text += &token.text } else { print(&token.text)? }
    }
    let rest = generation.finish_text();
    let (stop, timing) =
        (generation.stop_reason().unwrap_or(StopReason::Length), generation.timing());
    drop(generation);

    let logprobs = args.logprobs.map(|_| logprobs);
    let generated = Generated { prompt_ids, ids, text: text + &rest, logprobs, stop };
    let summary = Summary::new(&lane, model, load, generated, timing)?;
    if args.json {
        print_json(&summary)?;
    } else {
        print(&(rest + "\n"))?;
        super::say(&summary.line());
    }
    // After the answer, which nobody should miss because this fails.
    if let Some(path) = &args.save_state {
        let saved = lane.save_state().and_then(|state| Ok(state.write(path)?));
        saved.with_context(|| format!("cannot save the state to {}", path.display()))?;
    }
    let interrupted = summary.generated.stop == StopReason::Cancelled;
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn load_state(lane: &Lane, path: &Path, prompt: &[u32]) -> anyhow::Result<()> {
    let loaded = SavedState::read(path).map_err(LaneError::from).and_then(|state| {
        lane.load_state(&state)?;
        Ok(state.tokens)
    });
    let tokens = loaded.with_context(|| format!("cannot use the state in {}", path.display()))?;
    let common = tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    if common < tokens.len() {
        let n = tokens.len();
        log::warn!(target: "lane", "of the {n} tokens of the state the prompt begins with {common}");
    }
    Ok(())
}

#[derive(Serialize)]
struct Generated {
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenLogprobs>>,
    stop: StopReason,
}

/// How likely a token was, and the likeliest in its place.
#[derive(Serialize)]
struct TokenLogprobs {
    #[serde(flatten)]
    chosen: TokenLogprob,
    top: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct TokenLogprob {
    id: u32,
    /// What the token spells; part characters are U+FFFD.
    text: String,
    /// Natural logarithm, before temperature and penalties.
    logprob: f32,
}

impl TokenLogprobs {
    fn new(lane: &Lane, found: &Logprobs) -> Self {
        let tokenizer = lane.tokenizer();
        let token = |&Logprob { id, logprob }: &Logprob| {
            let text = match tokenizer.special_text(id) {
                Some(text) => text.to_owned(),
                None => String::from_utf8_lossy(tokenizer.piece_bytes(id)).into_owned(),
            };
            TokenLogprob { id, text, logprob }
        };
        Self { chosen: token(&found.chosen), top: found.top.iter().map(token).collect() }
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Summary {
    model: String,
    backend: &'static str,
    device: String,
    #[serde(flatten)]
    generated: Generated,
    graph: GraphSummary,
    slab: SlabSummary,
    kv: KvSummary,
    timing: TimingSummary,
}

#[derive(Serialize)]
struct GraphSummary {
    key: String,
    nodes: usize,
    h2d_bytes_per_token: Option<u64>,
    d2h_bytes_per_token: Option<u64>,
    captures: u64,
    replays: u64,
}

#[derive(Serialize)]
struct SlabSummary {
    capacity_bytes: u64,
    permanent_end_bytes: u64,
    high_water_bytes: u64,
    resident_weights: usize,
    resident_bytes: u64,
}

#[derive(Serialize)]
struct KvSummary {
    max_context_tokens: u32,
    block_size: u32,
    blocks: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TimingSummary {
    load_ms: f64,
    first_token_ms: f64,
    prefill_tokens_per_s: Option<f64>,
    decode_tokens_per_s: Option<f64>,
    decode_ms_per_token: Option<f64>,
}

impl Summary {
    fn new(
        lane: &Lane,
        model: String,
        load: Duration,
        generated: Generated,
        timing: Timing,
    ) -> anyhow::Result<Self> {
        let telemetry: Telemetry = lane.telemetry()?;
        let graph = telemetry.graph.context("no graph was captured")?;
        let kv = lane.kv()?;
        let per_s = |tokens: u32, time: Duration| {
            (tokens > 0).then(|| f64::from(tokens) / time.as_secs_f64())
        };
        let decode_tokens_per_s = per_s(timing.decode_tokens, timing.decode);
        Ok(Self {
            model,
            backend: lane.backend()?,
            device: lane.device()?,
            generated,
            graph: GraphSummary {
                key: graph.key.to_string(),
                nodes: graph.nodes,
                // Of a single token only the prompt's upload could be told.
                h2d_bytes_per_token: graph.h2d_bytes_per_token.filter(|_| timing.decode_tokens > 0),
                d2h_bytes_per_token: telemetry.d2h_bytes_per_token,
                captures: telemetry.captures,
                replays: graph.replays,
            },
            slab: SlabSummary {
                capacity_bytes: telemetry.capacity_bytes,
                permanent_end_bytes: telemetry.permanent_end_bytes,
                high_water_bytes: telemetry.high_water_bytes,
                resident_weights: telemetry.resident_weights,
                resident_bytes: telemetry.resident_weight_bytes,
            },
            kv: KvSummary {
                max_context_tokens: kv.max_context_tokens(),
                block_size: kv.block_size_tokens(),
                blocks: u64::from(kv.blocks_per_layer()) * u64::from(kv.n_layer()),
                bytes: kv.total_bytes(),
            },
            timing: TimingSummary {
                load_ms: load.as_secs_f64() * 1e3,
                first_token_ms: timing.first_token.as_secs_f64() * 1e3,
                prefill_tokens_per_s: per_s(timing.prefill_tokens, timing.first_token),
                decode_tokens_per_s,
                decode_ms_per_token: decode_tokens_per_s.map(|rate| 1e3 / rate),
            },
        })
    }

    fn line(&self) -> String {
        let rate = self.timing.decode_tokens_per_s.map_or("-".into(), |rate| format!("{rate:.1}"));
        format!(
            "[{} tokens, {rate} tok/s with {} on {}; graph of {} nodes, {} H2D bytes/token; slab {:.1} of \
             {:.1} MiB]",
            self.generated.ids.len(),
            super::visible(&self.model),
            self.device,
            self.graph.nodes,
            self.graph.h2d_bytes_per_token.map_or("-".into(), |bytes| bytes.to_string()),
            self.slab.high_water_bytes as f64 / 1048576.0,
            self.slab.capacity_bytes as f64 / 1048576.0,
        )
    }
}
