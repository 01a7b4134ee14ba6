//! RMS norm, the logits of its result, the likeliest token, and the input of the next step: what
//! [`super::gemv_norm`] and [`super::argmax`] do one after the other.

use super::argmax::{argmax, expect_idle, next_step};
use super::gemv_q8::{Epilogue, Form};
use super::gemv_residual::product;
use super::matrix::{Parts, Q8Vector, expect_grouped, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// The output matrix, of a type whose weights come in groups.
        read w: u8 [packed_bytes(ggml_type, n_vocab, n_in)],
        /// `[n_in]`.
        read x: f32 [n_in],
        /// `[n_in]`, the norm's weights.
        read norm: f32 [n_in],
        /// `[n_vocab]`.
        write logits: f32 [n_vocab],
        /// The best candidate so far as a 64-bit key; 0 before and after.
        update best: u32 [2],
        /// Blocks that are done; 0 before and after.
        update arrivals: u32 [1],
        /// The token.
        write token: u32 [1],
        /// [`crate::TokenParams`] of the step, then those of the next.
        update tokens: u32 [3],
        /// Steps made.
        update step_count: u32 [1],
    }
    scalars {
        /// GGUF type of the matrix.
        ggml_type: u32,
        /// Rows.
        n_vocab: u32,
        /// Input length.
        n_in: u32,
        /// See [`super::gemv_residual::product`].
        ring_bytes: u32,
        /// Slots of the ring.
        max_context_tokens: u32,
        /// Added to the mean square.
        eps: f32,
    }
}

impl<B> Args<B> {
    /// Blocks share the rows.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        product(self.ggml_type, self.n_vocab, self.n_in, device).geometry()
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    expect_grouped(kernel, "ggml_type", a.ggml_type)?;
    expect_idle(a.best, a.arrivals);
    let matrix = (Some(a.w), a.ggml_type, a.n_vocab);
    let parts = Parts::bind(kernel, [matrix, (None, 0, 0), (None, 0, 0)], a.n_in)?;
    let q8 = Q8Vector::of_norm(a.x, a.norm, a.eps);
    let x = q8.arranged();
    let epilogue = Epilogue { form: Form::Store, bias: None, n_rows: a.n_vocab };
    epilogue.run(a.logits, a.n_in, |_, rows, out| {
        parts.rows_dot_q8(rows, &x, out);
    });
    a.token[0] = argmax(a.logits);
    next_step(a.token[0], a.tokens, a.step_count, a.max_context_tokens);
    Ok(())
}
