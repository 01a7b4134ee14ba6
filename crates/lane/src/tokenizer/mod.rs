//! Text to token ids and back, from the tables that a model file carries.
//!
//! - [`Vocabulary`]: the tables as plain data.
//! - [`Tokenizer`]: encodes and decodes. Byte-level BPE (`gpt2`) and SentencePiece by score
//!   (`llama`).
//! - [`TextStream`]: ids to text as they come, in whole characters.
//!
//! Special tokens (beginning of sequence, end of turn, …) are made from text only where the caller
//! says so ([`Special::Parse`]); text of a user's that spells one stays text.
//!
//! ```
//! use lane::tokenizer::{Special, Tokenizer, Vocabulary};
//!
//! let vocabulary = Vocabulary {
//!     model: "gpt2".into(),
//!     pre: Some("gpt-2".into()),
//!     tokens: ["<|end|>", "h", "i", "hi", "Ġ"].map(String::from).into(),
//!     token_types: vec![3, 1, 1, 1, 1],
//!     merges: vec!["h i".into()],
//!     eos: Some(0),
//!     ..Vocabulary::default()
//! };
//! let tokenizer = Tokenizer::new(vocabulary)?;
//! assert_eq!(tokenizer.encode("hi hi<|end|>", Special::Parse)?, [3, 4, 3, 0]);
//! assert_eq!(tokenizer.decode(&[3, 4, 3, 0]), "hi hi");
//! assert!(tokenizer.is_end(0));
//! # Ok::<(), lane::tokenizer::TokenizerError>(())
//! ```

mod alphabet;
mod bpe;
mod error;
mod pretokenizer;
mod sentencepiece;
mod special;
mod stream;
mod vocabulary;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use error::{TokenizerError, TokenizerWarning};
pub use stream::{TextStream, Utf8Joiner};
pub use vocabulary::Vocabulary;

use bpe::ByteLevelBpe;
use sentencepiece::SentencePiece;
use special::{Fragment, SpecialTokens};
use vocabulary::TokenKind;

/// The most tokens a vocabulary may have (the largest known have 262 144).
const MAX_TOKENS: usize = 1 << 22;
/// The longest text a token may have (the longest known are a few hundred bytes).
const MAX_TOKEN_BYTES: usize = 4096;

/// What text that spells a special token means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Text like any other: for everything that a user or a model wrote.
    AsText,
    /// The token: for text that is trusted to control the model.
    Parse,
}

/// A part of a text that is encoded as a whole: see [`Tokenizer::encode_segments`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment<'t> {
    /// The part.
    pub text: &'t str,
    /// What special tokens spelled in it mean.
    pub special: Special,
}

/// Encodes text and decodes token ids. Cheap to clone: clones share the tables.
#[derive(Clone)]
pub struct Tokenizer {
    tables: Arc<Tables>,
}

struct Tables {
    /// What is left of it: merges and scores have moved into `encoder`.
    vocabulary: Vocabulary,
    kinds: Vec<TokenKind>,
    encoder: Encoder,
    specials: SpecialTokens,
    ending_ids: Vec<u32>,
    /// Bytes of all tokens, one after the other; token `id` ends at `piece_ends[id]`.
    pieces: Vec<u8>,
    piece_ends: Vec<usize>,
    adds_bos: bool,
    adds_space_prefix: bool,
    warnings: Vec<TokenizerWarning>,
}

enum Encoder {
    ByteLevelBpe(Box<ByteLevelBpe>),
    SentencePiece(SentencePiece),
}

impl Tokenizer {
    /// Checks the tables and builds the tokenizer. What is odd but harmless is in
    /// [`warnings`](Tokenizer::warnings).
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer, TokenizerError> {
        let mut warnings = Vec::new();
        let is_sentencepiece = match vocabulary.model.as_str() {
            "gpt2" => false,
            "llama" => true,
            model => {
                let model = error::shorten(model);
                return Err(TokenizerError::UnsupportedModel { model });
            }
        };
        check_sizes(&vocabulary)?;
        if is_sentencepiece {
            // The ids that SentencePiece has used since Llama 1 where the file is silent.
            vocabulary.unk.get_or_insert(0);
            vocabulary.bos.get_or_insert(1);
            vocabulary.eos.get_or_insert(2);
        }
        drop_specials_out_of_range(&mut vocabulary, &mut warnings);
        warn_of_duplicates(&vocabulary.tokens, &mut warnings);

        let kinds = special::kinds(&vocabulary);
        let specials = SpecialTokens::new(&vocabulary.tokens, &kinds);
        let ending_ids = special::ending_ids(&vocabulary, &kinds);
        let (encoder, usually_adds_bos) = if is_sentencepiece {
            (Encoder::SentencePiece(SentencePiece::new(&mut vocabulary, &kinds)?), true)
        } else {
            let bpe = ByteLevelBpe::new(&mut vocabulary, &kinds, &mut warnings)?;
            let adds_bos = bpe.adds_bos();
            (Encoder::ByteLevelBpe(Box::new(bpe)), adds_bos)
        };
        if vocabulary.add_bos == Some(true) && vocabulary.bos.is_none() {
            return Err(TokenizerError::NoBos);
        }
        let adds_bos = vocabulary.add_bos.unwrap_or(usually_adds_bos) && vocabulary.bos.is_some();
        let adds_space_prefix = is_sentencepiece && vocabulary.add_space_prefix.unwrap_or(true);

        let mut pieces = Vec::new();
        let mut piece_ends = Vec::with_capacity(kinds.len());
        for (token, kind) in vocabulary.tokens.iter().zip(&kinds) {
            match kind {
                TokenKind::Control | TokenKind::Unknown => {}
                kind if is_sentencepiece => pieces.extend(sentencepiece::bytes_of(token, *kind)),
                TokenKind::UserDefined => pieces.extend(token.as_bytes()),
                _ => pieces.extend(bpe::bytes_of(token)),
            }
            piece_ends.push(pieces.len());
        }

        let tables = Tables {
            vocabulary,
            kinds,
            encoder,
            specials,
            ending_ids,
            pieces,
            piece_ends,
            adds_bos,
            adds_space_prefix,
            warnings,
        };
        Ok(Tokenizer { tables: Arc::new(tables) })
    }

