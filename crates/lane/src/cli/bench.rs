//! `lane bench`: llama-bench's table, with what the bytes say beside it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use lane::synth::{Mix, Shape};
use lane::{DriveMode, GenerateOptions, Lane, Sampling};
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use super::{LoadArgs, MAX_BATCH, open_model, print};

mod batch;
mod ops;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// A real model's shape with random weights, instead of a file
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    shape: Option<String>,
    /// Quantisation mix of --shape
    #[arg(long, value_name = "MIX", default_value = "q4_k_m")]
    mix: String,
    /// Seed of the weights of --shape and of the tokens
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Prompt tokens to process (0: no such row)
    #[arg(
        short,
        long = "n-prompt",
        value_delimiter = ',',
        default_value = "512",
        value_name = "N,N…"
    )]
    p: Vec<u32>,
    /// Tokens to generate (0: no such row)
    #[arg(short, long = "n-gen", default_value_t = 128, value_name = "N")]
    n: u32,
    /// Tokens already in the cache
    #[arg(
        short,
        long = "n-depth",
        value_delimiter = ',',
        default_value = "0",
        value_name = "N,N…"
    )]
    d: Vec<u32>,
    /// Sequences that decode at the same time; more than one are a cache of their own
    #[arg(short = 'B', value_delimiter = ',', default_value = "1", value_name = "N,N…", value_parser = clap::value_parser!(u32).range(1..=MAX_BATCH))]
    b: Vec<u32>,
    /// Repetitions
    #[arg(short, long = "repetitions", default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    r: u32,
    /// Whether the device feeds itself or the host does
    #[arg(long, value_enum, default_value = "self")]
    drive: super::generation::DriveArg,
    /// Time the operations of the step instead, each kind by itself
    #[arg(long)]
    ops: bool,
    /// Form of the results
    #[arg(short, long = "output", value_enum, default_value = "md")]
    o: Output,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Output {
    Md,
    Json,
    Jsonl,
    Csv,
}

/// A row. Names up to `stddev_ts` are llama-bench's.
#[derive(Serialize)]
struct Row {
    model_filename: String,
    model_type: String,
    model_size: u64,
    model_n_params: u64,
    backends: String,
    gpu_info: String,
    n_prompt: u32,
    n_gen: u32,
    n_depth: u32,
    /// Sequences that decode at the same time; the rates are of all together.
    n_parallel: u32,
    avg_ns: u64,
    stddev_ns: u64,
    avg_ts: f64,
    stddev_ts: f64,
    median_ts: f64,
    /// Bytes of the file's weights that a step needs and of the KV cache that is live, over the time.
    gb_per_s: f64,
    /// What the backend reads at best, measured in the same run.
    read_gb_per_s: f64,
    /// `gb_per_s` of it.
    read_fraction: f64,
    graph_nodes: usize,
    h2d_bytes_per_token: Option<u64>,
    d2h_bytes_per_token: Option<u64>,
    output_hash: String,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let measures = args.ops || args.n > 0 || args.p.iter().any(|&n| n > 0);
    anyhow::ensure!(measures, "nothing to measure: neither -p nor -n asks for a token");
    let folder = SynthFile::write(&args)?;
    let path = args.load.model.clone().or(folder.as_ref().map(|file| file.path.clone()));
    let two_layouts = args.p.iter().any(|&n| n > 0);
    let load = LoadArgs { model: path.clone(), two_layouts, ..args.load.clone() };
    let file = open_model(path.as_deref())?;
    let (lane, model) = load.load()?;
    let kv = lane.kv()?;
    let slots = u64::from(kv.blocks_per_layer()) * u64::from(kv.block_size_tokens());
    let facts = Facts {
        model: args.shape.clone().unwrap_or(model),
        label: file.model.label(),
        size: file.model.matrices().map(|matrix| matrix.n_bytes()).sum(),
        n_params: file.model.n_params,
        bytes_per_token: file.model.bytes_per_token(),
        kv_bytes_per_token: kv.total_bytes() / slots,
        read_gb_per_s: lane.read_bandwidth()? / 1e9,
    };
    if args.ops {
        let rows = ops::measure(&args, &lane, &facts)?;
        return print(&match format_data(&rows, args.o)? {
            Some(data) => data,
            None => ops::table(&rows, &facts),
        });
    }
    let mut rows = Vec::new();
    for &depth in &args.d {
        for &n in args.p.iter().filter(|&&n| n > 0) {
            rows.push(measure(&lane, &facts, &args, Test::Prompt(n), depth)?);
        }
        if args.n > 0 && args.b.contains(&1) {
            rows.push(measure(&lane, &facts, &args, Test::Generate(args.n), depth)?);
        }
    }
    // Its memory is needed for many sequences.
    drop(lane);
    rows.extend(batch::measure(&args, &load, &facts)?);
    for row in &mut rows {
        row.read_fraction = row.gb_per_s / row.read_gb_per_s;
    }
    print(&match format_data(&rows, args.o)? {
        Some(data) => data,
        None => table(&rows),
    })
}

