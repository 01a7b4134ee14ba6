//! The twelve bytes in which a super-block of Q4_K or Q5_K keeps eight 6-bit scales and mins.

/// Scale and min of group `index`.
#[inline(always)]
pub(crate) fn scale_and_min(scales: &[u8; 12], index: usize) -> (u8, u8) {
    if index < 4 {
        (scales[index] & 63, scales[index + 4] & 63)
    } else {
        let high = (scales[index - 4] >> 6, scales[index] >> 6);
        (scales[index + 4] & 15 | high.0 << 4, scales[index + 4] >> 4 | high.1 << 4)
    }
}

/// All eight scales and all eight mins, group i in byte i.
#[inline(always)]
pub(crate) fn scales_and_mins(scales: &[u8; 12]) -> [u64; 2] {
    const LOW_SIX: u32 = 0x3f3f_3f3f;
    const LOW_FOUR: u32 = 0x0f0f_0f0f;
    const HIGH_TWO: u32 = 0x3030_3030;
    let words = scales.as_chunks::<4>().0;
    let [a, b, c] = [0, 1, 2].map(|i| u32::from_le_bytes(words[i]));
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [
        join(a & LOW_SIX, c & LOW_FOUR | a >> 2 & HIGH_TWO),
        join(b & LOW_SIX, c >> 4 & LOW_FOUR | b >> 2 & HIGH_TWO),
    ]
}

/// The inverse of [`scale_and_min`] for numbers below 64.
pub(crate) fn from_scales_and_mins(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    core::array::from_fn(|i| match i {
        0..4 => scales[i] | scales[i + 4] >> 4 << 6,
        4..8 => mins[i - 4] | mins[i] >> 4 << 6,
        _ => scales[i - 4] & 15 | mins[i - 4] << 4,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packing_is_bijective(bytes: [u8; 12]) {
            let pairs: [(u8, u8); 8] = core::array::from_fn(|i| scale_and_min(&bytes, i));
            let (scales, mins) = (pairs.map(|pair| pair.0), pairs.map(|pair| pair.1));
            prop_assert!(scales.iter().chain(&mins).all(|&number| number < 64));
            prop_assert_eq!(from_scales_and_mins(&scales, &mins), bytes);
            prop_assert_eq!(scales_and_mins(&bytes), [scales, mins].map(u64::from_le_bytes));
        }
    }
}
