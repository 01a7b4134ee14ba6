//! Encoding and decoding with real vocabularies and with small ones checked by other programs.

use std::io::Write;
use std::path::{Path, PathBuf};

use lane::gguf::Gguf;
use lane::tokenizer::{Segment, Special, TextStream, Tokenizer, TokenizerWarning, Vocabulary};
use proptest::prelude::*;
use serde_json::Value;

fn in_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn gold(name: &str) -> Value {
    let path = in_crate("tests/gold").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn tokenizer_of(path: &Path) -> Tokenizer {
    let gguf = Gguf::open(path).unwrap();
    Tokenizer::new(Vocabulary::from_gguf(&gguf).unwrap()).unwrap()
}

fn whale() -> Tokenizer {
    tokenizer_of(&in_crate("models/whale-5.8m-q4_k_m.gguf"))
}

/// The file's tokenizer, or `None` after a word on what is skipped: such files are too large to be
/// in the repository.
fn downloaded(test: &str, variable: &str, file: &str) -> Option<Tokenizer> {
    let path = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => in_crate("../../target/models").join(file),
    };
    if path.exists() {
        return Some(tokenizer_of(&path));
    }
    // Not through the harness, which swallows what passing tests print.
    let _ =
        writeln!(std::io::stderr(), "skipped {test}: no {} ({variable} names it)", path.display());
    None
}

fn check_gold(tokenizer: &Tokenizer, name: &str) {
    let gold = gold(name);
    let cases = gold["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let prompt = case["prompt"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        for special in [Special::AsText, Special::Parse] {
            assert_eq!(tokenizer.encode_prompt(prompt, special).unwrap(), expected, "{prompt:?}");
        }
        assert_eq!(tokenizer.decode(&expected), prompt);

        let Some(greedy_text) = case["greedy_text"].as_str() else { continue };
        let mut stream = TextStream::new(tokenizer);
        let mut text: String = ids(&case["greedy"]).iter().map(|id| stream.push(*id)).collect();
        text += &stream.finish();
        assert_eq!(text, greedy_text);
    }
}

#[test]
fn whale_ids_are_those_of_the_reference() {
    let tokenizer = whale();
    check_gold(&tokenizer, "whale-q4_k_m.json");
    check_gold(&tokenizer, "whale-q4_k.json");
    assert_eq!(tokenizer.n_vocab(), 4096);
    assert_eq!(tokenizer.warnings(), []);
    assert!(tokenizer.adds_bos() && tokenizer.is_end(0) && !tokenizer.is_end(1));
    assert!(tokenizer.encode("", Special::Parse).unwrap().is_empty());
    assert_eq!(tokenizer.encode_prompt("", Special::Parse).unwrap(), [0]);
}

#[test]
fn smollm2_ids_are_those_of_the_reference() {
    let test = "smollm2_ids_are_those_of_the_reference";
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let Some(tokenizer) = downloaded(test, "LANE_SMOLLM2", file) else { return };
    check_gold(&tokenizer, "smollm2-135m-q4_1.json");
    assert_eq!(tokenizer.n_vocab(), 49152);
    assert!(!tokenizer.adds_bos());
    // <|endoftext|> and <|im_end|>, though the file names only the second.
    assert_eq!(tokenizer.ending_ids(), [0, 2]);
    assert_eq!(tokenizer.encode("<|im_start|>", Special::Parse).unwrap(), [1]);
    assert!(!tokenizer.encode("<|im_start|>", Special::AsText).unwrap().contains(&1));
}

#[test]
fn gemma3_ids_are_those_of_the_reference() {
    let test = "gemma3_ids_are_those_of_the_reference";
    let Some(tokenizer) = downloaded(test, "LANE_GEMMA3", "gemma-3-270m-q4_k_m.gguf") else {
        return;
    };
    check_gold(&tokenizer, "gemma3-270m.json");
    // <eos> and <end_of_turn>, though the file names only the first.
    assert_eq!(tokenizer.ending_ids(), [1, 106]);
}