/// A synthetic model that lives as long as the measurement.
struct SynthFile {
    path: PathBuf,
}

impl SynthFile {
    fn write(args: &Args) -> anyhow::Result<Option<Self>> {
        let Some(name) = &args.shape else { return Ok(None) };
        let shape = Shape::from_name(name).with_context(|| {
            format!("unknown shape {name}, known: {}", Shape::ALL.map(Shape::name).join(", "))
        })?;
        let mix = Mix::from_name(&args.mix).with_context(|| {
            format!("unknown mix {}, known: {}", args.mix, Mix::ALL.map(Mix::name).join(", "))
        })?;
        let name = format!("lane-bench-{}-{name}-{}.gguf", std::process::id(), args.mix);
        let path = std::env::temp_dir().join(name);
        // In a folder of everybody's, what has this name already is somebody else's.
        let out = std::fs::File::create_new(&path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let file = Self { path };
        lane::synth::write(shape, mix, args.seed, std::io::BufWriter::new(out), |_| {})?;
        Ok(Some(file))
    }
}

impl Drop for SynthFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

struct Facts {
    model: String,
    label: String,
    size: u64,
    n_params: u64,
    bytes_per_token: u64,
    kv_bytes_per_token: u64,
    read_gb_per_s: f64,
}

/// How long each repetition took, in seconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64());
    }

    /// The row of a test of so many tokens, but for what only the test knows.
    fn row(&self, facts: &Facts, backend: &str, device: &str, tokens: u32) -> Row {
        let rates: Vec<f64> = self.0.iter().map(|time| f64::from(tokens) / time).collect();
        let (avg_ns, stddev_ns) = mean_and_deviation(&self.0, 1e9);
        let (avg_ts, stddev_ts) = mean_and_deviation(&rates, 1.0);
        Row {
            model_filename: facts.model.clone(),
            model_type: facts.label.clone(),
            model_size: facts.size,
            model_n_params: facts.n_params,
            backends: backend.to_owned(),
            gpu_info: device.to_owned(),
            n_prompt: 0,
            n_gen: 0,
            n_depth: 0,
            n_parallel: 1,
            avg_ns: avg_ns as u64,
            stddev_ns: stddev_ns as u64,
            avg_ts,
            stddev_ts,
            median_ts: median(&rates),
            gb_per_s: 0.0,
            read_gb_per_s: facts.read_gb_per_s,
            read_fraction: 0.0,
            graph_nodes: 0,
            h2d_bytes_per_token: None,
            d2h_bytes_per_token: None,
            output_hash: String::new(),
        }
    }
}

#[derive(Clone, Copy)]
enum Test {
    Prompt(u32),
    Generate(u32),
}

