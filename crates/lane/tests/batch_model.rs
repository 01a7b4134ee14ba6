//! The engine over the embedded model: sequences that share a batch and a cache say what they say
//! alone, and the cache is given back.
//!
//! The program can be carried to a machine with a GPU: `LANE_TEST_BACKEND=cuda LANE_SOAK_SECONDS=60
//! batch_model --include-ignored --nocapture`.

#[allow(dead_code)] // Other tests use the rest of it.
mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use decode_graph::Numerics;
use lane::batch::{BatchDevice, BatchOptions, Chosen, Engine, Job, Preempt, Ticket};
use lane::{BackendChoice, ContextSize, Lane, LaneOptions, ModelFile, PlanOptions, Sampling};
use support::{load, whales};

type WhaleEngine = Engine<Box<dyn BatchDevice>>;

fn backend() -> BackendChoice {
    match std::env::var("LANE_TEST_BACKEND").as_deref() {
        Ok("cuda") => BackendChoice::Cuda,
        _ => BackendChoice::Host,
    }
}

fn engine_of(plan: PlanOptions, batch: &BatchOptions) -> WhaleEngine {
    let options = LaneOptions { backend: backend(), plan, ..Default::default() };
    ModelFile::open(None).unwrap().load_batch(&options, batch, &mut |_| {}).unwrap().engine
}

fn engine(context: u32, batch: &BatchOptions) -> WhaleEngine {
    let context = ContextSize::Tokens(context);
    engine_of(PlanOptions { context, ..Default::default() }, batch)
}

/// Ids of the vocabulary that follow each other as if at random.
fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 300 + (i * 2_654_435 + seed * 40_503) % 3700).collect()
}

fn submit(engine: &mut WhaleEngine, prompt: &[u32], n_tokens: u32) -> Ticket {
    let job = Job { prompt: prompt.to_vec(), n_tokens, salt: 0 };
    engine.submit(job, Sampling::GREEDY).unwrap()
}

/// Runs everything to its end; the tokens of each, and the most blocks in use.
fn run(engine: &mut WhaleEngine) -> (BTreeMap<Ticket, Vec<u32>>, u32) {
    let (mut chosen, mut done, mut peak_blocks) = (Vec::new(), BTreeMap::new(), 0);
    while engine.step(&mut chosen).unwrap() {
        let used = engine.scheduler().report().groups[0].used_blocks;
        peak_blocks = peak_blocks.max(used);
        for Chosen { ticket, is_last, .. } in chosen.drain(..) {
            if is_last {
                done.insert(ticket, engine.finish(ticket).unwrap().tokens);
            }
        }
    }
    (done, peak_blocks)
}

fn alone(engine: &mut WhaleEngine, prompt: &[u32], n_tokens: u32) -> Vec<u32> {
    let ticket = submit(engine, prompt, n_tokens);
    run(engine).0.remove(&ticket).unwrap()
}

fn assert_nothing_is_held(engine: &WhaleEngine) {
    let report = engine.report();
    assert_eq!((report.planner.sequences, engine.scheduler().live_jobs()), (0, 0));
    for group in &report.planner.groups {
        assert_eq!((group.used_blocks, group.host_used_blocks), (0, 0));
    }
}

#[test]
fn sixty_four_requests_with_a_common_prefix_share_it_and_are_as_alone() {
    let batch = BatchOptions { max_batch: 16, min_bucket: 16, ..Default::default() };
    let prompts: Vec<Vec<u32>> =
        (0..64).map(|i| [text(1, 512), text(100 + i, 20)].concat()).collect();
    let n_tokens = 3;
    let mut together = engine(640, &batch);
    let tickets: Vec<Ticket> =
        prompts.iter().map(|prompt| submit(&mut together, prompt, n_tokens)).collect();
    let (answers, peak_blocks) = run(&mut together);
    // 512 tokens once, and for each of the 16 that run together the blocks of 20 + 2 more.
    let ideal = 32 + 16 * 2;
    assert!(peak_blocks * 100 <= ideal * 105, "{peak_blocks} blocks, {ideal} would do");
    let report = together.report();
    assert_eq!(report.counts.chunk_rows, 512 + 64 * 20);
    assert_nothing_is_held(&together);
    // A graph for the chunk inside the prefix, one for chunks that end a prompt, one for batches,
    // and the one that warmed up.
    assert!(together.device().telemetry().captures <= 4);

    let mut solo = engine(640, &batch);
    for (ticket, prompt) in tickets.iter().zip(&prompts) {
        assert_eq!(answers[ticket], alone(&mut solo, prompt, n_tokens));
    }
    // And with nothing cached at all.
    let mut solo = engine(640, &BatchOptions { prefix_cache: false, ..batch });
    for i in [0, 63] {
        assert_eq!(answers[&tickets[i]], alone(&mut solo, &prompts[i], n_tokens));
    }
}

