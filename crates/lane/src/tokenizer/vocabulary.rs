//! The tables a model file carries, as plain data.

use crate::gguf::{Gguf, GgufError};

/// Everything a model file says about its tokens. Nothing is checked here; [`Tokenizer::new`] does.
///
/// | field | GGUF key |
/// |---|---|
/// | `model` | `tokenizer.ggml.model` |
/// | `pre` | `tokenizer.ggml.pre` |
/// | `tokens`, `scores`, `token_types`, `merges` | `tokenizer.ggml.tokens`, `….scores`, `….token_type`, `….merges` |
/// | `bos`, `eos`, `eot`, `eom`, `unk`, `pad` | `tokenizer.ggml.bos_token_id`, `….eos_token_id`, `….eot_token_id`, `….eom_token_id`, `….unknown_token_id`, `….padding_token_id` |
/// | `add_bos`, `add_space_prefix` | `tokenizer.ggml.add_bos_token`, `….add_space_prefix` |
/// | `chat_template` | `tokenizer.chat_template` |
///
/// [`Tokenizer::new`]: super::Tokenizer::new
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Vocabulary {
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// How text is cut into words before BPE.
    pub pre: Option<String>,
    /// Token texts; the index is the id.
    pub tokens: Vec<String>,
    /// SentencePiece scores, one a token.
    pub scores: Option<Vec<f32>>,
    /// Token kinds as GGUF numbers them, one a token, or empty where the file has none.
    pub token_types: Vec<i32>,
    /// BPE merges, `left right`, strongest first.
    pub merges: Vec<String>,
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message.
    pub eom: Option<u32>,
    /// Unknown text.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether a prompt starts with `bos`.
    pub add_bos: Option<bool>,
    /// SentencePiece: whether text starts with a space that is not there.
    pub add_space_prefix: Option<bool>,
    /// The Jinja chat template.
    pub chat_template: Option<String>,
}

impl Vocabulary {
    /// Reads the tables of a model file. Keys that are absent are empty here; one of another type
    /// than it should be is an error.
    pub fn from_gguf(gguf: &Gguf) -> Result<Vocabulary, GgufError> {
        let metadata = gguf.metadata();
        let text = |key| Ok(metadata.str(key)?.map(str::to_owned));
        let texts =
            |key| Ok(metadata.strings(key)?.into_iter().flatten().map(str::to_owned).collect());
        // Some writers say -1 for "none".
        let id = |key| Ok(metadata.i64(key)?.and_then(|id| u32::try_from(id).ok()));
        Ok(Vocabulary {
            model: text("tokenizer.ggml.model")?.unwrap_or_default(),
            pre: text("tokenizer.ggml.pre")?,
            tokens: texts("tokenizer.ggml.tokens")?,
            scores: metadata.f32s("tokenizer.ggml.scores")?.map(Iterator::collect),
            token_types: metadata
                .i32s("tokenizer.ggml.token_type")?
                .into_iter()
                .flatten()
                .collect(),
            merges: texts("tokenizer.ggml.merges")?,
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            eot: id("tokenizer.ggml.eot_token_id")?,
            eom: id("tokenizer.ggml.eom_token_id")?,
            unk: id("tokenizer.ggml.unknown_token_id")?,
            pad: id("tokenizer.ggml.padding_token_id")?,
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
            add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
            chat_template: text("tokenizer.chat_template")?,
        })
    }
}

/// What a token is, after GGUF's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    /// Found in text before anything else, in user text too.
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    pub(super) fn from_gguf(number: i32) -> TokenKind {
        match number {
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }

    /// Whether it stands for itself and not for text.
    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control)
    }
}

/// The byte that a token such as `<0x0A>` stands for.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}
