//! The likeliest token, and the input of the next step from it: position and slot move on by one,
//! the slot around the ring, and `step_count` counts. Equal logits: the lower id. NaN counts as −∞.

use crate::Candidate;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_vocab]`.
        read logits: f32 [n_vocab],
        /// The best candidate so far as a 64-bit key; 0 before and after.
        update best: u32 [2],
        /// Blocks that are done; 0 before and after.
        update arrivals: u32 [1],
        /// The token.
        write token: u32 [1],
        /// [`crate::TokenParams`] of the token whose logits these are, then those of the next.
        update tokens: u32 [3],
        /// Steps made.
        update step_count: u32 [1],
    }
    scalars {
        /// Length of the logits.
        n_vocab: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
    }
}

impl<B> Args<B> {
    /// Blocks of 256 threads with four logits each, at most two for each SM.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        let blocks = self.n_vocab.div_ceil(1024).clamp(1, 2 * device.sm_count);
        Geometry::grid([blocks, 1, 1]).threads(256)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    expect_idle(a.best, a.arrivals);
    a.token[0] = argmax(a.logits);
    next_step(a.token[0], a.tokens, a.step_count, a.max_context_tokens);
    Ok(())
}

/// What blocks tell each other is as the last launch left it.
pub(super) fn expect_idle(best: &[u32], arrivals: &[u32]) {
    debug_assert!(best.iter().chain(arrivals).all(|&word| word == 0), "{best:?} {arrivals:?}");
}

/// The best candidate's token; 0 if there is none.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    let candidates = logits.iter().zip(0..).map(|(&value, index)| Candidate { value, index });
    let best = candidates.reduce(|a, b| if b.beats(a) { b } else { a });
    best.map_or(0, |best| best.index)
}

/// Makes the chosen token the input of the next step.
pub(super) fn next_step(
    token: u32,
    tokens: &mut [u32],
    step_count: &mut [u32],
    max_context_tokens: u32,
) {
    tokens[0] = tokens[0].wrapping_add(1);
    tokens[1] = (tokens[1] + 1) % max_context_tokens;
    tokens[2] = token;
    step_count[0] = step_count[0].wrapping_add(1);
}
