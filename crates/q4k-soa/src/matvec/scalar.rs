//! Plain Rust, for every processor and as the definition of what faster code computes.

use core::ops::Range;

use super::{check_f32, check_q8};
use crate::block::{Float, Group, Grouped, Planes};
use crate::{GROUP_ELEMS, PackedMatrix, Q8Group};

/// [`rows_dot_q8`](crate::rows_dot_q8) without special instructions: the same integers.
///
/// # Panics
/// As [`rows_dot_q8`](crate::rows_dot_q8).
pub fn rows_dot_q8_scalar(
    matrix: &PackedMatrix<'_>,
    rows: Range<u32>,
    quants: &[i8],
    groups: &[Q8Group],
    out: &mut [f32],
) {
    check_q8(matrix, &rows, quants, groups, out);
    let dot = matrix.weight_type().entry().dot_q8;
    for (row, out) in rows.zip(out) {
        *out = dot(matrix.row_planes(row), quants, groups);
    }
}

/// [`rows_dot_f32`](crate::rows_dot_f32) without special instructions: the same bits.
///
/// # Panics
/// As [`rows_dot_f32`](crate::rows_dot_f32).
pub fn rows_dot_f32_scalar(
    matrix: &PackedMatrix<'_>,
    rows: Range<u32>,
    x: &[f32],
    out: &mut [f32],
) {
    check_f32(matrix, &rows, x, out);
    let dot = matrix.weight_type().entry().dot_f32;
    for (row, out) in rows.zip(out) {
        *out = dot(matrix.row_planes(row), x);
    }
}

impl Group {
    #[inline(always)]
    fn dequantize(&self, out: &mut [f32; GROUP_ELEMS]) {
        let halves = out.as_chunks_mut::<16>().0.iter_mut().zip(self.quants.as_chunks::<16>().0);
        for ((out, quants), scale) in halves.zip(self.scales) {
            let scale = self.d * scale as f32;
            for (out, &quant) in out.iter_mut().zip(quants) {
                *out = scale * f32::from(quant);
            }
        }
        if let Some(offset) = self.offset {
            out.iter_mut().for_each(|out| *out += offset);
        }
    }

    #[inline(always)]
    fn dequantize_f16(&self, out: &mut [f32; GROUP_ELEMS]) {
        let offset = round_to_f16(self.offset.unwrap_or(0.0));
        let halves = out.as_chunks_mut::<16>().0.iter_mut().zip(self.quants.as_chunks::<16>().0);
        for ((out, quants), scale) in halves.zip(self.scales) {
            let scale = round_to_f16(self.d * scale as f32);
            for (out, &quant) in out.iter_mut().zip(quants) {
                *out = round_to_f16(scale * f32::from(quant) + offset);
            }
        }
    }

    #[inline(always)]
    fn dot_q8(&self, x: &[i8; GROUP_ELEMS], group: &Q8Group) -> f32 {
        let halves = self.quants.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0);
        let dots = halves.map(|(quants, x)| {
            quants.iter().zip(x).map(|(&quant, &x)| i32::from(quant) * i32::from(x)).sum::<i32>()
        });
        let scaled: i32 = dots.zip(self.scales).map(|(dot, scale)| dot * scale).sum();
        let product = self.d * group.scale * scaled as f32;
        self.offset.map_or(product, |offset| product + offset * group.scaled_sum)
    }
}

pub(crate) fn dequantize_grouped<B: Grouped>(planes: Planes<'_>, out: &mut [f32]) {
    for (index, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        B::group(&planes, index).dequantize(out);
    }
}

/// The nearest f16, as far as it is finite; the even one of two. NaN stays NaN. Without branches, so
/// that loops become vector instructions.
#[inline(always)]
fn round_to_f16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits(bits.wrapping_add(0xfff + (bits >> 13 & 1)) & !0x1fff);
    // The carry out of a NaN's mantissa would reach the sign and leave a zero.
    let normal = if x.is_nan() { x } else { rounded };
    // Below 2^-14 f16 are the multiples of 2^-24, as floats between 0.5 and 1 are.
    let tiny = (x.abs() + 0.5) - 0.5;
    if x.abs() < 6.103_515_6e-5 { tiny.copysign(x) } else { normal }
}

