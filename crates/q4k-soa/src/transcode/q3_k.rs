//! Q3_K: 256 weights of 3 bits in sixteen groups with 6-bit scales,
//! w = d·(scale − 32)·(q − 4).
//!
//! (scale − 32)·(q − 4) is a whole number from −124 to 128, and its negative one of Q8_0's: with
//! −d as the scale of all eight blocks nothing is lost.

use bytemuck::{Pod, Zeroable};

use super::Source;
use super::q2_k::crumbs;
use crate::block::{BlockQ8_0, HalfBytes};

/// 256 weights in 110 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// Bit g of byte i is the third bit of weight 32g + i.
    pub hmask: [u8; 32],
    /// The two low bits, as in [`BlockQ2K`](super::BlockQ2K).
    pub qs: [u8; 64],
    /// Sixteen 6-bit scales: low nibbles in bytes 0..8, those of scales 8 to 15 in the high half;
    /// upper bits of scale i in byte 8 + i % 4 from bit 2 · (i / 4) up.
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: HalfBytes,
}

const _: () = assert!(size_of::<BlockQ3K>() == 110);

impl BlockQ3K {
    /// scale − 32 of a group of 16.
    fn scale(&self, group: usize) -> i32 {
        let low = self.scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = self.scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        i32::from(low | high << 4) - 32
    }

    /// q − 4 of the weights of a group of 16.
    fn quants(&self, group: usize) -> impl Iterator<Item = i32> {
        let high = self.hmask[16 * (group % 2)..][..16].iter();
        let low = crumbs(&self.qs, group).zip(high);
        low.map(move |(low, high)| i32::from(low) + 4 * i32::from(high >> (group / 2) & 1) - 4)
    }
}

impl Source for BlockQ3K {
    const GGML_ID: u32 = 11;
    const NAME: &'static str = "Q3_K";
    const ELEMS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * self.scale(group) as f32;
            for (out, quant) in out.iter_mut().zip(self.quants(group)) {
                *out = scale * quant as f32;
            }
        }
    }

    fn transcode(&self, out: &mut [BlockQ8_0]) {
        let [low, high] = self.d.0;
        let d = HalfBytes([low, high ^ 0x80]);
        for (index, out) in out.iter_mut().enumerate() {
            let (mut qs, groups) = ([0; 32], [2 * index, 2 * index + 1]);
            for (group, qs) in groups.into_iter().zip(qs.chunks_exact_mut(16)) {
                let scale = self.scale(group);
                for (out, quant) in qs.iter_mut().zip(self.quants(group)) {
                    *out = -(scale * quant) as i8;
                }
            }
            *out = BlockQ8_0 { d, qs };
        }
    }
}
