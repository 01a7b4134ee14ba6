//! Q4_K: 256 weights of 4 bits in eight groups with 6-bit scales and mins,
//! w = d·scale·q − dmin·min.

use bytemuck::{Pod, Zeroable};

use super::bits::{from_nibbles, join_nibbles, nibbles, split_nibbles};
use super::half_float::{pair_bytes, pair_from_bytes};
use super::k_scales::{from_scales_and_mins, scale_and_min, scales_and_mins};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::affine;

/// 256 weights in 144 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: HalfBytes,
    /// Scale of the mins.
    pub dmin: HalfBytes,
    /// Eight 6-bit scales and eight 6-bit mins.
    pub scales: [u8; 12],
    /// Bytes 32j..32j+32 hold group 2j in the low nibbles and group 2j+1 in the high.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ4K>() == 144);

impl Block for BlockQ4K {
    const GGML_ID: u32 = 12;
    const NAME: &'static str = "Q4_K";
    const ELEMS: usize = 256;
    const PLANES: &'static [PlaneSpec] =
        &[plane("quants", 128), plane("scales", 12), plane("d, dmin", 4)];

    fn pack(blocks: &[Self], [quants, scales, d, ..]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<128>().0;
        let scales = scales.as_chunks_mut::<12>().0;
        let d = d.as_chunks_mut::<4>().0;
        for (((block, quants), scales), d) in blocks.iter().zip(quants).zip(scales).zip(d) {
            split_super_block(&block.qs, quants);
            *scales = block.scales;
            *d = pair_bytes(block.d, block.dmin);
        }
    }

    fn unpack([quants, scales, d, ..]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<128>().0;
        let scales = scales.as_chunks::<12>().0;
        let d = d.as_chunks::<4>().0;
        for (((block, quants), scales), d) in blocks.iter_mut().zip(quants).zip(scales).zip(d) {
            join_super_block(quants, &mut block.qs);
            block.scales = *scales;
            (block.d, block.dmin) = pair_from_bytes(d);
        }
    }

    fn dequantize(&self, out: &mut [f32]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let [scales, mins] = scales_and_mins(&self.scales).map(u64::to_le_bytes);
        for (group, out) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = (d * f32::from(scales[group]), dmin * f32::from(mins[group]));
            for (i, out) in out.iter_mut().enumerate() {
                let quant = self.qs[group / 2 * 32 + i] >> (4 * (group % 2)) & 15;
                *out = scale * f32::from(quant) - min;
            }
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let fit = affine::super_block(values, 15);
        let mut block = Self {
            d: fit.d,
            dmin: fit.dmin,
            scales: from_scales_and_mins(&fit.scales, &fit.mins),
            qs: [0; 128],
        };
        let mut quants = [0; 128];
        for (plane, quants) in quants.as_chunks_mut().0.iter_mut().zip(&fit.quants) {
            *plane = from_nibbles(quants);
        }
        join_super_block(&quants, &mut block.qs);
        block
    }
}

/// The nibbles of a super-block, from GGUF's order to groups of 16 bytes.
#[inline(always)]
pub(super) fn split_super_block(source: &[u8; 128], plane: &mut [u8; 128]) {
    let groups = plane.as_chunks_mut::<16>().0;
    for (pair, source) in source.as_chunks::<32>().0.iter().enumerate() {
        [groups[2 * pair], groups[2 * pair + 1]] = split_nibbles(source);
    }
}

/// The inverse of [`split_super_block`].
#[inline(always)]
pub(super) fn join_super_block(plane: &[u8; 128], source: &mut [u8; 128]) {
    let groups = plane.as_chunks::<16>().0;
    for (pair, source) in source.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        *source = join_nibbles(&groups[2 * pair], &groups[2 * pair + 1]);
    }
}

impl Grouped for BlockQ4K {
    #[inline(always)]
    fn group([quants, scales, d, ..]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<16>().0;
        let scales = scales.as_chunks::<12>().0;
        let d = d.as_chunks::<4>().0;
        let (scale, min) = scale_and_min(&scales[index / 8], index % 8);
        let (d, dmin) = pair_from_bytes(&d[index / 8]);
        Group {
            quants: nibbles(&quants[index]),
            d: d.to_f32(),
            scales: [i32::from(scale); 2],
            offset: Some(-(dmin.to_f32() * f32::from(min))),
        }
    }
}
