//! Q6_K: 256 weights of 6 bits with an 8-bit scale per 16, w = d·scale·(q − 32).

use bytemuck::{Pod, Zeroable};

use super::bits::{join_nibbles, nibbles_and_pair, split_nibbles, transpose_pairs};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::symmetric;

/// 256 weights in 210 bytes.
///
/// The two halves of 128 weights follow each other in `ql` and `qh`. In a half, weight 32k + i
/// has its low bits in `ql[32 (k % 2) + i]`, in the low nibble for k < 2 and else in the high,
/// and its high bits at bit 2k of `qh[i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// Low four bits.
    pub ql: [u8; 128],
    /// High two bits.
    pub qh: [u8; 64],
    /// One per 16 weights.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: HalfBytes,
}

const _: () = assert!(size_of::<BlockQ6K>() == 210);

impl Block for BlockQ6K {
    const GGML_ID: u32 = 14;
    const NAME: &'static str = "Q6_K";
    const ELEMS: usize = 256;
    const PLANES: &'static [PlaneSpec] =
        &[plane("low bits", 128), plane("high bits", 64), plane("scales", 16), plane("d", 2)];

    fn pack(blocks: &[Self], [low, high, scales, d]: PlanesMut<'_>) {
        let low = low.as_chunks_mut::<128>().0;
        let high = high.as_chunks_mut::<64>().0;
        let scales = scales.as_chunks_mut::<16>().0;
        let d = d.as_chunks_mut::<2>().0;
        let planes = low.iter_mut().zip(high).zip(scales).zip(d);
        for (block, (((low, high), scales), d)) in blocks.iter().zip(planes) {
            to_groups(&block.ql, &block.qh, low, high);
            *scales = bytemuck::cast(block.scales);
            *d = block.d.0;
        }
    }

    fn unpack([low, high, scales, d]: Planes<'_>, blocks: &mut [Self]) {
        let low = low.as_chunks::<128>().0;
        let high = high.as_chunks::<64>().0;
        let scales = scales.as_chunks::<16>().0;
        let d = d.as_chunks::<2>().0;
        let planes = low.iter().zip(high).zip(scales).zip(d);
        for (block, (((low, high), scales), d)) in blocks.iter_mut().zip(planes) {
            from_groups(low, high, &mut block.ql, &mut block.qh);
            block.scales = bytemuck::cast(*scales);
            block.d = HalfBytes(*d);
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (group, out) in out.chunks_exact_mut(32).enumerate() {
            let (half, k) = (group / 4, group % 4);
            let ql = &self.ql[64 * half + 32 * (k % 2)..][..32];
            let qh = &self.qh[32 * half..][..32];
            let scales = [0, 1].map(|i| d * f32::from(self.scales[2 * group + i]));
            for (i, (out, (low, high))) in out.iter_mut().zip(ql.iter().zip(qh)).enumerate() {
                let quant = low >> (4 * (k / 2)) & 15 | (high >> (2 * k) & 3) << 4;
                *out = scales[i / 16] * f32::from(quant as i8 - 32);
            }
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let fit = symmetric::super_block(values);
        let (mut low, mut high) = ([0; 128], [0; 64]);
        for (index, &quant) in fit.quants.iter().enumerate() {
            let (group, i) = (index / 32, index % 32);
            low[16 * group + i % 16] |= (quant & 15) << (4 * (i / 16));
            high[8 * group + i % 8] |= (quant >> 4) << (2 * (i / 8));
        }
        let mut block = Self { ql: [0; 128], qh: [0; 64], scales: fit.scales, d: fit.d };
        from_groups(&low, &high, &mut block.ql, &mut block.qh);
        block
    }
}

/// From GGUF's order to groups of 16 and 8 bytes.
#[inline(always)]
fn to_groups(ql: &[u8; 128], qh: &[u8; 64], low: &mut [u8; 128], high: &mut [u8; 64]) {
    let (ql, low) = (ql.as_chunks::<32>().0, low.as_chunks_mut::<16>().0);
    let (qh, high) = (qh.as_chunks::<32>().0, high.as_chunks_mut::<32>().0);
    for half in 0..2 {
        for part in 0..2 {
            let [near, far] = split_nibbles(&ql[2 * half + part]);
            low[4 * half + part] = near;
            low[4 * half + part + 2] = far;
        }
        high[half] = transposed(&qh[half]);
    }
}

/// The inverse of [`to_groups`].
#[inline(always)]
fn from_groups(low: &[u8; 128], high: &[u8; 64], ql: &mut [u8; 128], qh: &mut [u8; 64]) {
    let (ql, low) = (ql.as_chunks_mut::<32>().0, low.as_chunks::<16>().0);
    let (qh, high) = (qh.as_chunks_mut::<32>().0, high.as_chunks::<32>().0);
    for half in 0..2 {
        for part in 0..2 {
            ql[2 * half + part] = join_nibbles(&low[4 * half + part], &low[4 * half + part + 2]);
        }
        qh[half] = transposed(&high[half]);
    }
}

/// The high bits of 128 weights: from byte i = weights i, 32 + i, 64 + i, 96 + i to byte 8g + i =
/// weights 32g + i, 32g + 8 + i, 32g + 16 + i, 32g + 24 + i, and back.
#[inline(always)]
fn transposed(bytes: &[u8; 32]) -> [u8; 32] {
    let words = bytes.as_chunks::<8>().0;
    let words = core::array::from_fn(|k| u64::from_le_bytes(words[k]));
    bytemuck::cast(transpose_pairs(words).map(u64::to_le_bytes))
}

impl Grouped for BlockQ6K {
    #[inline(always)]
    fn group([low, high, scales, d]: &Planes<'_>, index: usize) -> Group {
        let low = low.as_chunks::<16>().0;
        let high = high.as_chunks::<8>().0;
        let scales = scales.as_chunks::<2>().0;
        let d = d.as_chunks::<2>().0;
        Group {
            quants: nibbles_and_pair(&low[index], &high[index]).map(|quant| quant - 32),
            d: HalfBytes(d[index / 8]).to_f32(),
            scales: scales[index].map(|scale| i32::from(scale as i8)),
            offset: None,
        }
    }
}
