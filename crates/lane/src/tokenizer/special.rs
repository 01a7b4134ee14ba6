//! Tokens that are found in text before anything else, and those that end an answer.

use std::ops::Range;

use super::vocabulary::{TokenKind, Vocabulary};

/// A stretch of input: text still to be encoded, or a token found in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

/// The tokens to be found, sorted by text.
pub(super) struct SpecialTokens {
    sorted: Vec<(Box<[u8]>, u32, TokenKind)>,
}

impl SpecialTokens {
    pub(super) fn new(tokens: &[String], kinds: &[TokenKind]) -> SpecialTokens {
        let found_first = |kind: &TokenKind| kind.is_special() || *kind == TokenKind::UserDefined;
        let mut sorted: Vec<_> = tokens
            .iter()
            .zip(kinds)
            .enumerate()
            .filter(|(_, (token, kind))| found_first(kind) && !token.is_empty())
            .map(|(id, (token, kind))| (token.as_bytes().into(), id as u32, *kind))
            .collect();
        sorted.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        sorted.dedup_by(|later, first| later.0 == first.0);
        SpecialTokens { sorted }
    }

    /// The longest token at the start of `text`. Special ones count only up to `trusted_bytes`.
    fn longest_at(&self, text: &[u8], trusted_bytes: usize) -> Option<(u32, usize)> {
        // Entries that share the bytes seen so far lie side by side; narrow them byte by byte.
        let mut candidates = &self.sorted[..];
        let mut longest = None;
        for (at, byte) in text.iter().enumerate() {
            let from = candidates.partition_point(|(token, ..)| token[at] < *byte);
            let to = candidates.partition_point(|(token, ..)| token[at] <= *byte);
            candidates = &candidates[from..to];
            if let Some((token, id, kind)) = candidates.first()
                && token.len() == at + 1
            {
                if !kind.is_special() || at < trusted_bytes {
                    longest = Some((*id, at + 1));
                }
                candidates = &candidates[1..];
            }
            if candidates.is_empty() {
                break;
            }
        }
        longest
    }

    /// Cuts `text` at the tokens in it, leftmost and longest first. A special token is one only
    /// where it lies wholly inside one of the `trusted` ranges (sorted, apart from each other).
    pub(super) fn cut<'t>(&self, text: &'t str, trusted: &[Range<usize>]) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut trusted = trusted.iter().peekable();
        let (mut at, mut text_start) = (0, 0);
        while at < text.len() {
            while trusted.next_if(|range| range.end <= at).is_some() {}
            let trusted_bytes = match trusted.peek() {
                Some(range) if range.start <= at => range.end - at,
                _ => 0,
            };
            match self.longest_at(&text.as_bytes()[at..], trusted_bytes) {
                // A token is whole characters, so a match at a character's start ends at one.
                Some((id, len)) => {
                    if text_start < at {
                        fragments.push(Fragment::Text(&text[text_start..at]));
                    }
                    fragments.push(Fragment::Token(id));
                    at += len;
                    text_start = at;
                }
                None => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
        if text_start < text.len() {
            fragments.push(Fragment::Text(&text[text_start..]));
        }
        fragments
    }
}

/// Texts of tokens that end an answer in some model family, whatever the file calls them.
const ENDING_MARKS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];
/// The same, for texts that an ordinary token can have as well.
const ENDING_CONTROL_MARKS: &[&str] = &["</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]"];
/// Texts that open a turn; together with the shape `<|…|>` what user text must never produce.
const TURN_MARKS: &[&str] = &["<start_of_turn>"];

/// Each token's kind. Some converters write the marks of a conversation as ordinary or
/// user-defined tokens; they are made control tokens here.
pub(super) fn kinds(vocabulary: &Vocabulary) -> Vec<TokenKind> {
    let is_sentencepiece = vocabulary.model == "llama";
    let kind = |(id, token): (usize, &String)| {
        let kind = match vocabulary.token_types.get(id) {
            Some(number) => TokenKind::from_gguf(*number),
            None if is_sentencepiece && super::vocabulary::byte_of(token).is_some() => {
                TokenKind::Byte
            }
            None => TokenKind::Normal,
        };
        let is_mark =
            ENDING_MARKS.contains(&token.as_str()) || TURN_MARKS.contains(&token.as_str());
        let has_shape = token.len() > 4 && token.starts_with("<|") && token.ends_with("|>");
        let named =
            [vocabulary.bos, vocabulary.eos, vocabulary.eot, vocabulary.eom, vocabulary.unk];
        let is_named = named.into_iter().flatten().any(|special| special as usize == id);
        match kind {
            TokenKind::UserDefined if is_mark || has_shape => TokenKind::Control,
            TokenKind::Normal if is_mark || (is_named && vocabulary.token_types.is_empty()) => {
                TokenKind::Control
            }
            kind => kind,
        }
    };
    vocabulary.tokens.iter().enumerate().map(kind).collect()
}

/// The ids that end an answer, sorted.
pub(super) fn ending_ids(vocabulary: &Vocabulary, kinds: &[TokenKind]) -> Vec<u32> {
    let named = [vocabulary.eos, vocabulary.eot, vocabulary.eom].into_iter().flatten();
    let marks = vocabulary.tokens.iter().zip(kinds).enumerate().filter(|(_, (token, kind))| {
        ENDING_MARKS.contains(&token.as_str())
            || (kind.is_special() && ENDING_CONTROL_MARKS.contains(&token.as_str()))
    });
    let mut ids: Vec<u32> = named.chain(marks.map(|(id, _)| id as u32)).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(tokens: &[(&str, TokenKind)]) -> SpecialTokens {
        let texts: Vec<String> = tokens.iter().map(|(text, _)| (*text).to_owned()).collect();
        let kinds: Vec<TokenKind> = tokens.iter().map(|(_, kind)| *kind).collect();
        SpecialTokens::new(&texts, &kinds)
    }

    fn one(range: Range<usize>) -> [Range<usize>; 1] {
        [range]
    }

    #[test]
    fn the_longest_match_wins_and_user_defined_tokens_need_no_trust() {
        use Fragment::{Text, Token};
        use TokenKind::{Control, Normal, UserDefined};
        let s = specials(&[
            ("<a>", Control),
            ("<a><b>", Control),
            ("<", Normal),
            ("  ", UserDefined),
            ("鯨", UserDefined),
        ]);
        let text = "x<a><b><a>  y鯨";
        assert_eq!(
            s.cut(text, &one(0..text.len())),
            [Text("x"), Token(1), Token(0), Token(3), Text("y"), Token(4)]
        );
        assert_eq!(s.cut(text, &[]), [Text("x<a><b><a>"), Token(3), Text("y"), Token(4)]);
        // The trusted range ends inside the longer token.
        assert_eq!(s.cut("<a><b>", &one(0..4)), [Token(0), Text("<b>")]);
        // A token across a boundary is none.
        assert_eq!(s.cut("<a>", &[0..1, 1..3]), [Text("<a>")]);
        assert_eq!(s.cut("<a><a>", &one(3..6)), [Text("<a>"), Token(0)]);
    }
}
