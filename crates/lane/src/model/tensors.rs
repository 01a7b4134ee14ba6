//! Finding the tensors that play the parts of a model.

use q4k_soa::{TranscodedType, WeightType};

use super::architecture::{Presence, Spec};
use super::config::{Keys, ModelConfig};
use super::error::ModelError;
use super::rope::original_context_tokens;
use super::{Layer, LongRope, Model, QkNorm, QkvBias, TensorRef, VectorRef};
use crate::gguf::{Gguf, TensorInfo};

/// Looks tensors up by name and remembers which were asked for.
pub(super) struct Finder<'g> {
    gguf: &'g Gguf,
    used: Vec<bool>,
}

impl<'g> Finder<'g> {
    pub(super) fn new(gguf: &'g Gguf) -> Self {
        Self { gguf, used: vec![false; gguf.tensors().len()] }
    }

    fn find(&mut self, name: &str) -> Option<(usize, &'g TensorInfo)> {
        let index = self.gguf.tensor_index(name)?;
        self.used[index] = true;
        Some((index, &self.gguf.tensors()[index]))
    }

    /// A weight matrix, if it is there.
    fn optional_matrix(
        &mut self,
        name: &str,
        n_out: u32,
        n_in: u32,
    ) -> Result<Option<TensorRef>, ModelError> {
        let Some((index, info)) = self.find(name) else { return Ok(None) };
        check_shape(info, &[n_in.into(), n_out.into()])?;
        let stored_as = info.ggml_type().transcoded_type();
        let ty = stored_as.map(|_| TranscodedType::TARGET).or(info.ggml_type().weight_type());
        let Some(ty) = ty else {
            let native = WeightType::ALL.iter().map(|ty| ty.name());
            let transcoded = TranscodedType::ALL.iter().map(|ty| ty.name());
            let supported: Vec<_> = native.chain(transcoded).collect();
            return Err(unsupported_type(info, supported.join(", ")));
        };
        Ok(Some(TensorRef { index, ty, stored_as, first_row: 0, n_out, n_in }))
    }

    fn matrix(&mut self, name: &str, n_out: u32, n_in: u32) -> Result<TensorRef, ModelError> {
        let missing = || ModelError::MissingTensor { tensor: name.to_owned() };
        self.optional_matrix(name, n_out, n_in)?.ok_or_else(missing)
    }

    /// A vector of f32, if it is there.
    fn optional_vector(
        &mut self,
        name: &str,
        n_elems: u32,
    ) -> Result<Option<VectorRef>, ModelError> {
        let Some((index, info)) = self.find(name) else { return Ok(None) };
        check_shape(info, &[n_elems.into()])?;
        if info.ggml_type().weight_type() != Some(WeightType::F32) {
            return Err(unsupported_type(info, WeightType::F32.name().to_owned()));
        }
        Ok(Some(VectorRef { index, n_elems }))
    }

    fn vector(&mut self, name: &str, n_elems: u32) -> Result<VectorRef, ModelError> {
        let missing = || ModelError::MissingTensor { tensor: name.to_owned() };
        self.optional_vector(name, n_elems)?.ok_or_else(missing)
    }

    /// The names of the tensors that nothing asked for, unless one of them must not be ignored.
    pub(super) fn extra(self) -> Result<Vec<String>, ModelError> {
        let unused = self.gguf.tensors().iter().zip(&self.used).filter(|(_, used)| !**used);
        unused
            .map(|(tensor, _)| match changes_the_result(tensor.name()) {
                true => Err(ModelError::UnsupportedTensor { tensor: tensor.name().to_owned() }),
                false => Ok(tensor.name().to_owned()),
            })
            .collect()
    }
}

/// Whether a tensor that nothing reads shows that the model computes something else.
fn changes_the_result(name: &str) -> bool {
    let name = match name.strip_prefix("blk.") {
        // The layer's number is followed by the tensor's own name.
        Some(rest) => rest.split_once('.').map_or(rest, |(_, own)| own),
        None => name,
    };
    name.ends_with(".bias")
        || name.ends_with(".scale")
        || name.contains("_exps.")
        || name.starts_with("ffn_gate_inp")
        || name.starts_with("rope_factors_")
        || name.starts_with("post_")
        || name.ends_with("_sub_norm.weight")
        || matches!(name, "attn_q_norm.weight" | "attn_k_norm.weight")
}

/// Finds every tensor that a step of the model reads.
pub(super) fn find(
    finder: &mut Finder<'_>,
    spec: &Spec,
    config: ModelConfig,
) -> Result<Model, ModelError> {
    let (n_embd, n_vocab) = (config.n_embd, config.n_vocab);
    let embed = finder.matrix("token_embd.weight", n_vocab, n_embd)?;
    let output = finder.optional_matrix("output.weight", n_vocab, n_embd)?.unwrap_or(embed);
    let output_norm = finder.vector("output_norm.weight", n_embd)?;
    let rope_freqs = finder.optional_vector("rope_freqs.weight", config.rope.dims / 2)?;
    let long_rope = if spec.long_rope { find_long_rope(finder, spec, &config)? } else { None };
    // Not reserved: the count is the file's, and the first missing layer ends the search.
    let mut layers = Vec::new();
    for index in 0..config.n_layer {
        layers.push(find_layer(finder, spec, &config, index)?);
    }
    Ok(Model {
        config,
        embed,
        output_norm,
        output,
        rope_freqs,
        long_rope,
        layers,
        extra_tensors: Vec::new(),
        n_params: 0,
        file_type: None,
    })
}

