//! A lane with the embedded model: generations, drives, prefix reuse, context, refusals.

#[allow(dead_code, reason = "it serves another test too")]
mod support;

use std::sync::atomic::Ordering;

use decode_graph::Numerics;
use lane::{
    BackendChoice, ContextSize, DriveMode, GenerateOptions, Lane, LaneError, LaneOptions,
    MemoryPlan, ModelFile, PlanOptions, Sampling, StopReason,
};
use support::failing::failing;
use support::{greedy, ids};

fn load_with(plan: PlanOptions) -> Result<Lane, LaneError> {
    let options = LaneOptions { backend: BackendChoice::Host, plan, ..Default::default() };
    ModelFile::open(None)?.load(&options, &mut |_| {})
}

fn load() -> Lane {
    load_with(PlanOptions::default()).unwrap()
}

const PROMPT: [u32; 6] = [0, 35, 452, 443, 294, 12];

#[test]
fn s18_both_drives_give_the_same_ids_with_12_bytes_and_with_none() {
    let lane = load();
    let host = ids(&lane, &PROMPT, greedy(40, DriveMode::Host));
    assert_eq!(lane.telemetry().unwrap().graph.unwrap().h2d_bytes_per_token, Some(12));
    let own = ids(&lane, &PROMPT, greedy(40, DriveMode::SelfAdvance));
    assert_eq!(lane.telemetry().unwrap().graph.unwrap().h2d_bytes_per_token, Some(0));
    assert_eq!(host, own);
}

#[test]
fn equal_seeds_draw_equal_texts() {
    let lane = load();
    let draw = |seed, drive| {
        let sampling = Sampling { seed, ..Sampling::default() };
        ids(&lane, &PROMPT, GenerateOptions { n_tokens: 30, sampling, drive, ..Default::default() })
    };
    assert_eq!(draw(3, DriveMode::Host), draw(3, DriveMode::SelfAdvance));
    assert_ne!(draw(3, DriveMode::Host), draw(4, DriveMode::Host));
}

#[test]
fn a_cached_beginning_is_not_computed_again_and_changes_nothing() {
    let lane = load();
    let first = ids(&lane, &PROMPT, greedy(10, DriveMode::SelfAdvance));
    let longer: Vec<u32> = PROMPT.iter().chain(&first[..5]).copied().collect();
    let mut generation = lane.generate(&longer, greedy(5, DriveMode::SelfAdvance)).unwrap();
    let again: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
    assert_eq!(generation.timing().prefill_tokens, 1, "all but the last token was there");
    drop(generation);
    assert_eq!(again, first[5..]);
    // Another prompt in between, and the first answer comes out the same.
    ids(&lane, &[0, 9, 8, 7], greedy(5, DriveMode::Host));
    assert_eq!(ids(&lane, &PROMPT, greedy(10, DriveMode::SelfAdvance)), first);
}

#[test]
fn dropping_a_generation_cancels_it() {
    let lane = load();
    let whole = ids(&lane, &PROMPT, greedy(10, DriveMode::SelfAdvance));
    let mut cancelled = lane.generate(&PROMPT, greedy(100, DriveMode::SelfAdvance)).unwrap();
    cancelled.next().unwrap().unwrap();
    drop(cancelled);
    assert_eq!(ids(&lane, &PROMPT, greedy(10, DriveMode::SelfAdvance)), whole);
}

#[test]
fn the_context_ends_a_generation_unless_the_ring_goes_on() {
    let context = ContextSize::Tokens(16);
    let lane = load_with(PlanOptions { context, ..Default::default() }).unwrap();
    let mut generation = lane.generate(&PROMPT, greedy(100, DriveMode::SelfAdvance)).unwrap();
    assert_eq!(generation.by_ref().count(), 16 - PROMPT.len() + 1);
    assert_eq!(generation.stop_reason(), Some(StopReason::Context));
    drop(generation);
    let ring = |drive| GenerateOptions { ring: true, ..greedy(100, drive) };
    let own = ids(&lane, &PROMPT, ring(DriveMode::SelfAdvance));
    assert_eq!(own.len(), 100);
    assert_eq!(own, ids(&lane, &PROMPT, ring(DriveMode::Host)));
}

