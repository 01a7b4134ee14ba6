//! Q5_1: 32 weights of 5 bits, w = d·q + m.

use bytemuck::{Pod, Zeroable};

use super::bits::{fifth_bits, from_nibbles, nibbles_and_bit};
use super::half_float::{pair_bytes, pair_from_bytes};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::affine;

/// 32 weights in 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: HalfBytes,
    /// Added to every weight.
    pub m: HalfBytes,
    /// Bit i is the fifth bit of weight i.
    pub qh: [u8; 4],
    /// Byte i is weight i in the low nibble and weight 16 + i in the high.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ5_1>() == 24);

impl Block for BlockQ5_1 {
    const GGML_ID: u32 = 7;
    const NAME: &'static str = "Q5_1";
    const ELEMS: usize = 32;
    const PLANES: &'static [PlaneSpec] =
        &[plane("quants", 16), plane("high bits", 4), plane("d, m", 4)];

    fn pack(blocks: &[Self], [quants, high, scales, ..]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<16>().0;
        let high = high.as_chunks_mut::<4>().0;
        let scales = scales.as_chunks_mut::<4>().0;
        for (((block, quants), high), scales) in blocks.iter().zip(quants).zip(high).zip(scales) {
            *quants = block.qs;
            *high = block.qh;
            *scales = pair_bytes(block.d, block.m);
        }
    }

    fn unpack([quants, high, scales, ..]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<16>().0;
        let high = high.as_chunks::<4>().0;
        let scales = scales.as_chunks::<4>().0;
        for (((block, quants), high), scales) in blocks.iter_mut().zip(quants).zip(high).zip(scales)
        {
            let (d, m) = pair_from_bytes(scales);
            *block = Self { d, m, qh: *high, qs: *quants };
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        for (out, quant) in out.iter_mut().zip(nibbles_and_bit(&self.qs, &self.qh)) {
            *out = f32::from(quant) * d + m;
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let (d, m, quants) = affine::block(values, 31);
        Self { d, m, qh: fifth_bits(&quants), qs: from_nibbles(&quants) }
    }
}

impl Grouped for BlockQ5_1 {
    #[inline(always)]
    fn group([quants, high, scales, ..]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<16>().0;
        let high = high.as_chunks::<4>().0;
        let scales = scales.as_chunks::<4>().0;
        let (d, m) = pair_from_bytes(&scales[index]);
        Group {
            quants: nibbles_and_bit(&quants[index], &high[index]),
            d: d.to_f32(),
            scales: [1; 2],
            offset: Some(m.to_f32()),
        }
    }
}
