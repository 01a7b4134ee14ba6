//! RMS norm whose result is quantised to q8, per token.
//!
//! `u = x · weight` is quantised, and the root mean square enters the group scales only, so the
//! integers do not depend on the order in which the squares are summed: twin and kernel agree
//! on them exactly.

use q4k_soa::{Q8Group, quantize_q8};

use super::rms_norm::inverse_rms;
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
        write quants: i8 [n_tokens * n],
        /// `[n_tokens][n / 32]`.
        write groups: Q8Group [n_tokens * (n / 32)],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Elements per token, a multiple of 32.
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

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let n = a.n as usize;
    let quants = a.quants.chunks_exact_mut(n);
    let groups = a.groups.chunks_exact_mut(n / 32);
    for ((x, quants), groups) in a.x.chunks_exact(n).zip(quants).zip(groups) {
        norm(x, a.weight, a.eps, quants, groups);
    }
    Ok(())
}

/// One token's.
pub(super) fn norm(x: &[f32], weight: &[f32], eps: f32, quants: &mut [i8], groups: &mut [Q8Group]) {
    let inverse = inverse_rms(x, eps);
    let mut u = [0.0f32; 32];
    for (index, group) in groups.iter_mut().enumerate() {
        let range = index * 32..index * 32 + 32;
        for ((u, x), w) in u.iter_mut().zip(&x[range.clone()]).zip(&weight[range.clone()]) {
            *u = x * w;
        }
        let quants = &mut quants[range];
        quantize_q8(&u, quants, std::slice::from_mut(group));
        let sum: i32 = quants.iter().map(|&q| i32::from(q)).sum();
        group.scale *= inverse;
        group.scaled_sum = group.scale * sum as f32;
    }
}