#[test]
fn special_tokens_are_parsed_only_where_asked() {
    let tokenizer = whale();
    let text = "one<|endoftext|> two";
    let parsed = tokenizer.encode(text, Special::Parse).unwrap();
    assert_eq!(parsed.iter().filter(|id| **id == 0).count(), 1);
    assert_eq!(tokenizer.decode(&parsed), "one two");
    let as_text = tokenizer.encode(text, Special::AsText).unwrap();
    assert!(!as_text.contains(&0));
    assert_eq!(tokenizer.decode(&as_text), text);

    assert_eq!(tokenizer.special_text(0), Some("<|endoftext|>"));
    assert_eq!(tokenizer.special_text(1), None);
    assert_eq!(tokenizer.special_id("<|endoftext|>"), Some(0));
    assert_eq!(tokenizer.special_id("!"), None);
    assert_eq!(tokenizer.piece_bytes(0), b"");
    assert_eq!(tokenizer.piece_bytes(1), b"!");
    assert_eq!(tokenizer.piece_bytes(4096), b"");
    let shown = TextStream::new(&tokenizer).with_special().push(0);
    assert_eq!(shown, "<|endoftext|>");
    // A prompt that brings its own beginning gets no second one.
    assert_eq!(tokenizer.encode_prompt("<|endoftext|>!", Special::Parse).unwrap(), [0, 1]);

    assert!(tokenizer.check_ids(&[0, 4095]).is_ok());
    let error = tokenizer.check_ids(&[0, 4096]).unwrap_err().to_string();
    assert_eq!(error, "token id 4096 is out of range: the vocabulary has 4096 tokens");
}

#[test]
fn segments_are_encoded_as_one_text() {
    let tokenizer = whale();
    let segment = |text, special| Segment { text, special };
    let whole = tokenizer.encode("the white whale", Special::AsText).unwrap();
    let parts = [
        segment("the wh", Special::Parse),
        segment("ite wha", Special::AsText),
        segment("le", Special::Parse),
    ];
    assert_eq!(tokenizer.encode_segments(&parts).unwrap(), whole);
    // A special token is none when part of it comes from a segment that is not trusted.
    let parts = [segment("<|endof", Special::Parse), segment("text|>", Special::AsText)];
    assert!(!tokenizer.encode_segments(&parts).unwrap().contains(&0));
    let parts =
        [segment("<|endoftext|>", Special::AsText), segment("<|endoftext|>", Special::Parse)];
    let ids = tokenizer.encode_segments(&parts).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 0).count(), 1);
    assert_eq!(ids.last(), Some(&0));
}

