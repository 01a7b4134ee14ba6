//! Prompts computed in chunks: the same as token by token.

#[allow(dead_code)] // Other tests use the rest of it.
mod support;

use std::sync::atomic::Ordering;

use decode_graph::Numerics;
use lane::{
    BackendChoice, Cancel, ContextSize, DriveMode, FusionChoice, GenerateOptions, Lane,
    LaneOptions, ModelFile, PlanOptions, StopReason,
};
use support::failing::failing;
use support::{greedy, ids};

fn plan(chunk_tokens: u32, numerics: Numerics, context: u32) -> PlanOptions {
    let context = ContextSize::Tokens(context);
    PlanOptions { chunk_tokens, numerics, context, ..Default::default() }
}

fn load(chunk_tokens: u32, numerics: Numerics, context: u32) -> Lane {
    let plan = plan(chunk_tokens, numerics, context);
    let options = LaneOptions { backend: BackendChoice::Host, plan, ..Default::default() };
    ModelFile::open(None).unwrap().load(&options, &mut |_| {}).unwrap()
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| 300 + i * 97 % 3000).collect()
}

/// Log-probabilities of the whole vocabulary behind a prompt, by id.
fn logprobs(lane: &Lane, prompt: &[u32]) -> Vec<f32> {
    let n_vocab = lane.tokenizer().n_vocab() as u32;
    let options = GenerateOptions { logprobs: Some(n_vocab), ..greedy(1, DriveMode::Host) };
    let token = lane.generate(prompt, options).unwrap().next().unwrap().unwrap();
    let mut top = token.logprobs.unwrap().top;
    top.sort_unstable_by_key(|entry| entry.id);
    top.iter().map(|entry| entry.logprob).collect()
}

/// Relative L2 distance.
fn distance(expected: &[f32], found: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| -> f64 {
        values.map(|value| f64::from(value).powi(2)).sum()
    };
    let difference = squares(&mut expected.iter().zip(found).map(|(a, b)| a - b));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}

#[test]
fn a_prompt_in_chunks_is_as_one_token_by_token() {
    for (numerics, tolerance) in [(Numerics::Exact, 1e-4), (Numerics::Q8, 3e-2)] {
        let by_one = load(1, numerics, 300);
        let chunked = load(128, numerics, 300);
        // Whole chunks of every size, and rests of every kind.
        for len in [1, 8, 9, 33, 40, 129, 169, 300] {
            let (expected, found) =
                (logprobs(&by_one, &prompt(len)), logprobs(&chunked, &prompt(len)));
            let error = distance(&expected, &found);
            println!("{numerics:?}, {len} tokens: relative L2 distance {error:.1e}");
            assert!(error < tolerance, "{numerics:?}, {len} tokens: {error}");
        }
    }
}

/// On a GPU that has a persistent step, chunks read the weights in another layout.
#[test]
fn a_persistent_step_goes_on_after_chunks() {
    let load = |two_layouts| {
        let (context, fusion) = (ContextSize::Tokens(300), FusionChoice::Persistent);
        let plan = PlanOptions { context, fusion, two_layouts, ..Default::default() };
        let options = LaneOptions { backend: BackendChoice::Host, plan, ..Default::default() };
        ModelFile::open(None).unwrap().load(&options, &mut |_| {}).unwrap()
    };
    let (one, two) = (load(false), load(true));
    let (one_bytes, two_bytes) =
        [&one, &two].map(|lane| lane.telemetry().unwrap().resident_weight_bytes).into();
    assert!(two_bytes > one_bytes * 19 / 10, "{one_bytes} and {two_bytes} bytes");
    let telemetry = two.telemetry().unwrap();
    assert_eq!(telemetry.high_water_bytes, telemetry.capacity_bytes, "as planned");
    let (expected, found) = (logprobs(&one, &prompt(50)), logprobs(&two, &prompt(50)));
    assert!(distance(&expected, &found) < 3e-2);
    assert!(two.telemetry().unwrap().captures > one.telemetry().unwrap().captures);
    // What one saved the other can use: the second layout is no part of a model's identity.
    two.load_state(&one.save_state().unwrap()).unwrap();
}

#[test]
fn chunks_are_fewer_steps() {
    let lane = load(128, Numerics::Q8, 300);
    ids(&lane, &prompt(170), greedy(1, DriveMode::SelfAdvance));
    // 128, 32 and 8 at once, and one by one the last but one and the last.
    assert_eq!(lane.telemetry().unwrap().captures, 1 + 3);
}

#[test]
fn a_prompt_longer_than_the_context_goes_around_the_ring() {
    let (by_one, chunked) = (load(1, Numerics::Exact, 64), load(512, Numerics::Exact, 64));
    let options = || GenerateOptions { ring: true, ..greedy(30, DriveMode::SelfAdvance) };
    assert_eq!(ids(&by_one, &prompt(150), options()), ids(&chunked, &prompt(150), options()));
}

#[test]
fn a_prompt_cancelled_before_it_begins_leaves_the_lane_usable() {
    let lane = load(32, Numerics::Exact, 300);
    let cancel = Cancel::default();
    cancel.cancel();
    let options = GenerateOptions { cancel, ..greedy(5, DriveMode::SelfAdvance) };
    let mut generation = lane.generate(&prompt(100), options).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.stop_reason(), Some(StopReason::Cancelled));
    drop(generation);
    let whole = ids(&lane, &prompt(100), greedy(5, DriveMode::SelfAdvance));
    let by_one = load(1, Numerics::Exact, 300);
    assert_eq!(whole, ids(&by_one, &prompt(100), greedy(5, DriveMode::Host)));
}

#[test]
fn a_cancelled_prompt_is_kept_as_far_as_it_came() {
    let cancel = Cancel::default();
    let (lane, steps_left) = failing(plan(32, Numerics::Exact, 300), false, Some(cancel.clone()));
    steps_left.store(2, Ordering::Relaxed);
    let options = GenerateOptions { cancel, ..greedy(5, DriveMode::SelfAdvance) };
    let mut generation = lane.generate(&prompt(100), options).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.stop_reason(), Some(StopReason::Cancelled));
    drop(generation);

    steps_left.store(u32::MAX, Ordering::Relaxed);
    let options = greedy(5, DriveMode::SelfAdvance);
    let mut generation = lane.generate(&prompt(100), options).unwrap();
    let whole: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
    assert_eq!(generation.timing().prefill_tokens, 100 - 2 * 32, "two chunks were there");
    let by_one = load(1, Numerics::Exact, 300);
    assert_eq!(whole, ids(&by_one, &prompt(100), greedy(5, DriveMode::Host)));
}