    /// The ids of `text` alone, without a beginning-of-sequence token.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        self.encode_segments(&[Segment { text, special }])
    }

    /// The ids of `text` as a prompt: with the beginning-of-sequence token in front where the model
    /// asks for it, once, even if `text` brings its own. (A file may ask for an end-of-sequence
    /// token as well; not here, where the text is to go on.)
    pub fn encode_prompt(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        self.encode_prompt_segments(&[Segment { text, special }])
    }

    /// The ids of the segments' texts joined: tokens may reach across their boundaries, except
    /// special ones, which are found only inside a segment that has them parsed.
    pub fn encode_segments(&self, segments: &[Segment<'_>]) -> Result<Vec<u32>, TokenizerError> {
        let mut text = String::with_capacity(segments.iter().map(|s| s.text.len()).sum());
        let mut trusted: Vec<Range<usize>> = Vec::new();
        for segment in segments {
            let start = text.len();
            text.push_str(segment.text);
            if segment.special == Special::Parse && start < text.len() {
                trusted.push(start..text.len());
            }
        }

        let mut ids = Vec::new();
        let mut starts_text = true;
        for fragment in self.tables.specials.cut(&text, &trusted) {
            match (fragment, &self.tables.encoder) {
                (Fragment::Token(id), _) => {
                    ids.push(id);
                    starts_text = true;
                }
                (Fragment::Text(text), Encoder::ByteLevelBpe(bpe)) => bpe.encode(text, &mut ids)?,
                (Fragment::Text(text), Encoder::SentencePiece(model)) => {
                    if starts_text && self.tables.adds_space_prefix {
                        model.encode(&format!(" {text}"), &mut ids)?;
                    } else {
                        model.encode(text, &mut ids)?;
                    }
                    starts_text = false;
                }
            }
        }
        Ok(ids)
    }

    /// [`encode_segments`](Tokenizer::encode_segments) with the beginning-of-sequence token in front
    /// as in [`encode_prompt`](Tokenizer::encode_prompt).
    pub fn encode_prompt_segments(
        &self,
        segments: &[Segment<'_>],
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.encode_segments(segments)?;
        if let Some(bos) = self.bos().filter(|bos| self.adds_bos() && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of `ids`; special tokens and ids out of range are nothing, bytes that are no UTF-8
    /// are U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut stream = TextStream::at_start(self);
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text += &stream.finish();
        text
    }

    /// Refuses ids that the vocabulary does not have.
    pub fn check_ids(&self, ids: &[u32]) -> Result<(), TokenizerError> {
        let n_vocab = self.n_vocab();
        match ids.iter().find(|id| **id as usize >= n_vocab) {
            Some(id) => Err(TokenizerError::IdOutOfRange { id: *id, n_vocab }),
            None => Ok(()),
        }
    }

    /// Tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.tables.kinds.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.tables.vocabulary.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.tables.vocabulary.eos
    }

    /// Whether a prompt starts with [`bos`](Tokenizer::bos).
    pub fn adds_bos(&self) -> bool {
        self.tables.adds_bos
    }

    /// Whether encoding puts a space in front of every text, and decoding takes it away again.
    pub fn adds_space_prefix(&self) -> bool {
        self.tables.adds_space_prefix
    }

    /// Whether `id` ends an answer: end of sequence, of turn, of message, by the file's own ids and
    /// by the texts that model families use for it.
    pub fn is_end(&self, id: u32) -> bool {
        self.tables.ending_ids.binary_search(&id).is_ok()
    }

    /// All ids that end an answer, ascending.
    pub fn ending_ids(&self) -> &[u32] {
        &self.tables.ending_ids
    }

    /// The bytes of text that a token stands for, not always whole characters; none for special
    /// tokens and ids out of range.
    pub fn piece_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.tables.piece_ends.get(id) else { return &[] };
        let start = id.checked_sub(1).map_or(0, |before| self.tables.piece_ends[before]);
        &self.tables.pieces[start..*end]
    }

    /// A token's text in the table: bytes spelled in the vocabulary's own way.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.tables.vocabulary.tokens.get(id as usize).map(String::as_str)
    }

    /// The text of a special token; `None` for all others.
    pub fn special_text(&self, id: u32) -> Option<&str> {
        let kind = self.tables.kinds.get(id as usize)?;
        if kind.is_special() { self.token_text(id) } else { None }
    }

    /// A special token that `text` spells somewhere, if it does.
    pub fn special_in(&self, text: &str) -> Option<&str> {
        self.specials_in(text).first().and_then(|id| self.special_text(*id))
    }

    /// The special tokens that `text` spells, in order.
    pub fn specials_in(&self, text: &str) -> Vec<u32> {
        let whole = 0..text.len();
        let fragments = self.tables.specials.cut(text, std::slice::from_ref(&whole));
        let ids = fragments.into_iter().filter_map(|fragment| match fragment {
            Fragment::Token(id) => self.special_text(id).map(|_| id),
            Fragment::Text(_) => None,
        });
        ids.collect()
    }

    /// The id of the special token with this text.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        match self.tables.specials.cut(text, std::slice::from_ref(&(0..text.len())))[..] {
            [Fragment::Token(id)] if self.special_text(id).is_some() => Some(id),
            _ => None,
        }
    }

    /// The chat template in the file.
    pub fn chat_template(&self) -> Option<&str> {
        self.tables.vocabulary.chat_template.as_deref()
    }

    /// What was odd about the tables.
    pub fn warnings(&self) -> &[TokenizerWarning] {
        &self.tables.warnings
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("model", &self.tables.vocabulary.model)
            .field("pre", &self.tables.vocabulary.pre)
            .field("n_vocab", &self.n_vocab())
            .finish_non_exhaustive()
    }
}