#[test]
fn characters_are_not_broken_across_pieces() {
    let tokenizer = whale();
    let text = "é鯨🐋 x";
    let ids = tokenizer.encode(text, Special::AsText).unwrap();
    assert!(ids.len() > text.chars().count(), "this text takes several tokens a character");
    let mut stream = TextStream::new(&tokenizer);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
    assert!(pieces.iter().any(String::is_empty));
    assert_eq!(pieces.concat() + &stream.finish(), text);

    // Cut off in the middle of a character.
    let mut stream = TextStream::new(&tokenizer);
    assert_eq!(stream.push(ids[0]), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
}

fn sentencepiece(name: &str) -> (Tokenizer, Vocabulary, Value) {
    let gold = gold("sentencepiece-tiny.json")[name].take();
    let list = |key: &str| gold[key].as_array().unwrap().clone();
    let vocabulary = Vocabulary {
        model: "llama".into(),
        tokens: list("tokens").iter().map(|t| t.as_str().unwrap().to_owned()).collect(),
        scores: Some(list("scores").iter().map(|s| s.as_f64().unwrap() as f32).collect()),
        token_types: list("token_types").iter().map(|t| t.as_i64().unwrap() as i32).collect(),
        add_space_prefix: gold["add_space_prefix"].as_bool(),
        ..Vocabulary::default()
    };
    (Tokenizer::new(vocabulary.clone()).unwrap(), vocabulary, gold)
}

#[test]
fn sentencepiece_ids_are_those_of_the_reference() {
    for name in ["llama", "gemma"] {
        let (tokenizer, _, gold) = sentencepiece(name);
        let cases = gold["cases"].as_array().unwrap();
        assert!(cases.len() > 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let expected = ids(&case["ids"]);
            assert_eq!(
                tokenizer.encode(text, Special::AsText).unwrap(),
                expected,
                "{name}: {text:?}"
            );
            assert_eq!(tokenizer.decode(&expected), text, "{name}");
        }
    }
}

/// Worked out by hand on eight tokens.
#[test]
fn sentencepiece_merges_the_best_score_first() {
    let tokens = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("▁", -9.0),
        ("a", -8.0),
        ("b", -8.0),
        ("c", -8.0),
        ("ab", -1.0),
        ("bc", -2.0),
        ("abc", -3.0),
        ("▁a", -0.5),
        ("aa", -4.0),
    ];
    let mut vocabulary = Vocabulary {
        model: "llama".into(),
        tokens: tokens.iter().map(|(text, _)| (*text).to_owned()).collect(),
        scores: Some(tokens.iter().map(|(_, score)| *score).collect()),
        token_types: vec![2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        ..Vocabulary::default()
    };
    let tokenizer = Tokenizer::new(vocabulary.clone()).unwrap();
    // "▁abc": "▁a" is best, which leaves "bc".
    assert_eq!(tokenizer.encode("abc", Special::AsText).unwrap(), [10, 8]);
    // Beginning of sequence by default, and a space in front again after a special token.
    assert_eq!(tokenizer.encode_prompt("abc", Special::AsText).unwrap(), [1, 10, 8]);
    assert_eq!(tokenizer.encode("abc</s>a", Special::Parse).unwrap(), [10, 8, 2, 10]);
    // No token for the character and none for its bytes: the unknown token.
    assert_eq!(tokenizer.encode("z", Special::AsText).unwrap(), [3, 0]);
    assert_eq!(tokenizer.decode(&[1, 10, 8, 3, 4]), "abc a");
    assert_eq!(TextStream::new(&tokenizer).push(10), " a");

    vocabulary.add_space_prefix = Some(false);
    vocabulary.add_bos = Some(false);
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    // "ab" first, then "abc", though "bc" scores better than "abc".
    assert_eq!(tokenizer.encode_prompt("abc", Special::AsText).unwrap(), [9]);
    // Of equals the leftmost.
    assert_eq!(tokenizer.encode("aaa", Special::AsText).unwrap(), [11, 4]);
}

#[test]
fn byte_tokens_stand_in_for_missing_characters() {
    let (tokenizer, vocabulary, _) = sentencepiece("llama");
    let ids = tokenizer.encode("龍", Special::AsText).unwrap();
    let texts: Vec<&str> = ids.iter().map(|id| vocabulary.tokens[*id as usize].as_str()).collect();
    assert_eq!(texts, ["▁", "<0xE9>", "<0xBE>", "<0x8D>"]);
    let mut stream = TextStream::at_start(&tokenizer);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
    assert_eq!(pieces, ["", "", "", "龍"]);
}

#[test]
fn a_missing_pretokenizer_is_a_warning() {
    let gguf = Gguf::open(in_crate("models/whale-5.8m-q4_k_m.gguf")).unwrap();
    let vocabulary = Vocabulary { pre: None, ..Vocabulary::from_gguf(&gguf).unwrap() };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(tokenizer.warnings(), [TokenizerWarning::NoPreTokenizer]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("Call me", Special::AsText).unwrap()), "Call me");
}

proptest! {
    #[test]
    fn byte_level_text_comes_back(text in any::<String>(), spaces in "[ \\n\\ta1!鯨]{0,40}") {
        thread_local!(static WHALE: Tokenizer = whale());
        WHALE.with(|tokenizer| {
            for text in [&text, &spaces] {
                let ids = tokenizer.encode(text, Special::AsText).unwrap();
                prop_assert!(ids.iter().all(|id| *id > 0 && *id < 4096));
                prop_assert_eq!(&tokenizer.decode(&ids), text);
            }
            Ok(())
        })?;
    }

    #[test]
    fn sentencepiece_text_comes_back(text in "[^▁]*") {
        for name in ["llama", "gemma"] {
            let (tokenizer, ..) = sentencepiece(name);
            let ids = tokenizer.encode(&text, Special::AsText).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), text.clone());
        }
    }

    /// However ids are streamed, no piece is broken and nothing is lost.
    #[test]
    fn streams_of_any_ids_are_text(ids in prop::collection::vec(0u32..5000, 0..40)) {
        thread_local!(static WHALE: Tokenizer = whale());
        WHALE.with(|tokenizer| {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.piece_bytes(*id).to_vec()).collect();
            prop_assert_eq!(tokenizer.decode(&ids), String::from_utf8_lossy(&bytes));
            Ok(())
        })?;
    }
}
