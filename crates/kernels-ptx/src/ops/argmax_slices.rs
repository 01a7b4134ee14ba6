//! The best candidate of each slice of the vocabulary; slice i starts at `i·⌈n_vocab / n_slices⌉`.
//! An empty slice gives −∞ with index `u32::MAX`. Equal logits: the lower id. NaN counts as −∞.

use crate::Candidate;
use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// `[n_vocab]`.
        read logits: f32 [n_vocab],
        /// `[n_slices]`.
        write best: Candidate [n_slices],
    }
    scalars {
        /// Length of the logits.
        n_vocab: u32,
        /// Slices.
        n_slices: u32,
    }
}

impl<B> Args<B> {
    /// One block per slice.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_slices, 1, 1]).threads(256)
    }
}

/// Worse than every candidate.
const NONE: Candidate = Candidate { value: f32::NEG_INFINITY, index: u32::MAX };

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let per_slice = a.n_vocab.div_ceil(a.n_slices) as usize;
    for (slice, best) in a.best.iter_mut().enumerate() {
        let first = (slice * per_slice).min(a.logits.len());
        let end = (first + per_slice).min(a.logits.len());
        *best = NONE;
        for (index, &value) in a.logits[first..end].iter().enumerate() {
            let mut candidate = Candidate { value, index: (first + index) as u32 };
            if candidate.beats(*best) {
                candidate.value = candidate.rank_value();
                *best = candidate;
            }
        }
    }
    Ok(())
}
