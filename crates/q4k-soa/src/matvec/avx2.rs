//! AVX2.

use core::ops::Range;

use crate::{PackedMatrix, Q8Group};

pub(super) fn available() -> bool {
    false
}

pub(super) fn rows_dot_q8(
    _: &PackedMatrix<'_>,
    _: Range<u32>,
    _: &[i8],
    _: &[Q8Group],
    _: &mut [f32],
) -> bool {
    available()
}

pub(super) fn rows_dot_f32(_: &PackedMatrix<'_>, _: Range<u32>, _: &[f32], _: &mut [f32]) -> bool {
    available()
}
