//! What a residency accepts (S12).

/// Upper bounds on what is made resident. The defaults suit an engine that brings single
/// weights; [`crate::decoder`] derives wider ones from a model and the memory budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a weight matrix.
    pub max_rows: u32,
    /// Bytes of one weight or blob.
    pub max_blob_bytes: u64,
    /// Elements of the KV arena.
    pub max_kv_elems: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_rows: 131_072, max_blob_bytes: 256 << 20, max_kv_elems: 128 << 20 }
    }
}

impl Limits {
    /// Whatever fits the memory.
    pub const UNLIMITED: Self =
        Self { max_rows: u32::MAX, max_blob_bytes: u64::MAX, max_kv_elems: u64::MAX };
}
