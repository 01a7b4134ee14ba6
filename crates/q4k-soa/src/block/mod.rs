//! The block types of GGUF, one file each, and the table that everything else dispatches through.
//!
//! A new type is a file with its block, its planes and its formula, a variant of
//! [`WeightType`] and a row of the table. Blocks consist of bytes alone, so
//! that they can be read in place from a file at any address and on any byte order.

mod bf16;
pub(crate) mod bits;
mod f16;
mod f32;
pub(crate) mod half_float;
pub(crate) mod k_scales;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

pub use self::bf16::BlockBf16;
pub use self::f16::BlockF16;
pub use self::f32::BlockF32;
pub use self::half_float::HalfBytes;
pub use self::q4_0::BlockQ4_0;
pub use self::q4_1::BlockQ4_1;
pub use self::q4_k::BlockQ4K;
pub use self::q5_0::BlockQ5_0;
pub use self::q5_1::BlockQ5_1;
pub use self::q5_k::BlockQ5K;
pub use self::q6_k::BlockQ6K;
pub use self::q8_0::BlockQ8_0;

use bytemuck::Pod;

use crate::matvec::scalar;
use crate::{Error, GROUP_ELEMS, Q8Group, Result, WeightType};

/// No type has more planes.
pub(crate) const MAX_PLANES: usize = 4;

/// The same run of blocks in every plane; planes that the type lacks are empty.
pub(crate) type Planes<'a> = [&'a [u8]; MAX_PLANES];
/// As [`Planes`], to be written.
pub(crate) type PlanesMut<'a> = [&'a mut [u8]; MAX_PLANES];

/// A plane as a type declares it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaneSpec {
    pub(crate) name: &'static str,
    /// Bytes that one block has in it.
    pub(crate) block_bytes: u32,
}

pub(crate) const fn plane(name: &'static str, block_bytes: u32) -> PlaneSpec {
    PlaneSpec { name, block_bytes }
}

/// A block of GGUF and its form in planes.
pub(crate) trait Block: Pod + Send + Sync {
    const GGML_ID: u32;
    const NAME: &'static str;
    const ELEMS: usize;
    /// In order; together exactly as many bytes as the block.
    const PLANES: &'static [PlaneSpec];