#[test]
fn s14_the_plan_is_what_loading_allocates_and_nothing_comes_after() {
    let file = ModelFile::open(None).unwrap();
    for numerics in [Numerics::Q8, Numerics::Exact] {
        let options = PlanOptions { numerics, ..Default::default() };
        let device = kernels_ptx::DeviceProfile::A2000;
        let plan = MemoryPlan::new(&file.gguf, &file.model, &device, &options).unwrap();
        let lane = load_with(options).unwrap();
        let loaded = lane.telemetry().unwrap();
        assert_eq!(loaded.permanent_end_bytes, plan.bytes.total_bytes());
        assert_eq!(loaded.capacity_bytes, plan.bytes.total_bytes());
        let report = lane.report().unwrap();
        let places = |allocations: &[gpu_slab::Allocation]| -> Vec<_> {
            let place =
                |a: &gpu_slab::Allocation| (a.name.to_string(), a.offset_bytes, a.len_bytes);
            allocations.iter().map(place).collect()
        };
        assert_eq!(places(&report.allocations), places(plan.bytes.allocations()));
        ids(&lane, &PROMPT, greedy(20, DriveMode::SelfAdvance));
        assert_eq!(lane.telemetry().unwrap().high_water_bytes, plan.bytes.total_bytes());
    }
}

#[test]
fn s14_a_budget_shrinks_an_automatic_context_and_refuses_an_explicit_one() {
    let usable_bytes = Some(4_600_000);
    let lane = load_with(PlanOptions { usable_bytes, ..Default::default() }).unwrap();
    let shrunk = lane.kv().unwrap().max_context_tokens();
    assert!(shrunk < 512 && shrunk.is_multiple_of(16), "{shrunk}");
    let explicit = |tokens| PlanOptions {
        usable_bytes,
        context: ContextSize::Tokens(tokens),
        ..Default::default()
    };
    let error = load_with(explicit(512)).map(|_| ()).unwrap_err();
    assert!(error.to_string().ends_with(&format!("-c {shrunk} fits")), "{error}");
    load_with(explicit(shrunk)).unwrap();
    assert!(load_with(explicit(shrunk + 16)).is_err(), "the advice is the largest that fits");
    let error = load_with(PlanOptions { usable_bytes: Some(1 << 20), ..Default::default() })
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("no context fits"), "{error}");
}

#[test]
fn s13_refused_prompts_leave_the_lane_usable() {
    let lane = load();
    let before = ids(&lane, &PROMPT, greedy(5, DriveMode::SelfAdvance));
    let refuse = |prompt: &[u32]| {
        lane.generate(prompt, greedy(5, DriveMode::SelfAdvance)).map(|_| ()).unwrap_err()
    };
    assert!(matches!(refuse(&[]), LaneError::EmptyPrompt));
    assert!(matches!(refuse(&[0, 4096]), LaneError::TokenOutOfRange { id: 4096, n_vocab: 4096 }));
    let error = refuse(&vec![1; 513]);
    assert!(matches!(error, LaneError::PromptTooLong { prompt_tokens: 513, .. }));
    let sampling = Sampling { temperature: f32::NAN, ..Sampling::default() };
    let options = GenerateOptions { sampling, ..Default::default() };
    assert!(matches!(lane.generate(&PROMPT, options), Err(LaneError::Option { .. })));
    assert_eq!(ids(&lane, &PROMPT, greedy(5, DriveMode::SelfAdvance)), before);
}

#[test]
fn a_poisoned_lock_is_a_soft_failure() {
    let lane = load();
    let panicked = std::thread::scope(|scope| {
        let lane = &lane;
        scope
            .spawn(move || {
                let _generation = lane.generate(&PROMPT, greedy(5, DriveMode::Host)).unwrap();
                panic!("while the lane is locked");
            })
            .join()
    });
    assert!(panicked.is_err());
    assert!(matches!(lane.telemetry(), Err(LaneError::Poisoned)));
    assert!(matches!(lane.generate(&PROMPT, greedy(5, DriveMode::Host)), Err(LaneError::Poisoned)));
}

#[test]
fn s13_after_an_error_a_generation_ends_without_a_reason_and_the_lane_starts_over() {
    for asynchronous in [false, true] {
        let (lane, steps_left) = failing(PlanOptions::default(), asynchronous, None);
        let whole = ids(&lane, &PROMPT, greedy(10, DriveMode::SelfAdvance));
        for drive in [DriveMode::SelfAdvance, DriveMode::Host] {
            // In the middle of an answer.
            steps_left.store(6, Ordering::Relaxed);
            let mut generation = lane.generate(&[1, 2, 3], greedy(10, drive)).unwrap();
            let outcomes: Vec<bool> = generation.by_ref().map(|token| token.is_ok()).collect();
            let (&last, before) = outcomes.split_last().unwrap();
            assert!(!last && before.len() >= 3 && before.iter().all(|&ok| ok), "{outcomes:?}");
            assert!(generation.next().is_none());
            assert_eq!(generation.stop_reason(), None);
            drop(generation);
            // In the prompt.
            assert!(lane.generate(&PROMPT, greedy(10, drive)).is_err());
            steps_left.store(u32::MAX, Ordering::Relaxed);
            let mut generation = lane.generate(&PROMPT, greedy(10, drive)).unwrap();
            let again: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
            assert_eq!(generation.timing().prefill_tokens, PROMPT.len() as u32, "all of it again");
            assert_eq!(again, whole);
        }
    }
}

