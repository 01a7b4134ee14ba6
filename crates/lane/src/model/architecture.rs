//! How the supported architectures differ: one row each.

use super::error::ModelError;
use super::rope::RopePairing;
use crate::gguf::Metadata;

/// A supported model architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 2 to 3.2, Mistral, TinyLlama, SmolLM2.
    Llama,
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
}

/// Whether an architecture has certain tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// None; their presence means another model.
    Absent,
    /// All of them.
    #[allow(dead_code, reason = "for the rows of architectures that have biases or head norms")]
    Required,
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
    /// Where the file is silent.
    pub(super) default_norm_eps: f32,
    /// Where the file is silent.
    pub(super) default_rope_base: f64,
}

const SPECS: &[Spec] = &[Spec {
    architecture: Architecture::Llama,
    name: "llama",
    pairing: RopePairing::Adjacent,
    activation: Activation::SwiGlu,
    scales_embedding: false,
    qkv_bias: Presence::Absent,
    qk_norm: Presence::Absent,
    default_norm_eps: 1e-5,
    default_rope_base: 10000.0,
}];

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
