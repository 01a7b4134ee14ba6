//! What can be wrong with a vocabulary, or with the text given to it.

use super::pretokenizer::KNOWN_PRETOKENIZERS;

/// Why a tokenizer could not be built, or a text not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file has no token table.
    #[error("the model file holds no tokens (tokenizer.ggml.tokens is missing or empty)")]
    NoTokens,
    /// More tokens than an id can name.
    #[error("the vocabulary has {n_tokens} tokens, more than the {limit} this tokenizer takes")]
    TooManyTokens {
        /// Tokens in the table.
        n_tokens: usize,
        /// The most that are accepted.
        limit: usize,
    },
    /// One token is absurdly long.
    #[error("token {id} is {bytes} bytes long, more than the {limit} this tokenizer takes")]
    TokenTooLong {
        /// Its id.
        id: usize,
        /// Its length.
        bytes: usize,
        /// The longest that is accepted.
        limit: usize,
    },
    /// A table that goes with the tokens is shorter than they are.
    #[error("{key} has {found} entries for {n_tokens} tokens")]
    ShortTable {
        /// The metadata key of the short table.
        key: &'static str,
        /// Its entries.
        found: usize,
        /// Tokens in the table.
        n_tokens: usize,
    },
    /// The vocabulary's kind is not one of those that are understood.
    #[error(
        "tokenizer.ggml.model is '{model}'; supported are gpt2 (byte-level BPE) and llama (SentencePiece)"
    )]
    UnsupportedModel {
        /// The name in the file.
        model: String,
    },
    /// The pre-tokenizer is not one of those that are understood.
    #[error("tokenizer.ggml.pre is '{name}'; supported are {}", KNOWN_PRETOKENIZERS.join(", "))]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
    },
    /// Byte-level BPE without merges.
    #[error(
        "the model file holds no merges (tokenizer.ggml.merges is missing), which byte-level BPE needs"
    )]
    NoMerges,
    /// A merge that is not two parts.
    #[error("merge {index} is not two parts separated by a space: '{text}'")]
    BadMerge {
        /// Its place in the table.
        index: usize,
        /// Its text, shortened.
        text: String,
    },
    /// A merge about a token that does not exist.
    #[error("merge {index} names '{token}', which is not a normal token of this vocabulary")]
    MergeOfUnknownToken {
        /// Its place in the table.
        index: usize,
        /// The missing token, shortened.
        token: String,
    },
    /// SentencePiece without scores.
    #[error(
        "the model file holds no token scores (tokenizer.ggml.scores is missing), which a llama vocabulary needs"
    )]
    NoScores,
    /// The file asks for a beginning-of-sequence token and names none.
    #[error("the model file asks for a beginning-of-sequence token but names no valid one")]
    NoBos,
    /// A character that the vocabulary cannot express.
    #[error(
        "the vocabulary has no token for {character:?}: no byte tokens, and no unknown token that is no control token"
    )]
    Inexpressible {
        /// The character.
        character: char,
    },
    /// A token id outside the table.
    #[error("token id {id} is out of range: the vocabulary has {n_vocab} tokens")]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Tokens in the table.
        n_vocab: usize,
    },
    /// The BPE library refused the tables or the text.
    #[error("byte-level BPE: {reason}")]
    Bpe {
        /// What it said.
        reason: String,
    },
}

/// Something odd in a vocabulary that does not keep it from being used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerWarning {
    /// No pre-tokenizer is named: old converters did not write it.
    #[error(
        "the model file names no pre-tokenizer (tokenizer.ggml.pre); token boundaries may differ from the model's own"
    )]
    NoPreTokenizer,
    /// A special id points outside the table and is ignored.
    #[error("{key} is {id}, but the vocabulary has {n_tokens} tokens; ignored")]
    SpecialOutOfRange {
        /// The metadata key.
        key: &'static str,
        /// The id it holds.
        id: u32,
        /// Tokens in the table.
        n_tokens: usize,
    },
    /// The same text under several ids: the first is used for encoding.
    #[error(
        "{count} tokens repeat the text of an earlier one (the first is token {first}); the earlier id is used"
    )]
    DuplicateTokens {
        /// How many.
        count: usize,
        /// The first repeated id.
        first: u32,
    },
    /// The same merge twice: the earlier, stronger rank counts.
    #[error("{count} merges repeat an earlier one; the earlier rank is used")]
    DuplicateMerges {
        /// How many.
        count: usize,
    },
    /// Some bytes have no token, so text that needs them loses them.
    #[error(
        "{count} bytes that UTF-8 text can contain have no token in this vocabulary and are dropped from text"
    )]
    MissingBytes {
        /// How many.
        count: usize,
    },
}

/// At most 40 characters of `text`, for a message, which is one line whatever they are.
pub(super) fn shorten(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars().take(40) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if text.chars().nth(40).is_some() {
        out.push('…');
    }
    out
}
