//! Any bytes as a model file: read or refused in one sentence, and what a reader offers does not
//! panic.
#![no_main]

use lane::gguf::Gguf;
use lane::model::Model;
use lane::tokenizer::{Tokenizer, Vocabulary};
use libfuzzer_sys::fuzz_target;

/// Behind the header, for its tensors: small models are whole files then.
const DATA_BYTES: usize = 1 << 16;

fuzz_target!(|header: &[u8]| {
    read(header.to_vec());
    let mut bytes = header.to_vec();
    bytes.resize(header.len() + DATA_BYTES, 0);
    read(bytes);
});

fn read(bytes: Vec<u8>) {
    let gguf = match Gguf::from_vec(bytes) {
        Ok(gguf) => gguf,
        Err(error) => return one_sentence(&error),
    };
    for (key, _, value) in gguf.metadata().iter() {
        assert!(!format!("{key} {value:?}").is_empty());
        let _ = gguf.metadata().strings(key).map(|strings| strings.map(Iterator::count));
        let _ = gguf.metadata().i32s(key).map(|ints| ints.map(Iterator::count));
    }
    for tensor in gguf.tensors() {
        let bytes = gguf.tensor_to_vec(tensor).expect("an indexed tensor lies in the file");
        assert_eq!(bytes.len() as u64, tensor.n_bytes());
    }
    if let Err(error) = Model::from_gguf(&gguf) {
        one_sentence(&error);
        assert!(error.to_string().len() < 1000, "{error}");
    }
    match Vocabulary::from_gguf(&gguf).map(Tokenizer::new) {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => one_sentence(&error),
        Err(error) => one_sentence(&error),
    }
}

/// What a refusal is to whoever reads it.
fn one_sentence(error: &dyn std::error::Error) {
    let sentence = error.to_string();
    assert!(!sentence.is_empty() && !sentence.contains(['\n', '\r']), "{sentence:?}");
}
