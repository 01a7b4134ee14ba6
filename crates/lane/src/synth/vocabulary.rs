//! A byte-level BPE vocabulary of any size.
//!
//! Every byte, then merges that build pairs and quadruples of letters, then special tokens with
//! Llama 3's names at the end. Any text has an encoding, and every token but the special ones can
//! come out of one.

use crate::gguf::GgufWriter;

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// Adds the tokenizer of `n_vocab` tokens, the last `n_special` of them special.
pub(super) fn metadata(writer: &mut GgufWriter, n_vocab: u32, n_special: u32) {
    let n_merges = (n_vocab - n_special) as usize - 256;
    let merges: Vec<(String, String)> = merges().take(n_merges).collect();
    assert_eq!(merges.len(), n_merges, "there are enough merges for every shape");

    let bytes = (0..=255).map(byte_char).map(String::from);
    let merged = merges.iter().map(|(left, right)| format!("{left}{right}"));
    let special = (0..n_special).map(special_token);
    let types = (0..n_vocab).map(|id| if id < n_vocab - n_special { NORMAL } else { CONTROL });
    let first_special = n_vocab - n_special;
    writer
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "llama-bpe")
        .strings("tokenizer.ggml.tokens", bytes.chain(merged).chain(special))
        .i32s("tokenizer.ggml.token_type", types)
        .strings("tokenizer.ggml.merges", merges.iter().map(|(l, r)| format!("{l} {r}")))
        .u32("tokenizer.ggml.bos_token_id", first_special)
        .u32("tokenizer.ggml.eos_token_id", first_special + 1)
        .u32("tokenizer.ggml.eot_token_id", first_special + 9)
        .bool("tokenizer.ggml.add_bos_token", true);
}

/// The character that stands for a byte in GPT-2's vocabulary: itself where that can be printed,
/// else one from 256 on.
fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    char::from_u32(256 + before).expect("far below the surrogates")
}

/// Merges in order of rank: a letter after a space, two letters, two pairs of letters.
fn merges() -> impl Iterator<Item = (String, String)> {
    let letters = || (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let pairs = move || letters().flat_map(move |a| letters().map(move |b| format!("{a}{b}")));
    let space = byte_char(b' ').to_string();
    let spaced = letters().map(move |letter| (space.clone(), letter));
    let double = letters().flat_map(move |a| letters().map(move |b| (a.clone(), b)));
    let quadruple = pairs().flat_map(move |a| pairs().map(move |b| (a.clone(), b)));
    spaced.chain(double).chain(quadruple)
}

/// The name of special token `index`, as in Llama 3.
fn special_token(index: u32) -> String {
    match index {
        0 => "<|begin_of_text|>".to_owned(),
        1 => "<|end_of_text|>".to_owned(),
        6 => "<|start_header_id|>".to_owned(),
        7 => "<|end_header_id|>".to_owned(),
        9 => "<|eot_id|>".to_owned(),
        _ => format!("<|reserved_special_token_{index}|>"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn bytes_stand_for_themselves_or_move_up() {
        assert_eq!(byte_char(b'a'), 'a');
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(byte_char(0), 'Ā');
        assert_eq!(byte_char(0xad), 'Ń');
        assert_eq!((0..=255).map(byte_char).collect::<HashSet<_>>().len(), 256);
    }

    #[test]
    fn merges_only_use_tokens_that_are_there() {
        let mut tokens: HashSet<String> = (0..=255).map(|byte| byte_char(byte).into()).collect();
        for (left, right) in merges().take(127_744) {
            assert!(tokens.contains(&left) && tokens.contains(&right));
            assert!(tokens.insert(left + &right), "no token twice");
        }
    }
}
