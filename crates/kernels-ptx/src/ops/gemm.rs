//! Matrix products on tensor cores: what [`super::gemm_skinny`] and [`super::gemm_tiled`] have in
//! common.
//!
//! With y = the rows of `w0`, `w1`, `w2` one after the other times x, times `x_scale`, plus `bias`:
//! * [`GemmForm::Store`]: `out = y`
//! * [`GemmForm::Add`]: `out = residual + y`
//! * [`GemmForm::Swiglu`]: `out = silu(y of w0) · (y of w1) / 16` as f16, `silu(z) = z / (1 + e^−z)`
//! * [`GemmForm::Geglu`]: the same with
//!   `gelu(z) = z / 2 · (1 + tanh(√(2/π) · (z + 0.044715 z³)))`
//!
//! Weights are f16 as [`q4k_soa::PackedMatrix::dequantize_row_f16`] makes them, products exact, sums
//! in f32.

use half::f16;
use rayon::prelude::*;

use super::half_rows::{HalfRows, finite, half_elems};
use super::matrix::Parts;
use crate::params::ParamError;
use crate::table::Kernel;

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum GemmForm {
    /// f32 out.
    Store = 0,
    /// Residual plus result, f32 out.
    Add = 1,
    /// SwiGLU of two matrices times [`MIDDLE_SCALE`], f16 out.
    Swiglu = 2,
    /// GeGLU of two matrices times [`MIDDLE_SCALE`], f16 out.
    Geglu = 3,
}

/// Whether a form, by its number, joins two matrices.
pub(super) fn is_gated(form: u32) -> bool {
    form >= GemmForm::Swiglu as u32
}

/// Factor on what the forms that join two matrices store: the middle of a feed-forward network is beyond f16 in
/// some models.
pub const MIDDLE_SCALE: f32 = 1.0 / 16.0;

/// Bytes of the output of a form.
pub(super) fn out_bytes(form: u64, order: u64, n_tokens: u64, n_out: [u64; 3]) -> u64 {
    match form {
        0 | 1 => 4 * n_tokens * n_out.iter().sum::<u64>(),
        _ => 2 * half_elems(order, n_tokens, n_out[0]),
    }
}

/// Elements of a residual, which only one form has.
pub(super) fn residual_elems(form: u64, n_tokens: u64, n_out: [u64; 3]) -> u64 {
    if form == GemmForm::Add as u64 { n_tokens * n_out.iter().sum::<u64>() } else { 0 }
}

/// Refuses rows that are not eights of elements.
pub(super) fn expect_eights(kernel: Kernel, param: &'static str, n: u32) -> Result<(), ParamError> {
    if n.is_multiple_of(8) {
        return Ok(());
    }
    let (kernel, value) = (kernel.name(), n.into());
    Err(ParamError::Value { kernel, param, value, reason: "must be a multiple of 8" })
}

/// A launch of either kernel.
pub(super) struct Gemm<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) x: &'a [f16],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) residual: Option<&'a [f32]>,
    pub(super) out: &'a mut [u8],
    pub(super) n_out: [u32; 3],
    pub(super) n_in: u32,
    pub(super) n_tokens: u32,
    pub(super) form: u32,
    pub(super) order: u32,
    pub(super) x_scale: f32,
}

impl Gemm<'_> {
    pub(super) fn run(self, kernel: Kernel) -> Result<(), ParamError> {
        if self.residual.is_none() && self.form == GemmForm::Add as u32 {
            return Err(ParamError::Mismatch { kernel: kernel.name(), param: "residual" });
        }
        let (n_tokens, n_in) = (self.n_tokens as usize, self.n_in as usize);
        let place = HalfRows::new(self.order, self.n_tokens, self.n_in);
        let x: Vec<Vec<f32>> = (0..n_tokens).map(|token| place.get(token, self.x)).collect();
        // [row][token]: each row of weights is unpacked once.
        let n_rows = self.n_out.iter().sum::<u32>() as usize;
        let mut sums = vec![0.0f32; n_rows * n_tokens];
        sums.par_chunks_mut(n_tokens).enumerate().for_each(|(row, sums)| {
            let row = row as u32;
            self.parts.for_rows(row..row + 1, |matrix, rows, _| {
                let mut weights = vec![0.0f32; n_in];
                matrix.dequantize_row_f16(rows.start, &mut weights);
                for (sum, x) in sums.iter_mut().zip(&x) {
                    *sum = dot(&weights, x) * self.x_scale;
                }
            });
            if let Some(bias) = self.bias {
                sums.iter_mut().for_each(|sum| *sum += bias[row as usize]);
            }
        });
        if is_gated(self.form) {
            let geglu = self.form == GemmForm::Geglu as u32;
            let activate = |z: f32| if geglu { gelu(z) } else { z / (1.0 + (-z).exp()) };
            let n_ff = self.n_out[0] as usize;
            let place = HalfRows::new(self.order, self.n_tokens, self.n_out[0]);
            let out: &mut [f16] = bytemuck::cast_slice_mut(self.out);
            for (i, gate) in sums[..n_ff * n_tokens].iter().enumerate() {
                let up = sums[n_ff * n_tokens + i];
                let value = activate(*gate) * up * MIDDLE_SCALE;
                out[place.at(i % n_tokens, i / n_tokens)] = finite(value);
            }
            return Ok(());
        }
        let out: &mut [f32] = bytemuck::cast_slice_mut(self.out);
        for (i, out) in out.iter_mut().enumerate() {
            *out = sums[i % n_rows * n_tokens + i / n_rows];
            if let Some(residual) = self.residual.filter(|_| self.form == GemmForm::Add as u32) {
                *out += residual[i];
            }
        }
        Ok(())
    }
}

/// By the hyperbolic tangent.
fn gelu(z: f32) -> f32 {
    0.5 * z * (1.0 + (0.797_884_6 * (z + 0.044_715 * z * z * z)).tanh())
}

/// Sixteen running sums, which the compiler keeps in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a16, b16) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let tail: f32 = a16.1.iter().zip(b16.1).map(|(a, b)| a * b).sum();
    for (a, b) in a16.0.iter().zip(b16.0) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + tail
}
