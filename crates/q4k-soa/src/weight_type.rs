//! The weight types by their GGUF numbers and names.

use core::fmt;

use crate::block::{Entry, TABLE};
use crate::{Error, Result};

/// How the weights of a matrix are stored, in GGUF's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the documentation
pub enum WeightType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    /// Every type, in the order of the declaration.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    pub(crate) fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// The number that a GGUF file gives it.
    pub fn ggml_id(self) -> u32 {
        self.entry().ggml_id
    }

    /// The type with this number, where this crate has it.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.ggml_id() == id)
    }

    /// Its usual name, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Weights per block.
    pub fn block_elems(self) -> u32 {
        self.entry().block_elems
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u32 {
        self.entry().block_bytes
    }

    /// Bytes of one row of `n_in` weights, which has to be whole blocks.
    pub fn row_bytes(self, n_in: u32) -> Result<u64> {
        let block_elems = self.block_elems();
        if !n_in.is_multiple_of(block_elems) {
            return Err(Error::UnevenRow { ty: self, n_in, block_elems });
        }
        Ok(u64::from(n_in / block_elems) * u64::from(self.block_bytes()))
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// GGUF's name for a type, also for those that this crate refuses, so that a refusal can say it.
pub fn ggml_type_name(id: u32) -> Option<&'static str> {
    known(id).map(|&(_, name, _, _)| name)
}

/// Elements and bytes per block of a GGUF type, also for those that this crate refuses, so that
/// a reader can skip their tensors.
pub fn ggml_type_block(id: u32) -> Option<(u32, u32)> {
    known(id).map(|&(_, _, elems, bytes)| (elems, bytes))
}

fn known(id: u32) -> Option<&'static (u32, &'static str, u32, u32)> {
    GGML_TYPES.iter().find(|known| known.0 == id)
}

/// Id, name, elements per block, bytes per block. Numbers not listed were withdrawn from GGUF.
const GGML_TYPES: &[(u32, &str, u32, u32)] = &[
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_agrees_with_the_list_of_ggml_types() {
        for ty in WeightType::ALL {
            let id = ty.ggml_id();
            assert_eq!(WeightType::from_ggml_id(id), Some(ty));
            assert_eq!(ggml_type_name(id), Some(ty.name()));
            assert_eq!(ggml_type_block(id), Some((ty.block_elems(), ty.block_bytes())));
        }
    }

    #[test]
    fn refused_types_have_a_name_and_withdrawn_ones_have_none() {
        assert_eq!(ggml_type_name(22), Some("IQ2_S"));
        assert_eq!(WeightType::from_ggml_id(22), None);
        assert_eq!(ggml_type_name(4), None);
        assert_eq!(ggml_type_block(u32::MAX), None);
    }

    #[test]
    fn an_uneven_row_is_refused_with_its_numbers() {
        assert_eq!(WeightType::Q8_0.row_bytes(576), Ok(612));
        assert_eq!(
            WeightType::Q4K.row_bytes(576),
            Err(Error::UnevenRow { ty: WeightType::Q4K, n_in: 576, block_elems: 256 })
        );
        let text = alloc::format!("{}", WeightType::Q4K.row_bytes(576).unwrap_err());
        assert_eq!(text, "Q4_K rows are made of blocks of 256 weights; n_in = 576 leaves 64");
    }
}
