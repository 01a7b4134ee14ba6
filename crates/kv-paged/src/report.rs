//! What the planner can say about itself.

use crate::{BlockId, GroupId, PlanError, Planner, SequenceId};
use alloc::{vec, vec::Vec};
use core::fmt;

/// Counts of the prefix cache since the planner was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Sequences created.
    pub queries: u64,
    /// Tokens of their prompts.
    pub asked_tokens: u64,
    /// Tokens of their prompts that were in the cache.
    pub hit_tokens: u64,
    /// Cached blocks that were given up for others, or on request.
    pub evicted_blocks: u64,
    /// Computed blocks that were given back because the cache had them already.
    pub deduplicated_blocks: u64,
    /// Computed full blocks that the cache had no room to remember.
    pub uncached_blocks: u64,
}

/// The blocks of one layer group; each count is of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupReport {
    /// The group.
    pub group: GroupId,
    /// Blocks without the null block: used + cached + free.
    pub usable_blocks: u32,
    /// Blocks that sequences refer to.
    pub used_blocks: u32,
    /// Used blocks that more than one sequence refers to.
    pub shared_blocks: u32,
    /// Blocks that sharing saves: references beyond the first of each block.
    pub saved_blocks: u64,
    /// Unreferenced blocks that hold a cached prefix.
    pub cached_blocks: u32,
    /// Blocks that hold nothing.
    pub free_blocks: u32,
    /// Token slots of used blocks that hold no token (internal fragmentation).
    pub unused_slots_tokens: u64,
    /// Blocks in host memory.
    pub host_blocks: u32,
    /// Blocks in host memory that swapped-out sequences hold.
    pub host_used_blocks: u32,
}

/// The planner as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannerReport {
    /// One per layer group.
    pub groups: Vec<GroupReport>,
    /// Live sequences, swapped-out ones included.
    pub sequences: u32,
    /// Live sequences that are swapped out.
    pub swapped_sequences: u32,
    /// Token blocks that the prefix cache remembers or keeps as ancestors of such.
    pub prefix_nodes: u32,
    /// Prefix cache counts.
    pub prefix: PrefixStats,
}

/// One sequence in one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceReport {
    /// Tokens appended.
    pub len_tokens: u32,
    /// Tokens computed.
    pub committed_tokens: u32,
    /// Tokens that it may have.
    pub max_tokens: u32,
    /// Whether its blocks are in host memory.
    pub swapped_out: bool,
    /// Blocks that it refers to, on the device or, swapped out, in host memory.
    pub blocks: u32,
    /// Of these, blocks that other sequences refer to as well.
    pub shared_blocks: u32,
    /// Token slots of its blocks that hold none of its tokens.
    pub unused_slots_tokens: u32,
}

impl Planner {
    /// Counts over all sequences. Walks every table row.
    pub fn report(&self) -> PlannerReport {
        let block_size = self.config.block_size_tokens();
        let groups = self.pools.iter().enumerate().map(|(group, pool)| {
            // Two sequences may fill a shared block to different lengths: the longer one counts.
            let mut filled = vec![0; pool.usable_blocks() as usize + 1];
            let mut references = 0_u64;
            for (id, sequence) in self.sequences.iter().filter(|(_, s)| !s.swapped) {
                for logical in self.kept(id.row as usize, group) {
                    let block = self.table.get(id.row as usize, group, logical);
                    let tokens = (sequence.len() - logical * block_size).min(block_size);
                    let longest: &mut u32 = &mut filled[block.0 as usize];
                    *longest = tokens.max(*longest);
                    references += 1;
                }
            }
            let slots = u64::from(pool.used_blocks()) * u64::from(block_size);
            let host = &self.hosts[group];
            GroupReport {
                group: GroupId(group as u32),
                usable_blocks: pool.usable_blocks(),
                used_blocks: pool.used_blocks(),
                shared_blocks: pool.shared_blocks(),
                saved_blocks: references - u64::from(pool.used_blocks()),
                cached_blocks: pool.evictable_blocks(),
                free_blocks: pool.free_blocks(),
                unused_slots_tokens: slots - filled.iter().map(|&n| u64::from(n)).sum::<u64>(),
                host_blocks: host.blocks(),
                host_used_blocks: host.blocks() - host.free_blocks(),
            }
        });
        PlannerReport {
            groups: groups.collect(),
            sequences: self.sequences.live(),
            swapped_sequences: self.sequences.iter().filter(|(_, s)| s.swapped).count() as u32,
            prefix_nodes: self.prefix.live_nodes(),
            prefix: self.stats,
        }
    }

