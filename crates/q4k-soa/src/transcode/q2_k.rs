//! Q2_K: 256 weights of 2 bits in sixteen groups with 4-bit scales and mins,
//! w = d·scale·q − dmin·min.
//!
//! Becomes Q8_0 by rounding, to within 1/254 of the largest weight of 32.

use bytemuck::{Pod, Zeroable};

use super::{Source, rounded};
use crate::block::{BlockQ8_0, HalfBytes};

/// 256 weights in 84 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// Per group of 16 the scale in the low nibble and the min in the high.
    pub scales: [u8; 16],
    /// Bytes 32h..32h+32 hold weights 128h..128h+128: byte i those with index i, 32 + i, 64 + i,
    /// 96 + i from the lowest bits up.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: HalfBytes,
    /// Scale of the mins.
    pub dmin: HalfBytes,
}

const _: () = assert!(size_of::<BlockQ2K>() == 84);

impl Source for BlockQ2K {
    const GGML_ID: u32 = 10;
    const NAME: &'static str = "Q2_K";
    const ELEMS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(self.scales[group] & 15);
            let min = dmin * f32::from(self.scales[group] >> 4);
            for (out, quant) in out.iter_mut().zip(crumbs(&self.qs, group)) {
                *out = scale * f32::from(quant) - min;
            }
        }
    }

    fn transcode(&self, out: &mut [BlockQ8_0]) {
        let mut weights = [0.0; 256];
        self.dequantize(&mut weights);
        for (out, weights) in out.iter_mut().zip(weights.chunks_exact(32)) {
            *out = rounded(weights);
        }
    }
}

/// The pairs of bits of one group of 16 weights.
pub(super) fn crumbs(qs: &[u8; 64], group: usize) -> impl Iterator<Item = u8> {
    let (half, pair, part) = (group / 8, group / 2 % 4, group % 2);
    qs[32 * half + 16 * part..][..16].iter().map(move |byte| byte >> (2 * pair) & 3)
}
