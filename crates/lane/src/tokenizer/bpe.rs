//! Byte-level BPE: words as bytes, bytes as characters, characters merged by rank.

use std::collections::HashSet;

use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::error::shorten;
use super::pretokenizer::PreTokenizer;
use super::vocabulary::{TokenKind, Vocabulary};
use super::{TokenizerError, TokenizerWarning, alphabet};

/// Words whose tokens are remembered.
const CACHE_CAPACITY_WORDS: usize = 10_000;

pub(super) struct ByteLevelBpe {
    words: PreTokenizer,
    model: BPE,
}

impl ByteLevelBpe {
    pub(super) fn new(
        vocabulary: &mut Vocabulary,
        kinds: &[TokenKind],
        warnings: &mut Vec<TokenizerWarning>,
    ) -> Result<ByteLevelBpe, TokenizerError> {
        let name = vocabulary.pre.as_deref().unwrap_or_else(|| {
            warnings.push(TokenizerWarning::NoPreTokenizer);
            "default"
        });
        let words = PreTokenizer::named(name)?;
        if vocabulary.merges.is_empty() {
            return Err(TokenizerError::NoMerges);
        }

        // Special tokens are left out, so that no spelling of user text can produce one.
        let mut ids = Vocab::default();
        for (id, (token, kind)) in vocabulary.tokens.iter().zip(kinds).enumerate().rev() {
            if !kind.is_special() {
                // Ids fit: the tokenizer has checked their number.
                ids.insert(token.clone(), id as u32);
            }
        }
        let merges = merges(&vocabulary.merges, &ids, warnings)?;
        // The tables are large and needed no more.
        vocabulary.merges = Vec::new();

        let missing = (0..=u8::MAX)
            .filter(|byte| !matches!(byte, 0xC0 | 0xC1 | 0xF5..))
            .filter(|byte| !ids.contains_key(alphabet::char_of(*byte).encode_utf8(&mut [0; 4])))
            .count();
        if missing > 0 {
            warnings.push(TokenizerWarning::MissingBytes { count: missing });
        }

        let model = BPE::builder()
            .vocab_and_merges(ids, merges)
            .ignore_merges(words.whole_words_first())
            .cache_capacity(CACHE_CAPACITY_WORDS)
            .build()
            .map_err(refused)?;
        Ok(ByteLevelBpe { words, model })
    }

    /// Whether prompts start with the beginning-of-sequence token where the file is silent.
    pub(super) fn adds_bos(&self) -> bool {
        self.words.adds_bos()
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut spelled = String::new();
        for word in self.words.words(text) {
            spelled.clear();
            spelled.extend(word.bytes().map(alphabet::char_of));
            let tokens = self.model.tokenize(&spelled).map_err(refused)?;
            ids.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }
}

/// The bytes that a token's text stands for; text outside the alphabet stands for itself.
pub(super) fn bytes_of(token: &str) -> Vec<u8> {
    let spelled: Option<Vec<u8>> = token.chars().map(alphabet::byte_of).collect();
    spelled.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Checks the merges and cuts them in two.
fn merges(
    lines: &[String],
    ids: &Vocab,
    warnings: &mut Vec<TokenizerWarning>,
) -> Result<Merges, TokenizerError> {
    let mut merges = Merges::with_capacity(lines.len());
    let mut seen = HashSet::with_capacity(lines.len());
    let mut duplicates = 0;
    let mut joined = String::new();
    for (index, line) in lines.iter().enumerate() {
        let (left, right) = line
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty())
            .ok_or_else(|| TokenizerError::BadMerge { index, text: shorten(line) })?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for token in [left, right, &joined] {
            if !ids.contains_key(token) {
                return Err(TokenizerError::MergeOfUnknownToken { index, token: shorten(token) });
            }
        }
        if seen.insert(line.as_str()) {
            merges.push((left.to_owned(), right.to_owned()));
        } else {
            duplicates += 1;
        }
    }
    if duplicates > 0 {
        warnings.push(TokenizerWarning::DuplicateMerges { count: duplicates });
    }
    Ok(merges)
}

fn refused(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Bpe { reason: error.to_string() }
}