#[test]
fn a_step_that_ran_ahead_is_part_of_the_cache() {
    let plan = PlanOptions { context: ContextSize::Tokens(16), ..Default::default() };
    let (lane, _) = failing(plan, true, None);
    let ring = |n| GenerateOptions { ring: true, ..greedy(n, DriveMode::SelfAdvance) };
    let whole = ids(&lane, &PROMPT, ring(60));
    let host = GenerateOptions { ring: true, ..greedy(60, DriveMode::Host) };
    assert_eq!(ids(&lane, &PROMPT, host), whole);
    for taken in [3, 9, 11, 30] {
        lane.prefill(&[]).unwrap();
        let mut cancelled = lane.generate(&PROMPT, ring(60)).unwrap();
        let begun: Vec<u32> = cancelled.by_ref().take(taken).map(|t| t.unwrap().id).collect();
        drop(cancelled);
        assert_eq!(begun, whole[..taken]);
        let prompt: Vec<u32> = PROMPT.iter().chain(&begun).copied().collect();
        let mut generation = lane.generate(&prompt, ring(5)).unwrap();
        let next: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        assert_eq!(next, whole[taken..taken + 5], "{taken}");
        assert_eq!(generation.timing().prefill_tokens, 1, "{taken}");
    }
}

#[test]
fn a_generation_is_cancelled_from_elsewhere() {
    let lane = load();
    let options = GenerateOptions { ring: true, ..greedy(u32::MAX, DriveMode::SelfAdvance) };
    let cancel = options.cancel.clone();
    let mut generation = lane.generate(&PROMPT, options.clone()).unwrap();
    generation.next().unwrap().unwrap();
    cancel.cancel();
    assert!(generation.next().is_none());
    assert_eq!(generation.stop_reason(), Some(StopReason::Cancelled));
    drop(generation);
    // While it computes its prompt: nothing of it.
    let mut generation = lane.generate(&[7, 8, 9], options).unwrap();
    cancel.reset();
    assert!(generation.next().is_none());
    assert_eq!(generation.stop_reason(), Some(StopReason::Cancelled));
    drop(generation);
    let whole = ids(&load(), &[7, 8, 9], greedy(5, DriveMode::Host));
    assert_eq!(ids(&lane, &[7, 8, 9], greedy(5, DriveMode::Host)), whole);
}

#[test]
fn a_ring_takes_longer_prompts_and_goes_on_where_it_was() {
    // In q8 chunks of a prompt round otherwise than single tokens.
    ring_goes_on(PlanOptions { numerics: Numerics::Exact, ..Default::default() });
    ring_goes_on(PlanOptions { numerics: Numerics::Q8, chunk_tokens: 1, ..Default::default() });
}

fn ring_goes_on(plan: PlanOptions) {
    let lane = load_with(PlanOptions { context: ContextSize::Tokens(16), ..plan }).unwrap();
    let ring = |n| GenerateOptions { ring: true, ..greedy(n, DriveMode::SelfAdvance) };
    let whole = ids(&lane, &PROMPT, ring(60));
    for already in [1, 9, 11, 40] {
        let expected = &whole[already..already + 5];
        let prompt: Vec<u32> = PROMPT.iter().chain(&whole[..already]).copied().collect();
        // From nothing, and from a cache that holds exactly what comes before.
        lane.prefill(&[]).unwrap();
        assert_eq!(ids(&lane, &prompt, ring(5)), expected, "{already}");
        lane.prefill(&[]).unwrap();
        ids(&lane, &PROMPT, ring(already as u32));
        let mut generation = lane.generate(&prompt, ring(5)).unwrap();
        let next: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        assert_eq!(next, expected, "{already}");
        assert_eq!(generation.timing().prefill_tokens, 1);
        drop(generation);
        // From a cache that has gone beyond it.
        assert_eq!(ids(&lane, &prompt, ring(5)), expected, "{already}");
    }
}
