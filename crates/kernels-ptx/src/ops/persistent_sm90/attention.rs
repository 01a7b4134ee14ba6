//! The attention of the persistent step on the host: segments as the blocks have them.

use half::f16;

use super::rounded;
use crate::ops::cache::{CacheIndex, CacheType};
use crate::ops::rms_norm::inverse_rms;
use crate::ops::rope_append::{rotate, turn};
use crate::schedule::{Header, Op};

/// Of the cache, which is f16.
pub(super) const ELEM_BYTES: usize = size_of::<f16>();

/// What all layers have in common.
pub(super) struct Attention<'a> {
    pub(super) header: Header,
    /// All layers.
    pub(super) kv: &'a mut [u8],
    pub(super) block_table: &'a [u32],
    pub(super) position: u32,
    pub(super) slot: u32,
}

/// One layer.
pub(super) struct Layer<'a> {
    header: Header,
    cache: &'a mut [u8],
    block_table: &'a [u32],
    slot: u32,
    n_live: u32,
    window: u32,
    turns: Vec<(f32, f32)>,
    q_norm: Option<&'a [f32]>,
    k_norm: Option<&'a [f32]>,
}

impl Attention<'_> {
    /// `None` if the layer, one of its blocks or the slot lies outside of its buffer.
    pub(super) fn layer<'a>(
        &'a mut self,
        op: &Op,
        frequencies: &[f64],
        q_norm: Option<&'a [f32]>,
        k_norm: Option<&'a [f32]>,
    ) -> Option<Layer<'a>> {
        let h = self.header;
        let (layer, n_blocks) = (op.layer as usize, h.n_blocks as usize);
        let block_table = self.block_table.get(layer * n_blocks..(layer + 1) * n_blocks)?;
        let bytes = h.kv_layer as usize * 16;
        let cache = self.kv.get_mut(layer * bytes..(layer + 1) * bytes)?;
        let slots = n_blocks * h.block_size as usize;
        let n_live = self.position.saturating_add(1).min(h.max_context_tokens);
        let places = block_table.iter().all(|&block| block < h.n_blocks);
        (places && n_live as usize <= slots && self.slot < n_live).then_some(())?;
        let turns = frequencies.iter().map(|f| turn(self.position, *f, h.magnitude)).collect();
        let (slot, window) = (self.slot, op.window);
        Some(Layer { header: h, cache, block_table, slot, n_live, window, turns, q_norm, k_norm })
    }
}

impl Layer<'_> {
    /// The attention of `qkv`, whose key and value are appended first.
    pub(super) fn run(mut self, qkv: &[f32]) -> Vec<f32> {
        let h = self.header;
        let dim = h.head_dim as usize;
        let (n_head, n_kv_head) = (h.n_head as usize, h.n_kv_head as usize);
        let mut heads: Vec<Vec<f32>> = qkv.chunks_exact(dim).map(<[f32]>::to_vec).collect();
        for (index, head) in heads[..n_head + n_kv_head].iter_mut().enumerate() {
            let norm = if index < n_head { self.q_norm } else { self.k_norm };
            if let Some(weight) = norm {
                let inverse = inverse_rms(head, h.norm_eps);
                head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
            }
            rotate(head, &self.turns, h.pairing);
        }
        for (index, head) in heads[n_head..].iter().enumerate() {
            let at = self.place(self.slot, index >= n_kv_head, index % n_kv_head);
            self.store(at, head);
        }
        heads[..n_head]
            .iter()
            .enumerate()
            .flat_map(|(index, query)| self.attend(query, index / (n_head / n_kv_head)))
            .collect()
    }

    fn place(&self, slot: u32, value: bool, head: usize) -> usize {
        let h = self.header;
        let index = CacheIndex::new(CacheType::F16, h.n_kv_head, h.block_size, h.head_dim);
        index.first_elem(self.block_table, slot as usize, value, head)
    }

    fn store(&mut self, at: usize, head: &[f32]) {
        let places = self.cache[at * ELEM_BYTES..].chunks_exact_mut(ELEM_BYTES);
        for (to, x) in places.zip(head) {
            to.copy_from_slice(&f16::from_f32(*x).to_le_bytes());
        }
    }

    fn load(&self, at: usize, out: &mut [f32]) {
        let (places, _) = self.cache[at * ELEM_BYTES..].as_chunks::<ELEM_BYTES>();
        for (from, x) in places.iter().zip(out) {
            *x = f16::from_le_bytes(*from).to_f32();
        }
    }

    /// Tokens of a segment.
    fn segment_tokens(&self) -> u32 {
        let h = self.header;
        let share = self.n_live.div_ceil(h.segments.max(1)).max(h.segment_min);
        share.next_multiple_of(h.block_size.max(1))
    }

    fn attend(&self, query: &[f32], kv_head: usize) -> Vec<f32> {
        let h = self.header;
        let tokens = self.segment_tokens();
        let mut segments = Vec::new();
        let (mut key, mut value) = (vec![0.0; query.len()], vec![0.0; query.len()]);
        for first in (0..self.n_live).step_by(tokens as usize) {
            // Slots and scores, which are exponents of two.
            let attended = (first..(first + tokens).min(self.n_live)).filter(|slot| {
                let age = (self.slot + h.max_context_tokens - slot) % h.max_context_tokens;
                self.window == 0 || age < self.window
            });
            let scores: Vec<(u32, f32)> = attended
                .map(|slot| {
                    self.load(self.place(slot, false, kv_head), &mut key);
                    let dot: f32 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                    (slot, dot * h.attention_scale * std::f32::consts::LOG2_E)
                })
                .collect();
            let max = scores.iter().fold(f32::NEG_INFINITY, |max, score| max.max(score.1)).ceil();
            let (mut sum, mut out) = (0.0, vec![0.0; query.len()]);
            for (slot, score) in scores {
                self.load(self.place(slot, true, kv_head), &mut value);
                // Relative to a power of two, so that the rounding is the same whatever it is.
                let weight = f16::from_f32((score - max).exp2()).to_f32();
                sum += weight;
                out.iter_mut().zip(&value).for_each(|(o, v)| *o += weight * v);
            }
            if sum > 0.0 {
                out.iter_mut().for_each(|o| *o /= sum);
                segments.push((max + sum.log2(), out));
            }
        }
        if let [(_, out)] = &segments[..]
            && self.n_live <= tokens
        {
            return out.clone();
        }
        let max = segments.iter().map(|(weight, _)| *weight).fold(f32::NEG_INFINITY, f32::max);
        let total: f32 = segments.iter().map(|(weight, _)| (weight - max).exp2()).sum();
        let mut joined = vec![0.0; query.len()];
        for (weight, out) in &segments {
            let factor = (weight - max).exp2() / total;
            joined.iter_mut().zip(rounded(out)).for_each(|(to, o)| *to += factor * o);
        }
        joined
    }
}