#[test]
fn an_engine_says_what_the_reference_says() {
    let [whale, _] = whales();
    let batch = BatchOptions { max_batch: 8, ..Default::default() };
    let plan = PlanOptions { numerics: Numerics::Exact, ..Default::default() };
    let mut engine = engine_of(plan, &batch);
    let cases: Vec<_> = whale.greedy_cases().collect();
    let tickets: Vec<Ticket> = cases
        .iter()
        .map(|(prompt, greedy, _)| submit(&mut engine, prompt, greedy.len() as u32))
        .collect();
    let (answers, _) = run(&mut engine);
    for (ticket, (_, greedy, margins)) in tickets.iter().zip(&cases) {
        let sure = margins.iter().take_while(|&&margin| margin >= 0.001).count();
        assert_eq!(answers[ticket][..sure], greedy[..sure]);
    }
}

#[test]
fn a_step_uploads_what_is_new_and_nothing_else() {
    let mut engine = engine(512, &BatchOptions { max_batch: 4, ..Default::default() });
    for i in 0..4 {
        submit(&mut engine, &text(i, 5), 100);
    }
    let mut chosen = Vec::new();
    // Prompts, and a first step of the batch.
    for _ in 0..5 {
        engine.step(&mut chosen).unwrap();
    }
    let mut uploads = Vec::new();
    for _ in 0..32 {
        let before = (engine.device().h2d_bytes(), engine.report().table_bytes);
        engine.step(&mut chosen).unwrap();
        let after = (engine.device().h2d_bytes(), engine.report().table_bytes);
        assert_eq!(after.0 - before.0, after.1 - before.1, "the device feeds itself");
        uploads.push(after.0 - before.0);
    }
    // Each of the four takes a block every sixteenth step.
    assert_eq!(uploads.iter().sum::<u64>(), 2 * 4 * 4);
    assert_eq!(uploads.iter().filter(|&&bytes| bytes > 0).count(), 2);
}

#[test]
fn a_short_soak() {
    soak(Duration::from_secs(2), Preempt::Recompute);
    soak(Duration::from_secs(2), Preempt::Swap);
}

#[test]
#[ignore = "the same as a_short_soak, as long as LANE_SOAK_SECONDS says"]
fn a_long_soak() {
    let seconds = std::env::var("LANE_SOAK_SECONDS").ok().and_then(|s| s.parse().ok());
    for preempt in [Preempt::Recompute, Preempt::Swap] {
        soak(Duration::from_secs(seconds.unwrap_or(60)) / 2, preempt);
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((((z ^ (z >> 31)) >> 32) * u64::from(n)) >> 32) as u32
    }
}

