//! Perplexity as llama.cpp measures it, and how far a model's predictions are from another's.
//!
//! The ids of a text are cut into chunks of `n_ctx`, a rest that fills none left out. Every chunk
//! starts with an empty cache and, where the model asks for one, with the beginning-of-sequence
//! token in the place of its first. Of a chunk only predictions with at least half of it before
//! them count: those of the tokens `n_ctx / 2 + 1 .. n_ctx`.

use crate::lane::{Evaluator, Lane, LaneError};
use crate::tokenizer::{Special, Tokenizer};

/// Why a text cannot be measured with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PerplexityError {
    /// Fewer than two chunks.
    #[error(
        "the text has {tokens} tokens, two chunks of {n_ctx} need {}: take more text, or a smaller \
         context", 2 * n_ctx
    )]
    TextTooShort {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a chunk.
        n_ctx: usize,
    },
    /// No token of a chunk would count.
    #[error("a context of {n_ctx} tokens is too short, at least 4 are needed")]
    ContextTooShort {
        /// Tokens of a chunk.
        n_ctx: usize,
    },
    /// Predictions of one model say nothing about those of the other.
    #[error("the two models do not have the same vocabulary")]
    OtherVocabulary,
    /// The lane refused.
    #[error(transparent)]
    Lane(#[from] LaneError),
}

/// A text, cut.
#[derive(Clone, Debug)]
pub struct Chunks {
    ids: Vec<u32>,
    n_ctx: usize,
    bos: Option<u32>,
}

impl Chunks {
    /// Tokenizes `text` and cuts it into chunks of `n_ctx` tokens, at least two.
    pub fn new(tokenizer: &Tokenizer, text: &str, n_ctx: u32) -> Result<Self, PerplexityError> {
        let ids = tokenizer.encode_prompt(text, Special::AsText).map_err(LaneError::from)?;
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        Self::of_ids(ids, n_ctx as usize, bos)
    }

    fn of_ids(ids: Vec<u32>, n_ctx: usize, bos: Option<u32>) -> Result<Self, PerplexityError> {
        if n_ctx < 4 {
            return Err(PerplexityError::ContextTooShort { n_ctx });
        }
        if ids.len() < 2 * n_ctx {
            return Err(PerplexityError::TextTooShort { tokens: ids.len(), n_ctx });
        }
        Ok(Self { ids, n_ctx, bos })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ids.len() / self.n_ctx
    }

    /// Tokens of a chunk.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// The chunks, ready to be fed.
    pub fn iter(&self) -> impl Iterator<Item = Vec<u32>> + '_ {
        self.ids.chunks_exact(self.n_ctx).map(|chunk| {
            let mut chunk = chunk.to_vec();
            if let Some(bos) = self.bos {
                chunk[0] = bos;
            }
            chunk
        })
    }
}

/// A measurement under way, with the locks of its lanes.
pub struct Measurement<'a> {
    model: Evaluator<'a>,
    reference: Option<Evaluator<'a>>,
    tally: Tally,
}

impl<'a> Measurement<'a> {
    /// Of a model's predictions, beside those of a reference if there is one. Refuses another
    /// vocabulary.
    pub fn new(model: &'a Lane, reference: Option<&'a Lane>) -> Result<Self, PerplexityError> {
        let tokenizer = model.tokenizer();
        if let Some(reference) = reference {
            let other = reference.tokenizer();
            let same = tokenizer.n_vocab() == other.n_vocab()
                && (0..tokenizer.n_vocab() as u32)
                    .all(|id| tokenizer.token_text(id) == other.token_text(id));
            if !same {
                return Err(PerplexityError::OtherVocabulary);
            }
        }
        let reference = reference.map(Lane::evaluator).transpose()?;
        Ok(Self { model: model.evaluator()?, reference, tally: Tally::default() })
    }

