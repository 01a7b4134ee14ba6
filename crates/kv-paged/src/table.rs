//! The block table of one sequence that owns its whole cache.

use crate::{KvError, PagedKvConfig};
use alloc::{vec, vec::Vec};

/// `[layer][logical block] -> physical block`, one to one inside each layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockTable {
    entries: Vec<u32>,
    n_layer: u32,
    blocks_per_layer: u32,
    block_size_tokens: u32,
}

impl BlockTable {
    /// Logical block `i` is physical block `i`, in every layer.
    pub fn identity(config: &PagedKvConfig) -> Self {
        let mut entries = Vec::with_capacity(config.table_entries() as usize);
        for _ in 0..config.n_layer() {
            entries.extend(0..config.blocks_per_layer());
        }
        Self::of(config, entries)
    }

    /// The table with these entries, in `[layer][logical block]` order. Each layer must name
    /// each of its physical blocks exactly once.
    pub fn from_permutation(config: &PagedKvConfig, entries: Vec<u32>) -> Result<Self, KvError> {
        if entries.len() as u64 != config.table_entries() {
            return Err(KvError::TableLength {
                needed_entries: config.table_entries(),
                got_entries: entries.len() as u64,
            });
        }
        let blocks = config.blocks_per_layer();
        // The entry index + 1 that last named the block: one array serves all layers, because
        // what a layer before has left is below this layer's first entry.
        let mut named_by = vec![0_usize; blocks as usize];
        for (layer, row) in entries.chunks_exact(blocks as usize).enumerate() {
            let first_entry = layer * blocks as usize;
            for (logical, &physical) in row.iter().enumerate() {
                let (layer, logical) = (layer as u32, logical as u32);
                let Some(named) = named_by.get_mut(physical as usize) else {
                    return Err(KvError::EntryOutOfRange { layer, logical, physical, blocks });
                };
                if *named > first_entry {
                    return Err(KvError::DuplicateEntry {
                        layer,
                        physical,
                        first_logical: (*named - 1 - first_entry) as u32,
                        second_logical: logical,
                    });
                }
                *named = first_entry + logical as usize + 1;
            }
        }
        Ok(Self::of(config, entries))
    }

    fn of(config: &PagedKvConfig, entries: Vec<u32>) -> Self {
        Self {
            entries,
            n_layer: config.n_layer(),
            blocks_per_layer: config.blocks_per_layer(),
            block_size_tokens: config.block_size_tokens(),
        }
    }

    /// Every entry, in `[layer][logical block]` order: what the device holds.
    pub fn entries(&self) -> &[u32] {
        &self.entries
    }

    /// Bytes of the entries on the device.
    pub fn size_bytes(&self) -> u64 {
        size_of_val(self.entries.as_slice()) as u64
    }

    /// The entries of one layer; `None` where there is no such layer.
    pub fn layer(&self, layer: u32) -> Option<&[u32]> {
        self.entries.chunks_exact(self.blocks_per_layer as usize).nth(layer as usize)
    }

    /// The physical block and the token in it where a layer keeps a ring slot; `None` outside
    /// the cache.
    pub fn locate(&self, layer: u32, slot: u32) -> Option<(u32, u32)> {
        let (logical, token) = (slot / self.block_size_tokens, slot % self.block_size_tokens);
        Some((*self.layer(layer)?.get(logical as usize)?, token))
    }

    /// Layers.
    pub fn n_layer(&self) -> u32 {
        self.n_layer
    }

    /// Logical blocks of a layer.
    pub fn blocks_per_layer(&self) -> u32 {
        self.blocks_per_layer
    }

    /// Whether the table was made for a cache of this shape.
    pub fn fits(&self, config: &PagedKvConfig) -> bool {
        (self.n_layer, self.blocks_per_layer, self.block_size_tokens)
            == (config.n_layer(), config.blocks_per_layer(), config.block_size_tokens())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PagedKvConfig {
        PagedKvConfig::new(2, 1, 8, 12).unwrap().with_block_size(4).unwrap()
    }

    #[test]
    fn identity_counts_from_zero_in_each_layer() {
        let table = BlockTable::identity(&config());
        assert_eq!(table.entries(), [0, 1, 2, 0, 1, 2]);
        assert_eq!(table.size_bytes(), 24);
        assert!(table.fits(&config()));
        assert!(!table.fits(&config().with_block_size(2).unwrap()));
    }

    #[test]
    fn layers_are_permuted_on_their_own() {
        let table = BlockTable::from_permutation(&config(), vec![2, 0, 1, 1, 2, 0]).unwrap();
        assert_eq!(table.layer(1), Some(&[1, 2, 0][..]));
        assert_eq!(table.layer(2), None);
        assert_eq!(table.locate(0, 3), Some((2, 3)));
        assert_eq!(table.locate(1, 9), Some((0, 1)));
        assert_eq!(table.locate(1, 12), None);
    }

    #[test]
    fn a_wrong_length_is_an_error() {
        assert_eq!(
            BlockTable::from_permutation(&config(), vec![0; 5]),
            Err(KvError::TableLength { needed_entries: 6, got_entries: 5 })
        );
    }

    #[test]
    fn an_entry_out_of_range_is_an_error() {
        assert_eq!(
            BlockTable::from_permutation(&config(), vec![0, 1, 2, 0, 3, 2]),
            Err(KvError::EntryOutOfRange { layer: 1, logical: 1, physical: 3, blocks: 3 })
        );
    }

    #[test]
    fn a_duplicate_is_an_error_in_its_layer() {
        assert_eq!(
            BlockTable::from_permutation(&config(), vec![0, 1, 2, 2, 1, 2]),
            Err(KvError::DuplicateEntry {
                layer: 1,
                physical: 2,
                first_logical: 0,
                second_logical: 2
            })
        );
    }
}
