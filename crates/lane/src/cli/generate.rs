//! `lane generate`.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use lane::chat::{ChatTemplate, Conversation, Role};
use lane::residency::Telemetry;
use lane::tokenizer::Special;
use lane::{DriveMode, GenerateOptions, Lane, Sampling, StopReason, Timing};
use serde::Serialize;

use super::{LoadArgs, print, print_json};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The text to go on from; `-` reads it from stdin
    prompt: String,
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens to generate at most
    #[arg(short, default_value_t = 128, value_name = "N")]
    n: u32,
    /// Temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temp: f32,
    /// Keep this many likeliest tokens (0: 1024)
    #[arg(long, default_value_t = 40)]
    top_k: u32,
    /// Keep the likeliest tokens that together are this probable
    #[arg(long, default_value_t = 0.95, allow_negative_numbers = true)]
    top_p: f32,
    /// Keep tokens at least this probable relative to the likeliest
    #[arg(long, default_value_t = 0.05, allow_negative_numbers = true)]
    min_p: f32,
    /// Equal seeds draw equal texts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whether the device feeds itself (0 bytes per token) or the host does (12 bytes)
    #[arg(long, value_enum, default_value = "self")]
    drive: DriveArg,
    /// Go on beyond the context, forgetting the oldest tokens
    #[arg(long)]
    ring: bool,
    /// Treat the prompt as a chat message: apply the model's chat template
    #[arg(long)]
    chat: bool,
    /// Recognise special tokens written in the prompt
    #[arg(long)]
    special: bool,
    /// Print one JSON object at the end instead of the text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum DriveArg {
    #[value(name = "self")]
    SelfAdvance,
    Host,
}

impl From<DriveArg> for DriveMode {
    fn from(drive: DriveArg) -> Self {
        match drive {
            DriveArg::SelfAdvance => DriveMode::SelfAdvance,
            DriveArg::Host => DriveMode::Host,
        }
    }
}

impl Args {
    fn options(&self) -> GenerateOptions {
        GenerateOptions {
            n_tokens: self.n,
            sampling: Sampling {
                temperature: self.temp,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                seed: self.seed,
            },
            drive: self.drive.into(),
            ring: self.ring,
            ignore_end: false,
        }
    }

    fn prompt_ids(&self, lane: &Lane) -> anyhow::Result<Vec<u32>> {
        let mut stdin = String::new();
        let prompt = if self.prompt == "-" {
            std::io::stdin().read_to_string(&mut stdin).context("cannot read the prompt")?;
            &stdin
        } else {
            &self.prompt
        };
        anyhow::ensure!(!prompt.is_empty(), "the prompt is empty: give some text to go on from");
        let tokenizer = lane.tokenizer();
        if self.chat {
            let template = ChatTemplate::for_tokenizer(tokenizer)?;
            let mut conversation = Conversation::default();
            conversation.push(Role::User, prompt.as_str());
            return Ok(template.encode(tokenizer, &conversation, true)?);
        }
        let special = if self.special { Special::Parse } else { Special::AsText };
        Ok(tokenizer.encode_prompt(prompt, special)?)
    }
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let options = args.options();
    options.sampling.check()?;
    let started = Instant::now();
    let (lane, model) = args.load.load()?;
    let load = started.elapsed();
    let prompt_ids = args.prompt_ids(&lane)?;

    let mut generation = lane.generate(&prompt_ids, options)?;
    let (mut ids, mut text) = (Vec::new(), String::new());
    for token in generation.by_ref() {
        let token = token?;
        ids.push(token.id);
        if args.json { text += &token.text } else { print(&token.text)? }
    }
    let rest = generation.finish_text();
    let (stop, timing) =
        (generation.stop_reason().unwrap_or(StopReason::Length), generation.timing());
    drop(generation);

    let summary = Summary::new(&lane, model, load, prompt_ids, ids, text + &rest, stop, timing)?;
    if args.json {
        return print_json(&summary);
    }
    print(&(rest + "\n"))?;
    eprintln!("{}", summary.line());
    Ok(())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Summary {
    model: String,
    backend: &'static str,
    device: String,
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    text: String,
    stop: StopReason,
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
    #[allow(clippy::too_many_arguments)]
    fn new(
        lane: &Lane,
        model: String,
        load: Duration,
        prompt_ids: Vec<u32>,
        ids: Vec<u32>,
        text: String,
        stop: StopReason,
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
            prompt_ids,
            ids,
            text,
            stop,
            graph: GraphSummary {
                key: graph.key.to_string(),
                nodes: graph.nodes,
                h2d_bytes_per_token: graph.h2d_bytes_per_token,
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
            "[{} tokens, {rate} tok/s on {}; graph of {} nodes, {} H2D bytes/token; slab {:.1} of \
             {:.1} MiB]",
            self.ids.len(),
            self.device,
            self.graph.nodes,
            self.graph.h2d_bytes_per_token.map_or("-".into(), |bytes| bytes.to_string()),
            self.slab.high_water_bytes as f64 / 1048576.0,
            self.slab.capacity_bytes as f64 / 1048576.0,
        )
    }
}