pub(crate) fn dequantize_grouped_f16<B: Grouped>(planes: Planes<'_>, out: &mut [f32]) {
    for (index, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        B::group(&planes, index).dequantize_f16(out);
    }
}

pub(crate) fn dequantize_float_f16<B: Float>([values, ..]: Planes<'_>, out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(bytemuck::cast_slice::<u8, B>(values)) {
        *out = round_to_f16(value.to_f32());
    }
}

pub(crate) fn dequantize_float<B: Float>([values, ..]: Planes<'_>, out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(bytemuck::cast_slice::<u8, B>(values)) {
        *out = value.to_f32();
    }
}

pub(crate) fn dot_q8_grouped<B: Grouped>(planes: Planes<'_>, x: &[i8], groups: &[Q8Group]) -> f32 {
    let mut sum = 0.0;
    for (index, (x, group)) in x.as_chunks().0.iter().zip(groups).enumerate() {
        sum += B::group(&planes, index).dot_q8(x, group);
    }
    sum
}

/// Partial sums of exact products, and of the float types' 8-bit ones.
const LANES: usize = 8;

#[inline(always)]
pub(crate) fn dot_q8_float<B: Float>(
    [values, ..]: Planes<'_>,
    x: &[i8],
    groups: &[Q8Group],
) -> f32 {
    let values = bytemuck::cast_slice::<u8, B>(values).chunks(GROUP_ELEMS);
    let mut sum = 0.0;
    for ((values, x), group) in values.zip(x.chunks(GROUP_ELEMS)).zip(groups) {
        let mut lanes = [0.0; LANES];
        for (values, x) in values.chunks(LANES).zip(x.chunks(LANES)) {
            for ((lane, value), &x) in lanes.iter_mut().zip(values).zip(x) {
                *lane += value.to_f32() * f32::from(x);
            }
        }
        sum += group.scale * lanes.iter().sum::<f32>();
    }
    sum
}

/// Integers are multiplied in the uppermost byte of 32 bits, where vector instructions bring them
/// without a further step; activations make up for it.
pub(super) const QUANT_UNIT: f32 = 1.0 / 16_777_216.0;

/// Each of four lanes sums four activations of each half of a group.
#[inline(always)]
pub(super) fn group_sums(x: &[f32; GROUP_ELEMS]) -> [f32; 4] {
    let fours = x.as_chunks::<4>().0;
    let sum = |[a, b, c, d]: [f32; 4]| (a + b) + (c + d);
    core::array::from_fn(|lane| sum(fours[lane]) + sum(fours[4 + lane]))
}

/// `a * b + c`, rounded once. The standard library's is a slow call where the processor that is
/// compiled for lacks the instruction.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(all(feature = "std", target_arch = "aarch64"))]
    return a.mul_add(b, c);
    #[cfg(not(all(feature = "std", target_arch = "aarch64")))]
    return fma_of_doubles(a, b, c);
}

/// The product is exact. A sum that is not is made odd, so that rounding it once more gives what
/// the true one would.
#[cfg(any(test, not(all(feature = "std", target_arch = "aarch64"))))]
#[inline(always)]
fn fma_of_doubles(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let of_c = sum - product;
    let lost = (product - (sum - of_c)) + (c - of_c);
    let bits = sum.to_bits();
    let odd = match lost.abs() > 0.0 && bits & 1 == 0 {
        false => bits,
        true if (lost > 0.0) == (sum > 0.0) => bits + 1,
        true => bits - 1,
    };
    f64::from_bits(odd) as f32
}

