//! Activations in 8 bits: per group of 32 one i8 each, one scale, and the sum that min terms need.

use bytemuck::{Pod, Zeroable};

use crate::GROUP_ELEMS;

/// What belongs to 32 activation quants. Two floats side by side, as a kernel reads them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Q8Group {
    /// Activation i is about `scale * quants[i]`.
    pub scale: f32,
    /// `scale * (sum of the quants)`, the sum taken in integers and the product in f32.
    pub scaled_sum: f32,
}

/// Groups whose largest magnitude is below this, 2^-100, become zero: `127 / amax` would come
/// near the end of f32's range.
pub const SMALLEST_AMAX: f32 = f32::from_bits((127 - 100) << 23);

/// Quantises `x` in groups of 32; the last group may be shorter.
///
/// Every operation is a single IEEE f32 operation rounded to nearest even, none contracted, so
/// that another processor gives identical bits:
///
/// ```text
/// amax    = max |x_i|
/// scale   = amax / 127
/// inverse = 127 / amax
/// q_i     = round_half_even(x_i * inverse)          in -127..=127
/// scaled_sum = scale * f32(q_0 + … + q_31)          the sum in i32
/// ```
///
/// - `amax` < 2^-100 ([`SMALLEST_AMAX`]), zero included: scale, sum and quants are 0 (+0.0).
/// - A NaN or an infinity in the group: the quants are 0, scale and sum are the NaN 0x7fc00000, so
///   that whatever is computed from the group is NaN and not quietly wrong.
///
/// # Panics
/// Unless `quants` is as long as `x` and `groups` has one place per group.
pub fn quantize_q8(x: &[f32], quants: &mut [i8], groups: &mut [Q8Group]) {
    assert_eq!(x.len(), quants.len(), "quantize_q8: one quant per activation");
    assert_eq!(x.len().div_ceil(GROUP_ELEMS), groups.len(), "quantize_q8: one group per 32");
    let (whole_x, rest_x) = x.as_chunks::<GROUP_ELEMS>();
    let (whole_quants, rest_quants) = quants.as_chunks_mut::<GROUP_ELEMS>();
    for ((x, quants), group) in whole_x.iter().zip(whole_quants).zip(&mut *groups) {
        *group = quantize_group(x, quants);
    }
    if let (Some(group), false) = (groups.last_mut(), rest_x.is_empty()) {
        let (mut padded_x, mut padded_quants) = ([0.0; GROUP_ELEMS], [0; GROUP_ELEMS]);
        padded_x[..rest_x.len()].copy_from_slice(rest_x);
        *group = quantize_group(&padded_x, &mut padded_quants);
        rest_quants.copy_from_slice(&padded_quants[..rest_x.len()]);
    }
}

#[inline(always)]
fn quantize_group(x: &[f32; GROUP_ELEMS], quants: &mut [i8; GROUP_ELEMS]) -> Q8Group {
    // As integers, magnitudes are ordered like the floats, then infinity, then NaNs.
    let amax_bits = x.iter().fold(0, |amax, x| (x.to_bits() & 0x7fff_ffff).max(amax));
    *quants = [0; GROUP_ELEMS];
    if amax_bits >= f32::INFINITY.to_bits() {
        return Q8Group { scale: f32::NAN, scaled_sum: f32::NAN };
    }
    let amax = f32::from_bits(amax_bits);
    if amax < SMALLEST_AMAX {
        return Q8Group::default();
    }
    let scale = amax / 127.0;
    let inverse = 127.0 / amax;
    let mut sum = 0;
    for (quant, x) in quants.iter_mut().zip(x) {
        let rounded = round_half_even(x * inverse);
        sum += rounded;
        *quant = rounded as i8;
    }
    Q8Group { scale, scaled_sum: scale * sum as f32 }
}

/// Nearest integer, ties to even, of a number below 2^22 in magnitude: added to 1.5 · 2^23 the
/// number loses its fraction by f32's own rounding. Works without `std` and vectorises.
#[inline(always)]
pub(crate) fn round_half_even(value: f32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    (value + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quantized(x: &[f32]) -> (alloc::vec::Vec<i8>, alloc::vec::Vec<Q8Group>) {
        let mut quants = alloc::vec![1; x.len()];
        let mut groups = alloc::vec![Q8Group { scale: 1.0, scaled_sum: 1.0 }; x.len().div_ceil(32)];
        quantize_q8(x, &mut quants, &mut groups);
        (quants, groups)
    }

    #[test]
    fn a_group_by_hand() {
        let mut x = [0.0; 32];
        (x[0], x[1], x[2], x[3]) = (-254.0, 1.0, 3.0, 5.0); // inverse 0.5: ties at 0.5, 1.5, 2.5
        let (quants, groups) = quantized(&x);
        assert_eq!(quants[..5], [-127, 0, 2, 2, 0]);
        assert_eq!(groups, [Q8Group { scale: 2.0, scaled_sum: -246.0 }]);
    }

    #[test]
    fn nothing_and_almost_nothing_are_zero() {
        for x in [0.0, -0.0, f32::from_bits(1), SMALLEST_AMAX / 2.0] {
            let (quants, groups) = quantized(&[x; 32]);
            assert_eq!(quants, [0; 32]);
            assert_eq!(groups[0].scale.to_bits(), 0);
            assert_eq!(groups[0].scaled_sum.to_bits(), 0);
        }
        assert_eq!(quantized(&[SMALLEST_AMAX; 32]).0, [127; 32]);
        assert_eq!(quantized(&[f32::MAX; 32]).0, [127; 32]);
    }

    #[test]
    fn what_is_not_finite_stays_visible_and_stays_in_its_group() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 64];
            x[40] = bad;
            let (quants, groups) = quantized(&x);
            assert_eq!((quants[0], quants[32], quants[40]), (127, 0, 0));
            assert_eq!(groups[0].scaled_sum, 32.0 * 127.0 * (1.0 / 127.0));
            assert_eq!(groups[1].scale.to_bits(), 0x7fc0_0000);
            assert_eq!(groups[1].scaled_sum.to_bits(), 0x7fc0_0000);
        }
    }

    #[test]
    fn a_short_last_group_is_a_group_of_its_own() {
        let (quants, groups) = quantized(&[[1.0; 32].as_slice(), &[4.0; 3]].concat());
        assert_eq!(quants, [127; 35]);
        assert_eq!(groups[1].scale, 4.0 / 127.0);
    }

    proptest! {
        #[test]
        fn rounding_equals_the_standard_library(value in -200.0f32..200.0) {
            prop_assert_eq!(round_half_even(value), value.round_ties_even() as i32);
        }

        #[test]
        fn quants_are_in_range_and_near(x in prop::array::uniform32(-1e30f32..1e30), exponent in -60i32..1) {
            let x = x.map(|x| x * 2f32.powi(exponent));
            let (quants, groups) = quantized(&x);
            let sum: i32 = quants.iter().map(|&quant| i32::from(quant)).sum();
            prop_assert_eq!(groups[0].scaled_sum, groups[0].scale * sum as f32);
            for (&x, &quant) in x.iter().zip(&quants) {
                prop_assert!(quant >= -127);
                prop_assert!((x - groups[0].scale * f32::from(quant)).abs() <= groups[0].scale * 0.5001);
            }
        }
    }
}
