//! Makes the chosen token the input of the next step: position and slot move on by one, the
//! slot around the ring; `step_count` counts the replays.

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// The token chosen.
        read token: u32 [1],
        /// [`crate::TokenParams`] of the step.
        update tokens: u32 [3],
        /// Steps made.
        update step_count: u32 [1],
    }
    scalars {
        /// Slots of the ring.
        max_context_tokens: u32,
    }
}

impl<B> Args<B> {
    /// One thread.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([1, 1, 1]).threads(1)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    a.tokens[0] = a.tokens[0].wrapping_add(1);
    a.tokens[1] = (a.tokens[1] + 1) % a.max_context_tokens;
    a.tokens[2] = a.token[0];
    a.step_count[0] = a.step_count[0].wrapping_add(1);
    Ok(())
}
