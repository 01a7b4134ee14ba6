//! What can be wrong with a configuration, a table or a coordinate.

use alloc::string::String;

/// A refused configuration, table, coordinate or name, with the numbers that refused it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A dimension of the cache is zero.
    #[error("{what} must be at least 1")]
    ZeroDim {
        /// The dimension, as the configuration names it.
        what: &'static str,
    },
    /// The cache's size does not fit the integers that describe it.
    #[error(
        "{what} overflows: {n_layer} layers x {n_kv_head} KV heads x {head_dim} head dim x \
         {blocks_per_layer} blocks x {block_size_tokens} tokens"
    )]
    TooLarge {
        /// The number that overflowed.
        what: &'static str,
        /// Layers.
        n_layer: u32,
        /// KV heads of a layer.
        n_kv_head: u32,
        /// Elements of one head of one token.
        head_dim: u32,
        /// Physical blocks of a layer.
        blocks_per_layer: u32,
        /// Token slots of a block.
        block_size_tokens: u32,
    },
    /// A block table whose number of entries is not layers x blocks.
    #[error("block table has {got_entries} entries, the configuration needs {needed_entries}")]
    TableLength {
        /// Entries that the configuration needs.
        needed_entries: u64,
        /// Entries that were given.
        got_entries: u64,
    },
    /// A block table entry that names no block.
    #[error(
        "block table: layer {layer}, logical block {logical} maps to {physical}, but the layer has {blocks} blocks"
    )]
    EntryOutOfRange {
        /// The entry's layer.
        layer: u32,
        /// The entry's logical block.
        logical: u32,
        /// What the entry says.
        physical: u32,
        /// Physical blocks of the layer.
        blocks: u32,
    },
    /// Two logical blocks of one layer that map to the same physical block.
    #[error(
        "block table: layer {layer} maps logical blocks {first_logical} and {second_logical} both to {physical}"
    )]
    DuplicateEntry {
        /// The layer.
        layer: u32,
        /// The physical block that is named twice.
        physical: u32,
        /// The first logical block that names it.
        first_logical: u32,
        /// The second.
        second_logical: u32,
    },
    /// A coordinate outside the cache.
    #[error("{what} {index} is out of range, the cache has {limit}")]
    OutOfRange {
        /// The coordinate.
        what: &'static str,
        /// Its value.
        index: u64,
        /// The first value that is too large.
        limit: u64,
    },
    /// Address space for fewer blocks than there are.
    #[error("{reserved_blocks} blocks per layer reserved, there are {blocks_per_layer}")]
    ReservationTooSmall {
        /// Physical blocks of a layer.
        blocks_per_layer: u32,
        /// Blocks that address space was asked for.
        reserved_blocks: u32,
    },
    /// A name that is no KV element type.
    #[error("unknown KV type {name:?}, expected f32, f16, bf16, fp8 or q8")]
    UnknownKvType {
        /// The name.
        name: String,
    },
}
