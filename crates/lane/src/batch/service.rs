//! Requests in, answers out: text, stop texts and times around an [`Engine`].

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use super::engine::{Chosen, Engine, EngineError};
use super::job::{Job, JobReport, Ticket};
use super::request_line::{Prompt, RequestId, RequestLine};
use super::step::BatchStep;
use crate::chat::{ChatError, ChatTemplate};
use crate::generate::StopReason;
use crate::stop_text::StoppedText;
use crate::tokenizer::{Special, Tokenizer};

/// Answers many requests at once.
pub struct Service<'t, S> {
    engine: Engine<S>,
    tokenizer: &'t Tokenizer,
    template: Option<ChatTemplate>,
    live: BTreeMap<Ticket, Live>,
    chosen: Vec<Chosen>,
}

/// A request under way.
struct Live {
    line: u64,
    id: Option<RequestId>,
    n_tokens: u32,
    stopped: StoppedText,
    text: String,
    generated: u32,
    submitted: Instant,
    first_token: Option<Instant>,
}

/// What a line of the results says.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Record {
    /// A request was answered, as far as it came.
    Answer(Box<Answer>),
    /// A line could not be answered.
    Refusal(Refusal),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// The request's name for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<RequestId>,
    /// The request's line in the input, from 1.
    pub line: u64,
    /// What was generated, without a stop text.
    pub text: String,
    /// Its token ids, without one that ends the text.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: StopReason,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, tokens that an earlier request had left in the cache.
    pub cached_tokens: u32,
    /// Times it had to make room for an older request.
    pub preemptions: u32,
    /// How long it took.
    pub timing: AnswerTiming,
}

/// How long an answer took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AnswerTiming {
    /// From the request to its first token; `None` if there was none.
    pub first_token_ms: Option<f64>,
    /// From the request to its end.
    pub total_ms: f64,
    /// Tokens after the first, over their time.
    pub tokens_per_s: Option<f64>,
}

/// A line that was not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The line's name for itself, where it can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<RequestId>,
    /// Its number, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub error: String,
}

