//! A GPU-resident decode lane for quantised language models: loads a GGUF, captures the step, generates text.

pub mod chat;
pub mod gguf;
pub mod model;
pub mod tokenizer;
