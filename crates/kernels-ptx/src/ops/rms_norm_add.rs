//! `y = residual + x / √(mean(x²) + eps) · weight`, per token: a norm of what is added to the
//! hidden state.

use super::rms_norm::inverse_rms;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n]`.
        read x: f32 [n_tokens * n],
        /// `[n]`.
        read weight: f32 [n],
        /// `[n_tokens][n]`.
        read residual: f32 [n_tokens * n],
        /// `[n_tokens][n]`.
        write y: f32 [n_tokens * n],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Elements per token.
        n: u32,
        /// Added to the mean square.
        eps: f32,
    }
}

impl<B> Args<B> {
    /// One block per token.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::token_rows(self.n_tokens, self.n)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let n = a.n as usize;
    let rows = a.x.chunks_exact(n).zip(a.residual.chunks_exact(n));
    for ((x, residual), y) in rows.zip(a.y.chunks_exact_mut(n)) {
        let inverse = inverse_rms(x, a.eps);
        for (i, y) in y.iter_mut().enumerate() {
            *y = residual[i] + x[i] * inverse * a.weight[i];
        }
    }
    Ok(())
}
