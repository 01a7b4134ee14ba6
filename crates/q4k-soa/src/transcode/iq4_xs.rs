//! IQ4_XS: 256 weights of 4 bits as in IQ4_NL, in eight groups with 6-bit scales,
//! w = d·(scale − 32)·value(q).
//!
//! The values stay as they are; d·(scale − 32) is rounded to a half, by less than 1/2048 of itself.

use bytemuck::{Pod, Zeroable};

use super::iq4_nl::values;
use super::{Source, scale};
use crate::block::{BlockQ8_0, HalfBytes};

/// 256 weights in 136 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales.
    pub d: HalfBytes,
    /// The two upper bits of scale i from bit 2i up, little-endian.
    pub scales_h: [u8; 2],
    /// The four lower bits of scales 2i and 2i + 1 in byte i.
    pub scales_l: [u8; 4],
    /// 16 bytes per group, as in [`BlockIq4Nl`](super::BlockIq4Nl).
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockIq4Xs>() == 136);

impl BlockIq4Xs {
    /// Scale and values of each group of 32.
    fn groups(&self) -> impl Iterator<Item = (f32, [i8; 32])> {
        let (d, high) = (self.d.to_f32(), u16::from_le_bytes(self.scales_h));
        self.qs.as_chunks::<16>().0.iter().enumerate().map(move |(group, qs)| {
            let low = self.scales_l[group / 2] >> (4 * (group % 2)) & 15;
            let scale = i16::from(low) + (high >> (2 * group) & 3) as i16 * 16;
            (d * f32::from(scale - 32), values(qs))
        })
    }
}

impl Source for BlockIq4Xs {
    const GGML_ID: u32 = 23;
    const NAME: &'static str = "IQ4_XS";
    const ELEMS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        for ((scale, values), out) in self.groups().zip(out.chunks_exact_mut(32)) {
            for (out, value) in out.iter_mut().zip(values) {
                *out = scale * f32::from(value);
            }
        }
    }

    fn transcode(&self, out: &mut [BlockQ8_0]) {
        for ((d, qs), out) in self.groups().zip(out) {
            *out = BlockQ8_0 { d: scale(d), qs };
        }
    }
}
