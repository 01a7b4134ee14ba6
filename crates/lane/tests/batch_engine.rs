//! The engine over a toy device: every result equals that of the request alone, whatever joined,
//! left, was forked, cancelled or gave way meanwhile, and in the end nothing is held.

mod toy;

use std::collections::BTreeMap;

use kernels_ptx::SamplingPack;
use kv_paged::{GroupId, LayerGroup};
use lane::Sampling;
use lane::batch::{
    Chosen, Engine, EngineError, Job, Preempt, Scheduler, SchedulerOptions, StepKind, SubmitError,
    Ticket,
};
use proptest::prelude::*;
use toy::{PROMPT_VOCAB, Toy, VOCAB, choose};

fn options(blocks: u32) -> SchedulerOptions {
    SchedulerOptions {
        max_batch: 4,
        chunk_tokens: 8,
        max_context_tokens: 64,
        block_size_tokens: 4,
        groups: vec![LayerGroup::full(2, blocks).with_host_blocks(blocks / 2)],
        prefix_cache: true,
        watermark_blocks: 1,
        preempt: Preempt::Recompute,
        min_bucket: 1,
    }
}

fn engine(options: SchedulerOptions) -> Engine<Toy> {
    Engine::new(Toy::new(&options), Scheduler::new(options).unwrap())
}

fn seeded(seed: u64) -> Sampling {
    Sampling { seed, temperature: if seed == 0 { 0.0 } else { 1.0 }, ..Sampling::default() }
}

/// Runs jobs and compares each with itself alone.
struct Check {
    engine: Engine<Toy>,
    groups: Vec<LayerGroup>,
    live: BTreeMap<Ticket, (Vec<u32>, u32, u64, Vec<u32>)>,
    chosen: Vec<Chosen>,
    finished: Vec<Ticket>,
}

impl Check {
    fn new(options: SchedulerOptions) -> Self {
        let groups = options.groups.clone();
        let engine = engine(options);
        Self { engine, groups, live: BTreeMap::new(), chosen: Vec::new(), finished: Vec::new() }
    }

    fn submit(&mut self, prompt: &[u32], n_tokens: u32, salt: u64, seed: u64) -> Ticket {
        let job = Job { prompt: prompt.to_vec(), n_tokens, salt };
        let ticket = self.engine.submit(job, seeded(seed)).unwrap();
        self.live.insert(ticket, (prompt.to_vec(), n_tokens, seed, Vec::new()));
        ticket
    }

    /// One step; ends what is done. False when there was nothing to do.
    fn step(&mut self) -> bool {
        let ran = match self.engine.step(&mut self.chosen) {
            Ok(ran) => ran,
            Err(EngineError::Step(_)) => true,
            Err(error) => panic!("{error}"),
        };
        for Chosen { ticket, token, is_last } in self.chosen.drain(..) {
            let (prompt, n_tokens, seed, tokens) = self.live.get_mut(&ticket).unwrap();
            tokens.push(token);
            let room = self.engine.scheduler().max_tokens() + 1 - prompt.len() as u32;
            assert_eq!(is_last, tokens.len() as u32 == (*n_tokens).min(room));
            if is_last {
                let expected =
                    alone(&self.groups, prompt, tokens.len() as u32, &seeded(*seed).pack());
                let report = self.engine.finish(ticket).unwrap();
                assert_eq!((&report.tokens, &*tokens), (&expected, &expected));
                assert_eq!(report.prompt_tokens as usize, prompt.len());
                self.live.remove(&ticket);
                self.finished.push(ticket);
            }
        }
        ran
    }

    fn steps(&mut self, n: u32) {
        for _ in 0..n {
            self.step();
        }
    }

    fn finish_all(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 20_000, "it does not end");
        }
        assert!(self.live.is_empty());
        self.check_nothing_is_held();
    }

    fn check_nothing_is_held(&mut self) {
        let report = self.engine.report();
        assert_eq!((report.planner.sequences, self.engine.scheduler().live_jobs()), (0, 0));
        for group in &report.planner.groups {
            assert_eq!((group.used_blocks, group.host_used_blocks), (0, 0));
        }
        assert!(self.engine.scheduler().planner().table().iter().all(|&block| block == 0));
        assert_eq!(self.engine.device().uploaded_bytes, report.table_bytes);
    }
}

/// What a sequence alone in a cache without blocks would say.
fn alone(
    groups: &[LayerGroup],
    prompt: &[u32],
    n_tokens: u32,
    sampling: &SamplingPack,
) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n_tokens {
        let last = tokens.len() as u32 - 1;
        tokens.push(choose(groups, last, |_, at| tokens[at as usize], sampling));
    }
    tokens.split_off(prompt.len())
}

fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 7 + seed * 13) % VOCAB).collect()
}

