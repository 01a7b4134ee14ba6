//! Matrices × few f16 vectors, at most 8 or at most 32: a batch of sequences. Weights are read once
//! whatever the number of vectors. See [`super::gemm`].

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
        /// `[n_tokens][n_in]` in fragment order.
        read x: f16 [half_elems(1, n_tokens, n_in)],
        /// One value per row of all matrices.
        maybe bias: f32 [n_out0 + n_out1 + n_out2],
        /// Of the add form.
        maybe residual: f32 [residual_elems(form, n_tokens, [n_out0, n_out1, n_out2])],
        /// f32 `[n_tokens][rows]`; for the gated forms f16 `[n_tokens][n_out0]` in fragment order.
        update out: u8 [out_bytes(form, 1, n_tokens, [n_out0, n_out1, n_out2])],
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
    /// A block per tile of rows, or per two where there are enough of them to go round; its warps
    /// share the columns.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        let Tile { rows, warps, columns } = Tile::of(self.n_tokens);
        let tiles = |rows: u32| -> u32 {
            [self.n_out0, self.n_out1, self.n_out2].iter().map(|n| n.div_ceil(rows)).sum()
        };
        let (blocks, sides) = match is_gated(self.form) {
            true => (self.n_out0.div_ceil(rows), 2),
            false if tiles(2 * rows) >= 4 * device.sm_count => (tiles(2 * rows), 2),
            false => (tiles(rows), 1),
        };
        Geometry {
            grid: [blocks.max(1), 1, 1],
            block: [32 * warps / sides, sides, 1],
            // A sum per warp, token and row, rows apart so that banks are.
            shared_bytes: warps * columns * (rows + 1) * 4,
            cooperative: false,
        }
    }
}

/// What a warp works on, and how many of them a block has.
struct Tile {
    rows: u32,
    warps: u32,
    columns: u32,
}

impl Tile {
    /// Of the kernel for so many tokens. Registers decide: with 80 each there is room for 24 warps
    /// an SM, and with 168, for 12 warps, some types spill on sm_80.
    fn of(n_tokens: u32) -> Self {
        match n_tokens {
            0..=8 => Self { rows: 16, warps: 8, columns: 8 },
            _ => Self { rows: 32, warps: 8, columns: 32 },
        }
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let most = if kernel == Kernel::GemmSkinny8 { 8 } else { HalfOrder::MAX_FRAGMENT_ROWS };
    if a.n_tokens > most || (most > 8 && a.n_tokens <= 8) {
        let (kernel, value) = (kernel.name(), a.n_tokens.into());
        let reason = "must be at most 8, or 9 to 32 for the kernel of so many";
        return Err(ParamError::Value { kernel, param: "n_tokens", value, reason });
    }
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
        order: HalfOrder::Fragments as u32,
        x_scale: a.x_scale,
    }
    .run(kernel)
}
