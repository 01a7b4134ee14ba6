//! Floats to blocks.
//!
//! Every quantised type is fitted by least squares: from several guesses of the scale the weights
//! are rounded, the scale (and offset) that suits those integers best is solved for, and the guess
//! with the smallest squared error after rounding again wins. Where scales are themselves
//! quantised, each then chooses among its neighbours in the same way. All of it happens with the
//! values divided by the largest of them, so that squares neither overflow nor vanish.

pub(crate) mod affine;
pub(crate) mod symmetric;

use crate::activation::round_half_even;
use crate::block::HalfBytes;
use crate::{Error, Result, WeightType};

/// Quantises whole blocks into the bytes that a GGUF file would hold.
///
/// Scales beyond the range of a half are cut to it, and weights too small for it become zero. With
/// `std` the blocks are shared among rayon's threads.
pub fn quantize(ty: WeightType, values: &[f32], out: &mut [u8]) -> Result<()> {
    let (block_elems, block_bytes) = (ty.block_elems() as usize, ty.block_bytes() as usize);
    let actual_bytes = out.len() as u64;
    if !out.len().is_multiple_of(block_bytes) {
        return Err(Error::PartialBlock {
            name: ty.name(),
            block_bytes: ty.block_bytes(),
            actual_bytes,
        });
    }
    let expected_elems = (out.len() / block_bytes) as u64 * block_elems as u64;
    if values.len() as u64 != expected_elems {
        return Err(Error::ValuesLength { expected_elems, actual_elems: values.len() as u64 });
    }
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        return Err(Error::NonFinite { index, value: values[index] });
    }
    let quantize = ty.entry().quantize;
    #[cfg(feature = "std")]
    {
        use rayon::prelude::*;
        /// So many blocks that a task is worth handing out.
        const CHUNK_ELEMS: usize = 8192;
        let blocks = CHUNK_ELEMS / block_elems;
        let values = values.par_chunks(blocks * block_elems);
        let out = out.par_chunks_mut(blocks * block_bytes);
        values.zip(out).for_each(|(values, out)| quantize(values, out));
    }
    #[cfg(not(feature = "std"))]
    quantize(values, out);
    Ok(())
}

/// Nearest integer of a number below 2^22 in magnitude.
#[inline(always)]
pub(crate) fn round(value: f32) -> f32 {
    round_half_even(value) as f32
}

/// Below this magnitude half scales have nothing left.
const SMALLEST_AMAX: f32 = 1e-30;

/// The largest magnitude, or `None` where a block can only be zero.
fn magnitude(values: &[f32]) -> Option<f32> {
    let amax = values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
    (amax >= SMALLEST_AMAX).then_some(amax)
}

/// A half kept finite.
fn half(value: f32) -> HalfBytes {
    HalfBytes::from_f32(value.clamp(-65504.0, 65504.0))
}

/// The sum over `0..N`, a multiple of 8, in eight lanes and in loops that vectorise.
#[inline(always)]
fn sum<const N: usize>(of: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    for start in (0..N).step_by(8) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += of(start + lane);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// As `array::map`, which does not vectorise at this length.
#[inline(always)]
fn map<const N: usize>(x: &[f32; N], of: impl Fn(f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for (out, &x) in out.iter_mut().zip(x) {
        *out = of(x);
    }
    out
}
