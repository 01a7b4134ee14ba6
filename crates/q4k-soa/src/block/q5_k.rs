//! Q5_K: 256 weights of 5 bits in eight groups with 6-bit scales and mins,
//! w = d·scale·q − dmin·min.

use bytemuck::{Pod, Zeroable};

use super::bits::{fifth_bits, from_nibbles, nibbles_and_bit, transpose_bits};
use super::half_float::{pair_bytes, pair_from_bytes};
use super::k_scales::{from_scales_and_mins, scale_and_min, scales_and_mins};
use super::q4_k::{join_super_block, split_super_block};
use super::{Block, Group, Grouped, HalfBytes, PlaneSpec, Planes, PlanesMut, plane};
use crate::quantize::affine;

/// 256 weights in 176 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: HalfBytes,
    /// Scale of the mins.
    pub dmin: HalfBytes,
    /// Eight 6-bit scales and eight 6-bit mins.
    pub scales: [u8; 12],
    /// Bit g of byte i is the fifth bit of weight i of group g.
    pub qh: [u8; 32],
    /// Bytes 32j..32j+32 hold group 2j in the low nibbles and group 2j+1 in the high.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ5K>() == 176);

impl Block for BlockQ5K {
    const GGML_ID: u32 = 13;
    const NAME: &'static str = "Q5_K";
    const ELEMS: usize = 256;
    const PLANES: &'static [PlaneSpec] =
        &[plane("quants", 128), plane("high bits", 32), plane("scales", 12), plane("d, dmin", 4)];

    fn pack(blocks: &[Self], [quants, high, scales, d]: PlanesMut<'_>) {
        let quants = quants.as_chunks_mut::<128>().0;
        let high = high.as_chunks_mut::<32>().0;
        let scales = scales.as_chunks_mut::<12>().0;
        let d = d.as_chunks_mut::<4>().0;
        let planes = quants.iter_mut().zip(high).zip(scales).zip(d);
        for (block, (((quants, high), scales), d)) in blocks.iter().zip(planes) {
            split_super_block(&block.qs, quants);
            *high = bits_by_group(&block.qh);
            *scales = block.scales;
            *d = pair_bytes(block.d, block.dmin);
        }
    }

    fn unpack([quants, high, scales, d]: Planes<'_>, blocks: &mut [Self]) {
        let quants = quants.as_chunks::<128>().0;
        let high = high.as_chunks::<32>().0;
        let scales = scales.as_chunks::<12>().0;
        let d = d.as_chunks::<4>().0;
        let planes = quants.iter().zip(high).zip(scales).zip(d);
        for (block, (((quants, high), scales), d)) in blocks.iter_mut().zip(planes) {
            join_super_block(quants, &mut block.qs);
            block.qh = bits_by_weight(high);
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
                let low = self.qs[group / 2 * 32 + i] >> (4 * (group % 2)) & 15;
                let quant = low | (self.qh[i] >> group & 1) << 4;
                *out = scale * f32::from(quant) - min;
            }
        }
    }

    fn quantize(values: &[f32]) -> Self {
        let fit = affine::super_block(values, 31);
        let mut block = Self {
            d: fit.d,
            dmin: fit.dmin,
            scales: from_scales_and_mins(&fit.scales, &fit.mins),
            qh: [0; 32],
            qs: [0; 128],
        };
        let (mut quants, mut high) = ([0; 128], [0; 32]);
        let planes = quants.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
        for ((low, high), quants) in planes.zip(&fit.quants) {
            *low = from_nibbles(quants);
            *high = fifth_bits(quants);
        }
        join_super_block(&quants, &mut block.qs);
        block.qh = bits_by_weight(&high);
        block
    }
}

/// From bit g of byte i to bit i of word g, in four transpositions of 8 × 8 bits.
#[inline(always)]
fn bits_by_group(source: &[u8; 32]) -> [u8; 32] {
    let mut plane = [0; 32];
    for (part, source) in source.as_chunks::<8>().0.iter().enumerate() {
        for (group, bits) in transposed(source).into_iter().enumerate() {
            plane[4 * group + part] = bits;
        }
    }
    plane
}

/// The inverse of [`bits_by_group`].
#[inline(always)]
fn bits_by_weight(plane: &[u8; 32]) -> [u8; 32] {
    let mut source = [0; 32];
    for (part, source) in source.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *source = transposed(&core::array::from_fn(|group| plane[4 * group + part]));
    }
    source
}

fn transposed(bytes: &[u8; 8]) -> [u8; 8] {
    transpose_bits(u64::from_le_bytes(*bytes)).to_le_bytes()
}

impl Grouped for BlockQ5K {
    #[inline(always)]
    fn group([quants, high, scales, d]: &Planes<'_>, index: usize) -> Group {
        let quants = quants.as_chunks::<16>().0;
        let high = high.as_chunks::<4>().0;
        let scales = scales.as_chunks::<12>().0;
        let d = d.as_chunks::<4>().0;
        let (scale, min) = scale_and_min(&scales[index / 8], index % 8);
        let (d, dmin) = pair_from_bytes(&d[index / 8]);
        Group {
            quants: nibbles_and_bit(&quants[index], &high[index]),
            d: d.to_f32(),
            scales: [i32::from(scale); 2],
            offset: Some(-(dmin.to_f32() * f32::from(min))),
        }
    }
}
