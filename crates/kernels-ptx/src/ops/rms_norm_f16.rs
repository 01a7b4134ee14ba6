//! `y = x / √(mean(x²) + eps) · weight`, per token, as f16; what f16 cannot hold becomes its largest
//! number. Without a weight `y = x`.

use half::f16;

use super::half_rows::{HalfRows, half_elems};
use super::rms_norm::inverse_rms;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n]`.
        read x: f32 [n_tokens * n],
        /// `[n]`, or null: `x` is only converted.
        maybe weight: f32 [n],
        /// `[n_tokens][n]` in `order`; what it has beyond rows and columns stays.
        update y: f16 [half_elems(order, n_tokens, n)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Elements per token, a multiple of 8.
        n: u32,
        /// [`super::HalfOrder`].
        order: u32,
        /// Added to the mean square.
        eps: f32,
    }
}

impl<B> Args<B> {
    /// One block per token, a thread per eight elements.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        let threads = self.n.div_ceil(8).next_multiple_of(32).clamp(32, 1024);
        Geometry::grid([self.n_tokens, 1, 1]).threads(threads)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    super::gemm::expect_eights(kernel, "n", a.n)?;
    let place = HalfRows::new(a.order, a.n_tokens, a.n);
    let mut y = vec![0.0; a.n as usize];
    for (token, x) in a.x.chunks_exact(a.n as usize).enumerate() {
        y.copy_from_slice(x);
        if let Some(weight) = a.weight {
            let inverse = inverse_rms(x, a.eps);
            y.iter_mut().zip(weight).for_each(|(y, weight)| *y = *y * inverse * weight);
        }
        place.put(token, &y, a.y);
    }
    Ok(())
}
