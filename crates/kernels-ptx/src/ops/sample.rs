//! Draws the next token of each output of a step by parameters of its own, and makes it the input
//! of the next step as [`super::argmax`] does.
//!
//! The candidates are the `top_k` largest logits in falling order (equal logits: lower id
//! first). With their probabilities p at temperature 1: the shortest run from the front whose
//! sum reaches `top_p` is kept (at least one; all if `top_p` is 1 or more); of it, those with
//! `p ≥ min_p · p_first`. Then
//! `weight_i = e^((logit_i − logit_first) / temperature)`, and the first i is taken whose
//! running weight exceeds `u · Σ weight`, u = [`uniform`] of seed and position. A temperature
//! at or below 0 takes the first candidate.

use super::argmax::Ends;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;
use crate::{Candidate, MAX_CANDIDATES, SamplingPack};

kernel_params! {
    buffers {
        /// `[n_outputs][n_vocab]`.
        read logits: f32 [n_outputs * n_vocab],
        /// The row of each output; one that is no row: none.
        read outputs: u32 [n_outputs],
        /// Parameters of each output.
        read sampling: SamplingPack [n_outputs],
        /// [`crate::TokenParams`] of each row, those of outputs then those of the next step.
        update tokens: u32 [n_tokens * 3],
        /// Steps that each output made.
        update step_count: u32 [n_outputs],
        /// The token drawn for each output.
        update token: u32 [n_outputs],
    }
    scalars {
        /// Length of the logits.
        n_vocab: u32,
        /// Rows of the step.
        n_tokens: u32,
        /// Outputs.
        n_outputs: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
    }
}

impl<B> Args<B> {
    /// One block for each output.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_outputs, 1, 1]).threads(1024)
    }
}

/// A number in [0, 1) from seed and position: the upper 24 bits of a SplitMix64 output, so a
/// replay at the same position draws the same, wherever it runs.
pub fn uniform(seed: u64, position: u32) -> f32 {
    let step = (u64::from(position) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut z = seed.wrapping_add(step);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f32 / (1u32 << 24) as f32
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let ends = Ends {
        outputs: a.outputs,
        token: a.token,
        tokens: a.tokens,
        step_count: a.step_count,
        max_context_tokens: a.max_context_tokens,
    };
    ends.choose(a.logits, |output, position, logits| draw(logits, &a.sampling[output], position));
    Ok(())
}

fn draw(logits: &[f32], sampling: &SamplingPack, position: u32) -> u32 {
    let mut candidates: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .map(|(index, &value)| Candidate { value, index: index as u32 })
        .collect();
    let falling = |a: &Candidate, b: &Candidate| {
        b.rank_value().total_cmp(&a.rank_value()).then(a.index.cmp(&b.index))
    };
    let keep = match sampling.top_k {
        1..=MAX_CANDIDATES => sampling.top_k,
        _ => MAX_CANDIDATES,
    } as usize;
    if keep < candidates.len() {
        candidates.select_nth_unstable_by(keep - 1, falling);
        candidates.truncate(keep);
    }
    candidates.sort_unstable_by(falling);
    if sampling.temperature <= 0.0 {
        return candidates[0].index;
    }
    let first = candidates[0].rank_value();
    let weight = |c: &Candidate, temperature: f32| ((c.rank_value() - first) / temperature).exp();
    let total: f32 = candidates.iter().map(|c| weight(c, 1.0)).sum();
    let mut kept = 0;
    let mut sum = 0.0;
    for candidate in &candidates {
        let likelihood = weight(candidate, 1.0);
        // A sum may round to the whole before its end: top_p of 1 cuts nothing.
        let reached = sampling.top_p < 1.0 && sum >= sampling.top_p * total;
        if kept > 0 && (reached || likelihood < sampling.min_p) {
            break;
        }
        sum += likelihood;
        kept += 1;
    }
    let kept = &candidates[..kept];
    let total: f32 = kept.iter().map(|c| weight(c, sampling.temperature)).sum();
    let seed = u64::from(sampling.seed_high) << 32 | u64::from(sampling.seed_low);
    let target = uniform(seed, position) * total;
    let mut sum = 0.0;
    for candidate in kept {
        sum += weight(candidate, sampling.temperature);
        if sum > target {
            return candidate.index;
        }
    }
    kept[kept.len() - 1].index
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACK: SamplingPack = SamplingPack {
        temperature: 1.0,
        top_p: 1.0,
        min_p: 0.0,
        top_k: 0,
        seed_low: 7,
        seed_high: 0,
    };

    fn counts(logits: &[f32], pack: SamplingPack, draws: u32) -> Vec<u32> {
        let mut counts = vec![0; logits.len()];
        (0..draws).for_each(|position| counts[draw(logits, &pack, position) as usize] += 1);
        counts
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 3.0f32.ln(), 6.0f32.ln(), f32::NEG_INFINITY];
        let counts = counts(&logits, PACK, 100_000);
        for (count, share) in counts.iter().zip([0.1, 0.3, 0.6, 0.0]) {
            assert!((f64::from(*count) / 1e5 - share).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn zero_temperature_is_the_lowest_id_of_the_largest() {
        let pack = SamplingPack { temperature: 0.0, ..PACK };
        assert_eq!(draw(&[1.0, 5.0, f32::NAN, 5.0], &pack, 3), 1);
    }

    #[test]
    fn top_k_top_p_and_min_p_cut_the_tail() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let drawn = |pack| counts(&logits, pack, 20_000).iter().filter(|&&c| c > 0).count();
        assert_eq!(drawn(PACK), 4);
        assert_eq!(drawn(SamplingPack { top_k: 2, ..PACK }), 2);
        assert_eq!(drawn(SamplingPack { top_p: 0.7, ..PACK }), 2);
        assert_eq!(drawn(SamplingPack { min_p: 0.25, ..PACK }), 3);
        assert_eq!(drawn(SamplingPack { top_p: 0.0, ..PACK }), 1);
    }

    #[test]
    fn top_p_of_one_keeps_what_a_sum_in_f32_does_not_see() {
        // e^-20 is lost beside 1, and at a high temperature as likely as the first.
        let logits = [0.0, -20.0];
        let counts = counts(&logits, SamplingPack { temperature: 1e4, ..PACK }, 1000);
        assert!(counts[1] > 400, "{counts:?}");
    }

    #[test]
    fn the_seed_decides() {
        let logits = vec![0.0; 4096];
        let other = SamplingPack { seed_low: 8, ..PACK };
        assert_eq!(draw(&logits, &PACK, 1), draw(&logits, &PACK, 1));
        let differing =
            (0..100).filter(|&p| draw(&logits, &PACK, p) != draw(&logits, &other, p)).count();
        assert!(differing > 90);
    }
}
