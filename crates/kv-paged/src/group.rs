//! Layer groups and the planner's configuration.

use crate::{DEFAULT_BLOCK_SIZE_TOKENS, GroupId, KvLayout, KvType, PagedKvConfig, PlanError};
use alloc::vec::Vec;

/// Layer groups that a planner can have.
pub const MAX_GROUPS: usize = 8;

/// Layers that see the same positions and therefore share one block table: a physical block is
/// the same place in each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGroup {
    /// Layers of the group.
    pub layers: u32,
    /// Positions that a token sees, itself included; `None` for all.
    pub window_tokens: Option<u32>,
    /// First positions that stay visible outside the window (attention sinks).
    pub sink_tokens: u32,
    /// Physical blocks per layer, the null block included.
    pub blocks: u32,
    /// Blocks per layer in host memory for swapped-out sequences.
    pub host_blocks: u32,
}

impl LayerGroup {
    /// Layers that see every position.
    pub const fn full(layers: u32, blocks: u32) -> Self {
        Self { layers, window_tokens: None, sink_tokens: 0, blocks, host_blocks: 0 }
    }

    /// Layers that see the last `window_tokens` positions and the first `sink_tokens`.
    pub const fn sliding(layers: u32, blocks: u32, window_tokens: u32, sink_tokens: u32) -> Self {
        Self { layers, window_tokens: Some(window_tokens), sink_tokens, blocks, host_blocks: 0 }
    }

    /// The same group with blocks in host memory.
    pub const fn with_host_blocks(self, host_blocks: u32) -> Self {
        Self { host_blocks, ..self }
    }

    /// Blocks at most in use by one sequence of `len_tokens` that is computed in chunks of up to
    /// `chunk_tokens`.
    pub const fn peak_blocks(
        &self,
        block_size_tokens: u32,
        len_tokens: u32,
        chunk_tokens: u32,
    ) -> u32 {
        let all = len_tokens.div_ceil(block_size_tokens);
        let Some(window) = self.window_tokens else { return all };
        // The window before the chunk's first token, and the chunk; the oldest of these positions
        // may be the last of its block.
        let tokens = window as u64 - 1 + chunk_tokens as u64;
        let visible = tokens.saturating_sub(1).div_ceil(block_size_tokens as u64) + 1;
        let kept = self.sink_tokens.div_ceil(block_size_tokens) as u64 + visible;
        if kept < all as u64 { kept as u32 } else { all }
    }
}

/// The validated configuration of a [`Planner`](crate::Planner).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannerConfig {
    groups: Vec<LayerGroup>,
    max_sequences: u32,
    max_context_tokens: u32,
    block_size_tokens: u32,
    prefix_nodes: Option<u32>,
    hash_seed: u64,
}

impl PlannerConfig {
    /// A planner for at most `max_sequences` at a time of at most `max_context_tokens` each, with
    /// blocks of [`DEFAULT_BLOCK_SIZE_TOKENS`] and a prefix cache.
    pub fn new(
        groups: Vec<LayerGroup>,
        max_sequences: u32,
        max_context_tokens: u32,
    ) -> Result<Self, PlanError> {
        Self {
            groups,
            max_sequences,
            max_context_tokens,
            block_size_tokens: DEFAULT_BLOCK_SIZE_TOKENS,
            prefix_nodes: None,
            hash_seed: 0,
        }
        .validated()
    }

    /// The same planner with blocks of `tokens`.
    pub fn with_block_size(self, tokens: u32) -> Result<Self, PlanError> {
        Self { block_size_tokens: tokens, ..self }.validated()
    }

    /// The same planner with a prefix cache that remembers at most this many blocks of tokens;
    /// 0 is no prefix cache. The default is as many as there are blocks, so that no block is
    /// forgotten before it is needed for something else. Each costs about 50 bytes of host memory
    /// and its tokens.
    pub fn with_prefix_nodes(self, nodes: u32) -> Self {
        Self { prefix_nodes: Some(nodes), ..self }
    }

    /// The same planner with another seed of the content hashes. Hits are confirmed by the tokens
    /// whatever the hash says; a secret seed only keeps a hostile client from slowing the
    /// look-up down with colliding prompts.
    pub fn with_hash_seed(self, hash_seed: u64) -> Self {
        Self { hash_seed, ..self }
    }

