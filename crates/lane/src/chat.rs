//! Conversations as token ids, through the chat template that a model file carries.
//!
//! A template is a Jinja program from an untrusted file. It runs with a budget ([`ChatTemplate`]),
//! sees no files and no environment, and what it may do is write text.
//!
//! ```
//! use lane::chat::{ChatTemplate, Conversation, Role};
//!
//! let template = ChatTemplate::new("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}")?;
//! let mut conversation = Conversation::default();
//! conversation.push(Role::User, "Is it a whale? ");
//! assert_eq!(template.render(&conversation, false, "<s>", "</s>")?, "<user>Is it a whale?\n");
//! # Ok::<(), lane::chat::ChatError>(())
//! ```

mod clock;
mod python;
mod segments;

use minijinja::{Environment, ErrorKind, Value, context};

use crate::tokenizer::{Segment, Special, Tokenizer, TokenizerError};

/// The longest template that is accepted (the longest known are about 30 kB).
const MAX_TEMPLATE_BYTES: usize = 1 << 16;
/// The most operators that are accepted, hyphens and stars in text among them (the longest templates
/// known have a few hundred). minijinja folds constants anew at each operator of a chain: 4000
/// `~` in a row take it a second, 30 000 half a minute.
const MAX_OPERATORS: usize = 4096;
/// Stack for compiling and rendering. A template that is one long chain of operators takes minijinja
/// one call deeper with each: up to 32 MB at the longest, and a few times that without
/// optimisation. Only what is used is ever touched.
const STACK_BYTES: usize = 256 << 20;
/// What a rendering may use: about a million steps, or 64 MB of text.
const BASE_FUEL: u64 = 1_000_000;

/// The template's name in messages of the engine.
const NAME: &str = "chat_template";

/// For models that mark turns as ChatML does.
const CHATML: &str = "\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}";
/// For models that know nothing of turns.
const TRANSCRIPT: &str = "\
{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}

{% else %}{{ message.role | capitalize }}: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions before the conversation.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool's answer to the model.
    Tool,
}

impl Role {
    /// Its name in templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

/// What was said so far, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The turns.
    pub messages: Vec<Message>,
}

impl Conversation {
    /// Adds a turn.
    pub fn push(&mut self, role: Role, content: impl Into<String>) {
        self.messages.push(Message { role, content: content.into() });
    }

    /// Forgets the oldest exchange: the first turn that is no instruction, and what follows it up
    /// to the user's next turn. Says whether there was one to forget; the last user turn stays.
    pub fn drop_oldest(&mut self) -> bool {
        let is_user = |m: &Message| m.role == Role::User;
        let Some(start) = self.messages.iter().position(|m| m.role != Role::System) else {
            return false;
        };
        let Some(next) = self.messages.iter().skip(start + 1).position(is_user) else {
            return false;
        };
        self.messages.drain(start..start + 1 + next);
        true
    }
}

/// Why a conversation could not be turned into text or tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is absurdly long.
    #[error("the chat template is {bytes} bytes long, more than the {limit} that are accepted")]
    TemplateTooLong {
        /// Its length.
        bytes: usize,
        /// The longest that is accepted.
        limit: usize,
    },
    /// The template is absurdly complicated.
    #[error("the chat template has {count} operators, more than the {limit} that are accepted")]
    TooManyOperators {
        /// Its operators.
        count: usize,
        /// The most that are accepted.
        limit: usize,
    },
    /// The template is no valid Jinja, or uses something that is not supported.
    #[error("the chat template in the model file is not valid: {reason}")]
    Invalid {
        /// Where and what.
        reason: String,
    },
    /// The template ran into an error.
    #[error("the chat template in the model file failed: {reason}")]
    Failed {
        /// Where and what.
        reason: String,
    },
    /// The template itself refuses the conversation.
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// What it says.
        message: String,
    },
    /// The template runs or writes without end.
    #[error("the chat template in the model file does more work than the {fuel} steps it is given")]
    TooMuchWork {
        /// The budget.
        fuel: u64,
    },
    /// A message spells a special token and the template rewrites messages, so that the two cannot
    /// be told apart.
    #[error(
        "a message spells a special token of this model ('{text}'), which its chat template does not keep apart; take it out"
    )]
    SpecialInMessage {
        /// The token's text, or a hint where no single message spells it.
        text: String,
    },
    /// The text could not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// What is used where a file has no chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// ChatML, because the vocabulary has its marks.
    ChatMl,
    /// `User: … Assistant: …` in plain text.
    Transcript,
}

impl std::fmt::Display for Fallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self {
            Fallback::ChatMl => "ChatML is used, because the vocabulary has its marks",
            Fallback::Transcript => "a plain transcript is used, which the model may not follow",
        };
        write!(f, "the model file has no chat template: {what}")
    }
}

/// A chat template, ready to render conversations.
///
/// Each rendering has a budget that bounds both its steps and the text it makes. `include`,
/// `import` and the like are not known; functions are limited to Jinja's own and the three that
/// templates expect: `raise_exception`, `strftime_now` (in UTC) and the filter `tojson`.
pub struct ChatTemplate {
    environment: Environment<'static>,
    fallback: Option<Fallback>,
}

