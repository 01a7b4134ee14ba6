//! A matrix times one vector, which is quantised to q8 first, added to a residual:
//! `out = residual + w · x`.

use super::gemv_q8::{Epilogue, Form};
use super::matrix::{Parts, Q8Vector, expect_grouped, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry, VectorProduct};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// The matrix, of a type whose weights come in groups.
        read w: u8 [packed_bytes(ggml_type, n_out, n_in)],
        /// `[n_in]`.
        read x: f32 [n_in],
        /// `[n_out]`.
        read residual: f32 [n_out],
        /// `[n_out]`.
        write out: f32 [n_out],
    }
    scalars {
        /// GGUF type of the matrix.
        ggml_type: u32,
        /// Rows.
        n_out: u32,
        /// Input length.
        n_in: u32,
        /// See [`product`].
        ring_bytes: u32,
    }
}

impl<B> Args<B> {
    /// Blocks share the rows.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        product(self.ggml_type, self.n_out, self.n_in, device).geometry()
    }
}

/// How a matrix `[n_out, n_in]` is shared out.
pub fn product(ggml_type: u32, n_out: u32, n_in: u32, device: &DeviceProfile) -> VectorProduct {
    let blocks = VectorProduct::blocks(n_out, device);
    VectorProduct::new(n_in, &[ggml_type], 1, blocks, n_out.div_ceil(blocks), device)
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    expect_grouped(kernel, "ggml_type", a.ggml_type)?;
    let matrix = (Some(a.w), a.ggml_type, a.n_out);
    let parts = Parts::bind(kernel, [matrix, (None, 0, 0), (None, 0, 0)], a.n_in)?;
    let q8 = Q8Vector::of(a.x);
    let x = q8.arranged();
    let epilogue = Epilogue { form: Form::Add(a.residual), bias: None, n_rows: a.n_out };
    epilogue.run(a.out, a.n_in, |_, rows, out| parts.rows_dot_q8(rows, &x, out));
    Ok(())
}