#[inline(always)]
pub(crate) fn dot_f32_grouped<B: Grouped>(planes: Planes<'_>, x: &[f32]) -> f32 {
    // Lanes 0 to 3 are of even groups, 4 to 7 of odd ones.
    let (mut halves, mut offsets) = ([[0.0f32; LANES]; 2], [0.0; LANES]);
    for (index, x) in x.as_chunks::<GROUP_ELEMS>().0.iter().enumerate() {
        let group = B::group(&planes, index);
        let lanes = 4 * (index % 2)..4 * (index % 2) + 4;
        let quants = group.quants.as_chunks::<4>().0.chunks_exact(4);
        let x_halves = x.as_chunks::<4>().0.chunks_exact(4);
        for (half, (quants, x)) in quants.zip(x_halves).enumerate() {
            let scale = group.d * group.scales[half] as f32;
            for ((sum, quants), x) in halves[half][lanes.clone()].iter_mut().zip(quants).zip(x) {
                let mut dot = 0.0;
                for (&quant, x) in quants.iter().zip(x) {
                    dot = fma((i32::from(quant) << 24) as f32, x * QUANT_UNIT, dot);
                }
                *sum = fma(dot, scale, *sum);
            }
        }
        if let Some(offset) = group.offset {
            for (sum, x) in offsets[lanes].iter_mut().zip(group_sums(x)) {
                *sum = fma(offset, x, *sum);
            }
        }
    }
    let sums: [f32; LANES] = core::array::from_fn(|i| (halves[0][i] + halves[1][i]) + offsets[i]);
    let [a, b, c, d] = core::array::from_fn(|i| sums[i] + sums[4 + i]);
    (a + c) + (b + d)
}

#[inline(always)]
pub(crate) fn dot_f32_float<B: Float>([values, ..]: Planes<'_>, x: &[f32]) -> f32 {
    let (weights, last_weights) = bytemuck::cast_slice::<u8, B>(values).as_chunks::<LANES>();
    let (x, last_x) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (weights, x) in weights.iter().zip(x) {
        for i in 0..LANES {
            lanes[i] += f64::from(weights[i].to_f32()) * f64::from(x[i]);
        }
    }
    finish_dot_f32::<B>(lanes, bytemuck::cast_slice(last_weights), last_x)
}

/// Adds the weights that follow the last whole eight.
#[inline(always)]
pub(super) fn finish_dot_f32<B: Float>(mut lanes: [f64; LANES], weights: &[u8], x: &[f32]) -> f32 {
    let weights = bytemuck::cast_slice::<u8, B>(weights);
    for ((lane, weight), &x) in lanes.iter_mut().zip(weights).zip(x) {
        *lane += f64::from(weight.to_f32()) * f64::from(x);
    }
    total(lanes)
}

/// In pairs and always the same ones, so that the bits do not depend on the instructions.
#[inline(always)]
pub(super) fn total(lanes: [f64; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    (((a + e) + (c + g)) + ((b + f) + (d + h))) as f32
}

#[cfg(test)]
mod tests {
    use super::{fma_of_doubles, round_to_f16};
    use half::f16;
    use proptest::prelude::*;

    proptest! {
        /// Any floats, and sums that cancel or end in a tie.
        #[test]
        fn fused_products_are_those_of_the_standard_library(
            bits: [u32; 3], short in prop::array::uniform3(-4096i16..4096), shift in 0..48,
        ) {
            let [a, b, c] = bits.map(f32::from_bits);
            let [d, e, f] = short.map(f32::from);
            let f = f * 2f32.powi(shift - 24);
            for (a, b, c) in [(a, b, c), (a, b, -(a * b)), (d, e, f), (a, d, f)] {
                let (found, expected) = (fma_of_doubles(a, b, c), a.mul_add(b, c));
                let same = found.to_bits() == expected.to_bits();
                prop_assert!(same || found.is_nan() && expected.is_nan(), "{a:e} {b:e} {c:e}");
            }
        }
    }

    #[test]
    fn floats_are_rounded_as_f16_are() {
        // Every exponent that f16 has and some below, mantissas around every kind of tie.
        for exponent in 0x60..=0x8e {
            for mantissa in [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7f_efff] {
                let x = f32::from_bits(exponent << 23 | mantissa);
                for x in [x, -x] {
                    let expected = f16::from_f32(x).to_f32();
                    assert_eq!(round_to_f16(x).to_bits(), expected.to_bits(), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for mantissa in [1, 0xfff, 0x1000, 0x40_0000, 0x7f_e000, 0x7f_f000, 0x7f_ffff] {
            let nan = f32::from_bits(0xff << 23 | mantissa);
            assert!(round_to_f16(nan).is_nan() && round_to_f16(-nan).is_nan(), "{mantissa:#x}");
        }
        for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(round_to_f16(infinity), infinity);
        }
    }
}