    fn validated(self) -> Result<Self, PlanError> {
        if self.groups.is_empty() || self.groups.len() > MAX_GROUPS {
            return Err(PlanError::GroupCount { groups: self.groups.len(), max: MAX_GROUPS });
        }
        for (what, value) in [
            ("max_sequences", self.max_sequences),
            ("max_context_tokens", self.max_context_tokens),
            ("block_size_tokens", self.block_size_tokens),
        ] {
            if value == 0 {
                return Err(PlanError::ZeroDim { what });
            }
        }
        for (group, g) in self.groups.iter().enumerate() {
            if g.layers == 0 {
                return Err(PlanError::ZeroDim { what: "layers of a group" });
            }
            if g.window_tokens == Some(0) {
                return Err(PlanError::ZeroDim { what: "window_tokens" });
            }
            if g.blocks < 2 {
                return Err(PlanError::PoolTooSmall {
                    group: GroupId(group as u32),
                    blocks: g.blocks,
                });
            }
        }
        let rows = u64::from(self.max_sequences) + 1;
        let groups = self.groups.len() as u64;
        let blocks_per_sequence = u64::from(self.blocks_per_sequence());
        let entries = rows.checked_mul(groups).and_then(|n| n.checked_mul(blocks_per_sequence));
        if entries.is_none_or(|n| n > u64::from(u32::MAX)) {
            return Err(PlanError::TableTooLarge { rows, groups, blocks_per_sequence });
        }
        Ok(self)
    }

    /// The layer groups.
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Sequences that can live at the same time.
    pub fn max_sequences(&self) -> u32 {
        self.max_sequences
    }

    /// Tokens of the longest sequence.
    pub fn max_context_tokens(&self) -> u32 {
        self.max_context_tokens
    }

    /// Token slots of a block.
    pub fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens
    }

    /// Where everything of one group lies, with as many blocks as its pool has.
    pub fn layout(
        &self,
        group: GroupId,
        n_kv_head: u32,
        head_dim: u32,
        kv_type: KvType,
    ) -> Result<KvLayout, PlanError> {
        let groups = self.groups.len() as u32;
        let Some(of) = self.groups.get(group.0 as usize) else {
            return Err(PlanError::UnknownGroup { group, groups });
        };
        let shape = PagedKvConfig::new(of.layers, n_kv_head, head_dim, self.max_context_tokens)?
            .with_block_size(self.block_size_tokens)?
            .with_kv_type(kv_type)?;
        Ok(KvLayout::with_blocks(&shape, of.blocks)?)
    }

    /// Blocks of tokens that the prefix cache remembers at most.
    pub fn prefix_nodes(&self) -> u32 {
        let default = || {
            let blocks = self.groups.iter().fold(0_u32, |sum, g| sum.saturating_add(g.blocks));
            if self.groups.iter().any(|g| g.window_tokens.is_none()) {
                return blocks;
            }
            // No group holds every block of a sequence, so there are more of tokens than of keys.
            blocks.saturating_add(self.max_sequences.saturating_mul(self.blocks_per_sequence()))
        };
        self.prefix_nodes.unwrap_or_else(default)
    }

    /// The seed of the content hashes.
    pub fn hash_seed(&self) -> u64 {
        self.hash_seed
    }

    /// Logical blocks of the longest sequence.
    pub fn blocks_per_sequence(&self) -> u32 {
        self.max_context_tokens.div_ceil(self.block_size_tokens)
    }

    pub(crate) fn grow_pool(&mut self, group: usize, blocks: u32) {
        self.groups[group].blocks = blocks;
    }
}

/// Which blocks of a sequence one group keeps: the sinks, and all from the window's first on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    window_tokens: Option<u32>,
    pub(crate) sink_blocks: u32,
    block_size: u32,
}

impl Span {
    pub(crate) fn new(group: &LayerGroup, block_size: u32) -> Self {
        let sink_blocks = match group.window_tokens {
            Some(_) => group.sink_tokens.div_ceil(block_size),
            None => 0,
        };
        Self { window_tokens: group.window_tokens, sink_blocks, block_size }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.window_tokens.is_none()
    }

    /// The first block beyond the sinks that computing position `committed` still reads.
    pub(crate) fn first_needed(&self, committed: u32) -> u32 {
        let first_visible = match self.window_tokens {
            Some(window) => committed.saturating_sub(window - 1),
            None => 0,
        };
        (first_visible / self.block_size).max(self.sink_blocks)
    }

