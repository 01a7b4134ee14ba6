//! Text as it comes, one token after the other, in whole characters.

use super::Tokenizer;

/// Joins byte pieces into text without ever splitting a character: what may still become one is
/// held back, what cannot is replaced by U+FFFD.
#[derive(Debug, Clone, Default)]
pub struct Utf8Joiner {
    held: Vec<u8>,
}

impl Utf8Joiner {
    /// The text that `bytes` complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.held.len());
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    // No length: the bytes end too early, but could go on.
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        self.held = rest.to_vec();
        text
    }

    /// What is held back at the end: U+FFFD for a character that was never completed, or nothing.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }
}

/// Decodes a stream of token ids into text as it comes.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    joiner: Utf8Joiner,
    drop_space: bool,
    show_special: bool,
}

impl TextStream {
    /// A stream that goes on after other tokens: spaces are what they are.
    pub fn new(tokenizer: &Tokenizer) -> TextStream {
        TextStream {
            tokenizer: tokenizer.clone(),
            joiner: Utf8Joiner::default(),
            drop_space: false,
            show_special: false,
        }
    }

    /// A stream that starts a text: where the vocabulary puts a space before every text, the first
    /// one is not the text's own and is dropped.
    pub fn at_start(tokenizer: &Tokenizer) -> TextStream {
        TextStream { drop_space: tokenizer.adds_space_prefix(), ..TextStream::new(tokenizer) }
    }

    /// The same stream with special tokens written out as text.
    pub fn with_special(self) -> TextStream {
        TextStream { show_special: true, ..self }
    }

    /// The text that `id` completes; often empty, as special tokens and part characters are.
    /// Ids outside the vocabulary are ignored.
    pub fn push(&mut self, id: u32) -> String {
        let special = if self.show_special { self.tokenizer.special_text(id) } else { None };
        let mut bytes = match special {
            Some(text) => text.as_bytes(),
            None => self.tokenizer.piece_bytes(id),
        };
        if self.drop_space && special.is_none() && !bytes.is_empty() {
            self.drop_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.joiner.push(bytes)
    }

    /// What is still held back when no more tokens come.
    pub fn finish(&mut self) -> String {
        self.joiner.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole_however_they_are_cut() {
        let text = "aé鯨🐋z";
        for size in 1..6 {
            let mut joiner = Utf8Joiner::default();
            let mut out = String::new();
            for piece in text.as_bytes().chunks(size) {
                let part = joiner.push(piece);
                assert!(!part.contains(char::REPLACEMENT_CHARACTER), "{part:?}");
                out += &part;
            }
            assert_eq!(out + &joiner.finish(), text);
        }
    }

    #[test]
    fn what_cannot_be_completed_is_replaced_at_once() {
        let mut joiner = Utf8Joiner::default();
        assert_eq!(joiner.push(b"\xF0\x9F"), "");
        assert_eq!(joiner.push(b"x\xFFy"), "\u{FFFD}x\u{FFFD}y");
        assert_eq!(joiner.push(b"\xE9\xAF"), "");
        assert_eq!(joiner.finish(), "\u{FFFD}");
        assert_eq!(joiner.finish(), "");
    }
}
