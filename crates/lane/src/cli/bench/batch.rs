//! Rows of the benchmark in which many sequences decode at the same time.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use lane::batch::{BatchDevice, BatchOptions, Chosen, Engine, Job};
use lane::{ContextSize, Sampling};
use xxhash_rust::xxh3::Xxh3;

use super::{Args, Facts, LoadArgs, Row, Times, mix};
use crate::cli::FusionArg;

type BatchEngine = Engine<Box<dyn BatchDevice>>;

/// `tg` rows for each number of sequences above one, at each depth.
pub(super) fn measure(args: &Args, load: &LoadArgs, facts: &Facts) -> anyhow::Result<Vec<Row>> {
    let sequences: Vec<u32> = args.b.iter().copied().filter(|&b| b > 1).collect();
    let Some(&max_batch) = sequences.iter().max().filter(|_| args.n > 0) else {
        return Ok(Vec::new());
    };
    let deepest = args.d.iter().copied().max().unwrap_or(0);
    // A prompt is at least one token; the last token is not computed.
    let context = deepest.max(1) + args.n;
    // `--fusion` is for the rows of one sequence.
    let (ctx, fusion) = (ContextSize::Tokens(context), FusionArg::Ops);
    let load = LoadArgs { ctx, fusion, ..load.clone() };
    // All of the cache is for the sequences that are measured.
    let options =
        BatchOptions { max_batch, prefix_cache: false, watermark_percent: 0, ..Default::default() };
    let lane = load.load_batch(&options)?;
    let n_vocab = lane.tokenizer.n_vocab() as u64;
    let token = |i: u64| (mix(args.seed.wrapping_add(i)) % n_vocab) as u32;
    let mut engine = lane.engine;
    let mut rows = Vec::new();
    for &depth in &args.d {
        for &b in &sequences {
            rows.push(row(&mut engine, args, facts, depth, b, &token)?);
        }
    }
    Ok(rows)
}

fn row(
    engine: &mut BatchEngine,
    args: &Args,
    facts: &Facts,
    depth: u32,
    sequences: u32,
    token: &impl Fn(u64) -> u32,
) -> anyhow::Result<Row> {
    let (mut times, mut hasher) = (Times::default(), Xxh3::new());
    let (mut h2d_bytes, mut steps) = (0, 0);
    // The first is for warming up.
    for repetition in 0..=args.r {
        let prompt = |sequence: u32| -> Vec<u32> {
            let first = u64::from(repetition) << 48 | u64::from(sequence) << 32;
            (0..u64::from(depth.max(1))).map(|i| token(first | i)).collect()
        };
        for sequence in 0..sequences {
            let job = Job { prompt: prompt(sequence), n_tokens: args.n + 1, salt: 0 };
            engine.submit(job, Sampling::GREEDY)?;
        }
        let done = decode(engine, sequences, &mut hasher)?;
        if repetition > 0 {
            times.push(done.time);
            h2d_bytes += done.h2d_bytes;
            steps += done.steps;
        }
    }
    let tokens = sequences * args.n;
    let telemetry = engine.device().telemetry();
    let graph = telemetry.graph.context("no graph was captured")?;
    let live_tokens = f64::from(depth) + f64::from(args.n + 1) / 2.0;
    // Weights are read once a step, and each sequence's part of the cache.
    let bytes_per_step = facts.bytes_per_token as f64
        + f64::from(sequences) * live_tokens * facts.kv_bytes_per_token as f64;
    let (backend, device) = (engine.device().backend(), engine.device().device());
    let row = times.row(facts, backend, &device, tokens);
    Ok(Row {
        n_gen: args.n,
        n_depth: depth,
        n_parallel: sequences,
        gb_per_s: bytes_per_step * row.median_ts / f64::from(sequences) / 1e9,
        graph_nodes: graph.nodes,
        h2d_bytes_per_token: Some(h2d_bytes / (steps * u64::from(sequences)).max(1)),
        d2h_bytes_per_token: Some(4),
        output_hash: format!("{:016x}", hasher.digest()),
        ..row
    })
}

/// What decoding took, without the prompts.
struct Done {
    time: Duration,
    steps: u64,
    h2d_bytes: u64,
}

/// Runs what was submitted; the clock starts when every prompt is computed. Refuses where not all
/// sequences decode together from then on.
fn decode(engine: &mut BatchEngine, sequences: u32, hasher: &mut Xxh3) -> anyhow::Result<Done> {
    let (mut chosen, mut started, mut begun) = (Vec::new(), None, 0);
    let before = engine.scheduler().counts();
    while engine.step(&mut chosen)? {
        let counts = engine.scheduler().counts();
        // Prompts go first, so one that is left behind a decode step has no room.
        let waited = started.is_none() && counts.decode_steps > before.decode_steps;
        let gave_way = counts.recomputed + counts.swapped > before.recomputed + before.swapped;
        anyhow::ensure!(
            !waited && !gave_way,
            "{sequences} sequences do not fit the cache together: ask for fewer (-B) or shorter \
             ones (-d, -n), or give it more memory (--vram)"
        );
        for Chosen { ticket, token, is_last } in chosen.drain(..) {
            hasher.update(&token.to_le_bytes());
            begun += 1;
            if is_last {
                engine.finish(ticket);
            }
        }
        if begun >= sequences && started.is_none() {
            let steps = engine.scheduler().counts().decode_steps;
            started = Some((Instant::now(), steps, engine.device().h2d_bytes()));
        }
    }
    let (at, steps, h2d_bytes) = started.context("nothing was decoded")?;
    Ok(Done {
        time: at.elapsed(),
        steps: engine.scheduler().counts().decode_steps - steps,
        h2d_bytes: engine.device().h2d_bytes() - h2d_bytes,
    })
}
