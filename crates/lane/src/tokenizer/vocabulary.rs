//! The tables a model file carries, as plain data.

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