    /// The fewest tokens after which blocks below `released_to` are not read any more.
    pub(crate) fn min_tokens(&self, released_to: u32) -> u32 {
        self.window_tokens.map_or(0, |window| {
            released_to.saturating_mul(self.block_size).saturating_add(window - 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn configurations_that_make_no_sense_are_refused() {
        let new = |groups| PlannerConfig::new(groups, 4, 64);
        assert_eq!(new(vec![]), Err(PlanError::GroupCount { groups: 0, max: MAX_GROUPS }));
        assert!(matches!(
            new(vec![LayerGroup::full(1, 9); MAX_GROUPS + 1]),
            Err(PlanError::GroupCount { groups: 9, .. })
        ));
        assert_eq!(
            new(vec![LayerGroup::full(1, 9), LayerGroup::full(1, 1)]),
            Err(PlanError::PoolTooSmall { group: GroupId(1), blocks: 1 })
        );
        assert_eq!(
            new(vec![LayerGroup::full(0, 9)]),
            Err(PlanError::ZeroDim { what: "layers of a group" })
        );
        assert_eq!(
            new(vec![LayerGroup::sliding(1, 9, 0, 0)]),
            Err(PlanError::ZeroDim { what: "window_tokens" })
        );
        let one = vec![LayerGroup::full(1, 9)];
        assert!(PlannerConfig::new(one.clone(), 0, 64).is_err());
        assert!(PlannerConfig::new(one.clone(), 4, 0).is_err());
        assert!(new(one.clone()).unwrap().with_block_size(0).is_err());
        assert!(matches!(
            PlannerConfig::new(one, u32::MAX, u32::MAX),
            Err(PlanError::TableTooLarge { rows: 0x1_0000_0000, groups: 1, .. })
        ));
    }

    #[test]
    fn each_group_has_a_layout_of_its_own() {
        let groups = vec![LayerGroup::full(4, 30), LayerGroup::sliding(20, 9, 64, 0)];
        let config = PlannerConfig::new(groups, 4, 640).unwrap();
        let layout = |group| config.layout(GroupId(group), 2, 64, KvType::F16);
        assert_eq!(layout(0).unwrap().total_bytes(), 4 * 30 * 16 * 2 * 2 * 64 * 2);
        assert_eq!(layout(1).unwrap().total_bytes(), 20 * 9 * 16 * 2 * 2 * 64 * 2);
        assert_eq!(layout(2), Err(PlanError::UnknownGroup { group: GroupId(2), groups: 2 }));
        assert_eq!(
            config.layout(GroupId(0), 0, 64, KvType::F16).unwrap_err().to_string(),
            "n_kv_head must be at least 1"
        );
    }

    #[test]
    fn a_window_keeps_what_its_next_position_sees() {
        let span = Span::new(&LayerGroup::sliding(1, 9, 8, 0), 4);
        // Position 7 sees 0..=7, position 11 sees 4..=11, position 12 sees 5..=12.
        assert_eq!(span.first_needed(7), 0);
        assert_eq!(span.first_needed(10), 0);
        assert_eq!(span.first_needed(11), 1);
        assert_eq!(span.first_needed(14), 1);
        assert_eq!(span.first_needed(15), 2);
        assert_eq!(span.min_tokens(2), 15);
        let sinks = Span::new(&LayerGroup::sliding(1, 9, 8, 5), 4);
        assert_eq!(sinks.sink_blocks, 2);
        assert_eq!(sinks.first_needed(0), 2);
    }

    #[test]
    fn the_peak_covers_every_moment_of_a_chunked_run() {
        for (window, sinks, chunk) in [(1, 0, 1), (8, 3, 5), (7, 0, 4), (16, 9, 16)] {
            let group = LayerGroup::sliding(1, 99, window, sinks);
            let span = Span::new(&group, 4);
            let mut peak = 0;
            for committed in 0..100_u32 - chunk {
                let end = (committed + chunk).div_ceil(4);
                peak = peak.max(
                    end.min(span.sink_blocks) + end.saturating_sub(span.first_needed(committed)),
                );
            }
            assert!(peak <= group.peak_blocks(4, 100, chunk));
            assert!(group.peak_blocks(4, 100, chunk) <= peak + 1);
        }
        assert_eq!(LayerGroup::full(1, 99).peak_blocks(4, 101, 1), 26);
    }
}
