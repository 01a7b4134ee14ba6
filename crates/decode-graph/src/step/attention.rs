//! From the hidden state to what attention adds to it.

use gpu_slab::View;
use kernels_ptx::{DeviceProfile, Geometry, Kernel, ops};

use super::products::{Epilogue, Input};
use super::{RecordError, Recorder, expect};
use crate::batch::LayerCache;
use crate::launch::Launch;
use crate::plan::{LayerWeights, half_order};

/// Tokens of a run from which on they attend together: a tile of the matrix instructions has 16.
const LONG_RUN_TOKENS: u32 = 16;

/// Arguments of an operation over a layer's cache: its own, and those that all of them have.
macro_rules! over_cache {
    ($recorder:expr, $cache:expr, $op:ident { $($own:tt)* }) => {
        ops::$op::Args {
            kv: $cache.kv,
            sequences: $recorder.arena.sequences,
            block_table: $cache.block_table,
            tokens: $recorder.arena.tokens,
            n_tokens: $recorder.plan.n_tokens,
            n_head: $recorder.plan.dims.n_head,
            n_kv_head: $recorder.plan.dims.n_kv_head,
            head_dim: $recorder.plan.dims.head_dim,
            block_size: $recorder.plan.kv.block_size_tokens(),
            n_blocks: $cache.n_blocks,
            n_sequences: $cache.n_sequences,
            table_stride: $cache.table_stride,
            n_logical: $cache.n_logical,
            $($own)*
        }
    };
}

impl Recorder<'_> {
    pub(super) fn attention(
        &mut self,
        index: u32,
        layer: &LayerWeights,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let parts = [layer.q, layer.k, layer.v];
        for (part, rows) in parts.iter().zip([d.q_elems(), d.kv_elems(), d.kv_elems()]) {
            expect("rows of q, k or v", rows.into(), part.shape.n_out.into())?;
        }
        let (tokens, bias, numerics) = (plan.n_tokens, layer.qkv_bias, plan.qkv_numerics());
        let (x, norm) = (arena.hidden_a, layer.attn_norm);
        if self.fuses(&parts, tokens, numerics) {
            self.gemv_norm("qkv", &parts, x, norm, bias, arena.qkv)?;
        } else {
            let input = self.norm("attention norm", x, norm, tokens, numerics)?;
            self.gemv("qkv", &parts, input, bias, Epilogue::Store, arena.qkv, tokens)?;
        }

        let cache = self.caches[index as usize];
        match cache.kernels.step.filter(|_| tokens == 1 && plan.sequences.is_none()) {
            Some(kernel) => self.attention_step(kernel, layer, &cache, inverse_frequencies)?,
            None => self.attention_of_many(layer, &cache, inverse_frequencies)?,
        }
        let (residual, out) = (arena.hidden_a, arena.hidden_b);
        let x = match plan.uses_halves() && cache.kernels.half {
            true => Input::Half(arena.attention_half, 1.0),
            false => Input::F32(arena.attention),
        };
        let names = ["attention output q8", "output projection", "norm after attention"];
        self.add_to_hidden(names, layer.o, x, layer.post_attn_norm, residual, out)
    }

    /// Of one token: everything between the products of q, k and v and the output projection.
    fn attention_step(
        &mut self,
        kernel: Kernel,
        layer: &LayerWeights,
        cache: &LayerCache,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let arrivals_bytes = u64::from(d.n_kv_head) * 4;
        let args = ops::attention_step::Args {
            qkv: arena.qkv,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            inverse_frequencies,
            tokens: arena.tokens,
            block_table: cache.block_table,
            kv: cache.kv,
            partials: arena.partials,
            arrivals: self.slice("arrivals", arena.arrivals, 0..arrivals_bytes)?,
            out: arena.attention,
            n_head: d.n_head,
            n_kv_head: d.n_kv_head,
            head_dim: d.head_dim,
            n_pairs: plan.rope.n_pairs,
            pairing: plan.rope.pairing as u32,
            block_size: plan.kv.block_size_tokens(),
            n_blocks: cache.n_blocks,
            max_context_tokens: plan.kv.max_context_tokens(),
            n_segments: plan.n_segments,
            segment_min: DeviceProfile::SEGMENT_MIN,
            window: layer.window,
            kv_elem_bytes: cache.kernels.elem_bytes,
            norm_eps: plan.norm_eps,
            magnitude: plan.rope.magnitude,
            scale: plan.attention_scale,
        };
        launch!(self, "attention", kernel, args);
        Ok(())
    }

    /// The kernel for runs of tokens, where they are long enough to fill its tiles.
    fn chunk_kernel(&self, cache: &LayerCache) -> Option<Kernel> {
        let long = self.plan.run_tokens >= LONG_RUN_TOKENS;
        let usable = long && cache.kernels.half && self.plan.uses_halves();
        usable.then(|| ops::attention_chunk::kernel_for(self.plan.dims.head_dim)).flatten()
    }

    /// Of several tokens, each of which attends to those before it: all are appended first.
    fn attention_of_many(
        &mut self,
        layer: &LayerWeights,
        cache: &LayerCache,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let args = over_cache!(
            self,
            cache,
            rope_append {
                qkv: arena.qkv,
                q_norm: layer.q_norm,
                k_norm: layer.k_norm,
                inverse_frequencies,
                q: arena.q,
                n_pairs: plan.rope.n_pairs,
                pairing: plan.rope.pairing as u32,
                kv_elem_bytes: cache.kernels.elem_bytes,
                norm_eps: plan.norm_eps,
                magnitude: plan.rope.magnitude,
            }
        );
        launch!(self, "rope and kv append", cache.kernels.append, args);
        let (q, window, scale) = (arena.q, layer.window, plan.attention_scale);
        if let Some(kernel) = self.chunk_kernel(cache) {
            let (run_tokens, out) = (plan.run_tokens, arena.attention_half);
            let order = half_order(plan.n_tokens) as u32;
            let args = over_cache!(
                self,
                cache,
                attention_chunk { q, out, run_tokens, window, order, scale }
            );
            launch!(self, "attention", kernel, args);
            return Ok(());
        }
        let (partials, n_segments) = (arena.partials, plan.n_segments);
        let max_context_tokens = plan.kv.max_context_tokens();
        let segment_min = DeviceProfile::SEGMENT_MIN;
        if plan.uses_halves() && cache.kernels.half {
            let args = over_cache!(
                self,
                cache,
                attention_rows {
                    q,
                    partials,
                    arrivals: arena.row_arrivals,
                    out: arena.attention_half,
                    max_context_tokens,
                    n_segments,
                    segment_min,
                    window,
                    order: half_order(plan.n_tokens) as u32,
                    scale,
                }
            );
            launch!(self, "attention", Kernel::AttentionRows, args);
            return Ok(());
        }
        let args = over_cache!(
            self,
            cache,
            attention {
                q,
                partials,
                max_context_tokens,
                n_segments,
                segment_min,
                window,
                kv_elem_bytes: cache.kernels.elem_bytes,
                scale,
            }
        );
        launch!(self, "attention", cache.kernels.attention, args);
        let args = ops::attention_combine::Args {
            partials: arena.partials,
            out: arena.attention,
            n_tokens: plan.n_tokens,
            n_head: d.n_head,
            head_dim: d.head_dim,
            n_segments: plan.n_segments,
        };
        launch!(self, "attention combine", Kernel::AttentionCombine, args);
        Ok(())
    }
}
