//! ggml's tensor types, as far as a reader must know them.

use std::fmt;

use q4k_soa::{TranscodedType, WeightType, ggml_type_block, ggml_type_name};

/// A ggml tensor type with a known name and block size; whether the engine can compute with it is
/// [`weight_type`](Self::weight_type)'s answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType {
    id: u32,
    block_elems: u32,
    block_bytes: u32,
}

impl GgmlType {
    /// The type with this number in GGUF, if it is known.
    pub fn from_id(id: u32) -> Option<Self> {
        let (block_elems, block_bytes) = ggml_type_block(id)?;
        ggml_type_name(id)?;
        Some(Self { id, block_elems, block_bytes })
    }

    /// The number in GGUF.
    pub fn id(self) -> u32 {
        self.id
    }

    /// The name as ggml writes it.
    pub fn name(self) -> &'static str {
        ggml_type_name(self.id).expect("known, or it would not have been made")
    }

    /// Weights per block.
    pub fn block_elems(self) -> u64 {
        u64::from(self.block_elems)
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u64 {
        u64::from(self.block_bytes)
    }

    /// Bytes of a row of `n_in` weights; `None` when that is no whole number of blocks, or too
    /// large.
    pub fn row_bytes(self, n_in: u64) -> Option<u64> {
        if !n_in.is_multiple_of(self.block_elems()) {
            return None;
        }
        (n_in / self.block_elems()).checked_mul(self.block_bytes())
    }

    /// The type as one that the engine computes with; `None` where it does not.
    pub fn weight_type(self) -> Option<WeightType> {
        WeightType::from_ggml_id(self.id)
    }

    /// The type as one that is loaded as another; `None` where it is not.
    pub fn transcoded_type(self) -> Option<TranscodedType> {
        TranscodedType::from_ggml_id(self.id)
    }
}

impl From<WeightType> for GgmlType {
    fn from(ty: WeightType) -> Self {
        Self { id: ty.ggml_id(), block_elems: ty.block_elems(), block_bytes: ty.block_bytes() }
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_to_types_and_back() {
        for ty in WeightType::ALL {
            let ggml = GgmlType::from(ty);
            assert_eq!(GgmlType::from_id(ty.ggml_id()), Some(ggml));
            assert_eq!(ggml.weight_type(), Some(ty));
            assert_eq!(ggml.name(), ty.name());
        }
        assert_eq!(GgmlType::from_id(4), None, "Q4_2 was removed from ggml");
        assert_eq!(GgmlType::from_id(31), None, "Q4_0_4_4 was removed from ggml");
        assert_eq!(GgmlType::from_id(16).and_then(GgmlType::weight_type), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        let q4k = GgmlType::from(WeightType::Q4K);
        assert_eq!(q4k.row_bytes(512), Some(288));
        assert_eq!(q4k.row_bytes(500), None);
        let f64 = GgmlType::from_id(28).unwrap();
        assert_eq!(f64.row_bytes(u64::MAX), None);
    }
}