#[test]
fn jobs_run_together_as_they_do_alone() {
    let mut check = Check::new(options(200));
    for i in 0..10 {
        check.submit(&text(i, 3 + 5 * i), 10, 0, i.into());
    }
    check.finish_all();
    let counts = check.engine.report().counts;
    assert_eq!(counts.decode_rows, 10 * 9, "the first token comes from the prompt");
    assert!(counts.decode_steps < 40, "{counts:?}");
}

#[test]
fn chunks_end_at_multiples_of_their_size() {
    let mut check = Check::new(options(200));
    check.submit(&text(1, 21), 1, 0, 0);
    check.finish_all();
    let chunk = StepKind::Chunk;
    assert_eq!(check.engine.device().buckets, [(chunk, 8), (chunk, 8), (chunk, 8)]);
    // 12 tokens are cached: the next chunk goes to 16 only.
    let mut prompt = text(1, 12);
    prompt.extend(text(2, 9));
    check.submit(&prompt, 1, 0, 0);
    check.finish_all();
    assert_eq!(check.engine.device().buckets[3..], [(chunk, 4), (chunk, 8)]);
}

#[test]
fn a_batch_is_padded_to_the_smallest_bucket_that_holds_it() {
    let mut check = Check::new(options(200));
    let tickets: Vec<_> = (0..3).map(|i| check.submit(&text(i, 2), 5, 0, 1)).collect();
    check.steps(4);
    assert_eq!(check.engine.device().buckets.last(), Some(&(StepKind::Decode, 4)));
    check.engine.finish(tickets[1]);
    check.live.remove(&tickets[1]);
    check.step();
    assert_eq!(check.engine.device().buckets.last(), Some(&(StepKind::Decode, 2)));
    check.finish_all();

    let mut check = Check::new(SchedulerOptions { min_bucket: 4, ..options(200) });
    check.submit(&text(1, 2), 5, 0, 1);
    check.finish_all();
    assert!(check.engine.device().buckets.iter().all(|&(_, rows)| rows == 4));
}

#[test]
fn a_common_prefix_is_computed_once_and_kept_once() {
    let (max_batch, chunk_tokens, max_context_tokens) = (64, 512, 1024);
    let groups = vec![LayerGroup::full(1, 2000)];
    let sizes = SchedulerOptions {
        max_batch,
        chunk_tokens,
        max_context_tokens,
        block_size_tokens: 16,
        groups,
        ..options(2)
    };
    let mut check = Check::new(sizes);
    for i in 0..64 {
        let mut prompt = text(1, 512);
        prompt.extend(text(100 + i, 20));
        check.submit(&prompt, 8, 0, 0);
    }
    let mut peak_blocks = 0;
    while check.step() {
        peak_blocks = peak_blocks.max(check.engine.report().planner.groups[0].used_blocks);
    }
    // 512 tokens once, and for each sequence the blocks of 20 + 7 more.
    let ideal = 32 + 64 * 2;
    assert!(peak_blocks * 100 <= ideal * 105, "{peak_blocks} blocks, {ideal} would do");
    assert_eq!(check.engine.report().counts.chunk_rows, 512 + 64 * 20);
    check.finish_all();
}

#[test]
fn salts_share_nothing() {
    let mut check = Check::new(options(200));
    for salt in [1, 2, 1] {
        check.submit(&text(1, 33), 1, salt, 0);
    }
    check.finish_all();
    assert_eq!(check.engine.report().counts.chunk_rows, 33 + 33 + 1);
    assert_eq!(check.engine.report().planner.prefix.hit_tokens, 32);
}

#[test]
fn when_blocks_are_short_the_youngest_gives_way_and_the_oldest_gets_on() {
    for preempt in [Preempt::Recompute, Preempt::Swap] {
        // 16 blocks; each of the four wants 11 in the end.
        let mut check = Check::new(SchedulerOptions { preempt, ..options(17) });
        let tickets: Vec<_> = (0..4).map(|i| check.submit(&text(i, 8), 36, 0, 0)).collect();
        check.finish_all();
        assert_eq!(check.finished[0], tickets[0], "{preempt:?}");
        let counts = check.engine.report().counts;
        match preempt {
            Preempt::Recompute => assert!(counts.recomputed > 0 && counts.swapped == 0),
            Preempt::Swap => assert!(counts.swapped > 0 && check.engine.report().block_moves > 0),
        }
    }
}

#[test]
fn a_fork_goes_on_from_where_its_parent_is() {
    let mut check = Check::new(options(200));
    let parent = check.submit(&text(1, 9), 12, 0, 0);
    check.steps(6);
    let fork = check.engine.fork(parent, seeded(0)).unwrap();
    let known = check.live[&parent].clone();
    check.live.insert(fork, known);
    check.finish_all();
    assert!(
        check.engine.report().block_moves > 0,
        "the last block was copied before it was written"
    );
    assert_eq!(check.engine.fork(parent, seeded(0)), None);
}

