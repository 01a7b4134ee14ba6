//! What a GGUF is a model of: dimensions, and which tensor plays which part.
//!
//! [`Model::from_gguf`] loads no weights. It finds every tensor that the decode step will read,
//! checks its shape against the header and its type against what the engine computes with, and
//! refuses files whose meaning it would get wrong.

mod architecture;
mod config;
mod error;
mod label;
mod rope;
mod scales;
mod tensors;
mod transcoding;
mod window;

use q4k_soa::{TranscodedType, WeightType};

pub use architecture::{Activation, Architecture};
pub use config::ModelConfig;
pub use error::ModelError;
pub use rope::{Rope, RopePairing, RopeScaling};
pub use scales::{ScaleScan, non_finite_scales, scan_scales};
pub use transcoding::Transcoding;
pub use window::SlidingWindow;

use crate::gguf::{Gguf, TensorInfo};

/// A weight matrix `[n_out, n_in]` in a GGUF: a tensor, or consecutive rows of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// The tensor's place in [`Gguf::tensors`].
    pub index: usize,
    /// How its weights are computed with.
    pub ty: WeightType,
    /// How the file stores them, where that is another type.
    pub stored_as: Option<TranscodedType>,
    /// The tensor's row that is the matrix's first; not 0 only where a tensor holds several
    /// matrices.
    pub first_row: u32,
    /// Rows.
    pub n_out: u32,
    /// Weights per row, contiguous; a whole number of blocks.
    pub n_in: u32,
}

impl TensorRef {
    /// The tensor in the GGUF that the model was made from.
    pub fn info<'g>(&self, gguf: &'g Gguf) -> &'g TensorInfo {
        &gguf.tensors()[self.index]
    }

    /// Bytes of one row as stored.
    pub fn row_bytes(&self) -> u64 {
        let (block_elems, block_bytes) = match self.stored_as {
            Some(ty) => (ty.block_elems(), ty.block_bytes()),
            None => (self.ty.block_elems(), self.ty.block_bytes()),
        };
        u64::from(self.n_in / block_elems) * u64::from(block_bytes)
    }

    /// Bytes of the whole matrix as stored.
    pub fn n_bytes(&self) -> u64 {
        u64::from(self.n_out) * self.row_bytes()
    }

    /// Bytes of one row in the type that it is computed with.
    pub fn resident_row_bytes(&self) -> u64 {
        u64::from(self.n_in / self.ty.block_elems()) * u64::from(self.ty.block_bytes())
    }

    /// Bytes of the whole matrix in that type.
    pub fn resident_bytes(&self) -> u64 {
        u64::from(self.n_out) * self.resident_row_bytes()
    }

    /// Where the matrix begins within its tensor.
    pub fn first_byte(&self) -> u64 {
        u64::from(self.first_row) * self.row_bytes()
    }

    /// The matrix of `n_out` rows from `first_row` of this one on.
    fn rows(&self, first_row: u32, n_out: u32) -> Self {
        Self { first_row: self.first_row + first_row, n_out, ..*self }
    }
}

/// A vector of f32 in a GGUF: norm weights, biases, rope factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorRef {
    /// Its place in [`Gguf::tensors`].
    pub index: usize,
    /// How many values it has.
    pub n_elems: u32,
}

impl VectorRef {
    /// The tensor in the GGUF that the model was made from.
    pub fn info<'g>(&self, gguf: &'g Gguf) -> &'g TensorInfo {
        &gguf.tensors()[self.index]
    }

    /// Bytes as stored.
    pub fn n_bytes(&self) -> u64 {
        4 * u64::from(self.n_elems)
    }
}

/// The biases added to queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvBias {
    /// Of the queries.
    pub q: VectorRef,
    /// Of the keys.
    pub k: VectorRef,
    /// Of the values.
    pub v: VectorRef,
}

/// The norm weights applied to each head of the queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkNorm {
    /// Of the queries.
    pub q: VectorRef,
    /// Of the keys.
    pub k: VectorRef,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Norm before attention, `[n_embd]`.
    pub attn_norm: VectorRef,
    /// Queries, `[n_head * head_dim, n_embd]`.
    pub q: TensorRef,
    /// Keys, `[n_kv_head * head_dim, n_embd]`.
    pub k: TensorRef,
    /// Values, `[n_kv_head * head_dim, n_embd]`.
    pub v: TensorRef,
    /// Attention output, `[n_embd, n_head * head_dim]`.
    pub o: TensorRef,
    /// Added to q, k and v (qwen2).
    pub qkv_bias: Option<QkvBias>,
    /// Applied to each head of q and k, before they are turned (qwen3, gemma3).
    pub qk_norm: Option<QkNorm>,
    /// Norm of what attention adds to the hidden state, `[n_embd]` (gemma3).
    pub post_attn_norm: Option<VectorRef>,
    /// Norm before the feed-forward part, `[n_embd]`.
    pub ffn_norm: VectorRef,
    /// The gate, `[n_ff, n_embd]`.
    pub gate: TensorRef,
    /// What is gated, `[n_ff, n_embd]`.
    pub up: TensorRef,
    /// Back to the hidden size, `[n_embd, n_ff]`.
    pub down: TensorRef,
    /// Norm of what the feed-forward part adds to the hidden state, `[n_embd]` (gemma3).
    pub post_ffn_norm: Option<VectorRef>,
    /// Tokens that the layer sees, the current one among them; 0: all.
    pub window_tokens: u32,
}

