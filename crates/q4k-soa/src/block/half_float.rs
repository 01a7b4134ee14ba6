//! Half floats as bytes, and their conversion without a branch.

use bytemuck::{Pod, Zeroable};

/// An IEEE half, little-endian, at any address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct HalfBytes(pub [u8; 2]);

impl HalfBytes {
    /// The nearest half; beyond its range infinite.
    pub fn from_f32(value: f32) -> Self {
        Self(half::f16::from_f32(value).to_le_bytes())
    }

    /// Exact.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        half_to_f32(u16::from_le_bytes(self.0))
    }
}

/// Widens a half exactly; a NaN keeps its payload and becomes quiet.
///
/// Exponent and mantissa go to their places in an f32 and a multiplication by 2^112 corrects the
/// bias, subnormals included. Without a branch or a call it vectorises with what surrounds it.
#[inline(always)]
pub(crate) fn half_to_f32(half: u16) -> f32 {
    const BIAS: f32 = f32::from_bits((112 + 127) << 23);
    let magnitude = u32::from(half & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * BIAS).to_bits();
    let special = magnitude | 0x7f80_0000 | if magnitude > 0x0f80_0000 { 0x0040_0000 } else { 0 };
    let sign = u32::from(half & 0x8000) << 16;
    f32::from_bits(sign | if magnitude >= 0x0f80_0000 { special } else { finite })
}

/// Two halves side by side, as the planes of `d, dmin` and `d, m` hold them.
#[inline(always)]
pub(crate) fn pair_bytes(first: HalfBytes, second: HalfBytes) -> [u8; 4] {
    [first.0[0], first.0[1], second.0[0], second.0[1]]
}

/// The inverse of [`pair_bytes`].
#[inline(always)]
pub(crate) fn pair_from_bytes(bytes: &[u8; 4]) -> (HalfBytes, HalfBytes) {
    (HalfBytes([bytes[0], bytes[1]]), HalfBytes([bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_equals_the_half_crate_for_every_half() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            assert_eq!(half_to_f32(bits).to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }
}
