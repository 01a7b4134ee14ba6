//! Matrices × few f16 vectors, at most 8 or at most 32: a batch of sequences. Weights are read once
//! whatever the number of vectors. See [`super::gemm`].

use half::f16;

use super::gemm::{Gemm, GemmForm, is_gated, out_bytes, residual_elems};
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
        /// Rows that a warp works on: what [`tile_rows`] says.
        tile_rows: u32,
        /// Factor on x.
        x_scale: f32,
    }
}

/// Rows that a warp works on, 16 or 24: with which of them the product takes less.
pub fn tile_rows(
    n_out: [u32; 3],
    n_in: u32,
    n_tokens: u32,
    form: GemmForm,
    device: &DeviceProfile,
) -> u32 {
    let cost = |rows| Tiling::of(rows, n_out, n_in, n_tokens, form as u32, device).cost;
    if cost(24) < cost(16) { 24 } else { 16 }
}

/// What the warps of a block do: `sides` of them have rows of their own, and as many as that leaves
/// share the columns.
struct Tiling {
    blocks: u32,
    warps: u32,
    sides: u32,
    /// Of the multiprocessor that has most to do; a row of 128 columns is 1 for each warp.
    cost: u64,
}

impl Tiling {
    /// The cheapest with tiles of so many rows. More tiles abreast read inputs less often, and leave
    /// each warp more columns, over which it fetches ahead.
    fn of(
        rows: u32,
        n_out: [u32; 3],
        n_in: u32,
        n_tokens: u32,
        form: u32,
        device: &DeviceProfile,
    ) -> Self {
        // The rows of two matrices lie abreast; the second has as many.
        let (matrices, n_out) = if is_gated(form) { (2, &n_out[..1]) } else { (1, &n_out[..]) };
        let (columns, sms) = (n_in.div_ceil(128), device.sm_count.max(1));
        let with = |abreast: u32| {
            let blocks: u32 = n_out.iter().map(|n| n.div_ceil(rows * abreast)).sum();
            // There are registers for 16 warps: in one block where none has to wait for another.
            let one_each = blocks <= sms && device.compute_capability >= 90;
            let (warps, sides) = (if one_each { 16 } else { 8 }, matrices * abreast);
            let k_warps = (warps / sides).max(1);
            // With 16 rows it is 256 columns at a time.
            let at_once = if rows == 16 { 2 } else { 1 };
            let turns = columns.div_ceil(at_once).div_ceil(k_warps) * at_once;
            // Measured on an H200: beside its rows a turn costs as much as 2, a block's beginning and
            // end as 24, and reading 32 tokens as 16 rows of one warp, 8 tokens as 4.
            let work = warps * (turns * (rows + 2) + 24);
            let inputs = columns * if n_tokens > 8 { 16 } else { 4 };
            let cost = u64::from(work + inputs) * u64::from(blocks.div_ceil(sms));
            Self { blocks, warps, sides, cost }
        };
        let fitting = [1, 2, 4, 8].map(with).into_iter().filter(|t| t.sides <= t.warps);
        fitting.min_by_key(|tiling| tiling.cost).expect("one tile of each matrix fits")
    }
}

impl<B> Args<B> {
    /// The tiling that costs the fewest clocks on the device, by a rule that was measured on an H200.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        let n_out = [self.n_out0, self.n_out1, self.n_out2];
        let rows = self.tile_rows;
        let Tiling { blocks, warps, sides, .. } =
            Tiling::of(rows, n_out, self.n_in, self.n_tokens, self.form, device);
        let columns = if self.n_tokens <= 8 { 8 } else { 32 };
        Geometry {
            grid: [blocks.max(1), 1, 1],
            block: [32 * warps / sides, sides, 1],
            // A sum per warp, token and row, rows apart so that banks are.
            shared_bytes: warps * columns * (rows + 1) * 4,
            cooperative: false,
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
    if ![16, 24].contains(&a.tile_rows) {
        let (kernel, value) = (kernel.name(), a.tile_rows.into());
        return Err(ParamError::Value { kernel, param: "tile_rows", value, reason: "is 16 or 24" });
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
