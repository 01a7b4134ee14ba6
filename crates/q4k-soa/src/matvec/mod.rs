//! Dot products of packed rows with activations, exact or in 8 bits.
//!
//! # What the 8-bit product is
//!
//! Row and activation are cut into groups of 32. With x the activation's quants, `scale_x` and
//! `scaled_sum_x` from its [`Q8Group`], and q the row's integers, a group adds
//!
//! | type | to the result |
//! |---|---|
//! | Q4_K, Q5_K | `d·sc · scale_x · dot(q, x) − dmin·m · scaled_sum_x` |
//! | Q6_K | `d · scale_x · (sc0 · dot(q[..16] − 32, x[..16]) + sc1 · dot(q[16..] − 32, x[16..]))` |
//! | Q8_0 | `d · scale_x · dot(q, x)` |
//! | Q4_0, Q5_0 | `d · scale_x · dot(q − 8, x)` and `q − 16` |
//! | Q4_1, Q5_1 | `d · scale_x · dot(q, x) + m · scaled_sum_x` |
//! | F32, F16, BF16 | `scale_x · Σ w · x`, in f32 |
//!
//! Dot products, and for Q6_K the sum in parentheses, are exact in i32 for every i8 activation,
//! -128 included. What is multiplied and added in f32 may be so in any order; implementations
//! agree to 1e-5 of the sum of the groups' magnitudes. A NaN or infinite scale in the row gives
//! what IEEE arithmetic makes of it.
//!
//! # What the exact product is
//!
//! The activations are f32. Of quantised types a group adds `scale · Σ q · x + offset · Σ x`, with a
//! scale for each 16 weights, in f32 with fused operations and in the one order that
//! [`rows_dot_f32_scalar`] has. It is the same bits on every processor, and within 1e-6 of the sum
//! of the magnitudes. Weights that are floats are multiplied and added in f64 (eight partial sums,
//! weight i in sum i mod 8), rounded once.

#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod avx2;
pub(crate) mod scalar;

use core::ops::Range;

use crate::{GROUP_ELEMS, PackedMatrix, Q8Group};

pub use scalar::{rows_dot_f32_scalar, rows_dot_q8_scalar};

/// 8-bit dot product of each row with one activation: `out[i]` is for row `rows.start + i`.
///
/// One thread; the fastest instructions that the processor has, chosen at run time.
///
/// # Panics
/// Unless the matrix has the rows, `quants` is one row long, `groups` has one place per 32 and
/// `out` one per row.
pub fn rows_dot_q8(
    matrix: &PackedMatrix<'_>,
    rows: Range<u32>,
    quants: &[i8],
    groups: &[Q8Group],
    out: &mut [f32],
) {
    ArrangedQ8::new(quants, groups).rows_dot(matrix, rows, out);
}

/// An activation in 8 bits, in the order in which the processor's instructions want it: made once,
/// it serves the rows of many matrices.
pub struct ArrangedQ8<'a> {
    quants: &'a [i8],
    groups: &'a [Q8Group],
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    octets: alloc::vec::Vec<avx2::Octet>,
}

impl<'a> ArrangedQ8<'a> {
    /// Of an activation's quants, and its groups of 32.
    pub fn new(quants: &'a [i8], groups: &'a [Q8Group]) -> Self {
        Self {
            quants,
            groups,
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            octets: avx2::arranged(quants, groups),
        }
    }

    /// [`rows_dot_q8`] with this activation.
    ///
    /// # Panics
    /// As [`rows_dot_q8`].
    pub fn rows_dot(&self, matrix: &PackedMatrix<'_>, rows: Range<u32>, out: &mut [f32]) {
        let Self { quants, groups, .. } = *self;
        check_q8(matrix, &rows, quants, groups, out);
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        if avx2::rows_dot_q8(matrix, rows.clone(), quants, groups, &self.octets, out) {
            return;
        }
        rows_dot_q8_scalar(matrix, rows, quants, groups, out);
    }
}

/// Exact dot product of each row with f32 activations: `out[i]` is for row `rows.start + i`.
///
/// # Panics
/// Unless the matrix has the rows, `x` is one row long and `out` has one place per row.
pub fn rows_dot_f32(matrix: &PackedMatrix<'_>, rows: Range<u32>, x: &[f32], out: &mut [f32]) {
    ArrangedF32::new(x).rows_dot(matrix, rows, out);
}