impl<'t, S: BatchStep> Service<'t, S> {
    /// A service without requests.
    pub fn new(engine: Engine<S>, tokenizer: &'t Tokenizer) -> Self {
        Self { engine, tokenizer, template: None, live: BTreeMap::new(), chosen: Vec::new() }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<S> {
        &self.engine
    }

    /// Requests that are not answered yet.
    pub fn live_requests(&self) -> usize {
        self.live.len()
    }

    /// Takes the line number `line` of the input. What cannot be answered, and what needs no token,
    /// is recorded at once.
    pub fn submit(&mut self, line: u64, text: &str, records: &mut Vec<Record>) {
        let request = match RequestLine::parse(text) {
            Ok(request) => request,
            Err(bad) => {
                records.push(Record::Refusal(Refusal { id: bad.id, line, error: bad.reason }));
                return;
            }
        };
        let id = request.id.clone();
        match self.take(line, request) {
            Ok(None) => {}
            Ok(Some(answer)) => records.push(Record::Answer(Box::new(answer))),
            Err(error) => records.push(Record::Refusal(Refusal { id, line, error })),
        }
    }

    fn take(&mut self, line: u64, request: RequestLine) -> Result<Option<Answer>, String> {
        let submitted = Instant::now();
        let mut stop = request.stop;
        let prompt = match &request.prompt {
            Prompt::Text(text) => self.tokenizer.encode_prompt(text, Special::AsText),
            Prompt::Messages(conversation) => {
                let tokenizer = self.tokenizer;
                let template = self.template().map_err(|error| error.to_string())?;
                stop.extend(template.stop_text().map(str::to_owned));
                let ids = template.encode(tokenizer, conversation, true);
                Ok(ids.map_err(|error| error.to_string())?)
            }
        };
        let prompt = prompt.map_err(|error| error.to_string())?;
        let prompt_tokens = prompt.len() as u32;
        let job = Job { prompt, n_tokens: request.n_tokens, salt: request.salt };
        let ticket =
            self.engine.submit(job, request.sampling).map_err(|error| error.to_string())?;
        let live = Live {
            line,
            id: request.id,
            n_tokens: request.n_tokens,
            stopped: StoppedText::new(self.tokenizer, &stop),
            text: String::new(),
            generated: 0,
            submitted,
            first_token: None,
        };
        if request.n_tokens == 0 {
            self.engine.finish(ticket);
            let nothing = JobReport { prompt_tokens, ..Default::default() };
            return Ok(Some(live.answer(nothing, StopReason::Length)));
        }
        self.live.insert(ticket, live);
        Ok(None)
    }

    fn template(&mut self) -> Result<&ChatTemplate, ChatError> {
        let template = match self.template.take() {
            Some(template) => template,
            None => {
                let template = ChatTemplate::for_tokenizer(self.tokenizer)?;
                if let Some(fallback) = template.fallback() {
                    log::warn!(target: "lane", "{fallback}");
                }
                template
            }
        };
        Ok(self.template.insert(template))
    }

    /// Runs one step, and records what it answered. False when there is nothing to do. After an
    /// error the next step begins to compute again what the cache has lost; no token is.
    pub fn step(&mut self, records: &mut Vec<Record>) -> Result<bool, EngineError> {
        let ran = self.engine.step(&mut self.chosen)?;
        let mut chosen = std::mem::take(&mut self.chosen);
        for chosen in chosen.drain(..) {
            if let Some(finish) = self.push(chosen) {
                self.finish(chosen.ticket, finish, records);
            }
        }
        self.chosen = chosen;
        Ok(ran)
    }

    /// Adds a token to its answer; says why that ends, if it does.
    fn push(&mut self, chosen: Chosen) -> Option<StopReason> {
        let live = self.live.get_mut(&chosen.ticket)?;
        live.first_token.get_or_insert_with(Instant::now);
        if self.tokenizer.is_end(chosen.token) {
            return Some(StopReason::Eos);
        }
        live.generated += 1;
        live.text += &live.stopped.push(chosen.token);
        if live.stopped.found() {
            return Some(StopReason::Stop);
        }
        let all = live.generated >= live.n_tokens;
        chosen.is_last.then_some(if all { StopReason::Length } else { StopReason::Context })
    }

    fn finish(&mut self, ticket: Ticket, finish: StopReason, records: &mut Vec<Record>) {
        let report = self.engine.finish(ticket);
        if let (Some(live), Some(report)) = (self.live.remove(&ticket), report) {
            records.push(Record::Answer(Box::new(live.answer(report, finish))));
        }
    }

    /// Ends every request as far as it came.
    pub fn cancel_all(&mut self, records: &mut Vec<Record>) {
        let tickets: Vec<Ticket> = self.live.keys().copied().collect();
        for ticket in tickets {
            self.finish(ticket, StopReason::Cancelled, records);
        }
    }
}

impl Live {
    fn answer(mut self, report: JobReport, finish: StopReason) -> Answer {
        let mut tokens = report.tokens;
        tokens.truncate(self.generated as usize);
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let end = Instant::now();
        let later = self.generated.saturating_sub(1);
        let tokens_per_s = self.first_token.filter(|_| later > 0);
        let tokens_per_s = tokens_per_s.map(|at| f64::from(later) * 1e3 / ms(at, end));
        Answer {
            id: self.id,
            line: self.line,
            text: self.text + &self.stopped.finish(),
            tokens,
            finish,
            prompt_tokens: report.prompt_tokens,
            cached_tokens: report.cached_tokens,
            preemptions: report.preemptions,
            timing: AnswerTiming {
                first_token_ms: self.first_token.map(|at| ms(self.submitted, at)),
                total_ms: ms(self.submitted, end),
                tokens_per_s,
            },
        }
    }
}
