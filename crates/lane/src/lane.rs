//! The library's front door: a loaded model behind one lock.

use std::time::{Duration, Instant};

use decode_graph::{Head, OpTime};

use crate::decode::Decode;
use crate::generate::{GenerateOptions, Generation};
use crate::residency::{ResidencyError, Telemetry};
use crate::shared::{Cancel, Held, Shared};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a lane refused. After a refusal the lane is as usable as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The model file cannot be read.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    /// The model in the file cannot be used.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// The tokenizer's tables or the text cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The conversation cannot be turned into a prompt.
    #[error(transparent)]
    Chat(#[from] crate::chat::ChatError),
    /// Memory, graph or device refused.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// A state cannot be saved or used.
    #[error(transparent)]
    State(#[from] crate::saved_state::StateError),
    /// A step whose logits are NaN.
    #[error("the step after {n_tokens} tokens failed: {}", ResidencyError::NotNumbers)]
    NotNumbers {
        /// Tokens whose logits these are.
        n_tokens: usize,
    },
    /// Nothing to start from.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The prompt does not fit the context.
    #[error("the prompt has {prompt_tokens} tokens, the context {max_context_tokens}: {advice}")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of the context.
        max_context_tokens: u32,
        /// What to do.
        advice: &'static str,
    },
    /// A token id that the vocabulary does not have.
    #[error("token id {id} is out of range, the vocabulary has {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// The host cannot choose as the device does.
    #[error("cannot choose a token on the host: {0}")]
    Choice(#[from] kernels_ptx::ParamError),
    /// An option has a value that means nothing.
    #[error("{what} {value}: must be {allowed}")]
    Option {
        /// Which option.
        what: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// The model does not fit the memory.
    #[error("{0}")]
    DoesNotFit(crate::memory_plan::DoesNotFit),
    /// The model has weights that would be computed with as another type, and that was refused.
    #[error("{0}; not done, as asked")]
    Transcoding(crate::model::Transcoding),
    /// The KV cache cannot have this shape.
    #[error(transparent)]
    Kv(#[from] kv_paged::KvError),
    /// The planner of many sequences cannot have this shape.
    #[error(transparent)]
    Plan(#[from] kv_paged::PlanError),
    /// Another thread panicked while it held the lane.
    #[error("a thread panicked while it used this lane; drop it and load it again")]
    Poisoned,
    /// The backend asked for is not there.
    #[error("{0}")]
    NoBackend(String),
}

/// A loaded model: one sequence at a time, its state behind one lock.
pub struct Lane {
    tokenizer: Tokenizer,
    state: Shared<State>,
}

/// What the lock protects.
pub(crate) struct State {
    pub(crate) decoder: Box<dyn Decode>,
    /// Tokens fed so far; slot i of the cache holds token i as long as there are no more than
    /// the context has slots.
    pub(crate) history: Vec<u32>,
    /// The token that the last step chose.
    pub(crate) chosen: u32,
}

impl State {
    /// Refuses ids out of range, and prompts that the context cannot hold unless its ring may
    /// forget their beginning.
    pub(crate) fn check_prompt(&self, prompt: &[u32], ring: bool) -> Result<(), LaneError> {
        let n_vocab = self.decoder.n_vocab();
        if prompt.is_empty() {
            return Err(LaneError::EmptyPrompt);
        }
        if let Some(&id) = prompt.iter().find(|&&id| id >= n_vocab) {
            return Err(LaneError::TokenOutOfRange { id, n_vocab });
        }
        self.check_length(prompt.len(), ring)
    }

    fn check_length(&self, prompt_tokens: usize, ring: bool) -> Result<(), LaneError> {
        let max_context_tokens = self.decoder.max_context_tokens();
        if prompt_tokens > max_context_tokens as usize && !ring {
            let advice = "shorten it, or ask for a larger context";
            return Err(LaneError::PromptTooLong { prompt_tokens, max_context_tokens, advice });
        }
        Ok(())
    }

    /// Goes back to the longest beginning that cache and prompt share, short of the prompt's
    /// last token, whose logits are wanted. Returns its length.
    pub(crate) fn rewind_to_common_prefix(&mut self, prompt: &[u32]) -> usize {
        self.rewind(prompt, prompt.len().saturating_sub(1))
    }

    /// Goes back to the longest beginning that cache and `ids` share, of at most `limit` tokens.
    fn rewind(&mut self, ids: &[u32], limit: usize) -> usize {
        let common = self.history.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let common = common.min(limit);
        // Token i has overwritten token i - n in a context of n slots. Going back by one token is
        // harmless, for it is the next to be written again; more would miss what is gone.
        let wrapped = self.history.len() > self.decoder.max_context_tokens() as usize;
        let kept = if wrapped && common + 1 < self.history.len() { 0 } else { common };
        self.history.truncate(kept);
        kept
    }

    /// After a failed step nothing is known about the cache.
    pub(crate) fn forget(&mut self) {
        self.history.clear();
    }

    /// Passes on what the decoder said; after a failure nothing is known about the cache.
    pub(crate) fn or_forget<T>(&mut self, done: Result<T, ResidencyError>) -> Result<T, LaneError> {
        done.map_err(|error| {
            let n_tokens = self.history.len();
            self.forget();
            match error {
                ResidencyError::NotNumbers => LaneError::NotNumbers { n_tokens },
                error => error.into(),
            }
        })
    }
}

impl Lane {
    /// A lane over a decoder that has a model loaded.
    pub fn new(decoder: Box<dyn Decode>, tokenizer: Tokenizer) -> Self {
        let state = State { decoder, history: Vec::new(), chosen: 0 };
        Self { tokenizer, state: Shared::new(state) }
    }

    /// The tokenizer of the model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Starts a generation; tokens are computed as the iterator is asked for them.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Generation<'_>, LaneError> {
        Generation::start(self.lock()?, &self.tokenizer, prompt, options)
    }

    /// Brings the cache to hold exactly `ids`, and waits until it does. What it holds of them
    /// already is not computed again.
    pub fn prefill(&self, ids: &[u32]) -> Result<Prefilled, LaneError> {
        let mut state = self.lock()?;
        if !ids.is_empty() {
            state.check_prompt(ids, false)?;
        }
        state.decoder.prepare(Head::Greedy)?;
        let started = Instant::now();
        let common = state.rewind(ids, ids.len());
        let fed = state.feed_prompt(&ids[common..], &Cancel::default())?;
        state.read_choice()?;
        Ok(Prefilled { time: started.elapsed(), steps: fed.steps })
    }

    /// Feeds `ids` one by one: the logits behind the last, and how likely the ids were.
    pub fn evaluate(&self, ids: &[u32]) -> Result<Evaluation, LaneError> {
        let (mut last, mut nll_sum, mut index) = (Vec::new(), 0.0, 0);
        self.evaluate_each(ids, |logits| {
            index += 1;
            match ids.get(index) {
                Some(&next) => nll_sum += negative_log_likelihood(logits, next),
                None => last = logits.to_vec(),
            }
        })?;
        let nll_mean = (ids.len() > 1).then(|| nll_sum / (ids.len() - 1) as f64);
        Ok(Evaluation { logits: last, nll_mean })
    }

    /// Feeds `ids` one by one and shows the logits behind each, `[n_vocab]`, to `look`.
    pub fn evaluate_each(
        &self,
        ids: &[u32],
        mut look: impl FnMut(&[f32]),
    ) -> Result<(), LaneError> {
        let mut evaluator = self.evaluator()?;
        evaluator.state.check_prompt(ids, false)?;
        for &id in ids {
            evaluator.feed(id)?;
            look(evaluator.logits()?);
        }
        Ok(())
    }

    /// Locks the lane for feeding it token by token; its cache is empty.
    pub fn evaluator(&self) -> Result<Evaluator<'_>, LaneError> {
        let mut state = self.lock()?;
        state.decoder.prepare(Head::Greedy)?;
        state.forget();
        let logits = vec![0.0; state.decoder.n_vocab() as usize];
        Ok(Evaluator { state, logits })
    }

    /// Times the operations of a greedy step that sees `depth` tokens before its own, each kind by
    /// itself, and the whole step, seconds: medians of `repetitions`. The cache is empty afterwards.
    pub fn time_ops(&self, depth: u32, repetitions: u32) -> Result<(Vec<OpTime>, f64), LaneError> {
        let mut state = self.lock()?;
        state.check_length(depth as usize + 1, false)?;
        state.decoder.prepare(Head::Greedy)?;
        state.forget();
        Ok(state.decoder.time_ops(depth, repetitions)?)
    }

    /// Bytes per second at which the backend reads memory that no cache holds.
    pub fn read_bandwidth(&self) -> Result<f64, LaneError> {
        Ok(self.lock()?.decoder.read_bandwidth()?)
    }

    /// A copy of everything that can be watched.
    pub fn telemetry(&self) -> Result<Telemetry, LaneError> {
        Ok(self.lock()?.decoder.telemetry())
    }

    /// `host` or `cuda`.
    pub fn backend(&self) -> Result<&'static str, LaneError> {
        Ok(self.lock()?.decoder.backend())
    }

    /// What it runs on, for people.
    pub fn device(&self) -> Result<String, LaneError> {
        Ok(self.lock()?.decoder.device())
    }

    /// Shape of the KV cache.
    pub fn kv(&self) -> Result<kv_paged::PagedKvConfig, LaneError> {
        Ok(self.lock()?.decoder.kv())
    }

    /// The slab's allocations, for people.
    pub fn report(&self) -> Result<gpu_slab::Report, LaneError> {
        Ok(self.lock()?.decoder.report())
    }

    pub(crate) fn lock(&self) -> Result<Held<'_, State>, LaneError> {
        self.state.hold().ok_or(LaneError::Poisoned)
    }
}

