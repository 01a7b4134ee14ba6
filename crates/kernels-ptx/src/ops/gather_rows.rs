//! `y[i] = row rows[i] of x`: the rows of a step that have outputs, one after the other. A row that
//! is none of `x` reads the last one: nobody reads its result.

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n]`.
        read x: f32 [n_tokens * n],
        /// `[n_rows]`.
        read rows: u32 [n_rows],
        /// `[n_rows][n]`.
        write y: f32 [n_rows * n],
    }
    scalars {
        /// Rows of `x`.
        n_tokens: u32,
        /// Rows gathered.
        n_rows: u32,
        /// Elements of a row.
        n: u32,
    }
}

impl<B> Args<B> {
    /// One block per row.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::token_rows(self.n_rows, self.n)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let n = a.n as usize;
    for (&row, y) in a.rows.iter().zip(a.y.chunks_exact_mut(n)) {
        let row = row.min(a.n_tokens - 1) as usize;
        y.copy_from_slice(&a.x[row * n..][..n]);
    }
    Ok(())
}