impl ChatTemplate {
    /// Checks a template's syntax.
    pub fn new(source: &str) -> Result<ChatTemplate, ChatError> {
        let (bytes, limit) = (source.len(), MAX_TEMPLATE_BYTES);
        if bytes > limit {
            return Err(ChatError::TemplateTooLong { bytes, limit });
        }
        let occurs = |mark: &str| source.matches(mark).count();
        let (tags, signs) =
            (occurs("{%") + occurs("%}"), ["+", "-", "*", "/", "%", "~"].map(occurs));
        let (count, limit) = (signs.iter().sum::<usize>().saturating_sub(tags), MAX_OPERATORS);
        if count > limit {
            return Err(ChatError::TooManyOperators { count, limit });
        }
        let mut environment = python::environment();
        on_deep_stack(|| environment.add_template_owned(NAME, source.to_owned()))?
            .map_err(|e| ChatError::Invalid { reason: e.to_string() })?;
        Ok(ChatTemplate { environment, fallback: None })
    }

    /// The template in the tokenizer's file, or a [`Fallback`] where there is none.
    pub fn for_tokenizer(tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        match tokenizer.chat_template() {
            Some(source) => ChatTemplate::new(source),
            None => ChatTemplate::fallback_for(tokenizer),
        }
    }

    /// The fallback that suits the tokenizer, whatever its file says.
    pub fn fallback_for(tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        let has = |mark| tokenizer.special_id(mark).is_some();
        let (fallback, source) = if has("<|im_start|>") && has("<|im_end|>") {
            (Fallback::ChatMl, CHATML)
        } else {
            (Fallback::Transcript, TRANSCRIPT)
        };
        Ok(ChatTemplate { fallback: Some(fallback), ..ChatTemplate::new(source)? })
    }

    /// Which fallback this is, if it is none of the file's own; worth a warning.
    pub fn fallback(&self) -> Option<Fallback> {
        self.fallback
    }

    /// Text that ends an answer besides the tokenizer's ending ids.
    pub fn stop_text(&self) -> Option<&'static str> {
        (self.fallback == Some(Fallback::Transcript)).then_some("\nUser:")
    }

    /// The conversation as text; with `add_generation_prompt`, the opening of the model's next turn
    /// after it.
    pub fn render(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
        bos: &str,
        eos: &str,
    ) -> Result<String, ChatError> {
        let content_bytes: usize = conversation.messages.iter().map(|m| m.content.len()).sum();
        let fuel = BASE_FUEL.saturating_add(content_bytes as u64);
        let messages: Value = conversation
            .messages
            .iter()
            .map(|m| context! { role => m.role.as_str(), content => m.content.as_str() })
            .collect();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let context = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => bos,
            eos_token => eos,
        };
        let rendered = on_deep_stack(move || environment.get_template(NAME)?.render(context))?;
        rendered.map_err(|error| match (error.kind(), python::raised(&error)) {
            (_, Some(message)) => ChatError::Refused { message },
            (ErrorKind::OutOfFuel, _) => ChatError::TooMuchWork { fuel },
            _ => ChatError::Failed { reason: error.to_string() },
        })
    }

    /// The conversation as token ids, as a prompt. Special tokens are those that the template
    /// writes; messages that spell one contain just its text.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        let text_of = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or("");
        let (bos, eos) = (text_of(tokenizer.bos()), text_of(tokenizer.eos()));
        let render = |c: &Conversation| self.render(c, add_generation_prompt, bos, eos);

        let rendered = render(conversation)?;
        // A template that refuses the marks (because it looks into messages) is no error here.
        let marks = segments::Marks::new(conversation);
        let marked = render(&marks.mark(conversation)).ok();
        let split = marked.as_deref().and_then(|m| marks.split(&rendered, m, conversation));
        let segments = match split {
            Some(segments) => segments,
            None => {
                check_specials(tokenizer, conversation, &rendered, marked.as_deref())?;
                vec![Segment { text: &rendered, special: Special::Parse }]
            }
        };
        Ok(tokenizer.encode_prompt_segments(&segments)?)
    }
}

/// Runs `work` on a thread of its own with a stack of [`STACK_BYTES`].
fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
        match thread.map(|thread| thread.join()) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err(ChatError::Failed { reason: "the template engine panicked".into() }),
            Err(error) => {
                Err(ChatError::Failed { reason: format!("no thread to run it: {error}") })
            }
        }
    })
}

/// For templates that rewrite messages: refuses where a message may have made a special token.
fn check_specials(
    tokenizer: &Tokenizer,
    conversation: &Conversation,
    rendered: &str,
    marked: Option<&str>,
) -> Result<(), ChatError> {
    let in_message = conversation.messages.iter().find_map(|m| tokenizer.special_in(&m.content));
    if let Some(text) = in_message {
        return Err(ChatError::SpecialInMessage { text: text.to_owned() });
    }
    // None is in a message; but rewriting could have joined one from parts.
    match marked {
        Some(marked) if tokenizer.specials_in(rendered) != tokenizer.specials_in(marked) => {
            Err(ChatError::SpecialInMessage { text: "in parts".to_owned() })
        }
        _ => Ok(()),
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("fallback", &self.fallback).finish_non_exhaustive()
    }
}