/// What [`Lane::prefill`] took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefilled {
    /// Time.
    pub time: Duration,
    /// Steps, each of a chunk of tokens or of one.
    pub steps: u32,
}

/// A lane being fed token by token.
pub struct Evaluator<'a> {
    state: Held<'a, State>,
    logits: Vec<f32>,
}

impl Evaluator<'_> {
    /// Empties the cache.
    pub fn restart(&mut self) {
        self.state.forget();
    }

    /// Runs a step on `id`, which the vocabulary and the context must have room for.
    pub fn feed(&mut self, id: u32) -> Result<(), LaneError> {
        let fed = self.state.history.len();
        self.state.check_prompt(&[id], false)?;
        self.state.check_length(fed + 1, false)?;
        self.state.feed(id)
    }

    /// The logits behind the last token, `[n_vocab]`.
    pub fn logits(&mut self) -> Result<&[f32], LaneError> {
        self.state.read_logits(&mut self.logits)?;
        Ok(&self.logits)
    }
}

/// What [`Lane::evaluate`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Behind the last token, `[n_vocab]`.
    pub logits: Vec<f32>,
    /// Mean over all ids but the first, given those before, in nats; `None` for a single id.
    pub nll_mean: Option<f64>,
}

fn negative_log_likelihood(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    sum.ln() - f64::from(logits[id as usize] - max)
}
