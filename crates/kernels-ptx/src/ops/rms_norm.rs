//! `y = x / √(mean(x²) + eps) · weight`, per token.

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

/// `1 / √(mean(x²) + eps)`, the sum in f64.
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let sum: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let n = a.n as usize;
    for (x, y) in a.x.chunks_exact(n).zip(a.y.chunks_exact_mut(n)) {
        let inverse = inverse_rms(x, a.eps);
        for ((y, x), weight) in y.iter_mut().zip(x).zip(a.weight) {
            *y = x * inverse * weight;
        }
    }
    Ok(())
}
