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

use q4k_soa::WeightType;

pub use architecture::{Activation, Architecture};
pub use config::ModelConfig;
pub use error::ModelError;
pub use rope::{Rope, RopePairing, RopeScaling};
pub use scales::{ScaleScan, non_finite_scales, scan_scales};

use crate::gguf::{Gguf, TensorInfo};

/// A weight matrix `[n_out, n_in]` in a GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// Its place in [`Gguf::tensors`].
    pub index: usize,
    /// How its weights are stored.
    pub ty: WeightType,
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
        u64::from(self.n_in / self.ty.block_elems()) * u64::from(self.ty.block_bytes())
    }

    /// Bytes of the whole matrix as stored.
    pub fn n_bytes(&self) -> u64 {
        u64::from(self.n_out) * self.row_bytes()
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
    /// Added to q, k and v; in no architecture supported so far.
    pub qkv_bias: Option<QkvBias>,
    /// Applied to each head of q and k; in no architecture supported so far.
    pub qk_norm: Option<QkNorm>,
    /// Norm before the feed-forward part, `[n_embd]`.
    pub ffn_norm: VectorRef,
    /// The gate, `[n_ff, n_embd]`.
    pub gate: TensorRef,
    /// What is gated, `[n_ff, n_embd]`.
    pub up: TensorRef,
    /// Back to the hidden size, `[n_embd, n_ff]`.
    pub down: TensorRef,
}

impl Layer {
    /// Its weight matrices.
    pub fn matrices(&self) -> [TensorRef; 7] {
        [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]
    }

    /// Its vectors.
    pub fn vectors(&self) -> impl Iterator<Item = VectorRef> {
        let bias = self.qkv_bias.map(|bias| [bias.q, bias.k, bias.v]);
        let norm = self.qk_norm.map(|norm| [norm.q, norm.k]);
        [self.attn_norm, self.ffn_norm]
            .into_iter()
            .chain(bias.into_iter().flatten())
            .chain(norm.into_iter().flatten())
    }
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
        model.extra_tensors = finder.extra(spec)?;
        model.n_params = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
        model.file_type = label::file_type(gguf.metadata())?;
        Ok(model)
    }

    /// Whether the output matrix is the embedding.
    pub fn tied_output(&self) -> bool {
        self.output.index == self.embed.index
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
