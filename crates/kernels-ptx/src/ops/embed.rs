//! `x[t] = scale · row token_id[t] of the embedding matrix`, dequantised.
//!
//! A token id beyond the vocabulary reads the last row: a kernel must not read elsewhere, and
//! the caller has refused such an id before.

use super::matrix::{bind_matrix, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// Packed embedding matrix `[n_vocab, n_embd]`.
        read table: u8 [packed_bytes(ggml_type, n_vocab, n_embd)],
        /// [`crate::TokenParams`] of each token.
        read tokens: u32 [n_tokens * 3],
        /// `[n_tokens][n_embd]`.
        write x: f32 [n_tokens * n_embd],
    }
    scalars {
        /// GGUF type of the matrix.
        ggml_type: u32,
        /// Tokens of the step.
        n_tokens: u32,
        /// Rows of the matrix.
        n_vocab: u32,
        /// Row length.
        n_embd: u32,
        /// Factor on the row (1, or √n_embd where the architecture says so).
        scale: f32,
    }
}

impl<B> Args<B> {
    /// One warp per 1024 elements of a token's row.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_embd.div_ceil(1024), self.n_tokens, 1]).threads(32)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let matrix = bind_matrix(kernel, "table", a.table, a.ggml_type, a.n_vocab, a.n_embd)?;
    for (params, x) in a.tokens.chunks_exact(3).zip(a.x.chunks_exact_mut(a.n_embd as usize)) {
        matrix.dequantize_row(params[2].min(a.n_vocab - 1), x);
        x.iter_mut().for_each(|x| *x *= a.scale);
    }
    Ok(())
}