/// An activation in f32, arranged as [`ArrangedQ8`] is.
pub struct ArrangedF32<'a> {
    x: &'a [f32],
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    pairs: alloc::vec::Vec<avx2::ExactPair>,
}

impl<'a> ArrangedF32<'a> {
    /// Of an activation.
    pub fn new(x: &'a [f32]) -> Self {
        Self {
            x,
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            pairs: avx2::arranged_f32(x),
        }
    }

    /// [`rows_dot_f32`] with this activation.
    ///
    /// # Panics
    /// As [`rows_dot_f32`].
    pub fn rows_dot(&self, matrix: &PackedMatrix<'_>, rows: Range<u32>, out: &mut [f32]) {
        check_f32(matrix, &rows, self.x, out);
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        if avx2::rows_dot_f32(matrix, rows.clone(), self.x, &self.pairs, out) {
            return;
        }
        rows_dot_f32_scalar(matrix, rows, self.x, out);
    }
}

/// The whole 8-bit product, rows shared among rayon's threads where there is `std`.
///
/// # Panics
/// As [`rows_dot_q8`].
pub fn matvec_q8(matrix: &PackedMatrix<'_>, quants: &[i8], groups: &[Q8Group], out: &mut [f32]) {
    check_q8(matrix, &matrix.rows(), quants, groups, out);
    let x = ArrangedQ8::new(quants, groups);
    for_row_chunks(matrix, out, |rows, out| x.rows_dot(matrix, rows, out));
}

/// The whole exact product, rows shared among rayon's threads where there is `std`.
///
/// # Panics
/// As [`rows_dot_f32`].
pub fn matvec_f32(matrix: &PackedMatrix<'_>, x: &[f32], out: &mut [f32]) {
    check_f32(matrix, &matrix.rows(), x, out);
    let x = ArrangedF32::new(x);
    for_row_chunks(matrix, out, |rows, out| x.rows_dot(matrix, rows, out));
}

/// The name of the instructions that [`rows_dot_q8`] uses here, for reports.
pub fn instructions() -> &'static str {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if avx2::available() {
        return "avx2";
    }
    "portable"
}

#[cfg(feature = "std")]
fn for_row_chunks(
    matrix: &PackedMatrix<'_>,
    out: &mut [f32],
    dot: impl Fn(Range<u32>, &mut [f32]) + Sync,
) {
    use rayon::prelude::*;
    /// So much work that handing it out costs little beside it.
    const CHUNK_BYTES: u64 = 64 * 1024;
    let rows_per_chunk = (CHUNK_BYTES / matrix.layout().row_bytes()).clamp(1, 4096) as u32;
    let chunks = out.par_chunks_mut(rows_per_chunk as usize).enumerate();
    chunks.for_each(|(index, out)| {
        let start = index as u32 * rows_per_chunk;
        dot(start..start + out.len() as u32, out);
    });
}

#[cfg(not(feature = "std"))]
fn for_row_chunks(
    matrix: &PackedMatrix<'_>,
    out: &mut [f32],
    dot: impl Fn(Range<u32>, &mut [f32]),
) {
    dot(matrix.rows(), out);
}

fn check_rows(matrix: &PackedMatrix<'_>, rows: &Range<u32>, out: &[f32]) {
    assert!(rows.start <= rows.end && rows.end <= matrix.n_out(), "dot: rows of the matrix");
    assert_eq!((rows.end - rows.start) as usize, out.len(), "dot: one result per row");
}

fn check_q8(
    matrix: &PackedMatrix<'_>,
    rows: &Range<u32>,
    quants: &[i8],
    groups: &[Q8Group],
    out: &[f32],
) {
    check_rows(matrix, rows, out);
    let n_in = matrix.n_in() as usize;
    assert_eq!(quants.len(), n_in, "dot: one activation quant per input");
    assert_eq!(groups.len(), n_in.div_ceil(GROUP_ELEMS), "dot: one activation group per 32 inputs");
}

fn check_f32(matrix: &PackedMatrix<'_>, rows: &Range<u32>, x: &[f32], out: &[f32]) {
    check_rows(matrix, rows, out);
    assert_eq!(x.len(), matrix.n_in() as usize, "dot: one activation per input");
}
