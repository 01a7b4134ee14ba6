//! SentencePiece by score: characters merged pairwise, the best-scored token first.

use std::collections::{BinaryHeap, HashMap};

use super::TokenizerError;
use super::vocabulary::{TokenKind, Vocabulary, byte_of};

/// What a space is written as.
pub(super) const SPACE: char = '▁';

pub(super) struct SentencePiece {
    ids: HashMap<String, u32>,
    scores: Vec<f32>,
    /// Token of each byte, for characters without one.
    bytes: Box<[Option<u32>; 256]>,
    unk: Option<u32>,
    /// The longest token: no longer pair is worth looking up.
    longest_bytes: usize,
}

/// A stretch of text, chained to its neighbours; empty once merged away.
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// Two neighbouring symbols that form a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Their common length when found: another length now means that one of them has changed.
    len: usize,
    id: u32,
}

impl Ord for Pair {
    /// Best score first, then leftmost.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}
impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Pair {}

impl SentencePiece {
    pub(super) fn new(
        vocabulary: &mut Vocabulary,
        kinds: &[TokenKind],
    ) -> Result<SentencePiece, TokenizerError> {
        let mut scores = vocabulary.scores.take().ok_or(TokenizerError::NoScores)?;
        // Any order will do for scores that are no numbers; the worst is the most harmless.
        scores.iter_mut().filter(|s| s.is_nan()).for_each(|s| *s = f32::NEG_INFINITY);
        let mut ids = HashMap::with_capacity(vocabulary.tokens.len());
        let mut bytes = Box::new([None; 256]);
        let mut longest_bytes = 0;
        for (id, (token, kind)) in vocabulary.tokens.iter().zip(kinds).enumerate() {
            // Ids fit: the tokenizer has checked their number.
            let id = id as u32;
            match kind {
                TokenKind::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[usize::from(byte)].get_or_insert(id);
                    }
                }
                // No spelling of user text can produce a special token.
                TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {}
                TokenKind::Normal | TokenKind::UserDefined if !token.is_empty() => {
                    longest_bytes = longest_bytes.max(token.len());
                    ids.entry(token.clone()).or_insert(id);
                }
                TokenKind::Normal | TokenKind::UserDefined => {}
            }
        }
        // What text has no token for is text all the same: it becomes no control token either.
        let unk = vocabulary.unk.filter(|&id| kinds[id as usize] != TokenKind::Control);
        Ok(SentencePiece { ids, scores, bytes, unk, longest_bytes })
    }

    /// Appends the tokens of `text`, whose spaces are still spaces.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let text = text.replace(' ', "▁");
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: i.checked_sub(1),
                next: Some(i + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }

        let mut pairs = BinaryHeap::new();
        for right in 1..symbols.len() {
            pairs.extend(self.pair(&text, &symbols, right - 1, right));
        }
        // Token of each symbol that was merged; single characters are looked up at the end.
        let mut merged = vec![None; symbols.len()];
        while let Some(Pair { left, right, len, id, .. }) = pairs.pop() {
            let is_current = symbols[left].len > 0
                && symbols[right].len > 0
                && symbols[left].next == Some(right)
                && symbols[left].len + symbols[right].len == len;
            if !is_current {
                continue;
            }
            let next = symbols[right].next;
            symbols[left].len = len;
            symbols[left].next = next;
            symbols[right].len = 0;
            merged[left] = Some(id);
            if let Some(next) = next {
                symbols[next].prev = Some(left);
                pairs.extend(self.pair(&text, &symbols, left, next));
            }
            if let Some(prev) = symbols[left].prev {
                pairs.extend(self.pair(&text, &symbols, prev, left));
            }
        }

        for (symbol, merged) in symbols.iter().zip(merged).filter(|(symbol, _)| symbol.len > 0) {
            match merged {
                Some(id) => ids.push(id),
                None => self.push_character(&text[symbol.start..symbol.start + symbol.len], ids)?,
            }
        }
        Ok(())
    }

    fn pair(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Pair> {
        let start = symbols[left].start;
        let len = symbols[left].len + symbols[right].len;
        if len > self.longest_bytes {
            return None;
        }
        let id = *self.ids.get(&text[start..start + len])?;
        Some(Pair { score: self.scores[id as usize], left, right, len, id })
    }

    /// One character: its own token, or its bytes, or the unknown token.
    fn push_character(&self, character: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if let Some(id) = self.ids.get(character) {
            ids.push(*id);
            return Ok(());
        }
        let bytes: Option<Vec<u32>> =
            character.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        if let Some(bytes) = bytes {
            ids.extend(bytes);
            return Ok(());
        }
        let character = character.chars().next().unwrap_or_default();
        ids.push(self.unk.ok_or(TokenizerError::Inexpressible { character })?);
        Ok(())
    }
}

/// The bytes that a token's text stands for.
pub(super) fn bytes_of(token: &str, kind: TokenKind) -> Vec<u8> {
    match (kind, byte_of(token)) {
        (TokenKind::Byte, Some(byte)) => vec![byte],
        _ => token.replace(SPACE, " ").into_bytes(),
    }
}
