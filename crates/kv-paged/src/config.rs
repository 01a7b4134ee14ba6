//! The shape of the cache.

use crate::{KvError, KvLayout, KvRing, KvType};

/// Token slots per block where the caller does not choose.
pub const DEFAULT_BLOCK_SIZE_TOKENS: u32 = 16;

/// The validated shape of a paged KV cache: every size computed from it fits its integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagedKvConfig {
    n_layer: u32,
    n_kv_head: u32,
    head_dim: u32,
    max_context_tokens: u32,
    block_size_tokens: u32,
    kv_type: KvType,
}

impl PagedKvConfig {
    /// A cache for `max_context_tokens` positions, with blocks of
    /// [`DEFAULT_BLOCK_SIZE_TOKENS`] and [`KvType::F16`].
    pub fn new(
        n_layer: u32,
        n_kv_head: u32,
        head_dim: u32,
        max_context_tokens: u32,
    ) -> Result<Self, KvError> {
        Self {
            n_layer,
            n_kv_head,
            head_dim,
            max_context_tokens,
            block_size_tokens: DEFAULT_BLOCK_SIZE_TOKENS,
            kv_type: KvType::default(),
        }
        .validated()
    }

    /// The same cache in blocks of `tokens`.
    pub fn with_block_size(self, tokens: u32) -> Result<Self, KvError> {
        Self { block_size_tokens: tokens, ..self }.validated()
    }

    /// The same cache with elements of `kv_type`.
    pub fn with_kv_type(self, kv_type: KvType) -> Result<Self, KvError> {
        Self { kv_type, ..self }.validated()
    }

    fn validated(self) -> Result<Self, KvError> {
        for (what, value) in [
            ("n_layer", self.n_layer),
            ("n_kv_head", self.n_kv_head),
            ("head_dim", self.head_dim),
            ("max_context_tokens", self.max_context_tokens),
            ("block_size_tokens", self.block_size_tokens),
        ] {
            if value == 0 {
                return Err(KvError::ZeroDim { what });
            }
        }
        KvLayout::compute(&self, self.blocks_per_layer()).map(|_| self)
    }

    /// Layers.
    pub const fn n_layer(&self) -> u32 {
        self.n_layer
    }

    /// KV heads of a layer.
    pub const fn n_kv_head(&self) -> u32 {
        self.n_kv_head
    }

    /// Elements of one head of one token.
    pub const fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Positions that are kept at the same time.
    pub const fn max_context_tokens(&self) -> u32 {
        self.max_context_tokens
    }

    /// Token slots of a block.
    pub const fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens
    }

    /// How an element is stored.
    pub const fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Logical blocks of a layer, the last one perhaps larger than what is left of the context.
    pub const fn blocks_per_layer(&self) -> u32 {
        self.max_context_tokens.div_ceil(self.block_size_tokens)
    }

    /// Entries of a [`BlockTable`](crate::BlockTable) for this cache; fits `u32`.
    pub const fn table_entries(&self) -> u64 {
        self.n_layer as u64 * self.blocks_per_layer() as u64
    }

    /// Where everything lies when each layer has [`blocks_per_layer`](Self::blocks_per_layer)
    /// physical blocks.
    pub fn layout(&self) -> KvLayout {
        KvLayout::new(self)
    }

    /// The ring of token slots.
    pub const fn ring(&self) -> KvRing {
        KvRing::of(self.max_context_tokens)
    }

    /// Key and value elements of the whole cache, the unused ends of last blocks included and
    /// scales excluded.
    pub fn total_elems(&self) -> u64 {
        self.layout().total_elems()
    }

    /// Bytes of the whole cache, scales included.
    pub fn total_bytes(&self) -> u64 {
        self.layout().total_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_blocks_of_16_and_f16() {
        let config = PagedKvConfig::new(28, 8, 128, 8192).unwrap();
        assert_eq!(config.block_size_tokens(), 16);
        assert_eq!(config.kv_type(), KvType::F16);
        assert_eq!(config.blocks_per_layer(), 512);
        assert_eq!(config.total_elems(), 28 * 8192 * 2 * 8 * 128);
        assert_eq!(config.total_bytes(), 2 * config.total_elems());
    }

    #[test]
    fn a_context_that_is_no_multiple_of_the_block_rounds_up() {
        let config = PagedKvConfig::new(1, 1, 2, 33).unwrap();
        assert_eq!(config.blocks_per_layer(), 3);
        assert_eq!(config.total_elems(), 3 * 16 * 2 * 2);
        assert_eq!(config.with_block_size(33).unwrap().blocks_per_layer(), 1);
    }

    #[test]
    fn each_zero_dim_is_named() {
        let zero = |what| Err(KvError::ZeroDim { what });
        assert_eq!(PagedKvConfig::new(0, 1, 1, 1), zero("n_layer"));
        assert_eq!(PagedKvConfig::new(1, 0, 1, 1), zero("n_kv_head"));
        assert_eq!(PagedKvConfig::new(1, 1, 0, 1), zero("head_dim"));
        assert_eq!(PagedKvConfig::new(1, 1, 1, 0), zero("max_context_tokens"));
        let config = PagedKvConfig::new(1, 1, 1, 1).unwrap();
        assert_eq!(config.with_block_size(0), zero("block_size_tokens"));
    }

    #[test]
    fn overflow_is_an_error_with_the_dims() {
        let error = PagedKvConfig::new(1 << 16, 1 << 20, 1 << 20, 1 << 16).unwrap_err();
        assert_eq!(
            error,
            KvError::TooLarge {
                what: "total_bytes",
                n_layer: 1 << 16,
                n_kv_head: 1 << 20,
                head_dim: 1 << 20,
                blocks_per_layer: 1 << 12,
                block_size_tokens: 16,
            }
        );
        let widest = u32::MAX;
        assert!(PagedKvConfig::new(widest, widest, widest, widest).is_err());
    }

    #[test]
    fn bytes_decide_where_elements_still_fit() {
        // 2^62 elements: 2^63 bytes as f16, 2^64 as f32.
        let config = PagedKvConfig::new(1 << 15, 1 << 15, 1 << 15, 1 << 16).unwrap();
        assert_eq!(config.total_bytes(), 1 << 63);
        assert!(matches!(
            config.with_kv_type(KvType::F32),
            Err(KvError::TooLarge { what: "total_bytes", .. })
        ));
    }

    #[test]
    fn a_table_that_cannot_be_indexed_is_refused() {
        assert!(matches!(
            PagedKvConfig::new(1 << 20, 1, 1, 1 << 20).and_then(|c| c.with_block_size(1)),
            Err(KvError::TooLarge { what: "table_entries", .. })
        ));
    }
}
