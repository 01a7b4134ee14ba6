//! The generation loop: prompt in, tokens out one by one, over one locked lane.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use decode_graph::{Drive, Head};
use kernels_ptx::{SamplingPack, TokenParams};

use crate::lane::{LaneError, State};
use crate::tokenizer::{TextStream, Tokenizer};

/// Who feeds the next token to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DriveMode {
    /// The device feeds itself: nothing is uploaded per token.
    #[default]
    SelfAdvance,
    /// The host uploads 12 bytes per token.
    Host,
}

/// How the next token is chosen. The order of the cuts is top-k, top-p, min-p, temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token (greedy).
    pub temperature: f32,
    /// Keeps this many likeliest tokens; 0: as many as sampling considers.
    pub top_k: u32,
    /// Keeps the likeliest tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the likeliest.
    pub min_p: f32,
    /// Equal seeds draw equal tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, seed: 1 }
    }
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Refuses values that mean nothing.
    pub fn check(&self) -> Result<(), LaneError> {
        let unit = |value: f32| (0.0..=1.0).contains(&value);
        let wrong = if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            ("temperature", self.temperature, "a finite number from 0 up")
        } else if !unit(self.top_p) {
            ("top-p", self.top_p, "from 0 to 1")
        } else if !unit(self.min_p) {
            ("min-p", self.min_p, "from 0 to 1")
        } else {
            return Ok(());
        };
        let (what, value, allowed) = wrong;
        Err(LaneError::Option { what, value: value.to_string(), allowed })
    }

    fn head(&self) -> Head {
        if self.temperature > 0.0 { Head::Sampled } else { Head::Greedy }
    }

    fn pack(&self) -> SamplingPack {
        SamplingPack {
            temperature: self.temperature,
            top_p: self.top_p,
            min_p: self.min_p,
            top_k: self.top_k,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
        }
    }
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub n_tokens: u32,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Who feeds it back.
    pub drive: DriveMode,
    /// Go on beyond the context, overwriting the oldest tokens.
    pub ring: bool,
    /// Do not stop at the model's end tokens.
    pub ignore_end: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            n_tokens: 128,
            sampling: Sampling::default(),
            drive: DriveMode::default(),
            ring: false,
            ignore_end: false,
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// The model ended its text.
    Eos,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

/// A generated token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that it completes; empty while a character is incomplete.
    pub text: String,
}

/// How long things took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// Prompt tokens computed, the last one too (those already in the cache are not).
    pub prefill_tokens: u32,
    /// From the call to the first token, which is the time of those.
    pub first_token: Duration,
    /// Tokens generated after the first.
    pub decode_tokens: u32,
    /// Their time.
    pub decode: Duration,
}

/// A generation under way: an iterator over its tokens that holds the lane's lock. Dropping it
/// cancels; the lane is ready for the next one.
pub struct Generation<'a> {
    state: MutexGuard<'a, State>,
    options: GenerateOptions,
    text: TextStream,
    tokenizer: &'a Tokenizer,
    /// The last token of the prompt, until the first step has fed it.
    pending: Option<u32>,
    position: u32,
    generated: u32,
    stop: Option<StopReason>,
    timing: Timing,
    started: Instant,
}

impl<'a> Generation<'a> {
    /// Computes the prompt up to its last token. What the cache still holds of an earlier
    /// sequence with the same beginning is not computed again.
    pub(crate) fn start(
        mut state: MutexGuard<'a, State>,
        tokenizer: &'a Tokenizer,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Self, LaneError> {
        let started = Instant::now();
        options.sampling.check()?;
        state.check_prompt(prompt)?;
        state.decoder.prepare(options.sampling.head())?;
        if options.sampling.head() == Head::Sampled {
            state.decoder.set_sampling(&options.sampling.pack())?;
        }
        let cached = state.rewind_to_common_prefix(prompt);
        let Some((&last, before)) = prompt.split_last() else {
            return Err(LaneError::EmptyPrompt);
        };
        for &id in &before[cached..] {
            state.feed(id)?;
        }
        let prefill_tokens = (prompt.len() - cached) as u32;
        let timing = Timing { prefill_tokens, ..Timing::default() };
        Ok(Self {
            state,
            options,
            text: TextStream::new(tokenizer),
            tokenizer,
            pending: Some(last),
            position: before.len() as u32,
            generated: 0,
            stop: None,
            timing,
            started,
        })
    }

    /// Why it ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop
    }

    /// How long things took so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Text held back because its last character is incomplete.
    pub fn finish_text(&mut self) -> String {
        self.text.finish()
    }

    fn step(&mut self) -> Result<u32, LaneError> {
        let at = Instant::now();
        let state = &mut *self.state;
        match (self.pending.take(), self.options.drive) {
            (Some(id), _) => state.feed(id)?,
            (None, DriveMode::Host) => {
                let id = state.chosen;
                state.feed(id)?;
            }
            (None, DriveMode::SelfAdvance) => state.feed_chosen()?,
        }
        self.position += 1;
        let id = state.read_choice()?;
        if self.generated == 0 {
            self.timing.first_token = self.started.elapsed();
        } else {
            self.timing.decode_tokens += 1;
            self.timing.decode += at.elapsed();
        }
        self.generated += 1;
        Ok(id)
    }

    fn check_stop(&self) -> Option<StopReason> {
        if self.generated >= self.options.n_tokens {
            return Some(StopReason::Length);
        }
        let full = self.position >= self.state.decoder.max_context_tokens();
        (full && !self.options.ring).then_some(StopReason::Context)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, LaneError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.stop = self.stop.or_else(|| self.check_stop());
        if self.stop.is_some() {
            return None;
        }
        let id = match self.step() {
            Ok(id) => id,
            Err(error) => {
                self.stop = Some(StopReason::Length);
                self.state.forget();
                return Some(Err(error));
            }
        };
        if !self.options.ignore_end && self.tokenizer.is_end(id) {
            self.stop = Some(StopReason::Eos);
            return None;
        }
        let text = self.text.push(id);
        Some(Ok(Token { id, text }))
    }
}

/// The parameters of the token at `position`.
pub(crate) fn token_params(position: u32, max_context_tokens: u32, token_id: u32) -> TokenParams {
    TokenParams { absolute_position: position, ring_slot: position % max_context_tokens, token_id }
}

impl State {
    /// Runs a step on a token given by the host.
    pub(crate) fn feed(&mut self, id: u32) -> Result<(), LaneError> {
        let position = self.history.len() as u32;
        let params = token_params(position, self.decoder.max_context_tokens(), id);
        self.decoder.step(Drive::Host(&[params]))?;
        self.history.push(id);
        Ok(())
    }

    /// Runs a step on the token that the device chose.
    fn feed_chosen(&mut self) -> Result<(), LaneError> {
        self.decoder.step(Drive::SelfAdvance)?;
        self.history.push(self.chosen);
        Ok(())
    }

    fn read_choice(&mut self) -> Result<u32, LaneError> {
        self.chosen = self.decoder.token()?;
        Ok(self.chosen)
    }
}