    /// Counts of one sequence in one group.
    pub fn sequence_report(
        &self,
        id: SequenceId,
        group: GroupId,
    ) -> Result<SequenceReport, PlanError> {
        let row = self.sequences.find(id)?;
        let group = self.check_group(group)?;
        let sequence = &self.sequences[row];
        let blocks = self.kept(row, group).count() as u32;
        let shared = self
            .kept(row, group)
            .filter(|&logical| self.pools[group].refs(self.table.get(row, group, logical)) > 1);
        let block_size = self.config.block_size_tokens();
        Ok(SequenceReport {
            len_tokens: sequence.len(),
            committed_tokens: sequence.committed,
            max_tokens: sequence.max_tokens,
            swapped_out: sequence.swapped,
            blocks,
            shared_blocks: shared.count() as u32,
            // Only the last block can be partial.
            unused_slots_tokens: sequence.len().div_ceil(block_size) * block_size - sequence.len(),
        })
    }

    /// Prefix cache counts since the planner was made.
    pub fn prefix_stats(&self) -> PrefixStats {
        self.stats
    }

    /// The pool of a group.
    pub fn pool(&self, group: GroupId) -> Result<&crate::BlockPool, PlanError> {
        Ok(&self.pools[self.check_group(group)?])
    }

    /// Live sequences, by row.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.iter().map(|(id, _)| id)
    }

    /// Every token of a sequence, the uncommitted ones last.
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32], PlanError> {
        Ok(&self.sequences[self.sequences.find(id)?].tokens)
    }

    /// Tokens of a sequence that have been computed.
    pub fn committed_tokens(&self, id: SequenceId) -> Result<u32, PlanError> {
        Ok(self.sequences[self.sequences.find(id)?].committed)
    }

    /// Whether a sequence is in host memory.
    pub fn is_swapped_out(&self, id: SequenceId) -> Result<bool, PlanError> {
        Ok(self.sequences[self.sequences.find(id)?].swapped)
    }

    /// The blocks that a sequence has on the device, as `(logical, physical)` in order: what to
    /// read to save its state, and what to write to restore it.
    pub fn blocks(
        &self,
        id: SequenceId,
        group: GroupId,
    ) -> Result<impl Iterator<Item = (u32, BlockId)>, PlanError> {
        let row = self.sequences.find_resident(id)?;
        let group = self.check_group(group)?;
        Ok(self.kept(row, group).map(move |logical| (logical, self.table.get(row, group, logical))))
    }
}

impl fmt::Display for PlannerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.prefix;
        writeln!(
            f,
            "{} sequences, {} swapped out; prefix cache: {} of {} prompt tokens hit, {} nodes, {} blocks evicted",
            self.sequences,
            self.swapped_sequences,
            p.hit_tokens,
            p.asked_tokens,
            self.prefix_nodes,
            p.evicted_blocks,
        )?;
        for g in &self.groups {
            writeln!(
                f,
                "group {}: {} blocks = {} used ({} shared, {} saved) + {} cached + {} free; {} slots unused; host {} of {}",
                g.group.0,
                g.usable_blocks,
                g.used_blocks,
                g.shared_blocks,
                g.saved_blocks,
                g.cached_blocks,
                g.free_blocks,
                g.unused_slots_tokens,
                g.host_used_blocks,
                g.host_blocks,
            )?;
        }
        Ok(())
    }
}