#[test]
fn what_cannot_run_is_refused_with_numbers() {
    let mut engine = engine(options(9));
    let submit = |engine: &mut Engine<Toy>, prompt: Vec<u32>| {
        engine.submit(Job { prompt, n_tokens: 9, salt: 0 }, Sampling::GREEDY)
    };
    assert_eq!(submit(&mut engine, vec![]), Err(SubmitError::EmptyPrompt));
    assert_eq!(
        submit(&mut engine, vec![1, PROMPT_VOCAB, 2]),
        Err(SubmitError::IdOutOfRange { id: PROMPT_VOCAB, n_vocab: PROMPT_VOCAB })
    );
    assert_eq!(engine.scheduler().max_tokens(), 32);
    assert_eq!(
        submit(&mut engine, vec![1; 33]),
        Err(SubmitError::PromptTooLong { prompt_tokens: 33, max_tokens: 32 })
    );
    submit(&mut engine, vec![1; 32]).unwrap();
    let mut chosen = Vec::new();
    while engine.step(&mut chosen).unwrap() {}
    assert!(chosen[0].is_last, "there is no room to compute a second token");
    assert_eq!(chosen.len(), 1);
}

#[test]
fn after_a_failed_step_everything_starts_over() {
    for fails_at in 1..30 {
        let mut check = Check::new(options(40));
        let mut toy = Toy::new(&options(40));
        toy.fails_at = Some(fails_at);
        check.engine = Engine::new(toy, Scheduler::new(options(40)).unwrap());
        for i in 0..6 {
            check.submit(&text(i, 10), 8, 0, 0);
        }
        let mut steps = 0;
        while check.step() {
            steps += 1;
        }
        assert!(steps > 10 && check.live.is_empty());
    }
}

#[derive(Clone, Debug)]
enum Op {
    Submit { text: u32, len: u32, n: u32, salt: u64, seed: u64 },
    Step { n: u32 },
    Cancel { pick: usize },
    Fork { pick: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..3_u32, 1..40_u32, 1..30_u32, 0..2_u64, 0..3_u64)
            .prop_map(|(text, len, n, salt, seed)| Op::Submit { text, len, n, salt, seed }),
        6 => (1..12_u32).prop_map(|n| Op::Step { n }),
        1 => (0..8_usize).prop_map(|pick| Op::Cancel { pick }),
        1 => (0..8_usize).prop_map(|pick| Op::Fork { pick }),
    ]
}

fn group_sets() -> impl Strategy<Value = Vec<LayerGroup>> {
    prop_oneof![
        2 => Just(vec![LayerGroup::full(2, 20).with_host_blocks(12)]),
        1 => Just(vec![LayerGroup::full(2, 80)]),
        1 => Just(vec![
            LayerGroup::full(1, 22).with_host_blocks(9),
            LayerGroup::sliding(2, 16, 9, 2).with_host_blocks(9),
        ]),
    ]
}

fn run(check: &mut Check, op: Op) {
    let pick = |check: &Check, pick: usize| {
        let n = check.live.len().max(1);
        check.live.keys().nth(pick % n).copied()
    };
    match op {
        Op::Submit { text: which, len, n, salt, seed } => {
            let len = len.min(check.engine.scheduler().max_tokens());
            let mut prompt = text(0, len / 2);
            prompt.extend(text(which, len - len / 2));
            check.submit(&prompt, n, salt, seed);
        }
        Op::Step { n } => check.steps(n),
        Op::Cancel { pick: n } => {
            if let Some(ticket) = pick(check, n) {
                check.engine.finish(ticket).unwrap();
                check.live.remove(&ticket);
            }
        }
        Op::Fork { pick: n } => {
            if let Some(ticket) = pick(check, n) {
                let known = check.live[&ticket].clone();
                let fork = check.engine.fork(ticket, seeded(known.2)).unwrap();
                check.live.insert(fork, known);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_run_ends_with_the_right_tokens_and_nothing_held(
        groups in group_sets(),
        preempt in prop_oneof![Just(Preempt::Recompute), Just(Preempt::Swap)],
        prefix_cache in proptest::bool::weighted(0.8),
        watermark_blocks in 0..4_u32,
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let (groups_of, base) = (groups.clone(), options(2));
        let mut check = Check::new(SchedulerOptions {
            groups: groups_of, preempt, prefix_cache, watermark_blocks, ..base
        });
        for op in ops {
            run(&mut check, op);
        }
        check.finish_all();
        let pool = check.engine.scheduler().planner().pool(GroupId(0)).unwrap().usable_blocks();
        prop_assert_eq!(pool, groups[0].blocks - 1);
    }
}