    /// Adds a chunk; `fed` is called behind each of its tokens.
    pub fn chunk(&mut self, ids: &[u32], mut fed: impl FnMut()) -> Result<(), LaneError> {
        self.model.restart();
        if let Some(reference) = &mut self.reference {
            reference.restart();
        }
        let first = ids.len() / 2;
        for (index, pair) in ids.windows(2).enumerate() {
            let [id, next] = [pair[0], pair[1]];
            self.model.feed(id)?;
            if let Some(reference) = &mut self.reference {
                reference.feed(id)?;
            }
            if index >= first {
                let logits = self.model.logits()?;
                match &mut self.reference {
                    None => self.tally.add(logits, next),
                    Some(reference) => self.tally.compare(reference.logits()?, logits, next),
                }
            }
            fed();
        }
        Ok(())
    }

    /// What was found so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }
}

/// Mean of numbers and how sure it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    n: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.n += 1;
        self.sum += x;
        self.sum_of_squares += x * x;
    }

    /// How many numbers.
    pub fn count(&self) -> u64 {
        self.n
    }

    /// Their mean.
    pub fn value(&self) -> f64 {
        self.sum / self.n as f64
    }

    /// Standard error of the mean.
    pub fn error(&self) -> f64 {
        let variance = self.sum_of_squares / self.n as f64 - self.value().powi(2);
        (variance.max(0.0) / (self.n as f64 - 1.0)).sqrt()
    }
}

/// What a measurement found.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    nll: Mean,
    divergence: Option<Divergence>,
}

/// How predictions differ from a reference's.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    reference_nll: Mean,
    kl: Mean,
    same_top: Mean,
    /// Of the probability of the text's own token.
    squared_change: Mean,
    /// Every divergence, for quantiles.
    values: Vec<f32>,
}

impl Tally {
    fn add(&mut self, logits: &[f32], next: u32) {
        self.nll.add(-Softmax::of(logits).log_probability(next));
    }

    fn compare(&mut self, reference: &[f32], logits: &[f32], next: u32) {
        let (base, model) = (Softmax::of(reference), Softmax::of(logits));
        self.nll.add(-model.log_probability(next));
        let found = self.divergence.get_or_insert_default();
        found.reference_nll.add(-base.log_probability(next));
        let kl = base.divergence_of(&model);
        found.kl.add(kl);
        found.values.push(kl as f32);
        found.same_top.add(f64::from(u8::from(base.top == model.top)));
        let change = model.log_probability(next).exp() - base.log_probability(next).exp();
        found.squared_change.add(change * change);
    }

    /// Negative log-likelihood of a token, nats.
    pub fn nll(&self) -> Mean {
        self.nll
    }

    /// Perplexity, and its standard error.
    pub fn perplexity(&self) -> (f64, f64) {
        perplexity(&self.nll)
    }

    /// How far from the reference, if there is one.
    pub fn divergence(&self) -> Option<&Divergence> {
        self.divergence.as_ref()
    }
}

impl Divergence {
    /// Perplexity of the reference, and its standard error.
    pub fn reference_perplexity(&self) -> (f64, f64) {
        perplexity(&self.reference_nll)
    }

    /// Kullback–Leibler divergence of the predictions from the reference's, nats.
    pub fn kl(&self) -> Mean {
        self.kl
    }

    /// The divergence that a share `q` of the predictions does not exceed, 0 to 1.
    pub fn kl_quantile(&self, q: f64) -> f32 {
        let mut values = self.values.clone();
        values.sort_unstable_by(f32::total_cmp);
        let index = (q * values.len() as f64).ceil() as usize;
        values.get(index.saturating_sub(1)).copied().unwrap_or(0.0)
    }

    /// Share of predictions with the reference's likeliest token, 0 to 1.
    pub fn same_top(&self) -> Mean {
        self.same_top
    }

    /// Root mean square of the change in probability of the text's own token.
    pub fn rms_change(&self) -> f64 {
        self.squared_change.value().sqrt()
    }
}

fn perplexity(nll: &Mean) -> (f64, f64) {
    let value = nll.value().exp();
    (value, value * nll.error())
}