fn measure(lane: &Lane, facts: &Facts, args: &Args, test: Test, depth: u32) -> anyhow::Result<Row> {
    let kv = lane.kv()?;
    let n_vocab = lane.tokenizer().n_vocab() as u64;
    let token = |i: u64| (mix(args.seed.wrapping_add(i)) % n_vocab) as u32;
    let tokens = match test {
        Test::Prompt(n) | Test::Generate(n) => n,
    };
    let needed = u64::from(depth) + u64::from(tokens);
    anyhow::ensure!(
        needed <= u64::from(kv.max_context_tokens()),
        "the test needs {needed} tokens of context, the cache has {}; raise -c",
        kv.max_context_tokens()
    );
    let before: Vec<u32> = (0..u64::from(depth)).map(token).collect();
    let mut hasher = Xxh3::new();
    let (mut times, mut steps) = (Times::default(), tokens);
    // The first is for warming up.
    for repetition in 0..=u64::from(args.r) {
        let fresh = |i: u64| token((repetition + 1) << 32 | i);
        let time = match test {
            Test::Prompt(n) => {
                lane.prefill(&before)?;
                let prompt: Vec<u32> =
                    before.iter().copied().chain((0..u64::from(n)).map(fresh)).collect();
                let done = lane.prefill(&prompt)?;
                steps = done.steps;
                done.time
            }
            Test::Generate(n) => {
                lane.prefill(&before)?;
                let prompt: Vec<u32> = before.iter().copied().chain([fresh(0)]).collect();
                generate(lane, args, &prompt, n, &mut hasher)?
            }
        };
        if repetition > 0 {
            times.push(time);
        }
    }
    let live_tokens = f64::from(depth) + f64::from(tokens + 1) / 2.0;
    let steps_per_token = f64::from(steps) / f64::from(tokens);
    let bytes = facts.bytes_per_token as f64 * steps_per_token
        + live_tokens * facts.kv_bytes_per_token as f64;
    let telemetry = lane.telemetry()?;
    let graph = telemetry.graph.context("no graph was captured")?;
    let (n_prompt, n_gen) = match test {
        Test::Prompt(n) => (n, 0),
        Test::Generate(n) => (0, n),
    };
    let row = times.row(facts, lane.backend()?, &lane.device()?, tokens);
    Ok(Row {
        n_prompt,
        n_gen,
        n_depth: depth,
        gb_per_s: bytes * row.median_ts / 1e9,
        graph_nodes: graph.nodes,
        h2d_bytes_per_token: graph.h2d_bytes_per_token,
        d2h_bytes_per_token: telemetry.d2h_bytes_per_token,
        output_hash: format!("{:016x}", hasher.digest()),
        ..row
    })
}

fn generate(
    lane: &Lane,
    args: &Args,
    prompt: &[u32],
    n_tokens: u32,
    hasher: &mut Xxh3,
) -> anyhow::Result<Duration> {
    let options = GenerateOptions {
        n_tokens,
        sampling: Sampling::GREEDY,
        drive: DriveMode::from(args.drive),
        ignore_end: true,
        ..Default::default()
    };
    let mut generation = lane.generate(prompt, options)?;
    for token in generation.by_ref() {
        hasher.update(&token?.id.to_le_bytes());
    }
    let timing = generation.timing();
    Ok(timing.first_token + timing.decode)
}

/// SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn mean_and_deviation(values: &[f64], unit: f64) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean * unit, variance.sqrt() * unit)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

impl Row {
    fn test(&self) -> String {
        let test = match self.n_gen {
            0 => format!("pp{}", self.n_prompt),
            n => format!("tg{n}"),
        };
        let test = if self.n_parallel > 1 { format!("{test} B={}", self.n_parallel) } else { test };
        if self.n_depth > 0 { format!("{test} @ d{}", self.n_depth) } else { test }
    }
}

/// Rows in one of the forms that programs read; `None` of the one for people.
fn format_data(rows: &[impl Serialize], output: Output) -> anyhow::Result<Option<String>> {
    Ok(Some(match output {
        Output::Md => return Ok(None),
        Output::Json => serde_json::to_string_pretty(rows)? + "\n",
        Output::Jsonl => {
            let lines: Result<Vec<_>, _> = rows.iter().map(serde_json::to_string).collect();
            lines?.join("\n") + "\n"
        }
        Output::Csv => {
            let mut out = String::new();
            for row in rows {
                let serde_json::Value::Object(fields) = serde_json::to_value(row)? else {
                    continue;
                };
                if out.is_empty() {
                    out += &(fields.keys().cloned().collect::<Vec<_>>().join(",") + "\n");
                }
                let values: Vec<String> = fields.values().map(|v| v.to_string()).collect();
                out += &(values.join(",") + "\n");
            }
            out
        }
    }))
}

fn table(rows: &[Row]) -> String {
    let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| bytes.to_string());
    let mut out = String::from(
        "| model | size | params | backend | test | t/s | GB/s | of read | nodes | H2D B/token | \
         D2H B/token | output hash |\n|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|---|\n",
    );
    for row in rows {
        out += &format!(
            "| {} | {:.2} GiB | {:.2} B | {} | {} | {:.2} ± {:.2} | {:.1} | {:.0} % | {} | {} | \
             {} | {} |\n",
            row.model_type,
            row.model_size as f64 / f64::from(1 << 30),
            row.model_n_params as f64 / 1e9,
            row.backends,
            row.test(),
            row.avg_ts,
            row.stddev_ts,
            row.gb_per_s,
            100.0 * row.read_fraction,
            row.graph_nodes,
            bytes(row.h2d_bytes_per_token),
            bytes(row.d2h_bytes_per_token),
            row.output_hash,
        );
    }
    out
}
