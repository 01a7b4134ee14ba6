//! Choosing on the host: the device's own draw, penalties, log-probabilities.

use lane::sampling::draw;
use lane::{
    BackendChoice, DriveMode, GenerateOptions, Lane, LaneError, LaneOptions, Logprobs, ModelFile,
    Penalties, Sampling,
};
use proptest::prelude::*;

fn load() -> Lane {
    let options = LaneOptions { backend: BackendChoice::Host, ..Default::default() };
    ModelFile::open(None).unwrap().load(&options, &mut |_| {}).unwrap()
}

const PROMPT: [u32; 6] = [0, 35, 452, 443, 294, 12];

fn ids(lane: &Lane, options: GenerateOptions) -> Vec<u32> {
    lane.generate(&PROMPT, options).unwrap().map(|token| token.unwrap().id).collect()
}

#[test]
fn the_host_draws_what_the_device_draws() {
    let lane = load();
    for sampling in [Sampling::GREEDY, Sampling { seed: 9, ..Default::default() }] {
        let options = GenerateOptions { n_tokens: 40, sampling, ..Default::default() };
        let host = GenerateOptions { logprobs: Some(0), ..options.clone() };
        let device = ids(&lane, options);
        assert_eq!(lane.telemetry().unwrap().d2h_bytes_per_token, Some(4));
        assert_eq!(ids(&lane, host), device);
        let telemetry = lane.telemetry().unwrap();
        assert_eq!(telemetry.d2h_bytes_per_token, Some(4 * 4096), "all logits are read back");
        assert_eq!(telemetry.graph.unwrap().h2d_bytes_per_token, Some(12));
    }
}

#[test]
fn penalised_greedy_is_what_the_definition_says() {
    let lane = load();
    let penalties = Penalties { repeat: 1.5, presence: 2.0, frequency: 0.5, last_tokens: 8 };
    let sampling = Sampling::GREEDY;
    let options = GenerateOptions { n_tokens: 12, sampling, penalties, ..Default::default() };
    let generated = ids(&lane, options);
    let unpenalised = ids(&lane, GenerateOptions { n_tokens: 12, sampling, ..Default::default() });
    assert_ne!(generated, unpenalised);

    let mut sequence = PROMPT.to_vec();
    for &id in &generated {
        let mut logits = lane.evaluate(&sequence).unwrap().logits;
        for (token, logit) in (0..).zip(&mut logits) {
            let recent = &sequence[sequence.len().saturating_sub(8)..];
            let count = recent.iter().filter(|&&t| t == token).count();
            if count > 0 {
                *logit = if *logit > 0.0 { *logit / 1.5 } else { *logit * 1.5 };
                *logit -= count as f32 * 0.5 + 2.0;
            }
        }
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        assert_eq!(id, best as u32);
        sequence.push(id);
    }
}

#[test]
fn logprobs_are_the_models_own_before_penalties_and_temperature() {
    let lane = load();
    let expected = {
        let logits = lane.evaluate(&PROMPT).unwrap().logits;
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
        move |id: u32| f64::from(logits[id as usize] - max) - sum.ln()
    };
    let options = GenerateOptions {
        n_tokens: 1,
        penalties: Penalties { presence: 5.0, ..Penalties::NONE },
        logprobs: Some(4096),
        drive: DriveMode::SelfAdvance,
        ..Default::default()
    };
    let token = lane.generate(&PROMPT, options).unwrap().next().unwrap().unwrap();
    let found = token.logprobs.unwrap();
    assert_eq!(found.chosen.id, token.id);
    assert_eq!(found.top.len(), 4096);
    for entry in found.top.iter().chain([&found.chosen]) {
        assert!((f64::from(entry.logprob) - expected(entry.id)).abs() < 1e-5, "{entry:?}");
    }
    let sum: f64 = found.top.iter().map(|entry| f64::from(entry.logprob).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
}

#[test]
fn values_that_mean_nothing_are_refused() {
    for penalties in [
        Penalties { repeat: 0.0, ..Penalties::NONE },
        Penalties { repeat: f32::INFINITY, ..Penalties::NONE },
        Penalties { presence: f32::NAN, ..Penalties::NONE },
        Penalties { frequency: f32::INFINITY, ..Penalties::NONE },
    ] {
        let options = GenerateOptions { penalties, ..Default::default() };
        assert!(matches!(options.check(), Err(LaneError::Option { .. })), "{penalties:?}");
    }
    let options = GenerateOptions { stop: vec![String::new()], ..Default::default() };
    assert!(matches!(options.check(), Err(LaneError::Option { .. })));
    assert!(draw(&[], &Sampling::GREEDY, 0).is_err());
    assert_eq!(draw(&[1.0, 5.0, 5.0], &Sampling::GREEDY, 0).unwrap(), 1);
}

proptest! {
    #[test]
    fn only_tokens_of_the_window_are_penalised(
        tokens in prop::collection::vec(0u32..20, 0..40),
        logits in prop::collection::vec(-9.0f32..9.0, 16),
        repeat in 0.5f32..2.0,
        presence in -1.0f32..1.0,
        frequency in -1.0f32..1.0,
        last_tokens in 0u32..50,
    ) {
        let penalties = Penalties { repeat, presence, frequency, last_tokens };
        let mut changed = logits.clone();
        penalties.apply(&tokens, &mut changed);
        let window = &tokens[tokens.len() - tokens.len().min(last_tokens as usize)..];
        for (id, (&before, &after)) in (0..).zip(logits.iter().zip(&changed)) {
            let count = window.iter().filter(|&&token| token == id).count() as f32;
            let scaled = if before > 0.0 { before / repeat } else { before * repeat };
            let expected = scaled - count * frequency - presence;
            let expected = if count > 0.0 { expected } else { before };
            prop_assert!((after - expected).abs() < 1e-4, "{id}: {after}, not {expected}");
        }
    }

    #[test]
    fn the_likeliest_come_first(
        logits in prop::collection::vec(
            prop_oneof![8 => (-3i8..3).prop_map(f32::from), 1 => Just(f32::NAN)], 1..40),
        n_top in 0u32..50,
        chosen in any::<prop::sample::Index>(),
    ) {
        let chosen = chosen.index(logits.len()) as u32;
        let found = Logprobs::new(&logits, chosen, n_top);
        let rank = |id: u32| match logits[id as usize] { x if x.is_nan() => f32::MIN, x => x };
        let mut all: Vec<u32> = (0..logits.len() as u32).collect();
        all.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)).then(a.cmp(&b)));
        all.truncate(n_top as usize);
        let top: Vec<u32> = found.top.iter().map(|entry| entry.id).collect();
        prop_assert_eq!(top, all);
        prop_assert_eq!(found.chosen.id, chosen);
        prop_assert!(found.top.iter().all(|entry| entry.logprob <= 1e-6 || entry.logprob.is_nan()));
    }
}
