//! ggml's tensor types: number, name, block size.

use std::fmt;

/// A ggml tensor type with a known block size.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(&'static Row);

#[derive(PartialEq, Eq, Hash)]
struct Row {
    id: u32,
    name: &'static str,
    block_elems: u64,
    block_bytes: u64,
}

impl GgmlType {
    /// The type with this number in GGUF, if it is known.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.id == id).map(Self)
    }

    /// The type with this name as ggml writes it (`"Q4_K"`), if it is known.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(Self)
    }

    /// The number in GGUF.
    pub fn id(self) -> u32 {
        self.0.id
    }

    /// The name as ggml writes it.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Weights per block.
    pub fn block_elems(self) -> u64 {
        self.0.block_elems
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u64 {
        self.0.block_bytes
    }

    /// Bytes of a row of `n_in` weights; `None` when that is no whole number of blocks, or too
    /// large.
    pub fn row_bytes(self, n_in: u64) -> Option<u64> {
        if !n_in.is_multiple_of(self.block_elems()) {
            return None;
        }
        (n_in / self.block_elems()).checked_mul(self.block_bytes())
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

macro_rules! table {
    ($($id:literal $name:ident $block_elems:literal $block_bytes:literal;)*) => {
        static TABLE: &[Row] = &[$(Row {
            id: $id,
            name: stringify!($name),
            block_elems: $block_elems,
            block_bytes: $block_bytes,
        }),*];

        /// The types by name.
        #[allow(missing_docs, reason = "each is named after the ggml type it is")]
        impl GgmlType {
            $(pub const $name: Self = Self(&Row {
                id: $id,
                name: stringify!($name),
                block_elems: $block_elems,
                block_bytes: $block_bytes,
            });)*
        }
    };
}

table! {
    0 F32 1 4;
    1 F16 1 2;
    2 Q4_0 32 18;
    3 Q4_1 32 20;
    6 Q5_0 32 22;
    7 Q5_1 32 24;
    8 Q8_0 32 34;
    9 Q8_1 32 36;
    10 Q2_K 256 84;
    11 Q3_K 256 110;
    12 Q4_K 256 144;
    13 Q5_K 256 176;
    14 Q6_K 256 210;
    15 Q8_K 256 292;
    16 IQ2_XXS 256 66;
    17 IQ2_XS 256 74;
    18 IQ3_XXS 256 98;
    19 IQ1_S 256 50;
    20 IQ4_NL 32 18;
    21 IQ3_S 256 110;
    22 IQ2_S 256 82;
    23 IQ4_XS 256 136;
    24 I8 1 1;
    25 I16 1 2;
    26 I32 1 4;
    27 I64 1 8;
    28 F64 1 8;
    29 IQ1_M 256 56;
    30 BF16 1 2;
    34 TQ1_0 256 54;
    35 TQ2_0 256 66;
    39 MXFP4 32 17;
    40 NVFP4 64 36;
    41 Q1_0 128 18;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique_and_lead_back() {
        for row in TABLE {
            let ty = GgmlType::from_id(row.id).unwrap();
            assert_eq!(ty.name(), row.name);
            assert_eq!(GgmlType::from_name(row.name).unwrap().id(), row.id);
        }
        assert_eq!(GgmlType::from_id(12), Some(GgmlType::Q4_K));
        assert_eq!(GgmlType::from_id(4), None, "Q4_2 was removed from ggml");
        assert_eq!(GgmlType::from_id(31), None, "Q4_0_4_4 was removed from ggml");
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(GgmlType::Q4_K.row_bytes(500), None);
        assert_eq!(GgmlType::F32.row_bytes(3), Some(12));
        assert_eq!(GgmlType::F64.row_bytes(u64::MAX), None);
    }
}
