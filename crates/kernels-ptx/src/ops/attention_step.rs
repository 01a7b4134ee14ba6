//! Attention of one token, from the products of q, k and v to the joined result: what
//! [`super::rope_append`], [`super::attention`] and [`super::attention_combine`] do one after the
//! other.
//!
//! Partial results of the segments in use come to lie in `partials` if there are several; `q` is
//! nowhere to be found.

use super::argmax::expect_idle;
use super::attention::{Attend, Segments};
use super::attention_combine::combine;
use super::cache::{CacheIndex, CacheType};
use super::rope_append::Append;
use super::tables::Tables;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[q heads, k heads, v heads][head_dim]`.
        read qkv: f32 [(n_head + 2 * n_kv_head) * head_dim],
        /// `[head_dim]`, if q is normed.
        maybe q_norm: f32 [head_dim],
        /// `[head_dim]`, if k is normed.
        maybe k_norm: f32 [head_dim],
        /// Radians per position of each pair, every scaling folded in.
        read inverse_frequencies: f64 [n_pairs],
        /// [`crate::TokenParams`] of the token. Read before earlier kernels of the step are
        /// waited for: none of them may write it.
        read tokens: u32 [3],
        /// Logical to physical block of this layer.
        read block_table: u32 [n_blocks],
        /// This layer of the KV arena.
        update kv: u8 [n_blocks * 2 * n_kv_head * block_size * head_dim * kv_elem_bytes],
        /// `[n_head][n_segments][max, sum, head_dim values]`.
        update partials: f32 [n_head * n_segments * (2 + head_dim)],
        /// `[n_kv_head]`, 0 before and after.
        update arrivals: u32 [n_kv_head],
        /// `[n_head][head_dim]`.
        write out: f32 [n_head * head_dim],
    }
    scalars {
        /// Query heads, a multiple of the key heads.
        n_head: u32,
        /// Key and value heads.
        n_kv_head: u32,
        /// Elements per head.
        head_dim: u32,
        /// Pairs turned per head.
        n_pairs: u32,
        /// [`crate::RopePairing`].
        pairing: u32,
        /// Tokens per block.
        block_size: u32,
        /// Blocks of the layer.
        n_blocks: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
        /// Segments.
        n_segments: u32,
        /// Fewest tokens of a segment.
        segment_min: u32,
        /// Ages attended to; 0: all.
        window: u32,
        /// Bytes per cached element: 4 or 2.
        kv_elem_bytes: u32,
        /// Of the head norms.
        norm_eps: f32,
        /// Factor on cosine and sine (1, or YaRN's).
        magnitude: f32,
        /// Factor on the scores.
        scale: f32,
    }
}

impl<B> Args<B> {
    /// One block per key head and segment.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        // Turned queries, the token's key and value, sines and cosines.
        Geometry::grid([self.n_kv_head, self.n_segments, 1]).attention_block(
            self.head_dim,
            self.kv_elem_bytes,
            4 + 3,
        )
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let cache_type = CacheType::of(kernel);
    cache_type.expect(kernel, a.kv_elem_bytes)?;
    let (n_head, head_dim) = (a.n_head as usize, a.head_dim as usize);
    let index = CacheIndex::new(cache_type, a.n_kv_head, a.block_size, a.head_dim);
    let append = Append {
        n_head,
        index,
        block_table: a.block_table,
        q_norm: a.q_norm,
        k_norm: a.k_norm,
        inverse_frequencies: a.inverse_frequencies,
        pairing: a.pairing,
        norm_eps: a.norm_eps,
        magnitude: a.magnitude,
    };
    let segments = Segments {
        count: a.n_segments,
        min_tokens: a.segment_min,
        block_size: a.block_size,
        max_context_tokens: a.max_context_tokens,
    };
    let attend = Attend {
        n_head,
        index,
        tables: Tables::of_one(a.block_table),
        segments,
        window: a.window,
        scale: a.scale,
    };
    expect_idle(&[], a.arrivals);
    let mut q = vec![0.0; n_head * head_dim];
    append.token([a.tokens[0], a.tokens[1]], a.qkv, &mut q, a.kv);
    let n_used = segments.n_used(a.tokens[0]) as usize;
    let used = n_used * (2 + head_dim);
    let mut partials = vec![0.0; n_head * used];
    attend.run(&q, a.kv, a.tokens, n_used, &mut partials);
    combine(&partials, n_used, head_dim, a.out);
    if n_used > 1 {
        let per_head = a.n_segments as usize * (2 + head_dim);
        for (to, from) in a.partials.chunks_exact_mut(per_head).zip(partials.chunks_exact(used)) {
            to[..used].copy_from_slice(from);
        }
    }
    Ok(())
}
