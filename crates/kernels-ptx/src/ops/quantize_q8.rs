//! f32 activations to q8: i8 with one f32 scale per 32, see [`q4k_soa::quantize_q8`].

use q4k_soa::Q8Group;

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n]`.
        read x: f32 [n_tokens * n],
        /// `[n_tokens][n]`.
        write quants: i8 [n_tokens * n],
        /// `[n_tokens][n / 32]`.
        write groups: Q8Group [n_tokens * (n / 32)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Elements per token, a multiple of 32.
        n: u32,
    }
}

impl<B> Args<B> {
    /// One thread per four elements.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n.div_ceil(1024), self.n_tokens, 1]).threads(256)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    q4k_soa::quantize_q8(a.x, a.quants, a.groups);
    Ok(())
}
