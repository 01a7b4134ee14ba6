//! The token of the best slice.

use crate::Candidate;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_slices]`.
        read best: Candidate [n_slices],
        /// The token.
        write token: u32 [1],
    }
    scalars {
        /// Slices.
        n_slices: u32,
    }
}

impl<B> Args<B> {
    /// One warp.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([1, 1, 1]).threads(32)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let best = a.best.iter().copied().reduce(|a, b| if b.beats(a) { b } else { a });
    a.token[0] = best.map_or(0, |best| best.index);
    Ok(())
}
