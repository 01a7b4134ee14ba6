//! Small structures that host and kernels share byte for byte.

use bytemuck::{Pod, Zeroable};

/// The per-token parameters of a step: everything that changes between replays, 12 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenParams {
    /// Tokens before this one in the sequence; RoPE turns by it.
    pub absolute_position: u32,
    /// Token slot of the KV cache, `absolute_position % max_context_tokens`.
    pub ring_slot: u32,
    /// The token.
    pub token_id: u32,
}

impl TokenParams {
    /// `u32` words of one token's parameters.
    pub const WORDS: u32 = 3;
}

/// A logit with its token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Candidate {
    /// Logit.
    pub value: f32,
    /// Token id.
    pub index: u32,
}

impl Candidate {
    /// The total order of candidates: larger logit first, then lower id. NaN counts as −∞.
    pub fn beats(self, other: Candidate) -> bool {
        let (a, b) = (self.rank_value(), other.rank_value());
        a > b || (a == b && self.index < other.index)
    }

    pub(crate) fn rank_value(self) -> f32 {
        if self.value.is_nan() { f32::NEG_INFINITY } else { self.value }
    }
}

/// Most candidates that sampling considers: `top_k` of 0 or above means this many. The tokens
/// beyond the 1024 likeliest are noise, and so many fit one thread block.
pub const MAX_CANDIDATES: u32 = 1024;

/// Sampling parameters in device memory: changing them re-uploads 24 bytes and captures nothing.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SamplingPack {
    /// Divides the logits; at or below 0 the likeliest token is taken.
    pub temperature: f32,
    /// Keeps the smallest set of likeliest tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the likeliest.
    pub min_p: f32,
    /// Keeps this many likeliest tokens; 0: [`MAX_CANDIDATES`].
    pub top_k: u32,
    /// Seed, low word.
    pub seed_low: u32,
    /// Seed, high word.
    pub seed_high: u32,
}

/// Which elements of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum RopePairing {
    /// (2i, 2i + 1), as `llama` files have it.
    Adjacent = 0,
    /// (i, i + dims/2), the NeoX order.
    Halves = 1,
}