fn check_sizes(vocabulary: &Vocabulary) -> Result<(), TokenizerError> {
    let n_tokens = vocabulary.tokens.len();
    if n_tokens == 0 {
        return Err(TokenizerError::NoTokens);
    }
    if n_tokens > MAX_TOKENS {
        return Err(TokenizerError::TooManyTokens { n_tokens, limit: MAX_TOKENS });
    }
    let too_long = vocabulary.tokens.iter().enumerate().find(|(_, t)| t.len() > MAX_TOKEN_BYTES);
    if let Some((id, token)) = too_long {
        let (bytes, limit) = (token.len(), MAX_TOKEN_BYTES);
        return Err(TokenizerError::TokenTooLong { id, bytes, limit });
    }
    let n_types = vocabulary.token_types.len();
    let n_scores = vocabulary.scores.as_ref().map(Vec::len);
    let tables = [
        ("tokenizer.ggml.token_type", (n_types > 0).then_some(n_types)),
        ("tokenizer.ggml.scores", n_scores),
    ];
    match tables.into_iter().find(|(_, found)| found.is_some_and(|found| found < n_tokens)) {
        Some((key, Some(found))) => Err(TokenizerError::ShortTable { key, found, n_tokens }),
        _ => Ok(()),
    }
}

fn drop_specials_out_of_range(vocabulary: &mut Vocabulary, warnings: &mut Vec<TokenizerWarning>) {
    let n_tokens = vocabulary.tokens.len();
    for (key, special) in [
        ("tokenizer.ggml.bos_token_id", &mut vocabulary.bos),
        ("tokenizer.ggml.eos_token_id", &mut vocabulary.eos),
        ("tokenizer.ggml.eot_token_id", &mut vocabulary.eot),
        ("tokenizer.ggml.eom_token_id", &mut vocabulary.eom),
        ("tokenizer.ggml.unknown_token_id", &mut vocabulary.unk),
        ("tokenizer.ggml.padding_token_id", &mut vocabulary.pad),
    ] {
        if let Some(id) = special.take_if(|id| *id as usize >= n_tokens) {
            warnings.push(TokenizerWarning::SpecialOutOfRange { key, id, n_tokens });
        }
    }
}

fn warn_of_duplicates(tokens: &[String], warnings: &mut Vec<TokenizerWarning>) {
    let mut seen = std::collections::HashSet::with_capacity(tokens.len());
    let mut repeated = (0u32..).zip(tokens).filter(|(_, token)| !seen.insert(token.as_str()));
    if let Some((first, _)) = repeated.next() {
        warnings.push(TokenizerWarning::DuplicateTokens { count: 1 + repeated.count(), first });
    }
}
