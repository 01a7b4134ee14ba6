//! The generation loop: prompt in, tokens out one by one, over one locked lane.

use std::time::{Duration, Instant};

use decode_graph::{Drive, Head};
use gpu_slab::QueuedRead;
use kernels_ptx::TokenParams;

use crate::lane::{LaneError, State};
use crate::sampling::{Logprobs, Penalties, Sampling, draw};
use crate::shared::{Cancel, Held};
use crate::stop_text::StoppedText;
use crate::tokenizer::Tokenizer;

/// Who feeds the next token to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DriveMode {
    /// The device feeds itself: nothing is uploaded per token.
    #[default]
    SelfAdvance,
    /// The host uploads 12 bytes per token.
    Host,
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub n_tokens: u32,
    /// How each is chosen.
    pub sampling: Sampling,
    /// What makes repetitions less likely; other than none, see [`Self::reads_logits`].
    pub penalties: Penalties,
    /// Tell with each token how likely it and so many likeliest tokens were; see
    /// [`Self::reads_logits`].
    pub logprobs: Option<u32>,
    /// Who feeds it back.
    pub drive: DriveMode,
    /// Go on beyond the context, overwriting the oldest tokens; a prompt may be longer than the
    /// context, too.
    pub ring: bool,
    /// Do not stop at the model's end tokens.
    pub ignore_end: bool,
    /// Texts that end the generation; they are not part of its text.
    pub stop: Vec<String>,
    /// Ends it from elsewhere.
    pub cancel: Cancel,
}

impl GenerateOptions {
    /// Whether every token's logits are read back, `4 · n_vocab` bytes, and the host chooses: for
    /// penalties and log-probabilities. The host then feeds the token too, whatever `drive` says.
    pub fn reads_logits(&self) -> bool {
        self.logprobs.is_some() || !self.penalties.is_none()
    }

    /// The same with one more stop text, such as a chat template's.
    pub fn stopping_at(mut self, stop_text: Option<&str>) -> Self {
        self.stop.extend(stop_text.map(str::to_owned));
        self
    }

    /// Refuses values that mean nothing.
    pub fn check(&self) -> Result<(), LaneError> {
        self.sampling.check()?;
        self.penalties.check()?;
        if self.stop.iter().any(String::is_empty) {
            let (what, value, allowed) = ("stop text", "\"\"".into(), "at least one character");
            return Err(LaneError::Option { what, value, allowed });
        }
        Ok(())
    }
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            n_tokens: 128,
            sampling: Sampling::default(),
            penalties: Penalties::NONE,
            logprobs: None,
            drive: DriveMode::default(),
            ring: false,
            ignore_end: false,
            stop: Vec::new(),
            cancel: Cancel::default(),
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum StopReason {
    /// The model ended its text.
    Eos,
    /// A stop text.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// [`Cancel`].
    Cancelled,
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that becomes certain with it; empty while a character is incomplete or a stop
    /// text may begin.
    pub text: String,
    /// How likely it was, where that was asked for.
    pub logprobs: Option<Logprobs>,
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

impl Timing {
    /// Of two generations, one after the other, that were one to the user.
    pub(crate) fn and(self, next: Self) -> Self {
        Self {
            prefill_tokens: self.prefill_tokens,
            first_token: self.first_token,
            decode_tokens: self.decode_tokens + 1 + next.decode_tokens,
            decode: self.decode + next.first_token + next.decode,
        }
    }
}

/// A generation under way: an iterator over its tokens that holds the lane's lock. Dropping it
/// cancels; the lane is ready for the next one. It ends after an error, with no stop reason, and
/// the lane forgets what its cache held.
pub struct Generation<'a> {
    state: Held<'a, State>,
    options: GenerateOptions,
    text: StoppedText,
    tokenizer: &'a Tokenizer,
    /// Logits read back, where the host chooses.
    logits: Option<Vec<f32>>,
    /// The last token of the prompt, until the first step has fed it.
    pending: Option<u32>,
    /// The token of a step that was queued before its input was known here: a device that feeds
    /// itself need not wait for the host between two tokens.
    ahead: Option<QueuedRead>,
    position: u32,
    generated: u32,
    stop: Option<StopReason>,
    failed: bool,
    timing: Timing,
    started: Instant,
}

impl<'a> Generation<'a> {
    /// Computes the prompt up to its last token. What the cache still holds of an earlier
    /// sequence with the same beginning is not computed again.
    pub(crate) fn start(
        mut state: Held<'a, State>,
        tokenizer: &'a Tokenizer,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Self, LaneError> {
        let started = Instant::now();
        options.check()?;
        state.check_prompt(prompt, options.ring)?;
        let Some((&last, before)) = prompt.split_last() else {
            return Err(LaneError::EmptyPrompt);
        };
        let reads_logits = options.reads_logits();
        let head = if reads_logits { Head::Greedy } else { options.sampling.head() };
        state.decoder.prepare(head)?;
        if head == Head::Sampled {
            state.decoder.set_sampling(&options.sampling.pack())?;
        }
        let cached = state.rewind_to_common_prefix(prompt);
        let fed = state.feed_prompt(&before[cached..], &options.cancel)?;
        let stop = fed.cancelled.then_some(StopReason::Cancelled);
        let prefill_tokens = (state.history.len() + 1 - cached) as u32;
        let timing = Timing { prefill_tokens, ..Timing::default() };
        let logits = reads_logits.then(|| vec![0.0; state.decoder.n_vocab() as usize]);
        Ok(Self {
            state,
            text: StoppedText::new(tokenizer, &options.stop),
            options,
            tokenizer,
            logits,
            pending: Some(last),
            ahead: None,
            position: before.len() as u32,
            generated: 0,
            stop,
            failed: false,
            timing,
            started,
        })
    }