/// How long a soak may take until there was something of each kind, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Joins, leaves, forks, cancels and preemptions at random; every result is that of the request
/// alone.
fn soak(duration: Duration, preempt: Preempt) {
    const N_TOKENS: u32 = 24;
    // Every chunk has one bucket, and every batch another: the same kernels for the same tokens,
    // whatever is cached.
    let batch = BatchOptions {
        max_batch: 8,
        min_bucket: 32,
        // Less than half of what eight sequences want at their longest.
        ctx_total_tokens: Some(320),
        preempt,
        ..Default::default()
    };
    let prompts: Vec<Vec<u32>> = (0..12)
        .map(|i| [text(i % 3, 16 + 8 * (i % 4)), text(50 + i, 3 + 5 * (i % 7))].concat())
        .collect();
    let context = ContextSize::Tokens(128);
    let plan = PlanOptions { context, chunk_tokens: 32, ..Default::default() };
    let mut solo = engine_of(plan, &batch);
    let expected: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| alone(&mut solo, prompt, N_TOKENS)).collect();

    let mut engine = engine_of(plan, &batch);
    let mut judge = Judge::default();
    let mut random = Random(0x50a4);
    let mut live: BTreeMap<Ticket, (usize, u32)> = BTreeMap::new();
    let (mut chosen, mut finished, mut forks, mut cancels) = (Vec::new(), 0, 0, 0);
    let started = Instant::now();
    let mut ending = false;
    loop {
        let report = engine.report();
        let preempted = match preempt {
            Preempt::Recompute => report.counts.recomputed,
            Preempt::Swap => report.counts.swapped,
        };
        let saw_all = finished > 0 && forks > 0 && cancels > 0 && preempted > 0;
        // Forks copy blocks when they part, swaps move them.
        let saw_all = saw_all && report.block_moves > 0;
        ending |= started.elapsed() >= duration && saw_all;
        assert!(saw_all || started.elapsed() < PATIENCE, "{finished} {forks} {cancels} {report:?}");
        if !ending {
            let pick = |random: &mut Random, live: &BTreeMap<Ticket, (usize, u32)>| {
                let at = random.below(live.len().max(1) as u32) as usize;
                live.iter().nth(at).map(|(&ticket, &job)| (ticket, job))
            };
            match random.below(16) {
                0..4 if live.len() < 24 => {
                    let which = random.below(prompts.len() as u32) as usize;
                    let n = 1 + random.below(N_TOKENS);
                    live.insert(submit(&mut engine, &prompts[which], n), (which, n));
                }
                4 => {
                    if let Some((ticket, job)) = pick(&mut random, &live)
                        && let Some(fork) = engine.fork(ticket, Sampling::GREEDY)
                    {
                        live.insert(fork, job);
                        forks += 1;
                    }
                }
                5 => {
                    if let Some((ticket, (which, _))) = pick(&mut random, &live) {
                        let report = engine.finish(ticket).unwrap();
                        judge.compare(&prompts[which], &report.tokens, &expected[which]);
                        live.remove(&ticket);
                        cancels += 1;
                    }
                }
                _ => {}
            }
        }
        let ran = engine.step(&mut chosen).unwrap();
        for Chosen { ticket, is_last, .. } in chosen.drain(..) {
            if is_last {
                let (which, n) = live.remove(&ticket).unwrap();
                let report = engine.finish(ticket).unwrap();
                assert_eq!(report.tokens.len() as u32, n);
                judge.compare(&prompts[which], &report.tokens, &expected[which]);
                finished += 1;
            }
        }
        if ending && !ran {
            break;
        }
    }
    assert_nothing_is_held(&engine);
    let report = engine.report();
    let telemetry = engine.device().telemetry();
    println!(
        "{preempt:?} on {}: {finished} finished, {forks} forks, {cancels} cancelled, {:?}, {} \
         blocks moved, {} captures, {} near ties",
        engine.device().device(),
        report.counts,
        report.block_moves,
        telemetry.captures,
        judge.near_ties,
    );
    assert!(live.is_empty());
    // Chunks with and without an end, batches, and the warm-up.
    assert!(telemetry.captures <= 2 + 1 + 1, "{} captures", telemetry.captures);
}

/// Says whether a result is that of the request alone: bit for bit on the host, where rows of every
/// kernel are computed alike; elsewhere up to the first step that is nearly a tie, because a token
/// that is computed again may be so by another kernel, in a chunk of another size.
#[derive(Default)]
struct Judge {
    lane: Option<Lane>,
    near_ties: u32,
}

impl Judge {
    fn compare(&mut self, prompt: &[u32], found: &[u32], expected: &[u32]) {
        let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) else { return };
        assert_ne!(backend(), BackendChoice::Host, "step {at} of {found:?} is not {expected:?}");
        let file = || ModelFile::open(None).unwrap();
        let lane =
            self.lane.get_or_insert_with(|| load(&file(), BackendChoice::Host, Numerics::Exact));
        let ids = [prompt, &found[..at]].concat();
        let mut logits = lane.evaluate(&ids).unwrap().logits;
        logits.sort_unstable_by(|a, b| b.total_cmp(a));
        let margin = logits[0] - logits[1];
        assert!(margin < 0.3, "step {at} of {found:?} is not {expected:?}, margin {margin}");
        self.near_ties += 1;
    }
}
