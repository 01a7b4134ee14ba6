//! Joins the segments of an attention: with `m = max over segments of max`,
//! `out = Σ e^(max_g − m) · values_g / Σ e^(max_g − m) · sum_g`.

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_tokens][n_head][n_segments][max, sum, head_dim values]`.
        read partials: f32 [n_tokens * n_head * n_segments * (2 + head_dim)],
        /// `[n_tokens][n_head][head_dim]`.
        write out: f32 [n_tokens * n_head * head_dim],
    }
    scalars {
        /// Tokens of the step.
        n_tokens: u32,
        /// Query heads.
        n_head: u32,
        /// Elements per head.
        head_dim: u32,
        /// Segments.
        n_segments: u32,
    }
}

impl<B> Args<B> {
    /// One block per head and token.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_head, self.n_tokens, 1]).threads(256)
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    combine(a.partials, a.n_segments as usize, a.head_dim as usize, a.out);
    Ok(())
}

/// Joins the segments of every head.
pub(super) fn combine(partials: &[f32], n_segments: usize, head_dim: usize, out: &mut [f32]) {
    let record = 2 + head_dim;
    let partials = partials.chunks_exact(n_segments * record);
    for (partials, out) in partials.zip(out.chunks_exact_mut(head_dim)) {
        let segments = || partials.chunks_exact(record).filter(|segment| segment[1] > 0.0);
        let max = segments().map(|segment| segment[0]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        out.fill(0.0);
        for segment in segments() {
            let weight = (segment[0] - max).exp();
            sum += weight * segment[1];
            out.iter_mut().zip(&segment[2..]).for_each(|(out, value)| *out += weight * value);
        }
        out.iter_mut().for_each(|out| *out /= sum);
    }
}