    /// Why it ended; `None` while it goes on and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop
    }

    /// How long things took so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Text held back because its last character is incomplete or a stop text might have begun.
    pub fn finish_text(&mut self) -> String {
        self.text.finish()
    }

    fn step(&mut self) -> Result<(u32, Option<Logprobs>), LaneError> {
        let at = Instant::now();
        let chosen = if self.logits.is_some() || self.options.drive == DriveMode::Host {
            let id = self.pending.take().unwrap_or(self.state.chosen);
            self.state.feed(id)?;
            self.position += 1;
            match &mut self.logits {
                None => (self.state.read_choice()?, None),
                Some(logits) => choose_on_host(&mut self.state, &self.options, logits)?,
            }
        } else {
            (self.self_driven_step()?, None)
        };
        if self.generated == 0 {
            self.timing.first_token = self.started.elapsed();
        } else {
            self.timing.decode_tokens += 1;
            self.timing.decode += at.elapsed();
        }
        self.generated += 1;
        Ok(chosen)
    }

    /// Takes the step that was queued ahead, or queues it now, and queues the next one before
    /// waiting for its token.
    fn self_driven_step(&mut self) -> Result<u32, LaneError> {
        let runs_ahead = self.runs_ahead();
        let state = &mut *self.state;
        let queued = match (self.ahead.take(), self.pending.take()) {
            (Some(queued), _) => {
                state.history.push(state.chosen);
                queued
            }
            (None, Some(id)) => {
                state.feed(id)?;
                state.queue_choice()?
            }
            (None, None) => {
                state.feed_chosen()?;
                state.queue_choice()?
            }
        };
        self.position += 1;
        if runs_ahead {
            state.run_ahead()?;
            self.ahead = Some(state.queue_choice()?);
        }
        state.finish_choice(queued)
    }

    /// Whether the token after the next one will be wanted, unless the next one ends the text, and
    /// queueing its step early saves time.
    fn runs_ahead(&self) -> bool {
        let decoder = &self.state.decoder;
        let room = self.position + 1 < decoder.max_context_tokens();
        decoder.is_asynchronous()
            && self.generated + 1 < self.options.n_tokens
            && (room || self.options.ring)
    }

    fn check_stop(&self) -> Option<StopReason> {
        if self.text.found() {
            return Some(StopReason::Stop);
        }
        if self.options.cancel.is_cancelled() {
            return Some(StopReason::Cancelled);
        }
        if self.generated >= self.options.n_tokens {
            return Some(StopReason::Length);
        }
        let full = self.position >= self.state.decoder.max_context_tokens();
        (full && !self.options.ring).then_some(StopReason::Context)
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        // A step that ran ahead has put the last token into the cache. After an error nothing is
        // known about the cache, and the history is empty.
        if self.ahead.is_some() && !self.failed {
            let chosen = self.state.chosen;
            self.state.history.push(chosen);
        }
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, LaneError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        self.stop = self.stop.or_else(|| self.check_stop());
        if self.stop.is_some() {
            return None;
        }
        let (id, logprobs) = match self.step() {
            Ok(chosen) => chosen,
            Err(error) => {
                self.failed = true;
                return Some(Err(error));
            }
        };
        if !self.options.ignore_end && self.tokenizer.is_end(id) {
            self.stop = Some(StopReason::Eos);
            return None;
        }
        let text = self.text.push(id);
        Some(Ok(Token { id, text, logprobs }))
    }
}

