//! Matrix products: what they read, what they do with their sums, what is fused with them; and the
//! feed-forward network, which is made of nothing else.

use gpu_slab::View;
use kernels_ptx::ops::GemmForm;
use kernels_ptx::{Geometry, Kernel, ops};
use q4k_soa::LayoutId;

use super::{RecordError, Recorder, expect};
use crate::launch::Launch;
use crate::plan::{Activation, LayerWeights, Numerics, WeightRef, half_order};

/// Where a matrix product finds its input.
#[derive(Clone, Copy)]
pub(super) enum Input {
    /// In `arena.quants` and `arena.groups`.
    Q8,
    /// An f32 buffer.
    F32(View),
    /// An f16 buffer, to be multiplied by a factor.
    Half(View, f32),
}

/// What a matrix product does with its sums.
#[derive(Clone, Copy)]
pub(super) enum Epilogue {
    Store,
    Add(View),
    Glu(Activation),
}

/// Up to three matrices with one input, as numbers; 0 for those that are not there.
pub(super) struct Matrices {
    pub(super) types: [u32; 3],
    pub(super) rows: [u32; 3],
    pub(super) n_in: u32,
}

impl Recorder<'_> {
    /// The matrices of a product as numbers, checked to fit each other.
    pub(super) fn matrices(
        &self,
        what: &'static str,
        parts: &[WeightRef],
    ) -> Result<Matrices, RecordError> {
        let (mut types, mut rows, n_in) = ([0; 3], [0; 3], parts[0].shape.n_in);
        for (index, part) in parts.iter().enumerate() {
            self.planes(what, part)?;
            expect("row length", n_in.into(), part.shape.n_in.into())?;
            (types[index], rows[index]) = (part.weight_type.ggml_id(), part.shape.n_out);
        }
        Ok(Matrices { types, rows, n_in })
    }

    pub(super) fn planes(&self, what: &'static str, matrix: &WeightRef) -> Result<(), RecordError> {
        let (expected, found) = (LayoutId::PLANES, matrix.layout);
        if found == expected {
            return Ok(());
        }
        Err(RecordError::Layout { label: self.label(what), expected, found })
    }

    pub(super) fn feed_forward(&mut self, layer: &LayerWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let tokens = plan.n_tokens;
        let (mid, middle) = match plan.uses_halves() {
            true => {
                let half = arena.ffn_mid_half;
                (half, Input::Half(half, 1.0 / ops::gemm::MIDDLE_SCALE))
            }
            false => (arena.ffn_mid, Input::F32(arena.ffn_mid)),
        };
        let parts = [layer.gate, layer.up];
        for part in parts {
            expect("rows of gate or up", plan.dims.n_ff.into(), part.shape.n_out.into())?;
        }
        let (x, norm) = (arena.hidden_b, layer.ffn_norm);
        let swiglu = plan.activation == Activation::SwiGlu;
        let same_type = layer.gate.weight_type == layer.up.weight_type;
        if swiglu && same_type && self.fuses(&parts, tokens, plan.numerics) {
            self.gemv_norm_swiglu("gate and up", parts, x, norm, mid)?;
        } else {
            let input = self.norm("feed-forward norm", x, norm, tokens, plan.numerics)?;
            self.gemv(
                "gate and up",
                &parts,
                input,
                None,
                Epilogue::Glu(plan.activation),
                mid,
                tokens,
            )?;
        }
        let (residual, out) = (arena.hidden_b, arena.hidden_a);
        let names = ["feed-forward q8", "down projection", "norm after feed-forward"];
        self.add_to_hidden(names, layer.down, middle, layer.post_ffn_norm, residual, out)
    }

    /// `out = residual + w · x`, or with a norm `out = residual + norm(w · x)`. An f32 `x` is brought
    /// into the form that the product reads.
    pub(super) fn add_to_hidden(
        &mut self,
        [quantise, product, add_norm]: [&'static str; 3],
        w: WeightRef,
        x: Input,
        norm: Option<View>,
        residual: View,
        out: View,
    ) -> Result<(), RecordError> {
        let (n_tokens, n, eps) = (self.plan.n_tokens, self.plan.dims.n_embd, self.plan.norm_eps);
        let numerics = self.plan.numerics;
        let input = match x {
            Input::F32(x) if norm.is_none() && self.fuses(&[w], n_tokens, numerics) => {
                return self.gemv_residual(product, w, x, residual, out);
            }
            Input::F32(x) => self.activation(quantise, x, w.shape.n_in)?,
            ready => ready,
        };
        let Some(weight) = norm else {
            let residual = Epilogue::Add(residual);
            return self.gemv(product, &[w], input, None, residual, out, n_tokens);
        };
        // Normed inputs have been read by now, so that their buffer is free.
        let sums = self.arena.normed;
        self.gemv(product, &[w], input, None, Epilogue::Store, sums, n_tokens)?;
        let args = ops::rms_norm_add::Args { x: sums, weight, residual, y: out, n_tokens, n, eps };
        launch!(self, add_norm, Kernel::RmsNormAdd, args);
        Ok(())
    }

    /// Whether a product of these matrices and `n_tokens` vectors takes its input as it comes, and
    /// norms or quantises it itself.
    pub(super) fn fuses(&self, parts: &[WeightRef], n_tokens: u32, numerics: Numerics) -> bool {
        let grouped = parts.iter().all(|part| ops::is_grouped(part.weight_type));
        numerics == Numerics::Q8 && n_tokens == 1 && grouped
    }

    pub(super) fn gemv_norm(
        &mut self,
        what: &'static str,
        parts: &[WeightRef],
        x: View,
        norm: View,
        bias: Option<View>,
        out: View,
    ) -> Result<(), RecordError> {
        let matrices = self.matrices(what, parts)?;
        let numbered = [0, 1, 2].map(|i| (matrices.types[i], matrices.rows[i]));
        let blocks = ops::gemv_norm::blocks(numbered, matrices.n_in, self.device);
        let product = ops::gemv_norm::product(numbered, blocks, matrices.n_in, self.device);
        let args = ops::gemv_norm::Args {
            w0: parts[0].view,
            w1: parts.get(1).map(|w| w.view),
            w2: parts.get(2).map(|w| w.view),
            x,
            norm,
            bias,
            out,
            type0: matrices.types[0],
            type1: matrices.types[1],
            type2: matrices.types[2],
            n_out0: matrices.rows[0],
            n_out1: matrices.rows[1],
            n_out2: matrices.rows[2],
            blocks0: blocks[0],
            blocks1: blocks[1],
            blocks2: blocks[2],
            n_in: matrices.n_in,
            ring_bytes: product.ring_bytes,
            eps: self.plan.norm_eps,
        };
        launch!(self, what, Kernel::GemvNorm, args);
        Ok(())
    }

    fn gemv_norm_swiglu(
        &mut self,
        what: &'static str,
        parts: [WeightRef; 2],
        x: View,
        norm: View,
        out: View,
    ) -> Result<(), RecordError> {
        let Matrices { types, rows, n_in } = self.matrices(what, &parts)?;
        let product = ops::gemv_norm_swiglu::product(types[0], rows[0], n_in, self.device);
        let args = ops::gemv_norm_swiglu::Args {
            gate: parts[0].view,
            up: parts[1].view,
            x,
            norm,
            out,
            ggml_type: types[0],
            n_out: rows[0],
            n_in,
            ring_bytes: product.ring_bytes,
            eps: self.plan.norm_eps,
        };
        launch!(self, what, Kernel::GemvNormSwiglu, args);
        Ok(())
    }

    pub(super) fn gemv_residual(
        &mut self,
        what: &'static str,
        w: WeightRef,
        x: View,
        residual: View,
        out: View,
    ) -> Result<(), RecordError> {
        let (ggml_type, shape) = (w.weight_type.ggml_id(), w.shape);
        let (n_out, n_in) = (shape.n_out, shape.n_in);
        let product = ops::gemv_residual::product(ggml_type, n_out, n_in, self.device);
        let args = ops::gemv_residual::Args {
            w: w.view,
            x,
            residual,
            out,
            ggml_type,
            n_out,
            n_in,
            ring_bytes: product.ring_bytes,
        };
        launch!(self, what, Kernel::GemvResidual, args);
        Ok(())
    }

    /// RMS norm of `x` into the form that the next matrix product, of such numerics, reads.
    pub(super) fn norm(
        &mut self,
        what: &'static str,
        x: View,
        weight: View,
        n_tokens: u32,
        numerics: Numerics,
    ) -> Result<Input, RecordError> {
        let (arena, n, eps) = (self.arena, self.plan.dims.n_embd, self.plan.norm_eps);
        if self.plan.uses_halves() {
            return self.halves(what, x, Some(weight), arena.normed_half, n_tokens, n);
        }
        match numerics {
            Numerics::Exact => {
                let args = ops::rms_norm::Args { x, weight, y: arena.normed, n_tokens, n, eps };
                launch!(self, what, Kernel::RmsNorm, args);
                Ok(Input::F32(arena.normed))
            }
            Numerics::Q8 => {
                let (quants, groups) = (arena.quants, arena.groups);
                let args = ops::rms_norm_q8::Args { x, weight, quants, groups, n_tokens, n, eps };
                launch!(self, what, Kernel::RmsNormQ8, args);
                Ok(Input::Q8)
            }
        }
    }

    /// An f32 buffer in the form that the next matrix product reads.
    fn activation(&mut self, what: &'static str, x: View, n: u32) -> Result<Input, RecordError> {
        if self.plan.numerics == Numerics::Exact {
            return Ok(Input::F32(x));
        }
        if self.plan.uses_halves() {
            let y = self.arena.attention_half;
            return self.halves(what, x, None, y, self.plan.n_tokens, n);
        }
        let (quants, groups) = (self.arena.quants, self.arena.groups);
        let args = ops::quantize_q8::Args { x, quants, groups, n_tokens: self.plan.n_tokens, n };
        launch!(self, what, Kernel::QuantizeQ8, args);
        Ok(Input::Q8)
    }

    /// `x`, normed if there is a weight, as f16.
    pub(super) fn halves(
        &mut self,
        what: &'static str,
        x: View,
        weight: Option<View>,
        y: View,
        n_tokens: u32,
        n: u32,
    ) -> Result<Input, RecordError> {
        let (order, eps) = (half_order(n_tokens) as u32, self.plan.norm_eps);
        let args = ops::rms_norm_f16::Args { x, weight, y, n_tokens, n, order, eps };
        launch!(self, what, Kernel::RmsNormF16, args);
        Ok(Input::Half(y, 1.0))
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn gemv(
        &mut self,
        what: &'static str,
        parts: &[WeightRef],
        input: Input,
        bias: Option<View>,
        epilogue: Epilogue,
        out: View,
        n_tokens: u32,
    ) -> Result<(), RecordError> {
        let Matrices { types, rows, n_in } = self.matrices(what, parts)?;
        let part = |index: usize| parts.get(index);
        let n_rows = match epilogue {
            Epilogue::Glu(_) => rows[0],
            _ => rows.iter().sum(),
        };
        let (store, residual) = match epilogue {
            Epilogue::Add(residual) => (1, Some(residual)),
            Epilogue::Store => (0, None),
            Epilogue::Glu(Activation::SwiGlu) => (2, None),
            Epilogue::Glu(Activation::GeGlu) => (3, None),
        };
        /// The operations differ in their input only.
        macro_rules! gemv {
            ($op:ident, $kernels:expr, { $($input:tt)* }) => {{
                let args = ops::$op::Args {
                    w0: parts[0].view,
                    w1: part(1).map(|w| w.view),
                    w2: part(2).map(|w| w.view),
                    $($input)*
                    bias,
                    residual,
                    out,
                    type0: types[0],
                    type1: types[1],
                    type2: types[2],
                    n_out0: rows[0],
                    n_out1: rows[1],
                    n_out2: rows[2],
                    n_rows,
                    n_in,
                    n_tokens,
                };
                launch!(self, what, $kernels[store], args);
            }};
        }
        match input {
            Input::Q8 => {
                let kernels = [
                    Kernel::GemvQ8Store,
                    Kernel::GemvQ8Add,
                    Kernel::GemvQ8Swiglu,
                    Kernel::GemvQ8Geglu,
                ];
                gemv!(gemv_q8, kernels, {
                    quants: self.arena.quants,
                    groups: self.arena.groups,
                });
            }
            Input::Half(x, x_scale) => {
                let form = match epilogue {
                    Epilogue::Store => GemmForm::Store,
                    Epilogue::Add(_) => GemmForm::Add,
                    Epilogue::Glu(Activation::SwiGlu) => GemmForm::Swiglu,
                    Epilogue::Glu(Activation::GeGlu) => GemmForm::Geglu,
                };
                let tile_rows =
                    ops::gemm_skinny::tile_rows(rows, n_in, n_tokens, form, self.device);
                /// The operations differ in the order of x, and one wants to know its tiles.
                macro_rules! gemm {
                    ($op:ident, $kernel:expr $(, $tile_rows:ident)?) => {{
                        let args = ops::$op::Args {
                            w0: parts[0].view,
                            w1: part(1).map(|w| w.view),
                            w2: part(2).map(|w| w.view),
                            x,
                            bias,
                            residual,
                            out,
                            type0: types[0],
                            type1: types[1],
                            type2: types[2],
                            n_out0: rows[0],
                            n_out1: rows[1],
                            n_out2: rows[2],
                            n_in,
                            n_tokens,
                            form: form as u32,
                            $($tile_rows,)?
                            x_scale,
                        };
                        launch!(self, what, $kernel, args);
                    }};
                }
                match n_tokens {
                    0..=8 => gemm!(gemm_skinny, Kernel::GemmSkinny8, tile_rows),
                    9..=32 => gemm!(gemm_skinny, Kernel::GemmSkinny32, tile_rows),
                    _ => gemm!(gemm_tiled, Kernel::GemmTiled),
                }
            }
            Input::F32(x) => {
                let kernels = [
                    Kernel::GemvF32Store,
                    Kernel::GemvF32Add,
                    Kernel::GemvF32Swiglu,
                    Kernel::GemvF32Geglu,
                ];
                gemv!(gemv_f32, kernels, { x, });
            }
        }
        Ok(())
    }
}
