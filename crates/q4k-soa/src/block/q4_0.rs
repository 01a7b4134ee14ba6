//! Q4_0: 32 weights of 4 bits, w = d·(q − 8).

use bytemuck::{Pod, Zeroable};

use super::bits::{from_nibbles, nibbles};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::symmetric;

/// 32 weights in 18 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: HalfBytes,
    /// Byte i is weight i in the low nibble and weight 16 + i in the high.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18);

impl Block for BlockQ4_0 {
    const GGML_ID: u32 = 2;
    const NAME: &'static str = "Q4_0";
    const ELEMS: usize = 32;
    const PLANES: &'static [PlaneSpec] = &[plane("quants", 16), plane("d", 2)];

    fn pack(blocks: &[Self], [quants, scales, ..]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<16>().0;
        let scales = scales.as_chunks_mut::<2>().0;
        for ((block, quants), scales) in blocks.iter().zip(quants).zip(scales) {
            *quants = block.qs;
            *scales = block.d.0;
        }
    }

    fn unpack([quants, scales, ..]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<16>().0;
        let scales = scales.as_chunks::<2>().0;
        for ((block, quants), scales) in blocks.iter_mut().zip(quants).zip(scales) {
            *block = Self { d: HalfBytes(*scales), qs: *quants };
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (out, quant) in out.iter_mut().zip(nibbles(&self.qs)) {
            *out = f32::from(quant - 8) * d;
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let (d, quants) = symmetric::block(values, 8);
        Self { d, qs: from_nibbles(&quants) }
    }
}

impl Grouped for BlockQ4_0 {
    #[inline(always)]
    fn group([quants, scales, ..]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<16>().0;
        let scales = scales.as_chunks::<2>().0;
        Group {
            quants: nibbles(&quants[index]).map(|quant| quant - 8),
            d: HalfBytes(scales[index]).to_f32(),
            scales: [1; 2],
            offset: None,
        }
    }
}
