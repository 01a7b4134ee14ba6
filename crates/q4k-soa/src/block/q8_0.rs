//! Q8_0: 32 weights of 8 bits, w = d·q.

use bytemuck::{Pod, Zeroable};

use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::round;

/// 32 weights in 34 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: HalfBytes,
    /// The weights in order.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_0>() == 34);

impl Block for BlockQ8_0 {
    const GGML_ID: u32 = 8;
    const NAME: &'static str = "Q8_0";
    const ELEMS: usize = 32;
    const PLANES: &'static [PlaneSpec] = &[plane("quants", 32), plane("d", 2)];

    fn pack(blocks: &[Self], [quants, scales, ..]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<32>().0;
        let scales = scales.as_chunks_mut::<2>().0;
        for ((block, quants), scales) in blocks.iter().zip(quants).zip(scales) {
            *quants = bytemuck::cast(block.qs);
            *scales = block.d.0;
        }
    }

    fn unpack([quants, scales, ..]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<32>().0;
        let scales = scales.as_chunks::<2>().0;
        for ((block, quants), scales) in blocks.iter_mut().zip(quants).zip(scales) {
            *block = Self { d: HalfBytes(*scales), qs: bytemuck::cast(*quants) };
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (out, &quant) in out.iter_mut().zip(&self.qs) {
            *out = f32::from(quant) * d;
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let amax = values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
        let d = HalfBytes::from_f32((amax / 127.0).min(65504.0));
        let scale = d.to_f32();
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let quant = |i: usize| round((values[i] * inverse).clamp(-128.0, 127.0)) as i8;
        Self { d, qs: core::array::from_fn(quant) }
    }
}

impl Grouped for BlockQ8_0 {
    #[inline(always)]
    fn group([quants, scales, ..]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<32>().0;
        let scales = scales.as_chunks::<2>().0;
        Group {
            quants: bytemuck::cast(quants[index]),
            d: HalfBytes(scales[index]).to_f32(),
            scales: [1; 2],
            offset: None,
        }
    }
}
