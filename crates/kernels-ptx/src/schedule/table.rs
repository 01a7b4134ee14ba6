//! The schedule as the kernel reads it: words.

use bytemuck::{Pod, Zeroable};
use q4k_soa::WeightType;

use super::NONE;

/// What all blocks know of the step. Words of the table, in this order; `_at` are places in shared
/// memory in bytes, those without unit places in the exchange buffer in words, or places in the
/// weights in 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Header {
    pub n_ctas: u32,
    pub n_ops: u32,
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_vocab: u32,
    pub n_pairs: u32,
    pub pairing: u32,
    pub block_size: u32,
    pub n_blocks: u32,
    pub max_context_tokens: u32,
    pub kv_elem_bytes: u32,
    /// Most segments of a key head.
    pub segments: u32,
    pub segment_min: u32,
    /// Tokens of a slot of keys and values.
    pub unit_tokens: u32,
    pub embed_format: u32,
    pub embed: u32,
    pub frequencies: u32,
    pub n_slots: u32,
    pub outstanding_busy: u32,
    pub outstanding_idle: u32,
    pub greedy: u32,
    /// Bytes of a layer of the KV cache, in 16.
    pub kv_layer: u32,
    /// `[n_head][segments][1 + head_dim / 2]` pairs of words: a word and its tag.
    pub partials: u32,
    /// `[n_ctas]` candidates as pairs of words.
    pub bests: u32,
    pub quants_at: u32,
    pub scales_at: u32,
    pub halves_at: u32,
    pub scratch_at: u32,
    pub squares_at: u32,
    pub misc_at: u32,
    pub turns_at: u32,
    pub residual_at: u32,
    pub table_at: u32,
    pub barriers_at: u32,
    pub norm_eps: f32,
    pub magnitude: f32,
    pub embed_scale: f32,
    pub attention_scale: f32,
    pub reserved: [u32; 23],
}

/// Words of [`Header`].
pub const HEADER_WORDS: u32 = 64;

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum OpKind {
    Qkv = 0,
    Output = 1,
    GateUp = 2,
    Down = 3,
    Logits = 4,
}

/// One block's part of an operation. Words of the table, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Op {
    /// [`OpKind`].
    pub kind: u32,
    /// Input length.
    pub n_in: u32,
    /// Units along a row.
    pub chunks: u32,
    /// Units of all runs.
    pub n_units: u32,
    /// Slots of the ring that they take.
    pub n_slots: u32,
    /// Slots of weights before.
    pub first_slot: u32,
    /// Attentions before, whose slots come on top.
    pub kv_before: u32,
    /// Input vector in the exchange buffer; [`NONE`]: the embedding row.
    pub input: u32,
    /// Hint counter of the input.
    pub counter_in: u32,
    /// Output vector in the exchange buffer; [`NONE`] for logits.
    pub output: u32,
    /// Hint counter of the output.
    pub counter_out: u32,
    /// Of q/k/v: the attention's result in the exchange buffer.
    pub attention: u32,
    /// Its hint counter.
    pub counter_attention: u32,
    /// Norm weights in the weights, in 16 bytes, or [`NONE`].
    pub norm: u32,
    /// Bias in the weights, in 16 bytes, or [`NONE`].
    pub bias: u32,
    /// Norm of query heads, in 16 bytes, or [`NONE`].
    pub q_norm: u32,
    /// Norm of key heads, in 16 bytes, or [`NONE`].
    pub k_norm: u32,
    /// Ages attended to; 0: all.
    pub window: u32,
    /// Layer.
    pub layer: u32,
    /// ⌈2³² / chunks⌉ modulo 2³²: unit % chunks is the upper half of (unit · this) · chunks.
    pub chunk_reciprocal: u32,
    /// Consecutive rows of one matrix each, unused ones without blocks.
    pub runs: [Run; 3],
}

/// Words of [`Op`].
pub const OP_WORDS: u32 = 32;

const _: () = assert!(size_of::<Header>() == 4 * HEADER_WORDS as usize);

const _: () = assert!(size_of::<Op>() == 4 * OP_WORDS as usize);

/// Consecutive blocks of rows of one matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Run {
    /// Where they begin in the weights, in 16 bytes.
    pub base: u32,
    /// The first row's place in the operation's output; for up, in the rows of gate.
    pub first_row: u32,
    /// Blocks of 8 rows.
    pub n_blocks: u32,
    /// [`format_code`], and from bit 8 on the logarithm of the units in a slot.
    pub format: u32,
}

/// Number of a weight type that streams.
pub const fn format_code(ty: WeightType) -> Option<u32> {
    match ty {
        WeightType::Q4K => Some(0),
        WeightType::Q6K => Some(1),
        WeightType::Q8_0 => Some(2),
        _ => None,
    }
}

/// The inverse of [`format_code`].
pub const fn format_type(code: u32) -> Option<WeightType> {
    match code {
        0 => Some(WeightType::Q4K),
        1 => Some(WeightType::Q6K),
        2 => Some(WeightType::Q8_0),
        _ => None,
    }
}

impl Run {
    /// The weight type.
    pub fn weight_type(&self) -> Option<WeightType> {
        format_type(self.format & 0xff)
    }

    /// Units that share a slot.
    pub fn units_per_slot(&self) -> u32 {
        1 << (self.format >> 8)
    }
}

pub(super) const EMPTY_OP: Op = Op {
    kind: 0,
    n_in: 0,
    chunks: 0,
    n_units: 0,
    n_slots: 0,
    first_slot: 0,
    kv_before: 0,
    input: NONE,
    counter_in: NONE,
    output: NONE,
    counter_out: NONE,
    attention: NONE,
    counter_attention: NONE,
    norm: NONE,
    bias: NONE,
    q_norm: NONE,
    k_norm: NONE,
    window: 0,
    layer: 0,
    chunk_reciprocal: 0,
    runs: [Run { base: 0, first_row: 0, n_blocks: 0, format: 0 }; 3],
};
