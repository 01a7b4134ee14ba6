//! Attention over one layer of the paged KV cache, each segment of the live tokens by itself.
//!
//! For a token at `absolute_position` p in slot s of a ring of `max_context_tokens` slots,
//! `n_live = min(p + 1, max_context_tokens)` slots hold tokens, and slot j holds the token of
//! age `(s − j) mod max_context_tokens`. With a window, ages of `window` and more are not
//! attended to. Segment g covers slots `g·S .. min((g+1)·S, n_live)` with
//! `S = max(segment_min, ⌈n_live / n_segments⌉ rounded up to block_size)`, so that one graph
//! serves every length. Per query head and segment, over its slots j, with
//! `score_j = scale · q·k_j`: `partials = [max = max score_j, sum = Σ e^(score_j − max),
//! values = Σ e^(score_j − max) · v_j]`; an empty segment is `[−∞, 0, 0…]`.

use rayon::prelude::*;

use super::cache::{self, CacheIndex, CacheType, Row};
use super::tables::{self, Tables};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n_head][head_dim]`.
        read q: f32 [n_tokens * n_head * head_dim],
        /// This layer of the KV arena.
        read kv: u8 [cache::bytes(n_blocks, n_kv_head, block_size, head_dim, kv_elem_bytes)],
        /// Each token's sequence; one beyond the last counts as the last.
        read sequences: u32 [n_tokens],
        /// Logical to physical block of this layer, `n_logical` entries every `table_stride`, one
        /// after the other for each sequence.
        read block_table: u32 [tables::entries(n_sequences, table_stride, n_logical)],
        /// [`crate::TokenParams`] of each token.
        read tokens: u32 [n_tokens * 3],
        /// `[n_tokens][n_head][n_segments][max, sum, head_dim values]`.
        write partials: f32 [n_tokens * n_head * n_segments * (2 + head_dim)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Query heads, a multiple of the key heads.
        n_head: u32,
        /// Key and value heads.
        n_kv_head: u32,
        /// Elements per head.
        head_dim: u32,
        /// Tokens per block.
        block_size: u32,
        /// Blocks of the layer.
        n_blocks: u32,
        /// Sequences with a block table.
        n_sequences: u32,
        /// Entries from a sequence's table to the next one's.
        table_stride: u32,
        /// Entries of a sequence's table.
        n_logical: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
        /// Segments.
        n_segments: u32,
        /// Fewest tokens of a segment.
        segment_min: u32,
        /// Ages attended to; 0: all.
        window: u32,
        /// Bytes per cached element: 4, 2, or 1 in q8.
        kv_elem_bytes: u32,
        /// Factor on the scores.
        scale: f32,
    }
}

impl<B> Args<B> {
    /// One block per key head, segment and token.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_kv_head, self.n_segments, self.n_tokens]).attention_block(
            self.head_dim,
            self.kv_elem_bytes,
            0,
        )
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let cache_type = CacheType::of(kernel);
    cache_type.expect(kernel, a.kv_elem_bytes)?;
    let attend = Attend {
        n_head: a.n_head as usize,
        index: CacheIndex::new(cache_type, a.n_kv_head, a.block_size, a.head_dim),
        tables: Tables::new(a.block_table, a.sequences, a.table_stride, a.n_logical),
        segments: Segments {
            count: a.n_segments,
            min_tokens: a.segment_min,
            block_size: a.block_size,
            max_context_tokens: a.max_context_tokens,
        },
        window: a.window,
        scale: a.scale,
    };
    attend.run(a.q, a.kv, a.tokens, a.n_segments as usize, a.partials);
    Ok(())
}

/// How the live slots of a sequence are cut.
#[derive(Clone, Copy)]
pub(super) struct Segments {
    pub(super) count: u32,
    pub(super) min_tokens: u32,
    pub(super) block_size: u32,
    pub(super) max_context_tokens: u32,
}

impl Segments {
    /// Slots that hold tokens.
    fn n_live(&self, position: u32) -> u32 {
        position.saturating_add(1).min(self.max_context_tokens)
    }

    /// Tokens per segment.
    fn tokens(&self, n_live: u32) -> u32 {
        n_live.div_ceil(self.count).next_multiple_of(self.block_size).max(self.min_tokens)
    }

    /// Segments that have slots.
    pub(super) fn n_used(&self, position: u32) -> u32 {
        let n_live = self.n_live(position);
        n_live.div_ceil(self.tokens(n_live))
    }
}

/// Attention over one layer of the cache.
pub(super) struct Attend<'a> {
    pub(super) n_head: usize,
    pub(super) index: CacheIndex,
    pub(super) tables: Tables<'a>,
    pub(super) segments: Segments,
    pub(super) window: u32,
    pub(super) scale: f32,
}

impl Attend<'_> {
    /// Fills the partial results of every token, head and the first `n_segments` of the segments.
    pub(super) fn run(
        &self,
        q: &[f32],
        kv: &[u8],
        tokens: &[u32],
        n_segments: usize,
        partials: &mut [f32],
    ) {
        let CacheIndex { n_kv_head, head_dim, .. } = self.index;
        let (n_head, slots) = (self.n_head, self.segments.max_context_tokens);
        let record = 2 + head_dim;
        let per_head = n_segments * record;
        let one = |(row, partials): (usize, &mut [f32])| {
            let (token, head) = (row / n_head, row % n_head);
            let params = &tokens[token * 3..token * 3 + 3];
            let n_live = self.segments.n_live(params[0]);
            let segment = self.segments.tokens(n_live);
            let q = &q[row * head_dim..][..head_dim];
            let block_table = self.tables.of_row(token);
            let kv_head = head / (n_head / n_kv_head);
            let mut row = vec![0.0f32; head_dim];
            for (g, partial) in partials.chunks_exact_mut(record).enumerate() {
                let first = (g as u32).saturating_mul(segment).min(n_live);
                let end = first.saturating_add(segment).min(n_live);
                let live = (first..end).filter(|&slot| {
                    let age = (params[1] + slots - slot) % slots;
                    self.window == 0 || age < self.window
                });
                let rows = live.map(|slot| {
                    let row = |value| self.index.row(block_table, slot as usize, value, kv_head);
                    (row(false), row(true))
                });
                let load = |from, to: &mut [f32]| self.index.load(kv, from, to);
                segment_attention(q, load, rows, self.scale, &mut row, partial);
            }
        };
        // A handful of short heads is quicker done than handed out.
        let longest = tokens.chunks_exact(3).map(|t| u64::from(t[0]) + 1).max().unwrap_or(0);
        if longest * (q.len() as u64) < 1 << 14 {
            partials.chunks_exact_mut(per_head).enumerate().for_each(one);
        } else {
            partials.par_chunks_exact_mut(per_head).enumerate().for_each(one);
        }
    }
}

/// One pass with a running maximum; a new maximum rescales what was summed before.
fn segment_attention(
    q: &[f32],
    load: impl Fn(Row, &mut [f32]),
    rows: impl Iterator<Item = (Row, Row)>,
    scale: f32,
    row: &mut [f32],
    partial: &mut [f32],
) {
    let (head, values) = partial.split_at_mut(2);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    values.fill(0.0);
    for (k, v) in rows {
        load(k, row);
        let score = dot(q, row) * scale;
        if score > max {
            let rescale = (max - score).exp();
            sum *= rescale;
            values.iter_mut().for_each(|value| *value *= rescale);
            max = score;
        }
        let weight = (score - max).exp();
        sum += weight;
        load(v, row);
        values.iter_mut().zip(&*row).for_each(|(value, v)| *value += weight * v);
    }
    head[0] = max;
    head[1] = sum;
}

/// Eight running sums, which the compiler keeps in one vector register.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + tail
}
