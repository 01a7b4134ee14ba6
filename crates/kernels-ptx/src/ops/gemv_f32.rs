//! Matrix × f32 activations over dequantised weights: the exact numerics. The forms are those
//! of [`super::gemv_q8`].

use q4k_soa::ArrangedF32;

use super::gemv_q8::{Epilogue, Form};
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
        /// `[n_tokens][n_in]`.
        read x: f32 [n_tokens * n_in],
        /// One value per row of all matrices.
        maybe bias: f32 [n_out0 + n_out1 + n_out2],
        /// Of the add form.
        maybe residual: f32 [n_tokens * (n_out0 + n_out1 + n_out2)],
        /// `[n_tokens][rows]`; for the SwiGLU form rows are those of one matrix.
        write out: f32 [n_tokens * n_rows],
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
        /// Rows of the output.
        n_rows: u32,
        /// Input length.
        n_in: u32,
        /// Tokens of the step.
        n_tokens: u32,
    }
}

impl<B> Args<B> {
    /// Warps stride over the rows.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        Geometry::rows(self.n_rows, device)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let parts = Parts::bind(
        kernel,
        [(Some(a.w0), a.type0, a.n_out0), (a.w1, a.type1, a.n_out1), (a.w2, a.type2, a.n_out2)],
        a.n_in,
    )?;
    let n_in = a.n_in as usize;
    let form = Form::of(kernel, a.residual)?;
    let epilogue = Epilogue { form, bias: a.bias, n_rows: a.n_rows };
    let x: Vec<_> = a.x.chunks_exact(n_in).map(ArrangedF32::new).collect();
    epilogue.run(a.out, a.n_in, |token, rows, out| {
        parts.for_rows(rows, |matrix, rows, at| {
            let len = rows.len();
            x[token].rows_dot(matrix, rows, &mut out[at..at + len]);
        });
    });
    Ok(())
}
