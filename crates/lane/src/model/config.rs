//! The dimensions of a model, from the metadata.

use std::fmt::Display;

use super::architecture::{Activation, Architecture, Spec};
use super::error::ModelError;
use super::rope::Rope;
use super::window::SlidingWindow;
use crate::gguf::{Gguf, Metadata};

/// The dimensions of a model. They are not zero and their products here fit a u32.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub arch: Architecture,
    /// What the file calls the model.
    pub name: String,
    /// Layers.
    pub n_layer: u32,
    /// Floats of the hidden state.
    pub n_embd: u32,
    /// Query heads per layer.
    pub n_head: u32,
    /// Key and value heads per layer; divides `n_head`.
    pub n_kv_head: u32,
    /// Floats per head.
    pub head_dim: u32,
    /// Floats of the feed-forward part.
    pub n_ff: u32,
    /// Rows of the embedding and output matrices.
    pub n_vocab: u32,
    /// Tokens that the model was made to see at once.
    pub context_length: u32,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Rotary position embedding of the layers with a window, where theirs is another.
    pub local_rope: Option<Rope>,
    /// Which layers see only the last tokens; `None`: all see all.
    pub window: Option<SlidingWindow>,
    /// How gate and up are combined.
    pub activation: Activation,
    /// What embeddings are multiplied by; mostly 1.
    pub embedding_scale: f32,
    /// What products of queries and keys are multiplied by; mostly `1 / sqrt(head_dim)`.
    pub attention_scale: f32,
}

impl ModelConfig {
    /// Floats of all query heads together.
    pub fn q_elems(&self) -> u32 {
        self.n_head * self.head_dim
    }

    /// Floats of all key heads together, and of all value heads.
    pub fn kv_elems(&self) -> u32 {
        self.n_kv_head * self.head_dim
    }

    /// Tokens that a layer sees, the current one among them; 0: all.
    pub fn window_tokens(&self, layer: u32) -> u32 {
        self.window.filter(|window| window.slides(layer)).map_or(0, |window| window.window_tokens)
    }

    /// The rotary position embedding of a layer.
    pub fn rope_of(&self, layer: u32) -> &Rope {
        match &self.local_rope {
            Some(local) if self.window_tokens(layer) > 0 => local,
            _ => &self.rope,
        }
    }

    /// Reads and checks the dimensions of a file of the architecture `spec`.
    pub(super) fn read(gguf: &Gguf, spec: &'static Spec) -> Result<Self, ModelError> {
        let keys = Keys { metadata: gguf.metadata(), prefix: spec.name };
        refuse_features(&keys)?;

        let n_layer = keys.dim("block_count")?;
        let n_embd = keys.dim("embedding_length")?;
        let n_head = keys.dim("attention.head_count")?;
        let n_kv_head = keys.optional_dim("attention.head_count_kv")?.unwrap_or(n_head);
        if !n_head.is_multiple_of(n_kv_head) {
            let expected = format!("it should divide the {n_head} query heads");
            return Err(keys.bad("attention.head_count_kv", n_kv_head, expected));
        }
        let head_dim = match keys.optional_dim("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if n_embd.is_multiple_of(n_head) => n_embd / n_head,
            None => {
                let expected = format!("it should divide the embedding length {n_embd}");
                return Err(keys.bad("attention.head_count", n_head, expected));
            }
        };
        if n_head.checked_mul(head_dim).is_none() {
            let expected = format!("with {n_head} heads that is more than any model has");
            return Err(keys.bad("attention.key_length", head_dim, expected));
        }
        let value_dim = keys.optional_dim("attention.value_length")?.unwrap_or(head_dim);
        if value_dim != head_dim {
            let feature = format!("value heads of {value_dim} floats beside keys of {head_dim}");
            return Err(ModelError::UnsupportedFeature { feature });
        }
        let context_length = keys.dim("context_length")?;
        let norm_eps = keys.f64("attention.layer_norm_rms_epsilon")?;
        let norm_eps = norm_eps.map_or(spec.default_norm_eps, |eps| eps as f32);
        if !(0.0..1.0).contains(&norm_eps) {
            let expected = "it should be a small positive number".to_owned();
            return Err(keys.bad("attention.layer_norm_rms_epsilon", norm_eps, expected));
        }

        let rope = Rope::read(&keys, spec, head_dim, context_length)?;
        let window = SlidingWindow::read(&keys, spec)?;
        let local_rope = match window {
            Some(_) => rope.local(&keys, spec)?,
            None => None,
        };

        Ok(Self {
            arch: spec.architecture,
            name: gguf.metadata().str("general.name")?.unwrap_or(spec.name).to_owned(),
            n_layer,
            n_embd,
            n_head,
            n_kv_head,
            head_dim,
            n_ff: keys.dim("feed_forward_length")?,
            n_vocab: n_vocab(gguf, &keys)?,
            context_length,
            norm_eps,
            rope,
            local_rope,
            window,
            activation: spec.activation,
            embedding_scale: if spec.scales_embedding { (n_embd as f32).sqrt() } else { 1.0 },
            attention_scale: attention_scale(&keys, spec, n_layer, n_embd / n_head, head_dim)?,
        })
    }
}

