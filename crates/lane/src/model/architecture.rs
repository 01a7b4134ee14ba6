//! How the supported architectures differ: one row each.

use kernels_ptx::RopePairing;

use super::error::ModelError;
use crate::gguf::Metadata;

/// A supported model architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 2 to 3.2, Mistral, TinyLlama, SmolLM2.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, without experts.
    Qwen3,
    /// Gemma 3, its text part.
    Gemma3,
    /// Phi 3, 3.5 and 4.
    Phi3,
}

impl Architecture {
    /// The name in `general.architecture`, which is also the prefix of its keys.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    pub(super) fn spec(self) -> &'static Spec {
        SPECS.iter().find(|spec| spec.architecture == self).expect("every variant has a row")
    }
}

/// How the feed-forward part combines gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate) * up`.
    SwiGlu,
    /// `gelu(gate) * up`, where
    /// `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.
    GeGlu,
}

/// Whether an architecture has certain tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// None; their presence means another model.
    Absent,
    /// All of them.
    Required,
}

/// Which layers see only a window of `attention.sliding_window` tokens, where the file has one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Windows {
    /// None; the key is not read.
    None,
    /// All.
    All,
    /// All but every so many-th, counted by the last of each group; the file may say another
    /// number. Those with a window turn by a base of their own, never scaled.
    Pattern { full_every: u32, local_rope_base: f64 },
}

/// One architecture.
pub(super) struct Spec {
    pub(super) architecture: Architecture,
    pub(super) name: &'static str,
    pub(super) pairing: RopePairing,
    pub(super) activation: Activation,
    /// Whether embeddings are multiplied by the square root of their length.
    pub(super) scales_embedding: bool,
    /// `attn_{q,k,v}.bias`.
    pub(super) qkv_bias: Presence,
    /// `attn_{q,k}_norm.weight`.
    pub(super) qk_norm: Presence,
    /// `post_attention_norm.weight` and `post_ffw_norm.weight`.
    pub(super) post_norms: Presence,
    /// Whether `ffn_up.weight` has the rows of the gate before its own.
    pub(super) gate_in_up: bool,
    /// Whether the file may have rope factors for short and for long contexts.
    pub(super) long_rope: bool,
    pub(super) windows: Windows,
    /// Where the file is silent.
    pub(super) default_norm_eps: f32,
    /// Where the file is silent.
    pub(super) default_rope_base: f64,
}

/// What the others differ from.
const LLAMA: Spec = Spec {
    architecture: Architecture::Llama,
    name: "llama",
    pairing: RopePairing::Adjacent,
    activation: Activation::SwiGlu,
    scales_embedding: false,
    qkv_bias: Presence::Absent,
    qk_norm: Presence::Absent,
    post_norms: Presence::Absent,
    gate_in_up: false,
    long_rope: false,
    windows: Windows::None,
    default_norm_eps: 1e-5,
    default_rope_base: 10_000.0,
};

const SPECS: &[Spec] = &[
    LLAMA,
    Spec {
        architecture: Architecture::Qwen2,
        name: "qwen2",
        pairing: RopePairing::Halves,
        qkv_bias: Presence::Required,
        default_norm_eps: 1e-6,
        ..LLAMA
    },
    Spec {
        architecture: Architecture::Qwen3,
        name: "qwen3",
        pairing: RopePairing::Halves,
        qk_norm: Presence::Required,
        default_norm_eps: 1e-6,
        ..LLAMA
    },
    Spec {
        architecture: Architecture::Gemma3,
        name: "gemma3",
        pairing: RopePairing::Halves,
        activation: Activation::GeGlu,
        scales_embedding: true,
        qk_norm: Presence::Required,
        post_norms: Presence::Required,
        windows: Windows::Pattern { full_every: 6, local_rope_base: 10_000.0 },
        default_norm_eps: 1e-6,
        default_rope_base: 1_000_000.0,
        ..LLAMA
    },
    Spec {
        architecture: Architecture::Phi3,
        name: "phi3",
        pairing: RopePairing::Halves,
        gate_in_up: true,
        long_rope: true,
        windows: Windows::All,
        ..LLAMA
    },
];

/// The architecture that the file says it is.
pub(super) fn of(metadata: &Metadata) -> Result<&'static Spec, ModelError> {
    const KEY: &str = "general.architecture";
    let Some(name) = metadata.str(KEY)? else {
        return Err(ModelError::MissingKey { key: KEY.to_owned() });
    };
    SPECS.iter().find(|spec| spec.name == name).ok_or_else(|| {
        let supported: Vec<_> = SPECS.iter().map(|spec| spec.name).collect();
        ModelError::UnsupportedArchitecture {
            name: name.to_owned(),
            supported: supported.join(", "),
        }
    })
}