    /// Writes the blocks into the planes, which hold as many.
    fn pack(blocks: &[Self], planes: PlanesMut<'_>);
    /// The inverse of [`Block::pack`], for any bytes.
    fn unpack(planes: Planes<'_>, blocks: &mut [Self]);
    /// The type's formula, straight from the block; `out` has `ELEMS` places.
    fn dequantize(&self, out: &mut [f32]);
    /// Chooses the block for `values`, which are finite and `ELEMS` in number.
    fn quantize(values: &[f32]) -> Self;
}

/// A type whose weights are small integers with scales: 32 consecutive ones read from planes.
pub(crate) trait Grouped: Block {
    fn group(planes: &Planes<'_>, index: usize) -> Group;
}

/// 32 weights: weight i is `(d * scales[i / 16]) * quants[i] + offset`, in f32 and in that order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    pub(crate) quants: [i8; GROUP_ELEMS],
    pub(crate) d: f32,
    pub(crate) scales: [i32; 2],
    /// `None` where the type has no such term, which is not the same as adding zero: -0.0 stays.
    pub(crate) offset: Option<f32>,
}

/// A type whose blocks are single numbers.
pub(crate) trait Float: Block {
    fn to_f32(self) -> f32;
}

/// A row of the table: what the rest of the crate knows of a type.
pub(crate) struct Entry {
    pub(crate) ggml_id: u32,
    pub(crate) name: &'static str,
    pub(crate) block_elems: u32,
    pub(crate) block_bytes: u32,
    pub(crate) planes: &'static [PlaneSpec],
    pub(crate) pack: fn(&[u8], PlanesMut<'_>),
    pub(crate) unpack: fn(Planes<'_>, &mut [u8]),
    pub(crate) dequantize: fn(&[u8], &mut [f32]),
    pub(crate) quantize: fn(&[f32], &mut [u8]),
    pub(crate) dequantize_row: fn(Planes<'_>, &mut [f32]),
    pub(crate) dequantize_row_f16: fn(Planes<'_>, &mut [f32]),
    pub(crate) dot_q8: fn(Planes<'_>, &[i8], &[Q8Group]) -> f32,
    pub(crate) dot_f32: fn(Planes<'_>, &[f32]) -> f32,
}

pub(crate) static TABLE: [Entry; 11] = [
    float::<BlockF32>(),
    float::<BlockF16>(),
    float::<BlockBf16>(),
    grouped::<BlockQ4_0>(),
    grouped::<BlockQ4_1>(),
    grouped::<BlockQ5_0>(),
    grouped::<BlockQ5_1>(),
    grouped::<BlockQ8_0>(),
    grouped::<BlockQ4K>(),
    grouped::<BlockQ5K>(),
    grouped::<BlockQ6K>(),
];

const fn grouped<B: Grouped>() -> Entry {
    Entry {
        dequantize_row: scalar::dequantize_grouped::<B>,
        dequantize_row_f16: scalar::dequantize_grouped_f16::<B>,
        dot_q8: scalar::dot_q8_grouped::<B>,
        dot_f32: scalar::dot_f32_grouped::<B>,
        ..entry::<B>()
    }
}

const fn float<B: Float>() -> Entry {
    Entry {
        dequantize_row: scalar::dequantize_float::<B>,
        dequantize_row_f16: scalar::dequantize_float_f16::<B>,
        dot_q8: scalar::dot_q8_float::<B>,
        dot_f32: scalar::dot_f32_float::<B>,
        ..entry::<B>()
    }
}

const fn entry<B: Block>() -> Entry {
    const { assert!(planes_hold_the_block::<B>(), "the planes hold other bytes than the block") };
    Entry {
        ggml_id: B::GGML_ID,
        name: B::NAME,
        block_elems: B::ELEMS as u32,
        block_bytes: size_of::<B>() as u32,
        planes: B::PLANES,
        pack: |source, planes| B::pack(bytemuck::cast_slice(source), planes),
        unpack: |planes, source| B::unpack(planes, bytemuck::cast_slice_mut(source)),
        dequantize: |source, out| {
            let blocks: &[B] = bytemuck::cast_slice(source);
            for (block, out) in blocks.iter().zip(out.chunks_exact_mut(B::ELEMS)) {
                block.dequantize(out);
            }
        },
        quantize: |values, out| {
            let blocks: &mut [B] = bytemuck::cast_slice_mut(out);
            for (block, values) in blocks.iter_mut().zip(values.chunks_exact(B::ELEMS)) {
                *block = B::quantize(values);
            }
        },
        dequantize_row: |_, _| {},
        dequantize_row_f16: |_, _| {},
        dot_q8: |_, _, _| 0.0,
        dot_f32: |_, _| 0.0,
    }
}

/// Compile-time check: alignment 1 (any address will do), and every byte has its place in a plane.
const fn planes_hold_the_block<B: Block>() -> bool {
    let mut bytes = 0;
    let mut index = 0;
    while index < B::PLANES.len() {
        bytes += B::PLANES[index].block_bytes as usize;
        index += 1;
    }
    bytes == size_of::<B>() && align_of::<B>() == 1 && B::PLANES.len() <= MAX_PLANES
}

/// Dequantises whole blocks as a GGUF file holds them, by the type's formula.
///
/// ```
/// use q4k_soa::{WeightType, dequantize};
///
/// let block = [&[0x00, 0x3c][..], &[3; 32]].concat(); // d = 1.0 and 32 × 3
/// let mut weights = [0.0; 32];
/// dequantize(WeightType::Q8_0, &block, &mut weights)?;
/// assert_eq!(weights, [3.0; 32]);
/// # Ok::<(), q4k_soa::Error>(())
/// ```
pub fn dequantize(ty: WeightType, source: &[u8], out: &mut [f32]) -> Result<()> {
    let expected_elems = source_elems(ty, source)?;
    if out.len() as u64 != expected_elems {
        return Err(Error::ValuesLength { expected_elems, actual_elems: out.len() as u64 });
    }
    (ty.entry().dequantize)(source, out);
    Ok(())
}

/// Weights that whole blocks hold.
fn source_elems(ty: WeightType, source: &[u8]) -> Result<u64> {
    let (block_bytes, actual_bytes) = (ty.block_bytes(), source.len() as u64);
    if !actual_bytes.is_multiple_of(u64::from(block_bytes)) {
        return Err(Error::PartialBlock { name: ty.name(), block_bytes, actual_bytes });
    }
    Ok(actual_bytes / u64::from(block_bytes) * u64::from(ty.block_elems()))
}
