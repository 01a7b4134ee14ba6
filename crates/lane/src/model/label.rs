//! Names of a model's size and mix of types, as llama.cpp prints them.

use super::{Architecture, Model, ModelError};
use crate::gguf::Metadata;

/// What `general.file_type` stands for.
const FILE_TYPES: &[(u32, &str)] = &[
    (0, "all F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K - Medium"),
    (11, "Q3_K - Small"),
    (12, "Q3_K - Medium"),
    (13, "Q3_K - Large"),
    (14, "Q4_K - Small"),
    (15, "Q4_K - Medium"),
    (16, "Q5_K - Small"),
    (17, "Q5_K - Medium"),
    (18, "Q6_K"),
    (21, "Q2_K - Small"),
    (25, "IQ4_NL - 4.5 bpw"),
    (30, "IQ4_XS - 4.25 bpw"),
    (32, "BF16"),
];

pub(super) fn file_type(metadata: &Metadata) -> Result<Option<&'static str>, ModelError> {
    let number = metadata.u32("general.file_type")?;
    Ok(number.and_then(|number| FILE_TYPES.iter().find(|row| row.0 == number)).map(|row| row.1))
}

impl Model {
    /// Architecture, size and mix of types, such as `llama 3B Q4_K - Medium`: the `model` column
    /// of llama-bench.
    pub fn label(&self) -> String {
        let arch = self.config.arch.name();
        let size = self.size_label();
        match self.file_type {
            Some(file_type) => format!("{arch} {size} {file_type}"),
            None => format!("{arch} {size}"),
        }
    }

    /// llama.cpp goes by the layers; what it does not know is named by its weights instead.
    fn size_label(&self) -> String {
        use Architecture::{Gemma3, Phi3, Qwen2, Qwen3};

        let config = &self.config;
        let known = match (config.arch, config.n_layer) {
            (Qwen2, 24) if config.n_embd == 1024 => Some("0.5B"),
            (Qwen2, 24) => Some("1B"),
            (Qwen2, 28) if config.n_embd == 1536 => Some("1.5B"),
            (Qwen2, 28 | 32) => Some("7B"),
            (Qwen2, 36) => Some("3B"),
            (Qwen2, 40) if config.n_head == 20 => Some("4B"),
            (Qwen2, 40) => Some("13B"),
            (Qwen2, 48) | (Qwen3, 40) | (Phi3, 40) => Some("14B"),
            (Qwen2 | Qwen3, 64) => Some("32B"),
            (Qwen2, 80) => Some("70B"),
            (Qwen3, 28) if config.n_embd == 1024 => Some("0.6B"),
            (Qwen3, 28) => Some("1.7B"),
            (Qwen3, 36) if config.n_embd == 2560 => Some("4B"),
            (Qwen3, 36) => Some("8B"),
            (Gemma3, 18) => Some("270M"),
            (Gemma3, 26) | (Phi3, 24) => Some("1B"),
            (Gemma3, 34) => Some("4B"),
            (Gemma3, 48) => Some("12B"),
            (Gemma3, 62) => Some("27B"),
            (Phi3, 32) => Some("3B"),
            (Architecture::Llama, 16 | 22) => Some("1B"),
            (Architecture::Llama, 26 | 28) => Some("3B"),
            (Architecture::Llama, 32) if config.n_vocab < 40_000 => Some("7B"),
            (Architecture::Llama, 32 | 36) => Some("8B"),
            (Architecture::Llama, 40) => Some("13B"),
            (Architecture::Llama, 48) => Some("34B"),
            (Architecture::Llama, 60) => Some("30B"),
            (Architecture::Llama, 80) if config.n_head == config.n_kv_head => Some("65B"),
            (Architecture::Llama, 80) => Some("70B"),
            _ => None,
        };
        known.map_or_else(|| count_label(self.n_params), str::to_owned)
    }
}

/// A number of weights in the unit that suits it: `135M`, `5.8M`.
fn count_label(n_params: u64) -> String {
    let (unit, suffix) = match n_params {
        0..1_000_000 => (1e3, "K"),
        1_000_000..1_000_000_000 => (1e6, "M"),
        _ => (1e9, "B"),
    };
    let count = n_params as f64 / unit;
    if count < 10.0 { format!("{count:.1}{suffix}") } else { format!("{count:.0}{suffix}") }
}

#[cfg(test)]
mod tests {
    use super::count_label;

    #[test]
    fn counts_have_two_digits_or_more() {
        assert_eq!(count_label(5_800_000), "5.8M");
        assert_eq!(count_label(134_515_008), "135M");
        assert_eq!(count_label(1_235_814_432), "1.2B");
        assert_eq!(count_label(4_096), "4.1K");
    }
}
