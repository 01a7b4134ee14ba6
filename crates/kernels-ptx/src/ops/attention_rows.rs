//! Attention of rows, each of any sequence, over one layer of the paged KV cache in f16; the result
//! as f16. What [`super::attention`] and [`super::attention_combine`] compute one after the other.
//!
//! `partials` are written as far as a row has more than one segment; `arrivals` are 0 before and
//! after.

use half::f16;

use super::argmax::expect_idle;
use super::attention::{Attend, Segments};
use super::attention_combine::combine;
use super::cache::{CacheIndex, CacheType};
use super::half_rows::{HalfRows, half_elems};
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
        /// `[n_tokens][n_head][n_segments][max, sum, head_dim values]`.
        update partials: f32 [n_tokens * n_head * n_segments * (2 + head_dim)],
        /// `[n_tokens][n_kv_head]`: blocks that are done.
        update arrivals: u32 [n_tokens * n_kv_head],
        /// `[n_tokens][n_head * head_dim]` in `order`; what it has beyond rows and columns stays.
        update out: f16 [half_elems(order, n_tokens, n_head * head_dim)],
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
        /// [`super::HalfOrder`].
        order: u32,
        /// Factor on the scores.
        scale: f32,
    }
}

impl<B> Args<B> {
    /// One block per key head, segment and token.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_kv_head, self.n_segments, self.n_tokens]).attention_block(
            self.head_dim,
            size_of::<f16>() as u32,
            0,
        )
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let (n_head, head_dim) = (a.n_head as usize, a.head_dim as usize);
    let segments = Segments {
        count: a.n_segments,
        min_tokens: a.segment_min,
        block_size: a.block_size,
        max_context_tokens: a.max_context_tokens,
    };
    let attend = Attend {
        n_head,
        index: CacheIndex::new(CacheType::F16, a.n_kv_head, a.block_size, a.head_dim),
        tables: Tables::new(a.block_table, a.sequences, a.table_stride, a.n_logical),
        segments,
        window: a.window,
        scale: a.scale,
    };
    expect_idle(&[], a.arrivals);
    let mut partials = vec![0.0; a.partials.len()];
    attend.run(a.q, a.kv, a.tokens, a.n_segments as usize, &mut partials);
    let mut out = vec![0.0; a.q.len()];
    combine(&partials, a.n_segments as usize, head_dim, &mut out);
    let place = HalfRows::new(a.order, a.n_tokens, a.n_head * a.head_dim);
    for (row, values) in out.chunks_exact(n_head * head_dim).enumerate() {
        place.put(row, values, a.out);
    }
    let record = 2 + head_dim;
    let per_head = a.n_segments as usize * record;
    let heads = a.partials.chunks_exact_mut(per_head).zip(partials.chunks_exact(per_head));
    for (head, (to, from)) in heads.enumerate() {
        let n_used = segments.n_used(a.tokens[head / n_head * 3]) as usize;
        if n_used > 1 {
            to[..n_used * record].copy_from_slice(&from[..n_used * record]);
        }
    }
    Ok(())
}
