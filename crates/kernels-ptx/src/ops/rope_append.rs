//! Turns q and k by their position, writes q out, appends k and v to one layer of the paged KV
//! cache at the token's slot.
//!
//! Per head of q and k: with `q_norm`/`k_norm` first an RMS norm over the head; then for pair i
//! the angle is `absolute_position · inverse_frequencies[i]`, computed and reduced to one turn
//! in f64 (a f32 product is off by 1e-3 rad at position 10 000), cosine and sine in f32, times
//! `magnitude`. Elements from `2·n_pairs` on are not turned.
//!
//! One layer of the cache is `[physical block][K, V][kv head][token in block][dim]`.

use half::f16;

use super::rms_norm::inverse_rms;
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
        /// Logical to physical block of this layer.
        read block_table: u32 [n_blocks],
        /// `[n_tokens][n_head][head_dim]`.
        write q: f32 [n_tokens * n_head * head_dim],
        /// This layer of the KV arena.
        update kv: u8 [n_blocks * 2 * n_kv_head * block_size * head_dim * kv_elem_bytes],
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
        /// Bytes per cached element: 4 or 2.
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

/// Where token `slot` of a head begins in a layer's cache, in elements.
pub(super) struct CacheIndex {
    pub(super) n_kv_head: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
}

impl CacheIndex {
    pub(super) fn token(&self, table: &[u32], slot: usize, value: bool, head: usize) -> usize {
        let block = table[slot / self.block_size] as usize;
        let plane = (block * 2 + usize::from(value)) * self.n_kv_head + head;
        (plane * self.block_size + slot % self.block_size) * self.head_dim
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let (n_head, n_kv_head, head_dim) =
        (a.n_head as usize, a.n_kv_head as usize, a.head_dim as usize);
    let index = CacheIndex { n_kv_head, block_size: a.block_size as usize, head_dim };
    let half_cache = kernel == Kernel::RopeAppendF16;
    let elem_bytes = if half_cache { 2 } else { 4 };
    if a.kv_elem_bytes != elem_bytes {
        return Err(ParamError::Value {
            kernel: kernel.name(),
            param: "kv_elem_bytes",
            value: u64::from(a.kv_elem_bytes),
            reason: "must be the element size of the kernel's cache",
        });
    }
    let mut head = vec![0.0f32; head_dim];
    let heads = n_head + 2 * n_kv_head;
    for (token, params) in a.tokens.chunks_exact(3).enumerate() {
        let slot = params[1] as usize;
        let turns: Vec<(f32, f32)> = a
            .inverse_frequencies
            .iter()
            .map(|frequency| turn(params[0], *frequency, a.magnitude))
            .collect();
        for h in 0..heads {
            head.copy_from_slice(&a.qkv[(token * heads + h) * head_dim..][..head_dim]);
            let norm = if h < n_head { a.q_norm } else { a.k_norm };
            if h < n_head + n_kv_head {
                if let Some(weight) = norm {
                    let inverse = inverse_rms(&head, a.norm_eps);
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
                }
                rotate(&mut head, &turns, a.pairing);
            }
            if h < n_head {
                a.q[(token * n_head + h) * head_dim..][..head_dim].copy_from_slice(&head);
                continue;
            }
            let (kv_head, value) = ((h - n_head) % n_kv_head, h >= n_head + n_kv_head);
            let at = index.token(a.block_table, slot, value, kv_head);
            if half_cache {
                let cache: &mut [f16] = bytemuck::cast_slice_mut(a.kv);
                let to = &mut cache[at..at + head_dim];
                to.iter_mut().zip(&head).for_each(|(to, x)| *to = f16::from_f32(*x));
            } else {
                let cache: &mut [f32] = bytemuck::cast_slice_mut(a.kv);
                cache[at..at + head_dim].copy_from_slice(&head);
            }
        }
    }
    Ok(())
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