fn attention_scale(
    keys: &Keys<'_>,
    spec: &Spec,
    n_layer: u32,
    embd_per_head: u32,
    head_dim: u32,
) -> Result<f32, ModelError> {
    const KEY: &str = "attention.scale";
    // 0 stands for "not set" in files in the wild.
    if let Some(scale) = keys.f64(KEY)?.filter(|&scale| scale != 0.0) {
        if !scale.is_finite() || scale <= 0.0 {
            return Err(keys.bad(KEY, scale, "it should be positive".to_owned()));
        }
        return Ok(scale as f32);
    }
    // The 27B, which has 62 layers, is the one Gemma 3 that does not scale by its heads, and its
    // file does not say so.
    let dim = match (spec.architecture, n_layer) {
        (Architecture::Gemma3, 62) => embd_per_head,
        _ => head_dim,
    };
    Ok(1.0 / (dim as f32).sqrt())
}

/// Refuses what would need another step than the one there is.
fn refuse_features(keys: &Keys<'_>) -> Result<(), ModelError> {
    let n_experts = keys.u32("expert_count")?.unwrap_or(0);
    if n_experts > 0 {
        let feature = format!("a mixture of {n_experts} experts");
        return Err(ModelError::UnsupportedFeature { feature });
    }
    for suffix in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.f64(suffix)?.filter(|&cap| cap != 0.0) {
            let feature = format!("soft caps on its logits ({} is {cap})", keys.name(suffix));
            return Err(ModelError::UnsupportedFeature { feature });
        }
    }
    if keys.metadata.bool(&keys.name("attention.causal"))? == Some(false) {
        let feature = "attention to later tokens (it is an embedding model)".to_owned();
        return Err(ModelError::UnsupportedFeature { feature });
    }
    Ok(())
}

/// The number of rows of the embedding, which the header must not contradict.
fn n_vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, ModelError> {
    const EMBED: &str = "token_embd.weight";
    let missing = || ModelError::MissingTensor { tensor: EMBED.to_owned() };
    let embed = gguf.tensor(EMBED).ok_or_else(missing)?;
    let n_rows = embed.dims().get(1).copied().unwrap_or(1);
    let too_many = || ModelError::WrongShape {
        tensor: EMBED.to_owned(),
        found: embed.dims().to_vec(),
        expected: vec![embed.dims().first().copied().unwrap_or(1), u64::from(u32::MAX)],
    };
    let n_rows = u32::try_from(n_rows).map_err(|_| too_many())?;
    if let Some(announced) = keys.u32("vocab_size")?
        && announced != n_rows
    {
        let expected = format!("the embedding has {n_rows} rows");
        return Err(keys.bad("vocab_size", announced, expected));
    }
    const TOKENS: &str = "tokenizer.ggml.tokens";
    if let Some(tokens) = keys.metadata.array(TOKENS)?
        && tokens.len() as u64 > u64::from(n_rows)
    {
        return Err(ModelError::BadValue {
            key: TOKENS.to_owned(),
            value: format!("a list of {} tokens", tokens.len()),
            expected: format!("the embedding has only {n_rows} rows"),
        });
    }
    Ok(n_rows)
}

/// The keys of one architecture.
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) prefix: &'static str,
}

impl Keys<'_> {
    pub(super) fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.prefix)
    }

    pub(super) fn bad(&self, suffix: &str, value: impl Display, expected: String) -> ModelError {
        ModelError::BadValue { key: self.name(suffix), value: value.to_string(), expected }
    }

    pub(super) fn u32(&self, suffix: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.metadata.u32(&self.name(suffix))?)
    }

    pub(super) fn f64(&self, suffix: &str) -> Result<Option<f64>, ModelError> {
        Ok(self.metadata.f64(&self.name(suffix))?)
    }

    pub(super) fn str(&self, suffix: &str) -> Result<Option<&str>, ModelError> {
        Ok(self.metadata.str(&self.name(suffix))?)
    }

    /// A dimension that has to be there.
    fn dim(&self, suffix: &str) -> Result<u32, ModelError> {
        let missing = || ModelError::MissingKey { key: self.name(suffix) };
        self.optional_dim(suffix)?.ok_or_else(missing)
    }

    /// A dimension, which is not 0. Where the file gives one per layer, they have to be equal.
    fn optional_dim(&self, suffix: &str) -> Result<Option<u32>, ModelError> {
        let key = self.name(suffix);
        let dim = if let Ok(Some(_)) = self.metadata.array(&key) {
            let mut dims = self.metadata.u32s(&key)?.into_iter().flatten();
            let first = dims.next();
            if let (Some(first), Some(other)) = (first, dims.find(|&dim| Some(dim) != first)) {
                let feature = format!("layers that differ ({key} is {first} and {other})");
                return Err(ModelError::UnsupportedFeature { feature });
            }
            first
        } else {
            self.metadata.u32(&key)?
        };
        match dim {
            Some(0) => Err(self.bad(suffix, 0, "it should be at least 1".to_owned())),
            dim => Ok(dim),
        }
    }
}