/// Two vectors or none.
fn find_long_rope(
    finder: &mut Finder<'_>,
    spec: &Spec,
    config: &ModelConfig,
) -> Result<Option<LongRope>, ModelError> {
    const LONG: &str = "rope_factors_long.weight";
    const SHORT: &str = "rope_factors_short.weight";
    let keys = Keys { metadata: finder.gguf.metadata(), prefix: spec.name };
    let n_pairs = config.rope.dims / 2;
    let long = finder.optional_vector(LONG, n_pairs)?;
    let short = finder.optional_vector(SHORT, n_pairs)?;
    let missing = |tensor: &str| Err(ModelError::MissingTensor { tensor: tensor.to_owned() });
    match (short, long) {
        (None, None) => Ok(None),
        (None, Some(_)) => missing(SHORT),
        (Some(_), None) => missing(LONG),
        (Some(short), Some(long)) => Ok(Some(LongRope {
            short,
            long,
            original_context_tokens: original_context_tokens(&keys, config.context_length)?,
        })),
    }
}

fn find_layer(
    finder: &mut Finder<'_>,
    spec: &Spec,
    config: &ModelConfig,
    index: u32,
) -> Result<Layer, ModelError> {
    let name = |own: &str| format!("blk.{index}.{own}");
    let (n_embd, n_ff) = (config.n_embd, config.n_ff);
    let (q_elems, kv_elems) = (config.q_elems(), config.kv_elems());
    let qkv_bias = match spec.qkv_bias {
        Presence::Absent => None,
        Presence::Required => Some(QkvBias {
            q: finder.vector(&name("attn_q.bias"), q_elems)?,
            k: finder.vector(&name("attn_k.bias"), kv_elems)?,
            v: finder.vector(&name("attn_v.bias"), kv_elems)?,
        }),
    };
    let qk_norm = match spec.qk_norm {
        Presence::Absent => None,
        Presence::Required => Some(QkNorm {
            q: finder.vector(&name("attn_q_norm.weight"), config.head_dim)?,
            k: finder.vector(&name("attn_k_norm.weight"), config.head_dim)?,
        }),
    };
    let post_norm = |finder: &mut Finder<'_>, own: &str| match spec.post_norms {
        Presence::Absent => Ok(None),
        Presence::Required => finder.vector(&name(own), n_embd).map(Some),
    };
    // Some files have the rows of q, k and v in one tensor, whatever the architecture.
    let qkv_rows = q_elems.saturating_add(kv_elems.saturating_mul(2));
    let [q, k, v] = match finder.optional_matrix(&name("attn_qkv.weight"), qkv_rows, n_embd)? {
        Some(qkv) => [
            qkv.rows(0, q_elems),
            qkv.rows(q_elems, kv_elems),
            qkv.rows(q_elems.saturating_add(kv_elems), kv_elems),
        ],
        None => [
            finder.matrix(&name("attn_q.weight"), q_elems, n_embd)?,
            finder.matrix(&name("attn_k.weight"), kv_elems, n_embd)?,
            finder.matrix(&name("attn_v.weight"), kv_elems, n_embd)?,
        ],
    };
    let [gate, up] = if spec.gate_in_up {
        let both = finder.matrix(&name("ffn_up.weight"), n_ff.saturating_mul(2), n_embd)?;
        [both.rows(0, n_ff), both.rows(n_ff, n_ff)]
    } else {
        [
            finder.matrix(&name("ffn_gate.weight"), n_ff, n_embd)?,
            finder.matrix(&name("ffn_up.weight"), n_ff, n_embd)?,
        ]
    };
    Ok(Layer {
        attn_norm: finder.vector(&name("attn_norm.weight"), n_embd)?,
        q,
        k,
        v,
        o: finder.matrix(&name("attn_output.weight"), n_embd, q_elems)?,
        qkv_bias,
        qk_norm,
        post_attn_norm: post_norm(finder, "post_attention_norm.weight")?,
        ffn_norm: finder.vector(&name("ffn_norm.weight"), n_embd)?,
        gate,
        up,
        down: finder.matrix(&name("ffn_down.weight"), n_embd, n_ff)?,
        post_ffn_norm: post_norm(finder, "post_ffw_norm.weight")?,
        window_tokens: config.window_tokens(index),
    })
}

/// Compares dimensions; trailing ones may be left out on either side.
fn check_shape(info: &TensorInfo, expected: &[u64]) -> Result<(), ModelError> {
    let found = info.dims();
    let dim = |dims: &[u64], axis: usize| dims.get(axis).copied().unwrap_or(1);
    let n_axes = found.len().max(expected.len());
    if (0..n_axes).all(|axis| dim(found, axis) == dim(expected, axis)) {
        return Ok(());
    }
    Err(ModelError::WrongShape {
        tensor: info.name().to_owned(),
        found: found.to_vec(),
        expected: expected.to_vec(),
    })
}

fn unsupported_type(info: &TensorInfo, supported: String) -> ModelError {
    ModelError::UnsupportedType {
        tensor: info.name().to_owned(),
        found: info.ggml_type().name(),
        supported,
    }
}
