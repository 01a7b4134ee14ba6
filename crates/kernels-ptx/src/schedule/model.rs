//! What a persistent step is made for: a model, where its weights are, and what is refused of it.

use q4k_soa::{PackedLayout, Shape, StreamUnits, WeightType};

use super::{MAX_GROUP, NONE};

/// A matrix in the stream layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Quantisation.
    pub weight_type: WeightType,
    /// Rows and row length.
    pub shape: Shape,
    /// Where it begins in the buffer of weights.
    pub offset_bytes: u64,
}

/// The weights of one layer; numbers are places in the buffer of weights, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LayerSpec {
    /// f32 `[n_embd]`.
    pub attn_norm: u64,
    /// `[q_elems, n_embd]`, `[kv_elems, n_embd]`, `[kv_elems, n_embd]`.
    pub qkv: [MatrixSpec; 3],
    /// f32 `[q_elems + 2 kv_elems]`.
    pub qkv_bias: Option<u64>,
    /// f32 `[head_dim]`.
    pub q_norm: Option<u64>,
    /// f32 `[head_dim]`.
    pub k_norm: Option<u64>,
    /// `[n_embd, q_elems]`.
    pub o: MatrixSpec,
    /// f32 `[n_embd]`.
    pub ffn_norm: u64,
    /// `[n_ff, n_embd]` each.
    pub gate_up: [MatrixSpec; 2],
    /// `[n_embd, n_ff]`.
    pub down: MatrixSpec,
    /// Ages attended to; 0: all.
    pub window: u32,
}

/// What a persistent step is made for.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // dimensions as everywhere
pub struct ModelSpec {
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_ff: u32,
    pub n_vocab: u32,
    /// Pairs turned per head.
    pub n_pairs: u32,
    /// [`crate::RopePairing`].
    pub pairing: u32,
    /// Factor on cosine and sine.
    pub magnitude: f32,
    pub norm_eps: f32,
    pub embed_scale: f32,
    pub attention_scale: f32,
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV blocks per layer.
    pub n_blocks: u32,
    pub max_context_tokens: u32,
    /// 4 or 2.
    pub kv_elem_bytes: u32,
    /// `[n_vocab, n_embd]`.
    pub embed: MatrixSpec,
    /// f64 `[n_pairs]`.
    pub inverse_frequencies: u64,
    pub layers: Vec<LayerSpec>,
    /// f32 `[n_embd]`.
    pub output_norm: u64,
    /// `[n_vocab, n_embd]`.
    pub output: MatrixSpec,
    /// Whether the step chooses the likeliest token and advances; else it ends with the logits.
    pub greedy: bool,
}

/// What the exchange buffer's size depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ExchangeDims {
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_ff: u32,
    pub max_context_tokens: u32,
}

impl ModelSpec {
    /// The part that the exchange buffer's size depends on.
    pub fn exchange_dims(&self) -> ExchangeDims {
        ExchangeDims {
            n_layer: self.layers.len() as u32,
            n_embd: self.n_embd,
            n_head: self.n_head,
            n_kv_head: self.n_kv_head,
            head_dim: self.head_dim,
            n_ff: self.n_ff,
            max_context_tokens: self.max_context_tokens,
        }
    }
}

/// Why there is no persistent step for a model on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A number is outside of what the kernel is made for.
    #[error("{what} = {value}: the persistent step needs {needs}")]
    Unsupported {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        needs: &'static str,
    },
    /// A matrix that cannot stream.
    #[error("{what}: {source}")]
    Matrix {
        /// Which matrix.
        what: &'static str,
        /// Why.
        source: q4k_soa::Error,
    },
    /// Shared memory does not hold the ring beside everything else.
    #[error(
        "a block has {found_bytes} bytes of shared memory, the persistent step needs {needed_bytes}"
    )]
    SharedMemory {
        /// With the smallest ring.
        needed_bytes: u64,
        /// Of the device.
        found_bytes: u64,
    },
}

/// A place in the weights, in 16 bytes.
pub(super) fn place(what: &'static str, offset_bytes: u64) -> Result<u32, ScheduleError> {
    let units = offset_bytes / 16;
    let fits = offset_bytes.is_multiple_of(16) && units < u64::from(NONE);
    let error = ScheduleError::Unsupported {
        what,
        value: offset_bytes,
        needs: "a multiple of 16 bytes below 64 GiB",
    };
    u32::try_from(units).ok().filter(|_| fits).ok_or(error)
}

pub(super) fn optional(
    what: &'static str,
    offset_bytes: Option<u64>,
) -> Result<u32, ScheduleError> {
    offset_bytes.map_or(Ok(NONE), |offset_bytes| place(what, offset_bytes))
}

pub(super) fn check(model: &ModelSpec, n_ctas: u32) -> Result<(), ScheduleError> {
    let is = |ok: bool, what, value: u32, needs| {
        let value = value.into();
        if ok { Ok(()) } else { Err(ScheduleError::Unsupported { what, value, needs }) }
    };
    let (n_head, n_kv_head) = (model.n_head, model.n_kv_head.max(1));
    is(!model.layers.is_empty(), "layers", 0, "one")?;
    is(n_head.is_multiple_of(n_kv_head), "query heads", n_head, "a multiple of the key heads")?;
    is(n_kv_head <= n_ctas, "key heads", n_kv_head, "as many multiprocessors")?;
    let group = n_head / n_kv_head;
    is(group <= MAX_GROUP, "query heads per key head", group, "at most 16")?;
    let dim = model.head_dim;
    is(dim.is_multiple_of(8) && dim <= 256, "head_dim", dim, "a multiple of 8 up to 256")?;
    is(2 * model.n_pairs <= dim, "pairs turned", model.n_pairs, "at most half a head")?;
    let n_ff = model.n_ff;
    is(model.n_embd.is_multiple_of(32), "n_embd", model.n_embd, "a multiple of 32")?;
    is(n_ff.is_multiple_of(32), "n_ff", n_ff, "a multiple of 32")?;
    let q_elems = n_head * dim;
    is(q_elems.is_multiple_of(32), "elements of q", q_elems, "a multiple of 32")?;
    is(model.kv_elem_bytes == 2, "bytes per cached element", model.kv_elem_bytes, "2: f16")?;
    let embed = &model.embed;
    let embed_rows = (embed.shape.n_out, embed.shape.n_in);
    is(
        embed_rows == (model.n_vocab, model.n_embd),
        "embedding rows",
        embed_rows.0,
        "the vocabulary's",
    )?;
    units("embedding", embed)?;
    Ok(())
}

pub(super) fn units(what: &'static str, matrix: &MatrixSpec) -> Result<StreamUnits, ScheduleError> {
    let layout = PackedLayout::stream(matrix.weight_type, matrix.shape)
        .map_err(|source| ScheduleError::Matrix { what, source })?;
    let source = q4k_soa::Error::NoUnits { ty: matrix.weight_type };
    layout.units().ok_or(ScheduleError::Matrix { what, source })
}
