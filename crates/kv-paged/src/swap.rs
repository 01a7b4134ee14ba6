//! Sequences that wait in host memory.

use crate::{GroupId, HostBlockId, PlanError, Planner, SequenceId, Transfer, prefix::NodeId};
use alloc::vec::Vec;

/// No block.
const NONE: u32 = u32::MAX;

/// Host blocks of one group. Each is in one singly linked list: the free ones, or those of a
/// swapped-out sequence in logical order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPool {
    next: Vec<u32>,
    free_top: u32,
    free: u32,
}

impl HostPool {
    pub(crate) fn new(blocks: u32) -> Self {
        let next = (0..blocks).map(|b| if b + 1 < blocks { b + 1 } else { NONE }).collect();
        Self { next, free_top: if blocks > 0 { 0 } else { NONE }, free: blocks }
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.next.len() as u32
    }

    pub(crate) fn free_blocks(&self) -> u32 {
        self.free
    }

    /// A free block, put before `head`.
    fn take_before(&mut self, head: u32) -> u32 {
        let block = self.free_top;
        self.free_top = core::mem::replace(&mut self.next[block as usize], head);
        self.free -= 1;
        block
    }

    /// Frees `head` and returns what comes behind it.
    fn free_first(&mut self, head: u32) -> u32 {
        let behind = core::mem::replace(&mut self.next[head as usize], self.free_top);
        self.free_top = head;
        self.free += 1;
        behind
    }
}

impl Planner {
    /// Moves a sequence to host memory: its blocks are copied out (transfers of the next delta)
    /// and return to the pool. Every token must be committed. Returns the blocks copied, summed
    /// over the groups.
    pub fn swap_out(&mut self, id: SequenceId) -> Result<u32, PlanError> {
        let row = self.sequences.find_resident(id)?;
        let uncommitted_tokens = self.sequences[row].uncommitted();
        if uncommitted_tokens > 0 {
            return Err(PlanError::Uncommitted { sequence: id, uncommitted_tokens });
        }
        for (group, host) in self.hosts.iter().enumerate() {
            let needed = self.kept(row, group).count() as u32;
            let free = host.free_blocks();
            if needed > free {
                let group = GroupId(group as u32);
                return Err(PlanError::OutOfHostBlocks { group, needed, free });
            }
        }

        let mut moved = 0;
        for group in 0..self.pools.len() {
            let mut head = NONE;
            // The last block first, as when a sequence is freed.
            for logical in self.kept(row, group).rev() {
                let from = self.table.get(row, group, logical);
                head = self.hosts[group].take_before(head);
                let (group_id, to) = (GroupId(group as u32), HostBlockId(head));
                self.transfers.push(Transfer::Out { group: group_id, from, to });
                self.drop_block(row, group, logical);
                moved += 1;
            }
            self.set_host_head(row, group, head);
        }
        self.sequences[row].swapped = true;
        Ok(moved)
    }

    /// Brings a sequence back. Blocks that the prefix cache still has are taken from there, the
    /// others are copied in (transfers of the next delta). Returns the blocks copied, summed over
    /// the groups.
    pub fn swap_in(&mut self, id: SequenceId) -> Result<u32, PlanError> {
        let row = self.sequences.find(id)?;
        if !self.sequences[row].swapped {
            return Err(PlanError::NotSwappedOut { sequence: id });
        }
        for group in 0..self.pools.len() {
            // Only a cached block that somebody uses is had without one less for others.
            let mut in_use = 0;
            self.on_path(row, |planner, node, logical| {
                let block = planner.prefix.block(node, group);
                let kept = planner.keeps(row, group, logical);
                in_use += u32::from(kept && planner.pools[group].refs(block) > 0);
            });
            let needed = self.kept(row, group).count() as u32 - in_use;
            if needed > self.pools[group].available_blocks() {
                return Err(self.out_of_blocks(group, needed));
            }
        }

        let mut moved = 0;
        for group in 0..self.pools.len() {
            // All of the cached ones first, so that none of them is evicted for another.
            self.on_path(row, |planner, node, logical| {
                let block = planner.prefix.block(node, group);
                if !block.is_null() && planner.keeps(row, group, logical) {
                    planner.pools[group].retain(block);
                    planner.table.set(row, group, logical, block);
                }
            });
            let mut head = self.host_head(row, group);
            for logical in self.kept(row, group) {
                let from = HostBlockId(head);
                head = self.hosts[group].free_first(head);
                if self.table.get(row, group, logical).is_null() {
                    let to = self.take(group);
                    self.table.set(row, group, logical, to);
                    self.transfers.push(Transfer::In { group: GroupId(group as u32), from, to });
                    moved += 1;
                }
            }
            // What the cache had lost meanwhile is there again.
            self.on_path(row, |planner, node, logical| {
                let block = planner.table.get(row, group, logical);
                if !block.is_null() && planner.prefix.block(node, group).is_null() {
                    planner.pools[group].set_tag(block, node.0);
                    planner.prefix.attach(node, group, block);
                }
            });
            self.set_host_head(row, group, NONE);
        }
        self.sequences[row].swapped = false;
        Ok(moved)
    }

    /// Gives back the host blocks of a swapped-out sequence.
    pub(crate) fn drop_host_blocks(&mut self, row: usize) {
        for group in 0..self.hosts.len() {
            let mut head = self.host_head(row, group);
            while head != NONE {
                head = self.hosts[group].free_first(head);
            }
            self.set_host_head(row, group, NONE);
        }
    }

    /// Each node from the sequence's tip to the root, with its logical block.
    fn on_path(&mut self, row: usize, mut each: impl FnMut(&mut Self, NodeId, u32)) {
        let mut at = self.sequences[row].tip;
        for logical in (0..self.sequences[row].tip_depth).rev() {
            let Some(node) = at else { return };
            at = self.prefix.parent(node);
            each(self, node, logical);
        }
    }

    fn host_head(&self, row: usize, group: usize) -> u32 {
        self.host_heads[row * self.hosts.len() + group]
    }

    fn set_host_head(&mut self, row: usize, group: usize, head: u32) {
        let n_group = self.hosts.len();
        self.host_heads[row * n_group + group] = head;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_and_return_what_they_took() {
        let mut pool = HostPool::new(3);
        let mut head = NONE;
        for _ in 0..3 {
            head = pool.take_before(head);
        }
        assert_eq!((pool.blocks(), pool.free_blocks()), (3, 0));
        let mut order = Vec::new();
        while head != NONE {
            order.push(head);
            head = pool.free_first(head);
        }
        assert_eq!(order, [2, 1, 0]);
        assert_eq!(pool.free_blocks(), 3);
    }
}
