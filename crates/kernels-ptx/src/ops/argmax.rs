//! The likeliest token of each output of a step, and the input of the next step from it: position
//! and slot of its row move on by one, the slot around the ring, and `step_count` counts. Equal
//! logits: the lower id. NaN counts as −∞. Of an output without a row nothing is written.

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_outputs][n_vocab]`.
        read logits: f32 [n_outputs * n_vocab],
        /// The row of each output; one that is no row: none.
        read outputs: u32 [n_outputs],
        /// The best candidate so far of each output as a 64-bit key; 0 before and after.
        update best: u32 [n_outputs * 2],
        /// Blocks that are done with each output; 0 before and after.
        update arrivals: u32 [n_outputs],
        /// The token of each output.
        update token: u32 [n_outputs],
        /// [`crate::TokenParams`] of each row, those of outputs then those of the next step.
        update tokens: u32 [n_tokens * 3],
        /// Steps that each output made.
        update step_count: u32 [n_outputs],
    }
    scalars {
        /// Length of the logits.
        n_vocab: u32,
        /// Rows of the step.
        n_tokens: u32,
        /// Outputs.
        n_outputs: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
    }
}

impl<B> Args<B> {
    /// Blocks of 256 threads with four logits each, all outputs' together at most as many as there is
    /// room for: eight for each SM.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        let most = (8 * device.sm_count / self.n_outputs.max(1)).max(1);
        let blocks = self.n_vocab.div_ceil(1024).clamp(1, most);
        Geometry::grid([blocks, self.n_outputs, 1]).threads(256)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    expect_idle(a.best, a.arrivals);
    let ends = Ends {
        outputs: a.outputs,
        token: a.token,
        tokens: a.tokens,
        step_count: a.step_count,
        max_context_tokens: a.max_context_tokens,
    };
    ends.choose(a.logits, |_, _, logits| argmax(logits));
    Ok(())
}

/// The ends of a step: what is known of each output.
pub(super) struct Ends<'a> {
    pub(super) outputs: &'a [u32],
    pub(super) token: &'a mut [u32],
    pub(super) tokens: &'a mut [u32],
    pub(super) step_count: &'a mut [u32],
    pub(super) max_context_tokens: u32,
}

impl Ends<'_> {
    /// Chooses a token for each output that has a row, by its number, its row's position and its
    /// logits, and makes it the row's next input.
    pub(super) fn choose(self, logits: &[f32], choice: impl Fn(usize, u32, &[f32]) -> u32) {
        let per_output = logits.len() / self.outputs.len().max(1);
        for (i, &row) in self.outputs.iter().enumerate() {
            let first = (row as usize).saturating_mul(3);
            let Some(params) = self.tokens.get_mut(first..first.saturating_add(3)) else {
                continue;
            };
            let logits = &logits[i * per_output..][..per_output];
            self.token[i] = choice(i, params[0], logits);
            let steps = &mut self.step_count[i..i + 1];
            next_step(self.token[i], params, steps, self.max_context_tokens);
        }
    }
}

/// What blocks tell each other is as the last launch left it.
pub(super) fn expect_idle(best: &[u32], arrivals: &[u32]) {
    debug_assert!(best.iter().chain(arrivals).all(|&word| word == 0), "{best:?} {arrivals:?}");
}

/// The best candidate's token; 0 if there is none.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    // First the best of all that come to lie in the same lane of a register, then of the lanes.
    let (rows, rest) = logits.as_chunks::<8>();
    let mut lanes = [f32::NEG_INFINITY; 8];
    for row in rows {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            // False for NaN.
            if value > *lane {
                *lane = value;
            }
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &value| max.max(value));
    let first = logits.iter().position(|&value| value == max || (max == f32::NEG_INFINITY));
    first.unwrap_or(0) as u32
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
