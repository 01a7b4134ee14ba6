//! Any tables as a tokenizer, and any text through it.
//!
//! The input is text of four parts with empty lines between them: a line of words (kind and
//! pre-tokenizer first, then settings), tokens (a digit for the token's kind, then its text), merges,
//! and the text to encode.
#![no_main]

use lane::tokenizer::{Special, Tokenizer, Vocabulary};
use libfuzzer_sys::fuzz_target;

/// As GGUF numbers the kinds of tokens.
const CONTROL: i32 = 3;

fuzz_target!(|input: &str| {
    let mut parts = input.splitn(4, "\n\n");
    let mut part = || parts.next().unwrap_or("");
    let (head, tokens, merges, text) = (part(), part(), part(), part());
    let mut words = head.split(' ');
    let mut vocabulary = Vocabulary {
        model: words.next().unwrap_or("").to_owned(),
        pre: words.next().map(str::to_owned),
        merges: merges.lines().map(str::to_owned).collect(),
        ..Vocabulary::default()
    };
    let mut scores = Vec::new();
    for (index, line) in tokens.lines().enumerate() {
        let kind = line.chars().next().and_then(|digit| digit.to_digit(10));
        vocabulary.token_types.push(kind.map_or(1, |kind| kind as i32));
        vocabulary.tokens.push(line.chars().skip(usize::from(kind.is_some())).collect());
        scores.push(if line.contains('?') { f32::NAN } else { (index * 7 % 13) as f32 - 9.0 });
    }
    for word in words {
        match word.split_once('=').map(|(name, value)| (name, value.parse().ok())) {
            Some(("bos", id)) => vocabulary.bos = id,
            Some(("eos", id)) => vocabulary.eos = id,
            Some(("eot", id)) => vocabulary.eot = id,
            Some(("unk", id)) => vocabulary.unk = id,
            Some(("add_bos", flag)) => vocabulary.add_bos = flag.map(|flag| flag != 0),
            Some(("space", flag)) => vocabulary.add_space_prefix = flag.map(|flag| flag != 0),
            Some(("short", n)) => scores.truncate(n.unwrap_or(0) as usize),
            _ => {}
        }
    }
    vocabulary.scores = Some(scores);
    let kinds = vocabulary.token_types.clone();
    let Ok(tokenizer) = Tokenizer::new(vocabulary) else { return };

    for special in [Special::AsText, Special::Parse] {
        let Ok(ids) = tokenizer.encode(text, special) else { continue };
        tokenizer.check_ids(&ids).expect("ids of the vocabulary");
        // A token for each byte, and for each special one, of a byte at least, a space that is added
        // to what follows it; at the ends beginning, space and end.
        let most = 2 * text.len() + 3;
        assert!(ids.len() <= most, "{} ids of {} bytes", ids.len(), text.len());
        if special == Special::AsText {
            let control = ids.iter().find(|&&id| kinds[id as usize] == CONTROL);
            assert_eq!(control, None, "text made a control token");
        }
        let _ = tokenizer.decode(&ids);
        let _ = tokenizer.encode_prompt(text, special);
    }
    let all: Vec<u32> = (0..kinds.len() as u32 + 2).collect();
    let _ = tokenizer.decode(&all);
});
