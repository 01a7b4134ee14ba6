//! Looking for scales that are not numbers.
//!
//! A NaN or an infinity among the block scales spreads over all logits. Such a file is loaded as
//! it is, since its bytes may be wanted all the same, but the user is told.

use q4k_soa::{TranscodedType, WeightType};

use super::TensorRef;
use crate::gguf::{Gguf, GgufError};

/// What looking through one tensor found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleScan {
    /// Scales in the tensor; for types without scales, weights.
    pub n_scales: u64,
    /// How many of them are NaN or infinite.
    pub non_finite: u64,
}

impl ScaleScan {
    /// Adds what was found elsewhere.
    pub fn add(&mut self, other: Self) {
        self.n_scales += other.n_scales;
        self.non_finite += other.non_finite;
    }
}

/// How a scale is stored.
#[derive(Clone, Copy)]
enum Float {
    F16,
    Bf16,
    F32,
}

/// Where the scales, all of them halves, are in a block of a type.
fn transcoded_floats(ty: TranscodedType) -> &'static [usize] {
    match ty {
        TranscodedType::Q2K => &[80, 82],
        TranscodedType::Q3K => &[108],
        TranscodedType::Iq4Nl | TranscodedType::Iq4Xs => &[0],
        // As below.
        _ => &[],
    }
}

/// Where the floats are in a block of a type.
fn floats(ty: WeightType) -> (Float, &'static [usize]) {
    match ty {
        WeightType::F32 => (Float::F32, &[0]),
        WeightType::Bf16 => (Float::Bf16, &[0]),
        WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => {
            (Float::F16, &[0])
        }
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => {
            (Float::F16, &[0, 2])
        }
        WeightType::Q6K => (Float::F16, &[208]),
        // A type that q4k-soa gains later; the test below fails until it has a line here.
        _ => (Float::F16, &[]),
    }
}

/// Counts the scales in whole blocks of a matrix as it is stored, and those of them that are NaN or
/// infinite. An incomplete block at the end is not looked at.
pub fn non_finite_scales(matrix: &TensorRef, blocks: &[u8]) -> ScaleScan {
    match matrix.stored_as {
        Some(ty) => scan(Float::F16, transcoded_floats(ty), ty.block_bytes(), blocks),
        None => {
            let (float, offsets) = floats(matrix.ty);
            scan(float, offsets, matrix.ty.block_bytes(), blocks)
        }
    }
}

fn scan(float: Float, offsets: &[usize], block_bytes: u32, blocks: &[u8]) -> ScaleScan {
    let blocks = blocks.chunks_exact(block_bytes as usize);
    let n_scales = (blocks.len() * offsets.len()) as u64;
    let mut non_finite = 0;
    for block in blocks {
        for &at in offsets {
            // Not a number or infinite: all bits of the exponent are set.
            let bad = match float {
                Float::F16 => block[at + 1] & 0x7c == 0x7c,
                Float::Bf16 | Float::F32 => {
                    let end = if matches!(float, Float::F32) { at + 4 } else { at + 2 };
                    block[end - 1] & 0x7f == 0x7f && block[end - 2] & 0x80 == 0x80
                }
            };
            non_finite += u64::from(bad);
        }
    }
    ScaleScan { n_scales, non_finite }
}

/// Looks through a whole matrix, a piece at a time.
pub fn scan_scales(gguf: &Gguf, matrix: &TensorRef) -> Result<ScaleScan, GgufError> {
    let info = matrix.info(gguf);
    // A whole number of rows, about a MiB.
    let piece_bytes = ((1 << 20) / matrix.row_bytes()).max(1) * matrix.row_bytes();
    let mut piece = vec![0; piece_bytes.min(matrix.n_bytes()) as usize];
    let mut scan = ScaleScan::default();
    let mut first_byte = matrix.first_byte();
    let end_byte = first_byte + matrix.n_bytes();
    while first_byte < end_byte {
        let n = piece_bytes.min(end_byte - first_byte) as usize;
        gguf.read_tensor(info, first_byte, &mut piece[..n])?;
        scan.add(non_finite_scales(matrix, &piece[..n]));
        first_byte += n as u64;
    }
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a float into a block at one of the type's places.
    fn put(block: &mut [u8], float: Float, at: usize, value: f32) {
        match float {
            Float::F16 => {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
            Float::Bf16 => {
                block[at..at + 2].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
            }
            Float::F32 => block[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        }
    }

    /// Name, bytes of a block, and where its floats are.
    fn every_type() -> impl Iterator<Item = (&'static str, usize, Float, &'static [usize])> {
        let native = WeightType::ALL.into_iter().map(|ty| {
            let (float, offsets) = floats(ty);
            (ty.name(), ty.block_bytes() as usize, float, offsets)
        });
        let transcoded = TranscodedType::ALL.into_iter();
        native.chain(
            transcoded.map(|ty| {
                (ty.name(), ty.block_bytes() as usize, Float::F16, transcoded_floats(ty))
            }),
        )
    }

    #[test]
    fn every_type_has_its_scales_looked_at() {
        for (name, block_bytes, float, offsets) in every_type() {
            assert!(!offsets.is_empty(), "{name}");
            let scan = |blocks: &[u8]| scan(float, offsets, block_bytes as u32, blocks);
            for &at in offsets {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut blocks = vec![0; 3 * block_bytes];
                    put(&mut blocks[block_bytes..], float, at, bad);
                    let found = scan(&blocks);
                    assert_eq!(found.n_scales, 3 * offsets.len() as u64);
                    assert_eq!(found.non_finite, 1, "{name} {bad}");
                }
                let mut blocks = vec![0; block_bytes];
                put(&mut blocks, float, at, -65504.0);
                assert_eq!(scan(&blocks).non_finite, 0, "{name}");
            }
        }
    }

    #[test]
    fn quants_are_not_taken_for_scales() {
        for (name, block_bytes, float, offsets) in every_type().filter(|ty| ty.1 > 4) {
            let mut block = vec![0xff; block_bytes];
            for &at in offsets {
                put(&mut block, float, at, 1.0);
            }
            assert_eq!(scan(float, offsets, block_bytes as u32, &block).non_finite, 0, "{name}");
        }
    }
}