impl Layer {
    /// Its weight matrices.
    pub fn matrices(&self) -> [TensorRef; 7] {
        [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]
    }

    /// Whether what it adds to the hidden state is normed.
    pub fn has_post_norms(&self) -> bool {
        self.post_attn_norm.is_some() || self.post_ffn_norm.is_some()
    }

    /// Its vectors.
    pub fn vectors(&self) -> impl Iterator<Item = VectorRef> {
        let bias = self.qkv_bias.map(|bias| [bias.q, bias.k, bias.v]);
        let norm = self.qk_norm.map(|norm| [norm.q, norm.k]);
        [self.attn_norm, self.ffn_norm]
            .into_iter()
            .chain(bias.into_iter().flatten())
            .chain(norm.into_iter().flatten())
            .chain(self.post_attn_norm)
            .chain(self.post_ffn_norm)
    }
}

/// What divides the rope frequencies, by the context that is planned (phi3): `[rope.dims / 2]`
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongRope {
    /// For contexts of at most `original_context_tokens`.
    pub short: VectorRef,
    /// For longer ones.
    pub long: VectorRef,
    /// Tokens of the context that the model was first trained on.
    pub original_context_tokens: u32,
}

/// A model as its file describes it.
#[derive(Clone, Debug)]
pub struct Model {
    /// The dimensions.
    pub config: ModelConfig,
    /// Token embeddings, `[n_vocab, n_embd]`.
    pub embed: TensorRef,
    /// The last norm, `[n_embd]`.
    pub output_norm: VectorRef,
    /// Logits, `[n_vocab, n_embd]`; the same tensor as `embed` when the two are tied.
    pub output: TensorRef,
    /// What divides the rope frequencies (Llama 3.1 and later), `[rope.dims / 2]`.
    pub rope_freqs: Option<VectorRef>,
    /// What divides them depending on the context, instead.
    pub long_rope: Option<LongRope>,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// Tensors in the file that nothing reads.
    pub extra_tensors: Vec<String>,
    /// Weights in the file, of all tensors.
    pub n_params: u64,
    /// The file's name for its mix of types, as llama.cpp prints it; `None` where it has none.
    pub file_type: Option<&'static str>,
}

impl Model {
    /// Describes the model in `gguf`.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let spec = architecture::of(gguf.metadata())?;
        let mut finder = tensors::Finder::new(gguf);
        let config = ModelConfig::read(gguf, spec)?;
        let mut model = tensors::find(&mut finder, spec, config)?;
        model.extra_tensors = finder.extra()?;
        model.n_params = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
        model.file_type = label::file_type(gguf.metadata())?;
        Ok(model)
    }

    /// Whether the output matrix is the embedding.
    pub fn tied_output(&self) -> bool {
        self.output.index == self.embed.index
    }

    /// What divides the rope frequencies when `context_tokens` are planned, `[rope.dims / 2]`.
    /// Layers that turn by [`ModelConfig::local_rope`] are not divided.
    pub fn rope_factors(&self, context_tokens: u32) -> Option<VectorRef> {
        let by_context = |long_rope: LongRope| {
            if context_tokens > long_rope.original_context_tokens {
                long_rope.long
            } else {
                long_rope.short
            }
        };
        self.rope_freqs.or_else(|| self.long_rope.map(by_context))
    }

    /// Every weight matrix, once, in the order in which a step reads them.
    pub fn matrices(&self) -> impl Iterator<Item = TensorRef> {
        let output = (!self.tied_output()).then_some(self.output);
        std::iter::once(self.embed)
            .chain(self.layers.iter().flat_map(Layer::matrices))
            .chain(output)
    }

    /// Every vector, in the order in which a step reads them.
    pub fn vectors(&self) -> impl Iterator<Item = VectorRef> {
        self.rope_freqs
            .into_iter()
            .chain(self.long_rope.into_iter().flat_map(|factors| [factors.short, factors.long]))
            .chain(self.layers.iter().flat_map(Layer::vectors))
            .chain(std::iter::once(self.output_norm))
    }

    /// Bytes of the file that decoding one token reads: every layer, the output matrix, and one
    /// row of the embedding. Without the KV cache.
    pub fn bytes_per_token(&self) -> u64 {
        let matrices: u64 =
            self.layers.iter().flat_map(Layer::matrices).map(|matrix| matrix.n_bytes()).sum();
        let vectors: u64 = self.vectors().map(|vector| vector.n_bytes()).sum();
        matrices + vectors + self.output.n_bytes() + self.embed.row_bytes()
    }
}
