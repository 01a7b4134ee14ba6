//! A conversation on a lane: turns in, answers out, the context kept from overflowing.
//!
//! ```
//! use lane::{GenerateOptions, LaneOptions, ModelFile, Sampling, Session, SessionEvent};
//!
//! let lane = ModelFile::open(None)?.load(&LaneOptions::default(), &mut |_| {})?;
//! let options = GenerateOptions { n_tokens: 8, sampling: Sampling::GREEDY, ..Default::default() };
//! let mut session = Session::new(&lane, options, Some("Speak of whales."))?;
//! let mut text = String::new();
//! let answer = session.answer("What is that?", &mut |event| {
//!     if let SessionEvent::Text(piece) = event {
//!         text += piece;
//!     }
//! })?;
//! assert_eq!(answer.text, text.trim_end());
//! # Ok::<(), lane::LaneError>(())
//! ```

use crate::chat::{ChatTemplate, Conversation, Role};
use crate::generate::{GenerateOptions, StopReason, Timing};
use crate::lane::{Lane, LaneError};
use crate::stop_text::StoppedText;

/// A conversation on a lane.
///
/// Each turn's prompt is the whole conversation; what the cache still holds of it is not computed
/// again. Where prompt and answer would not fit the context, the oldest exchanges are forgotten,
/// until half of it is free, so that it does not happen at every turn; with
/// [`GenerateOptions::ring`] nothing is, and the cache overwrites its oldest tokens.
pub struct Session<'a> {
    lane: &'a Lane,
    template: ChatTemplate,
    options: GenerateOptions,
    conversation: Conversation,
    system: Option<String>,
}

/// What happens while an answer is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent<'t> {
    /// The next piece of the answer: whole characters, no leading space.
    Text(&'t str),
    /// The context was full: so many of the oldest exchanges are forgotten.
    Forgot {
        /// Turns of the user's, each with its answer.
        exchanges: usize,
    },
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its text, without the space around it.
    pub text: String,
    /// Why it ended.
    pub stop: StopReason,
    /// Tokens of the conversation before it.
    pub prompt_tokens: usize,
    /// Its tokens.
    pub tokens: usize,
    /// How long things took.
    pub timing: Timing,
}

impl<'a> Session<'a> {
    /// A conversation in the lane's chat template that starts with the instructions in `system`.
    pub fn new(
        lane: &'a Lane,
        options: GenerateOptions,
        system: Option<&str>,
    ) -> Result<Self, LaneError> {
        options.check()?;
        let template = ChatTemplate::for_tokenizer(lane.tokenizer())?;
        let options = options.stopping_at(template.stop_text());
        let system = system.map(str::to_owned);
        let mut session =
            Self { lane, template, options, conversation: Conversation::default(), system };
        session.reset();
        Ok(session)
    }

    /// Starts a new conversation with the same instructions.
    pub fn reset(&mut self) {
        self.conversation = Conversation::default();
        if let Some(system) = &self.system {
            self.conversation.push(Role::System, system.as_str());
        }
    }

    /// What was said so far.
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// The template in use.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The model's answer to the user's next turn. The conversation is as before if this fails,
    /// or is cancelled before the answer's first token; an answer cancelled later stays as far as
    /// it came.
    pub fn answer(
        &mut self,
        turn: &str,
        on_event: &mut dyn FnMut(SessionEvent<'_>),
    ) -> Result<Answer, LaneError> {
        let mut conversation = self.conversation.clone();
        conversation.push(Role::User, turn);
        let max_context_tokens = self.lane.kv()?.max_context_tokens() as usize;
        // Pieces of one text, even if the answer is made in several generations.
        let mut pieces = StoppedText::new(self.lane.tokenizer(), &self.options.stop);
        let mut text = String::new();
        let mut say = |piece: String, on_event: &mut dyn FnMut(SessionEvent<'_>)| {
            let piece = if text.is_empty() { piece.trim_start() } else { &piece };
            if !piece.is_empty() {
                text += piece;
                on_event(SessionEvent::Text(piece));
            }
        };
        let (mut ids, mut timing) = (Vec::new(), None::<Timing>);
        let mut prompt_tokens = 0;
        let stop = loop {
            let n_tokens = self.options.n_tokens - ids.len() as u32;
            let room = (n_tokens as usize).min(max_context_tokens / 4);
            let prompt =
                self.prompt(&mut conversation, &ids, max_context_tokens, room, on_event)?;
            if !ids.is_empty() && prompt.len() > max_context_tokens && !self.options.ring {
                break StopReason::Context;
            }
            prompt_tokens = prompt.len() - ids.len();
            let options = GenerateOptions { n_tokens, stop: Vec::new(), ..self.options.clone() };
            let mut generation = self.lane.generate(&prompt, options)?;
            while !pieces.found()
                && let Some(token) = generation.next()
            {
                let id = token?.id;
                ids.push(id);
                say(pieces.push(id), on_event);
            }
            timing = Some(timing.map_or(generation.timing(), |t| t.and(generation.timing())));
            match generation.stop_reason() {
                _ if pieces.found() => break StopReason::Stop,
                // Now that there is a reason to, more can be forgotten.
                Some(StopReason::Context) => {}
                Some(reason) => break reason,
                None => break StopReason::Length,
            }
        };
        say(pieces.finish(), on_event);
        let text = text.trim_end().to_owned();
        if stop != StopReason::Cancelled || !ids.is_empty() {
            conversation.push(Role::Assistant, text.as_str());
            self.conversation = conversation;
        }
        let (tokens, timing) = (ids.len(), timing.unwrap_or_default());
        Ok(Answer { text, stop, prompt_tokens, tokens, timing })
    }

    /// The conversation and the answer so far as a prompt that leaves `room` tokens of the
    /// context, as far as forgetting exchanges can make it.
    fn prompt(
        &self,
        conversation: &mut Conversation,
        answer: &[u32],
        max_context_tokens: usize,
        room: usize,
        on_event: &mut dyn FnMut(SessionEvent<'_>),
    ) -> Result<Vec<u32>, LaneError> {
        let encode = |conversation: &Conversation| {
            let mut ids = self.template.encode(self.lane.tokenizer(), conversation, true)?;
            ids.extend(answer);
            Ok::<_, LaneError>(ids)
        };
        let mut prompt = encode(conversation)?;
        if self.options.ring || prompt.len() + room <= max_context_tokens {
            return Ok(prompt);
        }
        let mut exchanges = 0;
        while prompt.len() > max_context_tokens / 2 && conversation.drop_oldest() {
            exchanges += 1;
            prompt = encode(conversation)?;
        }
        if exchanges > 0 {
            on_event(SessionEvent::Forgot { exchanges });
        }
        Ok(prompt)
    }
}
