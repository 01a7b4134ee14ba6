//! Matrix × q8 activations, for up to three matrices that share their input.
//!
//! With y = the rows of `w0`, `w1`, `w2` one after the other times x, plus `bias`:
//! * `gemv_q8_store`: `out = y`
//! * `gemv_q8_add`: `out = residual + y`
//! * `gemv_q8_swiglu`: `out = silu(y of w0) · (y of w1)`, `silu(z) = z / (1 + e^−z)`
//! * `gemv_q8_geglu`: `out = gelu(y of w0) · (y of w1)`,
//!   `gelu(z) = z / 2 · (1 + tanh(√(2/π) · (z + 0.044715 z³)))`
//!
//! Dot products of integers are exact, see [`q4k_soa::rows_dot_q8`].

use q4k_soa::{ArrangedQ8, Q8Group};

use super::matrix::{Parts, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// First matrix (the gate).
        read w0: u8 [packed_bytes(type0, n_out0, n_in)],
        /// Second matrix (up), if any.
        maybe w1: u8 [packed_bytes(type1, n_out1, n_in)],
        /// Third matrix, if any.
        maybe w2: u8 [packed_bytes(type2, n_out2, n_in)],
        /// `[n_tokens][n_in]`.
        read quants: i8 [n_tokens * n_in],
        /// `[n_tokens][n_in / 32]`.
        read groups: Q8Group [n_tokens * (n_in / 32)],
        /// One value per row of all matrices.
        maybe bias: f32 [n_out0 + n_out1 + n_out2],
        /// Of the add form.
        maybe residual: f32 [n_tokens * (n_out0 + n_out1 + n_out2)],
        /// `[n_tokens][rows]`; for the gated forms rows are those of one matrix.
        write out: f32 [n_tokens * n_rows],
    }
    scalars {
        /// GGUF type of the first matrix.
        type0: u32,
        /// GGUF type of the second.
        type1: u32,
        /// GGUF type of the third.
        type2: u32,
        /// Rows of the first.
        n_out0: u32,
        /// Rows of the second, 0 if there is none.
        n_out1: u32,
        /// Rows of the third, 0 if there is none.
        n_out2: u32,
        /// Rows of the output.
        n_rows: u32,
        /// Input length.
        n_in: u32,
        /// Tokens of the step.
        n_tokens: u32,
    }
}

impl<B> Args<B> {
    /// Warps stride over the rows.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        Geometry::rows(self.n_rows, device)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let parts = Parts::bind(
        kernel,
        [(Some(a.w0), a.type0, a.n_out0), (a.w1, a.type1, a.n_out1), (a.w2, a.type2, a.n_out2)],
        a.n_in,
    )?;
    let n_in = a.n_in as usize;
    let form = Form::of(kernel, a.residual)?;
    let epilogue = Epilogue { form, bias: a.bias, n_rows: a.n_rows };
    let tokens = a.quants.chunks_exact(n_in).zip(a.groups.chunks_exact(n_in / 32));
    let x: Vec<_> = tokens.map(|(quants, groups)| ArrangedQ8::new(quants, groups)).collect();
    epilogue.run(a.out, a.n_in, |token, rows, out| parts.rows_dot_q8(rows, &x[token], out));
    Ok(())
}

/// What is done with the sums.
#[derive(Clone, Copy)]
pub(super) enum Form<'a> {
    Store,
    /// `[n_tokens][n_rows]`.
    Add(&'a [f32]),
    Swiglu,
    Geglu,
}

impl<'a> Form<'a> {
    /// That of a kernel that works for several tokens.
    pub(super) fn of(kernel: Kernel, residual: Option<&'a [f32]>) -> Result<Self, ParamError> {
        match (kernel, residual) {
            (Kernel::GemvQ8Add | Kernel::GemvF32Add, Some(residual)) => Ok(Form::Add(residual)),
            (Kernel::GemvQ8Swiglu | Kernel::GemvF32Swiglu, None) => Ok(Form::Swiglu),
            (Kernel::GemvQ8Geglu | Kernel::GemvF32Geglu, None) => Ok(Form::Geglu),
            (Kernel::GemvQ8Store | Kernel::GemvF32Store, None) => Ok(Form::Store),
            _ => Err(ParamError::Mismatch { kernel: kernel.name(), param: "residual" }),
        }
    }
}

/// By the hyperbolic tangent.
fn gelu(z: f32) -> f32 {
    // The root of 2 / π.
    let inner = 0.797_884_6 * (z + 0.044_715 * z * z * z);
    0.5 * z * (1.0 + inner.tanh())
}

/// What the GEMV operations do with a row's sum.
pub(super) struct Epilogue<'a> {
    pub(super) form: Form<'a>,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) n_rows: u32,
}

impl Epilogue<'_> {
    /// Computes `out` in parallel; `dot(token, rows, sums)` gives the bare sums.
    pub(super) fn run(
        &self,
        out: &mut [f32],
        n_in: u32,
        dot: impl Fn(usize, std::ops::Range<u32>, &mut [f32]) + Sync,
    ) {
        use rayon::prelude::*;

        let n_rows = self.n_rows as usize;
        let per_task = super::matrix::rows_per_task(self.n_rows, n_in);
        let task = |token: usize, first: usize, out: &mut [f32]| {
            let rows = first as u32..(first + out.len()) as u32;
            dot(token, rows.clone(), out);
            self.add_bias(first, out);
            match self.form {
                Form::Store => {}
                Form::Add(residual) => {
                    let residual = &residual[token * n_rows + first..];
                    out.iter_mut().zip(residual).for_each(|(out, residual)| *out += residual);
                }
                Form::Swiglu | Form::Geglu => {
                    let geglu = matches!(self.form, Form::Geglu);
                    let activate = |z: f32| if geglu { gelu(z) } else { z / (1.0 + (-z).exp()) };
                    // The up half of the rows, in pieces that fit the stack.
                    let mut up = [0.0f32; 64];
                    for (index, gate) in out.chunks_mut(64).enumerate() {
                        let first = n_rows + first + index * 64;
                        let up = &mut up[..gate.len()];
                        dot(token, first as u32..(first + up.len()) as u32, up);
                        self.add_bias(first, up);
                        for (gate, up) in gate.iter_mut().zip(up) {
                            *gate = activate(*gate) * *up;
                        }
                    }
                }
            }
        };
        for (token, out) in out.chunks_exact_mut(n_rows).enumerate() {
            if per_task >= n_rows {
                task(token, 0, out);
            } else {
                out.par_chunks_mut(per_task)
                    .enumerate()
                    .for_each(|(index, out)| task(token, index * per_task, out));
            }
        }
    }

    fn add_bias(&self, first: usize, out: &mut [f32]) {
        if let Some(bias) = self.bias {
            out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
        }
    }
}
