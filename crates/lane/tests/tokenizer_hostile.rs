//! Vocabularies that a broken or malicious file could carry: each is refused in one sentence, or
//! harmless.

use lane::tokenizer::{Special, Tokenizer, TokenizerError, TokenizerWarning, Vocabulary};
use proptest::prelude::*;

/// Byte-level BPE of the letters a to d, a space, and one special token.
fn bpe() -> Vocabulary {
    Vocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: ["<|end|>", "a", "b", "c", "d", "Ġ", "ab", "cd"].map(String::from).into(),
        token_types: vec![3, 1, 1, 1, 1, 1, 1, 1],
        merges: ["a b", "c d"].map(String::from).into(),
        eos: Some(0),
        ..Vocabulary::default()
    }
}

fn sentencepiece() -> Vocabulary {
    Vocabulary {
        model: "llama".into(),
        tokens: ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁"].map(String::from).into(),
        scores: Some(vec![0.0, 0.0, 0.0, -3.0, -4.0, -1.0, -2.0]),
        token_types: vec![2, 3, 3, 1, 1, 1, 1],
        ..Vocabulary::default()
    }
}

fn refusal(vocabulary: Vocabulary) -> String {
    Tokenizer::new(vocabulary).unwrap_err().to_string()
}

#[test]
fn the_tables_they_start_from_are_sound() {
    let tokenizer = Tokenizer::new(bpe()).unwrap();
    assert_eq!(tokenizer.encode("abcd a", Special::AsText).unwrap(), [6, 7, 5, 1]);
    let tokenizer = Tokenizer::new(sentencepiece()).unwrap();
    assert_eq!(tokenizer.encode("ab", Special::AsText).unwrap(), [6, 5]);
}

#[test]
fn empty_tables() {
    assert_eq!(
        refusal(Vocabulary { tokens: vec![], ..bpe() }),
        "the model file holds no tokens (tokenizer.ggml.tokens is missing or empty)"
    );
    assert!(refusal(Vocabulary { merges: vec![], ..bpe() }).contains("no merges"));
    assert!(refusal(Vocabulary { scores: None, ..sentencepiece() }).contains("no token scores"));
    assert!(refusal(Vocabulary::default()).contains("tokenizer.ggml.model is ''"));
}

#[test]
fn unknown_kinds() {
    let error = refusal(Vocabulary { model: "bert".into(), ..bpe() });
    assert!(error.contains("'bert'; supported are gpt2"), "{error}");
    let error = refusal(Vocabulary { pre: Some("x".repeat(1000)), ..bpe() });
    assert!(error.contains("supported are default, gpt-2") && error.len() < 300, "{error}");
}

#[test]
fn a_refusal_is_one_line_whatever_it_names() {
    let names = "a\nb\u{1b}[2J".to_owned();
    let pre = refusal(Vocabulary { pre: Some(names.clone()), ..bpe() });
    let model = refusal(Vocabulary { model: names.clone(), ..bpe() });
    let merge = refusal(Vocabulary { merges: vec![names], ..bpe() });
    for text in [pre, model, merge] {
        assert!(text.contains(r"a\nb\u{1b}[2J") && !text.contains(char::is_control), "{text:?}");
    }
}

#[test]
fn tables_of_the_wrong_length() {
    let error = refusal(Vocabulary { token_types: vec![1; 7], ..bpe() });
    assert_eq!(error, "tokenizer.ggml.token_type has 7 entries for 8 tokens");
    let error = refusal(Vocabulary { scores: Some(vec![0.0; 3]), ..sentencepiece() });
    assert_eq!(error, "tokenizer.ggml.scores has 3 entries for 7 tokens");
    // Longer ones are harmless.
    assert!(Tokenizer::new(Vocabulary { token_types: vec![1; 100], ..bpe() }).is_ok());
}

#[test]
fn merges_that_make_no_sense() {
    let with = |merge: &str| Vocabulary { merges: vec!["a b".into(), merge.into()], ..bpe() };
    for merge in ["", " ", "ab", " b", "a "] {
        assert!(refusal(with(merge)).starts_with("merge 1 is not two parts"), "{merge:?}");
    }
    for (merge, token) in [("a x", "x"), ("x a", "x"), ("b a", "ba"), ("a b ", "b ")] {
        let error = refusal(with(merge));
        assert!(error.starts_with(&format!("merge 1 names '{token}'")), "{error}");
    }
    // A special token cannot be merged up from text.
    let error = refusal(with("a <|end|>"));
    assert!(error.starts_with("merge 1 names '<|end|>'"), "{error}");
    let error = refusal(with(&format!("a {}", "y".repeat(100_000))));
    assert!(error.len() < 200, "{error}");
    // Twice the same: the first rank counts.
    let tokenizer = Tokenizer::new(with("a b")).unwrap();
    assert_eq!(tokenizer.warnings()[0], TokenizerWarning::DuplicateMerges { count: 1 });
}

#[test]
fn duplicate_and_empty_tokens_are_harmless() {
    for mut vocabulary in [bpe(), sentencepiece()] {
        for token in ["a", "a", "", ""] {
            vocabulary.tokens.push(token.into());
            vocabulary.token_types.push(1);
            vocabulary.scores.iter_mut().for_each(|s| s.push(0.0));
        }
        let first = vocabulary.tokens.len() as u32 - 4;
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        // "a" twice and "" once, which an earlier token has as well.
        let warning = TokenizerWarning::DuplicateTokens { count: 3, first };
        assert!(tokenizer.warnings().contains(&warning), "{:?}", tokenizer.warnings());
        let ids = tokenizer.encode("a", Special::AsText).unwrap();
        assert!(ids.iter().all(|id| *id < first), "{ids:?}");
    }
}

