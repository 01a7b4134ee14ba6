//! Q4_1: 32 weights of 4 bits, w = d·q + m.

use bytemuck::{Pod, Zeroable};

use super::bits::{from_nibbles, nibbles};
use super::half_float::{pair_bytes, pair_from_bytes};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::affine;

/// 32 weights in 20 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: HalfBytes,
    /// Added to every weight.
    pub m: HalfBytes,
    /// Byte i is weight i in the low nibble and weight 16 + i in the high.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_1>() == 20);

impl Block for BlockQ4_1 {
    const GGML_ID: u32 = 3;
    const NAME: &'static str = "Q4_1";
    const ELEMS: usize = 32;
    const PLANES: &'static [PlaneSpec] = &[plane("quants", 16), plane("d, m", 4)];

    fn pack(blocks: &[Self], [quants, scales, ..]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<16>().0;
        let scales = scales.as_chunks_mut::<4>().0;
        for ((block, quants), scales) in blocks.iter().zip(quants).zip(scales) {
            *quants = block.qs;
            *scales = pair_bytes(block.d, block.m);
        }
    }

    fn unpack([quants, scales, ..]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<16>().0;
        let scales = scales.as_chunks::<4>().0;
        for ((block, quants), scales) in blocks.iter_mut().zip(quants).zip(scales) {
            let (d, m) = pair_from_bytes(scales);
            *block = Self { d, m, qs: *quants };
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        for (out, quant) in out.iter_mut().zip(nibbles(&self.qs)) {
            *out = f32::from(quant) * d + m;
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let (d, m, quants) = affine::block(values, 15);
        Self { d, m, qs: from_nibbles(&quants) }
    }
}

impl Grouped for BlockQ4_1 {
    #[inline(always)]
    fn group([quants, scales, ..]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<16>().0;
        let scales = scales.as_chunks::<4>().0;
        let (d, m) = pair_from_bytes(&scales[index]);
        Group {
            quants: nibbles(&quants[index]),
            d: d.to_f32(),
            scales: [1; 2],
            offset: Some(m.to_f32()),
        }
    }
}
