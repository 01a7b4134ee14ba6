//! Turns q and k by their position, writes q out, appends k and v to one layer of the paged KV
//! cache at the token's slot of its sequence.
//!
//! Per head of q and k: with `q_norm`/`k_norm` first an RMS norm over the head; then for pair i
//! the angle is `absolute_position · inverse_frequencies[i]`, computed and reduced to one turn
//! in f64 (a f32 product is off by 1e-3 rad at position 10 000), cosine and sine in f32, times
//! `magnitude`. Elements from `2·n_pairs` on are not turned.
//!
//! A q8 cache gets each row of k and v quantised, with a scale of its own.

use super::cache::{self, CacheIndex, CacheType};
use super::rms_norm::inverse_rms;
use super::tables::{self, Tables};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][q heads, k heads, v heads][head_dim]`.
        read qkv: f32 [n_tokens * (n_head + 2 * n_kv_head) * head_dim],
        /// `[head_dim]`, if q is normed.
        maybe q_norm: f32 [head_dim],
        /// `[head_dim]`, if k is normed.
        maybe k_norm: f32 [head_dim],
        /// Radians per position of each pair, every scaling folded in.
        read inverse_frequencies: f64 [n_pairs],
        /// [`crate::TokenParams`] of each token.
        read tokens: u32 [n_tokens * 3],
        /// Each token's sequence; one beyond the last counts as the last.
        read sequences: u32 [n_tokens],
        /// Logical to physical block of this layer, `n_logical` entries every `table_stride`, one
        /// after the other for each sequence.
        read block_table: u32 [tables::entries(n_sequences, table_stride, n_logical)],
        /// `[n_tokens][n_head][head_dim]`.
        write q: f32 [n_tokens * n_head * head_dim],
        /// This layer of the KV arena.
        update kv: u8 [cache::bytes(n_blocks, n_kv_head, block_size, head_dim, kv_elem_bytes)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Query heads.
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
        /// Sequences with a block table.
        n_sequences: u32,
        /// Entries from a sequence's table to the next one's.
        table_stride: u32,
        /// Entries of a sequence's table.
        n_logical: u32,
        /// Bytes per cached element: 4, 2, or 1 in q8.
        kv_elem_bytes: u32,
        /// Of the head norms.
        norm_eps: f32,
        /// Factor on cosine and sine (1, or YaRN's).
        magnitude: f32,
    }
}

impl<B> Args<B> {
    /// One warp per head.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        let heads = self.n_head + 2 * self.n_kv_head;
        Geometry::grid([heads.div_ceil(4), self.n_tokens, 1]).threads(128)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let cache_type = CacheType::of(kernel);
    cache_type.expect(kernel, a.kv_elem_bytes)?;
    let tables = Tables::new(a.block_table, a.sequences, a.table_stride, a.n_logical);
    let append = |token| Append {
        n_head: a.n_head as usize,
        index: CacheIndex::new(cache_type, a.n_kv_head, a.block_size, a.head_dim),
        block_table: tables.of_row(token),
        q_norm: a.q_norm,
        k_norm: a.k_norm,
        inverse_frequencies: a.inverse_frequencies,
        pairing: a.pairing,
        norm_eps: a.norm_eps,
        magnitude: a.magnitude,
    };
    let q_elems = (a.n_head * a.head_dim) as usize;
    let qkv_elems = q_elems + 2 * (a.n_kv_head * a.head_dim) as usize;
    let rows = a.tokens.chunks_exact(3).zip(a.qkv.chunks_exact(qkv_elems));
    for (token, ((params, qkv), q)) in rows.zip(a.q.chunks_exact_mut(q_elems)).enumerate() {
        append(token).token([params[0], params[1]], qkv, q, a.kv);
    }
    Ok(())
}

/// Turning and appending, for one token after the other.
pub(super) struct Append<'a> {
    pub(super) n_head: usize,
    pub(super) index: CacheIndex,
    pub(super) block_table: &'a [u32],
    pub(super) q_norm: Option<&'a [f32]>,
    pub(super) k_norm: Option<&'a [f32]>,
    pub(super) inverse_frequencies: &'a [f64],
    pub(super) pairing: u32,
    pub(super) norm_eps: f32,
    pub(super) magnitude: f32,
}

impl Append<'_> {
    /// Turns `q` and appends to `kv` at `[position, slot]`.
    pub(super) fn token(
        &self,
        [position, slot]: [u32; 2],
        qkv: &[f32],
        q: &mut [f32],
        kv: &mut [u8],
    ) {
        let CacheIndex { n_kv_head, head_dim, .. } = self.index;
        let turns: Vec<(f32, f32)> = self
            .inverse_frequencies
            .iter()
            .map(|frequency| turn(position, *frequency, self.magnitude))
            .collect();
        let mut head = vec![0.0f32; head_dim];
        for (h, x) in qkv.chunks_exact(head_dim).enumerate() {
            head.copy_from_slice(x);
            let norm = if h < self.n_head { self.q_norm } else { self.k_norm };
            if h < self.n_head + n_kv_head {
                if let Some(weight) = norm {
                    let inverse = inverse_rms(&head, self.norm_eps);
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
                }
                rotate(&mut head, &turns, self.pairing);
            }
            if h < self.n_head {
                q[h * head_dim..][..head_dim].copy_from_slice(&head);
                continue;
            }
            let (kv_head, value) = ((h - self.n_head) % n_kv_head, h >= self.n_head + n_kv_head);
            let row = self.index.row(self.block_table, slot as usize, value, kv_head);
            self.index.store(kv, row, &head);
        }
    }
}

pub(super) fn turn(position: u32, inverse_frequency: f64, magnitude: f32) -> (f32, f32) {
    let angle = f64::from(position) * inverse_frequency;
    let turns = (angle / std::f64::consts::TAU).round_ties_even();
    let angle = (angle - turns * std::f64::consts::TAU) as f32;
    (angle.cos() * magnitude, angle.sin() * magnitude)
}

pub(super) fn rotate(head: &mut [f32], turns: &[(f32, f32)], pairing: u32) {
    for (i, (cos, sin)) in turns.iter().enumerate() {
        let (first, second) = if pairing == crate::RopePairing::Adjacent as u32 {
            (2 * i, 2 * i + 1)
        } else {
            (i, i + turns.len())
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos - b * sin;
        head[second] = a * sin + b * cos;
    }
}