#[test]
fn special_ids_out_of_range_are_ignored_with_a_warning() {
    let vocabulary = Vocabulary { eos: Some(8), pad: Some(u32::MAX), eot: Some(7), ..bpe() };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(tokenizer.eos(), None);
    // The one in range, and the one whose text says so.
    assert_eq!(tokenizer.ending_ids(), [0, 7]);
    let expected = "tokenizer.ggml.eos_token_id is 8, but the vocabulary has 8 tokens; ignored";
    assert!(tokenizer.warnings().iter().any(|w| w.to_string() == expected));

    let error = Tokenizer::new(Vocabulary { bos: Some(8), add_bos: Some(true), ..bpe() });
    assert_eq!(error.unwrap_err(), TokenizerError::NoBos);
    // The ids that SentencePiece uses by default are no different.
    let small = Vocabulary {
        tokens: vec!["a".into()],
        scores: Some(vec![0.0]),
        token_types: vec![],
        ..sentencepiece()
    };
    let tokenizer = Tokenizer::new(small).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (None, false));
}

#[test]
fn absurdly_long_tokens_are_refused() {
    for mut vocabulary in [bpe(), sentencepiece()] {
        vocabulary.tokens[3] = "x".repeat(1 << 20);
        let error = refusal(vocabulary);
        assert_eq!(error, "token 3 is 1048576 bytes long, more than the 4096 this tokenizer takes");
    }
}

#[test]
fn scores_that_are_no_numbers_are_harmless() {
    for score in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
        let scores = Some(vec![score; 7]);
        let tokenizer = Tokenizer::new(Vocabulary { scores, ..sentencepiece() }).unwrap();
        assert_eq!(tokenizer.encode("ab", Special::AsText).unwrap(), [6, 5]);
    }
}

#[test]
fn text_that_a_vocabulary_cannot_express() {
    // Byte-level: the bytes are dropped, as by the makers of such vocabularies; a warning says so.
    let tokenizer = Tokenizer::new(bpe()).unwrap();
    assert_eq!(tokenizer.encode("axb", Special::AsText).unwrap(), [6]);
    assert_eq!(tokenizer.warnings(), [TokenizerWarning::MissingBytes { count: 243 - 5 }]);
    // SentencePiece: neither bytes nor an unknown token.
    let vocabulary = Vocabulary { unk: Some(99), ..sentencepiece() };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    let error = tokenizer.encode("z", Special::AsText).unwrap_err();
    assert_eq!(error, TokenizerError::Inexpressible { character: 'z' });
}

#[test]
fn text_without_a_token_makes_no_control_token() {
    // The unknown token of this file is one that ends a turn.
    let vocabulary = Vocabulary { unk: Some(2), ..sentencepiece() };
    let error = Tokenizer::new(vocabulary).unwrap().encode("x", Special::AsText).unwrap_err();
    assert!(matches!(error, TokenizerError::Inexpressible { character: 'x' }));
}

#[test]
fn long_text_takes_no_more_than_linear_time() {
    // One word of a million letters, a million spaces, a million half special tokens.
    for (model, vocabulary) in [("bpe", bpe()), ("sentencepiece", sentencepiece())] {
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        for unit in ["ab", " ", "<|end|", "<"] {
            let text = unit.repeat(200_000);
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(&text, Special::Parse).unwrap();
            assert!(ids.len() <= text.len() + 1);
            assert!(start.elapsed().as_secs() < 20, "{model}: {unit:?}");
        }
    }
}

#[test]
fn marks_of_a_conversation_are_special_whatever_the_file_calls_them() {
    for kind in [1, 3, 4] {
        let mut vocabulary = bpe();
        vocabulary.token_types[0] = kind;
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        assert!(!tokenizer.encode("<|end|>", Special::AsText).unwrap().contains(&0), "{kind}");
        assert_eq!(tokenizer.encode("<|end|>", Special::Parse).unwrap(), [0], "{kind}");
        assert!(tokenizer.is_end(0));
    }
}

proptest! {
    /// Any tables at all: an error or a tokenizer that works without a panic.
    #[test]
    fn arbitrary_tables_never_panic(
        sentencepiece in any::<bool>(),
        tokens in prop::collection::vec("[abĠ▁<>|0x1F \u{0}é]{0,4}", 0..12),
        merges in prop::collection::vec("[abĠ]{0,2} [abĠ]{0,2}", 0..4),
        token_types in prop::option::of(prop::collection::vec(-1i32..9, 12)),
        scores in prop::option::of(prop::collection::vec(any::<f32>(), 0..14)),
        special in prop::array::uniform4(prop::option::of(0u32..14)),
        add in prop::array::uniform2(prop::option::of(any::<bool>())),
        text in "[ab é<>|\n]{0,20}",
    ) {
        let vocabulary = Vocabulary {
            model: if sentencepiece { "llama" } else { "gpt2" }.into(),
            pre: Some("llama-bpe".into()),
            tokens,
            merges,
            token_types: token_types.unwrap_or_default(),
            scores,
            bos: special[0],
            eos: special[1],
            eot: special[2],
            unk: special[3],
            add_bos: add[0],
            add_space_prefix: add[1],
            ..Vocabulary::default()
        };
        if let Ok(tokenizer) = Tokenizer::new(vocabulary) {
            for parse in [Special::AsText, Special::Parse] {
                if let Ok(ids) = tokenizer.encode_prompt(&text, parse) {
                    prop_assert!(tokenizer.check_ids(&ids).is_ok());
                    let _ = tokenizer.decode(&ids);
                }
            }
            let _ = tokenizer.decode(&(0..20).collect::<Vec<_>>());
        }
    }
}
