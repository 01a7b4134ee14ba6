//! Attention of runs of tokens over one layer of the paged KV cache, on tensor cores: a chunk of a
//! prompt, each of whose tokens sees those before it and itself.
//!
//! The row at `absolute_position` p attends to the slots j ≤ p, with a window to `p − j < window`;
//! slot j holds the token at position j: rings that have turned are not for this kernel. With q
//! rounded to f16, `score_j = scale · q·k_j`, `out = Σ e^score_j · v_j / Σ e^score_j`, the weights
//! rounded to f16 relative to a maximum; 0 where there is nothing to attend to.
//!
//! Rows come in runs of `run_tokens` of one sequence at positions that follow each other, padding
//! last. 64 of them at a time are of the first one's sequence, and those at positions before its are
//! padding and get 0.

use half::f16;
use rayon::prelude::*;

use super::cache::{CacheIndex, CacheType};
use super::gemm::expect_eights;
use super::half_rows::{HalfRows, finite, half_elems};
use super::tables::{self, Tables};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n_head][head_dim]`.
        read q: f32 [n_tokens * n_head * head_dim],
        /// This layer of the KV arena, f16.
        read kv: u8 [n_blocks * 2 * n_kv_head * block_size * head_dim * 2],
        /// Each token's sequence; one beyond the last counts as the last.
        read sequences: u32 [n_tokens],
        /// Logical to physical block of this layer, `n_logical` entries every `table_stride`, one
        /// after the other for each sequence.
        read block_table: u32 [tables::entries(n_sequences, table_stride, n_logical)],
        /// [`crate::TokenParams`] of each token.
        read tokens: u32 [n_tokens * 3],
        /// `[n_tokens][n_head * head_dim]` in `order`; what it has beyond rows and columns stays.
        update out: f16 [half_elems(order, n_tokens, n_head * head_dim)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Tokens of a run; they are whole runs.
        run_tokens: u32,
        /// Query heads, a multiple of the key heads.
        n_head: u32,
        /// Key and value heads.
        n_kv_head: u32,
        /// Elements per head, a multiple of 8.
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
        /// Ages attended to; 0: all.
        window: u32,
        /// [`super::HalfOrder`].
        order: u32,
        /// Factor on the scores.
        scale: f32,
    }
}

/// The kernel for heads of so many elements; none for more than 256, or ones that are no eights.
pub fn kernel_for(head_dim: u32) -> Option<Kernel> {
    match head_dim {
        _ if !head_dim.is_multiple_of(8) => None,
        0..=64 => Some(Kernel::AttentionChunk64),
        65..=128 => Some(Kernel::AttentionChunk128),
        129..=256 => Some(Kernel::AttentionChunk256),
        _ => None,
    }
}

/// Rows that a block works on.
const ROWS: u32 = 64;

impl<B> Args<B> {
    /// A block per head and 64 rows of a run.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        let (dim, keys) = match self.head_dim {
            0..=64 => (64, 64),
            65..=128 => (128, 64),
            _ => (256, 32),
        };
        let runs = self.n_tokens / self.run_tokens.max(1);
        Geometry {
            grid: [self.n_head, runs * self.run_tokens.div_ceil(ROWS), 1],
            block: [128, 1, 1],
            // Queries, and two stages of keys and values.
            shared_bytes: (ROWS + 4 * keys) * dim * 2,
            cooperative: false,
        }
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    expect_eights(kernel, "head_dim", a.head_dim)?;
    let (n_head, head_dim) = (a.n_head as usize, a.head_dim as usize);
    let heads_per_kv = n_head / a.n_kv_head as usize;
    let index = CacheIndex::new(CacheType::F16, a.n_kv_head, a.block_size, a.head_dim);
    let tables = Tables::new(a.block_table, a.sequences, a.table_stride, a.n_logical);
    let cache: &[f16] = bytemuck::cast_slice(a.kv);
    let mut heads = vec![0.0f32; a.q.len()];
    heads.par_chunks_mut(head_dim).enumerate().for_each(|(i, out)| {
        let (row, head) = (i / n_head, i % n_head);
        let tile = row - row % a.run_tokens as usize % ROWS as usize;
        let [lowest, position] = [tile, row].map(|row| a.tokens[row * 3]);
        if position < lowest {
            return;
        }
        let table = tables.of_row(tile);
        let q: Vec<f32> =
            a.q[i * head_dim..][..head_dim].iter().map(|q| finite(*q).to_f32()).collect();
        let first = if a.window == 0 { 0 } else { (position + 1).saturating_sub(a.window) };
        let at = |slot: u32, value| {
            let at = index.first_elem(table, slot as usize, value, head / heads_per_kv);
            &cache[at..at + head_dim]
        };
        let scores: Vec<f32> = (first..=position)
            .map(|slot| q.iter().zip(at(slot, false)).map(|(q, k)| q * k.to_f32()).sum::<f32>())
            .map(|score| score * a.scale)
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for (slot, score) in (first..=position).zip(scores) {
            let weight = f16::from_f32((score - max).exp()).to_f32();
            total += weight;
            out.iter_mut().zip(at(slot, true)).for_each(|(out, v)| *out += weight * v.to_f32());
        }
        out.iter_mut().for_each(|out| *out /= total);
    });
    let place = HalfRows::new(a.order, a.n_tokens, a.n_head * a.head_dim);
    for (row, values) in heads.chunks_exact(n_head * head_dim).enumerate() {
        place.put(row, values, a.out);
    }
    Ok(())
}
