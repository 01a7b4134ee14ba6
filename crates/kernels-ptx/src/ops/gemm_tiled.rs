//! Matrices × many f16 vectors: a chunk of a prompt. See [`super::gemm`].

use half::f16;

use super::gemm::{Gemm, is_gated, out_bytes, residual_elems};
use super::half_rows::{HalfOrder, half_elems};
use super::matrix::{Parts, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// First matrix (the gate).
        read w0: u8 [packed_bytes(type0, n_out0, n_in)],
        /// Second matrix (up), if any.
        maybe w1: u8 [packed_bytes(type1, n_out1, n_in)],
        /// Third matrix, if any.
        maybe w2: u8 [packed_bytes(type2, n_out2, n_in)],
        /// `[n_tokens][n_in]` in row order.
        read x: f16 [half_elems(0, n_tokens, n_in)],
        /// One value per row of all matrices.
        maybe bias: f32 [n_out0 + n_out1 + n_out2],
        /// Of the add form.
        maybe residual: f32 [residual_elems(form, n_tokens, [n_out0, n_out1, n_out2])],
        /// f32 `[n_tokens][rows]`; for the gated forms f16 `[n_tokens][n_out0]` in row order.
        update out: u8 [out_bytes(form, 0, n_tokens, [n_out0, n_out1, n_out2])],
    }
    scalars {
        /// GGUF type of the first matrix.
        type0: u32,
        /// GGUF type of the second.
        type1: u32,
        /// GGUF type of the third.
        type2: u32,
        /// Rows of the first.
        n_out0: u32,
        /// Rows of the second, 0 if there is none.
        n_out1: u32,
        /// Rows of the third, 0 if there is none.
        n_out2: u32,
        /// Input length.
        n_in: u32,
        /// Tokens of the step.
        n_tokens: u32,
        /// [`super::GemmForm`].
        form: u32,
        /// Factor on x.
        x_scale: f32,
    }
}

impl<B> Args<B> {
    /// A block per 128 rows (of the gated forms, 64 of each matrix) and 128 tokens.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        let tiles = match is_gated(self.form) {
            true => self.n_out0.div_ceil(TILE / 2),
            false => [self.n_out0, self.n_out1, self.n_out2].iter().map(|n| n.div_ceil(TILE)).sum(),
        };
        Geometry {
            grid: [self.n_tokens.div_ceil(TILE).max(1), tiles.max(1), 1],
            block: [256, 1, 1],
            // Two stages of weights and three of tokens, 64 columns of f16 each.
            shared_bytes: 5 * TILE * 64 * 2,
            cooperative: false,
        }
    }
}

/// Rows and tokens that a block works on.
const TILE: u32 = 128;

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    super::gemm::expect_eights(kernel, "n_in", a.n_in)?;
    let parts = Parts::bind(
        kernel,
        [(Some(a.w0), a.type0, a.n_out0), (a.w1, a.type1, a.n_out1), (a.w2, a.type2, a.n_out2)],
        a.n_in,
    )?;
    Gemm {
        parts,
        x: a.x,
        bias: a.bias,
        residual: a.residual,
        out: a.out,
        n_out: [a.n_out0, a.n_out1, a.n_out2],
        n_in: a.n_in,
        n_tokens: a.n_tokens,
        form: a.form,
        order: HalfOrder::Rows as u32,
        x_scale: a.x_scale,
    }
    .run(kernel)
}
