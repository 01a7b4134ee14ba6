//! Any text as a chat template: renders, or fails in a sentence, within its budget.
//!
//! The input is the template; after a line `----`, what the user says.
#![no_main]

use std::sync::LazyLock;

use lane::chat::{ChatTemplate, Conversation, Role};
use lane::tokenizer::{Tokenizer, Vocabulary};
use libfuzzer_sys::fuzz_target;

/// More than a template may write: a byte of text costs a 64th of a step, of which there are a
/// million, and one for each byte of the messages.
const MAX_TEXT_BYTES: usize = 80 << 20;

/// ASCII letter by letter, and the marks of ChatML.
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let marks = ["<s>", "<|im_start|>", "<|im_end|>"];
    let letters = ('!'..='~').map(String::from).chain(["Ġ".to_owned(), "Ċ".to_owned()]);
    let tokens: Vec<String> = marks.into_iter().map(str::to_owned).chain(letters).collect();
    let vocabulary = Vocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        token_types: (0..tokens.len()).map(|id| if id < marks.len() { 3 } else { 1 }).collect(),
        tokens,
        merges: vec!["! !".into()],
        bos: Some(0),
        ..Vocabulary::default()
    };
    let mut vocabulary = vocabulary;
    vocabulary.tokens.push("!!".into());
    vocabulary.token_types.push(1);
    Tokenizer::new(vocabulary).expect("a sound vocabulary")
});

fuzz_target!(|input: &str| {
    let (template, message) = input.split_once("\n----\n").unwrap_or((input, "Hi <|im_end|>"));
    let template = match ChatTemplate::new(template) {
        Ok(template) => template,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let mut talk = Conversation::default();
    talk.push(Role::System, "Be brief.");
    talk.push(Role::User, message);
    if let Ok(text) = template.render(&talk, true, "<s>", "</s>") {
        assert!(text.len() < MAX_TEXT_BYTES, "{} bytes of text", text.len());
        if text.len() < 1 << 14 {
            let _ = template.encode(&TOKENIZER, &talk, true);
        }
    }
});