/// Reads the logits of the last step and chooses by them.
fn choose_on_host(
    state: &mut State,
    options: &GenerateOptions,
    logits: &mut [f32],
) -> Result<(u32, Option<Logprobs>), LaneError> {
    state.read_logits(logits)?;
    // Log-probabilities are the model's own, so they need the logits as they were.
    let unpenalised = options.logprobs.map(|n_top| (n_top, logits.to_vec()));
    options.penalties.apply(&state.history, logits);
    let position = state.history.len().saturating_sub(1) as u32;
    let id = draw(logits, &options.sampling, position)?;
    state.chosen = id;
    Ok((id, unpenalised.map(|(n_top, logits)| Logprobs::new(&logits, id, n_top))))
}

/// The parameters of the token at `position`.
pub(crate) fn token_params(position: u32, max_context_tokens: u32, token_id: u32) -> TokenParams {
    TokenParams { absolute_position: position, ring_slot: position % max_context_tokens, token_id }
}

/// What became of tokens given by the host.
pub(crate) struct Fed {
    /// Steps that they took.
    pub(crate) steps: u32,
    /// Whether it was cancelled before the last.
    pub(crate) cancelled: bool,
}

impl State {
    /// Runs a step on a token given by the host.
    pub(crate) fn feed(&mut self, id: u32) -> Result<(), LaneError> {
        let position = self.history.len() as u32;
        let params = token_params(position, self.decoder.max_context_tokens(), id);
        let done = self.decoder.step(Drive::Host(&[params]));
        self.or_forget(done)?;
        self.history.push(id);
        Ok(())
    }

    /// Computes tokens given by the host, in chunks where that is quicker.
    pub(crate) fn feed_prompt(
        &mut self,
        mut ids: &[u32],
        cancel: &Cancel,
    ) -> Result<Fed, LaneError> {
        let mut fed = Fed { steps: 0, cancelled: false };
        while let Some(&first) = ids.first() {
            if cancel.is_cancelled() {
                fed.cancelled = true;
                break;
            }
            let done = self.decoder.prefill(self.history.len() as u32, ids);
            let mut n_tokens = self.or_forget(done)?;
            if n_tokens == 0 {
                self.feed(first)?;
                n_tokens = 1;
            } else {
                self.history.extend_from_slice(&ids[..n_tokens]);
            }
            ids = &ids[n_tokens..];
            fed.steps += 1;
        }
        Ok(fed)
    }

    /// Runs a step on the token that the device chose.
    fn feed_chosen(&mut self) -> Result<(), LaneError> {
        let done = self.decoder.step(Drive::SelfAdvance);
        self.or_forget(done)?;
        self.history.push(self.chosen);
        Ok(())
    }

    /// Queues a step on a token that the device is about to choose.
    fn run_ahead(&mut self) -> Result<(), LaneError> {
        let done = self.decoder.step(Drive::SelfAdvance);
        self.or_forget(done)
    }

    fn queue_choice(&mut self) -> Result<QueuedRead, LaneError> {
        let queued = self.decoder.queue_token();
        self.or_forget(queued)
    }

    fn finish_choice(&mut self, queued: QueuedRead) -> Result<u32, LaneError> {
        let token = self.decoder.finish_token(queued);
        self.chosen = self.or_forget(token)?;
        Ok(self.chosen)
    }

    /// Waits for the queued steps and reads the token that the last one chose.
    pub(crate) fn read_choice(&mut self) -> Result<u32, LaneError> {
        let token = self.decoder.token();
        self.chosen = self.or_forget(token)?;
        Ok(self.chosen)
    }

    /// Waits for the queued steps and reads the logits of the last one.
    pub(crate) fn read_logits(&mut self, logits: &mut [f32]) -> Result<(), LaneError> {
        let done = self.decoder.logits(logits);
        self.or_forget(done)
    }
}