/// Logits as probabilities.
struct Softmax<'a> {
    logits: &'a [f32],
    /// What to subtract from a logit.
    log_sum: f64,
    /// The likeliest, of equals the first.
    top: usize,
}

impl<'a> Softmax<'a> {
    fn of(logits: &'a [f32]) -> Self {
        let higher =
            |best: usize, (id, &x): (usize, &f32)| if x > logits[best] { id } else { best };
        let top = logits.iter().enumerate().fold(0, higher);
        let max = f64::from(logits[top]);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        Self { logits, log_sum: max + sum.ln(), top }
    }

    fn log_probability(&self, id: u32) -> f64 {
        f64::from(self.logits[id as usize]) - self.log_sum
    }

    /// `Σ p · ln(p / q)` with p of `self` and q of `other`.
    fn divergence_of(&self, other: &Softmax<'_>) -> f64 {
        let pairs = self.logits.iter().zip(other.logits);
        let terms = pairs.map(|(&base, &logit)| {
            let log_p = f64::from(base) - self.log_sum;
            log_p.exp() * (log_p - (f64::from(logit) - other.log_sum))
        });
        // Rounding must not make equal predictions better than equal.
        terms.sum::<f64>().max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::LN_2;

    /// Logits of the probabilities 1/4, 1/2, 1/4 and 1/2, 1/4, 1/4; a constant changes nothing.
    const MODEL: [f32; 3] = [3.0, 3.0 + LN_2 as f32, 3.0];
    const REFERENCE: [f32; 3] = [LN_2 as f32, 0.0, 0.0];

    #[track_caller]
    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }

    #[test]
    fn perplexity_by_hand() {
        let mut tally = Tally::default();
        tally.add(&MODEL, 1); // ln 2
        tally.add(&MODEL, 0); // 2 ln 2
        let (value, error) = tally.perplexity();
        near(value, 2f64.powf(1.5));
        // Mean square 5/2, squared mean 9/4, so (1/4 / (2 - 1))^½ ln 2.
        near(error, 2f64.powf(1.5) * 0.5 * LN_2);
    }

    #[test]
    fn divergence_by_hand() {
        let mut tally = Tally::default();
        tally.compare(&REFERENCE, &MODEL, 2);
        tally.compare(&MODEL, &MODEL, 1);
        let found = tally.divergence().unwrap();
        // 1/2 · ln(1/2 : 1/4) + 1/4 · ln(1/4 : 1/2) = 1/4 · ln 2, then 0.
        near(found.kl().value(), LN_2 / 8.0);
        near(f64::from(found.kl_quantile(0.5)), 0.0);
        near(f64::from(found.kl_quantile(1.0)), LN_2 / 4.0);
        near(found.same_top().value(), 0.5);
        near(found.rms_change(), 0.0);
        near(found.reference_perplexity().0, 2f64.powf(1.5));
        near(tally.perplexity().0, 2f64.powf(1.5));
    }

    #[test]
    fn chunks_are_whole_and_begin_with_bos() {
        let ids: Vec<u32> = (10..19).collect();
        let chunks = Chunks::of_ids(ids.clone(), 4, Some(1)).unwrap();
        assert_eq!(chunks.count(), 2);
        let cut: Vec<Vec<u32>> = chunks.iter().collect();
        assert_eq!(cut, [[1, 11, 12, 13], [1, 15, 16, 17]]);
        let cut: Vec<Vec<u32>> = Chunks::of_ids(ids.clone(), 4, None).unwrap().iter().collect();
        assert_eq!(cut, [[10, 11, 12, 13], [14, 15, 16, 17]]);
        let short = Chunks::of_ids(ids.clone(), 5, None).unwrap_err();
        assert!(short.to_string().contains("has 9 tokens, two chunks of 5 need 10"), "{short}");
        assert!(Chunks::of_ids(ids, 3, None).is_err());
    }
}
