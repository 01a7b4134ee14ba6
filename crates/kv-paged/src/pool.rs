//! The physical blocks of one layer group: who uses them, and which is taken next.

use crate::BlockId;
use alloc::{vec, vec::Vec};

/// No block, no tag.
const NONE: u32 = u32::MAX;
/// The null block is never in a list, so its links hold the ends of the cached list.
const ENDS: u32 = BlockId::NULL.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    refs: u32,
    /// What the block is cached as, `NONE` for nothing.
    tag: u32,
    prev: u32,
    next: u32,
}

/// Blocks with reference counts. An unreferenced block is either *free*, on a stack, or *cached*,
/// in a list with the least recently used first; free ones are taken before cached ones. All
/// links are indices, every operation is O(1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPool {
    entries: Vec<Entry>,
    free_top: u32,
    free: u32,
    cached: u32,
    shared: u32,
}

impl BlockPool {
    pub(crate) fn new(blocks: u32) -> Self {
        let null = Entry { refs: 0, tag: NONE, prev: ENDS, next: ENDS };
        let mut pool = Self { entries: vec![null], free_top: NONE, free: 0, cached: 0, shared: 0 };
        pool.grow(blocks);
        pool
    }

    /// Adds blocks at the end, up to `blocks` in all; they are taken after the free ones.
    pub(crate) fn grow(&mut self, blocks: u32) {
        let first = self.entries.len() as u32;
        if blocks <= first {
            return;
        }
        self.entries.reserve_exact((blocks - first) as usize);
        for block in first..blocks {
            let next = if block + 1 < blocks { block + 1 } else { NONE };
            self.entries.push(Entry { refs: 0, tag: NONE, prev: NONE, next });
        }
        // The new chain goes below the stack, so that low ids stay in use.
        let mut bottom = self.free_top;
        if bottom == NONE {
            self.free_top = first;
        } else {
            while self.entries[bottom as usize].next != NONE {
                bottom = self.entries[bottom as usize].next;
            }
            self.entries[bottom as usize].next = first;
        }
        self.free += blocks - first;
    }

    /// Blocks that sequences can have: all but the null block.
    pub fn usable_blocks(&self) -> u32 {
        self.entries.len() as u32 - 1
    }

    /// Blocks that hold nothing.
    pub fn free_blocks(&self) -> u32 {
        self.free
    }

    /// Unreferenced blocks that hold a cached prefix.
    pub fn evictable_blocks(&self) -> u32 {
        self.cached
    }

    /// Blocks that can be had now.
    pub fn available_blocks(&self) -> u32 {
        self.free + self.cached
    }

    /// Blocks that sequences refer to.
    pub fn used_blocks(&self) -> u32 {
        self.usable_blocks() - self.available_blocks()
    }

    /// Blocks that more than one sequence refers to.
    pub fn shared_blocks(&self) -> u32 {
        self.shared
    }

    /// Sequences that refer to a block; 0 for one that does not exist.
    pub fn refs(&self, block: BlockId) -> u32 {
        self.entries.get(block.0 as usize).map_or(0, |entry| entry.refs)
    }

    /// Whether the prefix cache knows the block.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.tag(block).is_some()
    }

    pub(crate) fn tag(&self, block: BlockId) -> Option<u32> {
        let entry = self.entries.get(block.0 as usize)?;
        (entry.tag != NONE).then_some(entry.tag)
    }

    /// A block with one reference, and the tag it lost if it was cached.
    pub(crate) fn take(&mut self) -> Option<(BlockId, Option<u32>)> {
        if self.free_top == NONE {
            let (_, tag) = self.evict_oldest()?;
            let (block, _) = self.take()?;
            return Some((block, Some(tag)));
        }
        let block = self.free_top;
        let entry = &mut self.entries[block as usize];
        self.free_top = entry.next;
        self.free -= 1;
        entry.refs = 1;
        Some((BlockId(block), None))
    }

    /// Makes the least recently used cached block a free one.
    pub(crate) fn evict_oldest(&mut self) -> Option<(BlockId, u32)> {
        let block = BlockId(self.entries[ENDS as usize].next);
        let tag = self.tag(block)?;
        self.clear_tag(block);
        Some((block, tag))
    }

    /// One more reference to a block that is in use or cached.
    pub(crate) fn retain(&mut self, block: BlockId) {
        debug_assert!(!block.is_null());
        let entry = &mut self.entries[block.0 as usize];
        debug_assert!(entry.refs > 0 || entry.tag != NONE, "a free block has no content to share");
        entry.refs += 1;
        match entry.refs {
            1 => self.unlink(block.0),
            2 => self.shared += 1,
            _ => {}
        }
    }

    /// One reference less. The last one leaves the block cached if it has a tag, free otherwise.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.0 as usize];
        debug_assert!(entry.refs > 0, "released more often than retained");
        entry.refs -= 1;
        match (entry.refs, entry.tag) {
            (0, NONE) => self.push_free(block.0),
            (0, _) => self.link_newest(block.0),
            (1, _) => self.shared -= 1,
            _ => {}
        }
    }

    /// The block's content is known to the cache as `tag` from now on; it must be in use.
    pub(crate) fn set_tag(&mut self, block: BlockId, tag: u32) {
        let entry = &mut self.entries[block.0 as usize];
        debug_assert!(entry.refs > 0 && entry.tag == NONE);
        entry.tag = tag;
    }

    /// The cache knows the block no more; one that nobody refers to becomes free.
    pub(crate) fn clear_tag(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.0 as usize];
        debug_assert!(entry.tag != NONE);
        let unused = entry.refs == 0;
        if unused {
            self.unlink(block.0);
            self.push_free(block.0);
        }
        self.entries[block.0 as usize].tag = NONE;
    }

    fn push_free(&mut self, block: u32) {
        self.entries[block as usize].next = self.free_top;
        self.free_top = block;
        self.free += 1;
    }

    fn link_newest(&mut self, block: u32) {
        let newest = self.entries[ENDS as usize].prev;
        self.entries[newest as usize].next = block;
        self.entries[ENDS as usize].prev = block;
        let entry = &mut self.entries[block as usize];
        (entry.prev, entry.next) = (newest, ENDS);
        self.cached += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Entry { prev, next, .. } = self.entries[block as usize];
        self.entries[prev as usize].next = next;
        self.entries[next as usize].prev = prev;
        self.cached -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut BlockPool) -> BlockId {
        pool.take().unwrap().0
    }

    #[test]
    fn low_ids_come_first_and_the_null_block_never() {
        let mut pool = BlockPool::new(4);
        assert_eq!(pool.usable_blocks(), 3);
        let taken: Vec<u32> = core::iter::from_fn(|| pool.take()).map(|(b, _)| b.0).collect();
        assert_eq!(taken, [1, 2, 3]);
        assert_eq!((pool.free_blocks(), pool.used_blocks()), (0, 3));
    }

    #[test]
    fn cached_blocks_are_evicted_least_recently_used_first() {
        let mut pool = BlockPool::new(4);
        for tag in [70, 80, 90] {
            let block = take(&mut pool);
            pool.set_tag(block, tag);
        }
        for block in [2, 1, 3] {
            pool.release(BlockId(block));
        }
        // A hit makes block 2 the newest.
        pool.retain(BlockId(2));
        pool.release(BlockId(2));
        assert_eq!(pool.evictable_blocks(), 3);
        assert_eq!(pool.take(), Some((BlockId(1), Some(70))));
        assert_eq!(pool.take(), Some((BlockId(3), Some(90))));
        assert_eq!(pool.take(), Some((BlockId(2), Some(80))));
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn free_blocks_go_before_cached_ones() {
        let mut pool = BlockPool::new(3);
        let (cached, plain) = (take(&mut pool), take(&mut pool));
        pool.set_tag(cached, 7);
        pool.release(cached);
        pool.release(plain);
        assert_eq!(pool.take(), Some((plain, None)));
        assert_eq!(pool.take(), Some((cached, Some(7))));
        assert!(!pool.is_cached(cached));
    }

    #[test]
    fn sharing_is_counted_once_per_block() {
        let mut pool = BlockPool::new(3);
        let block = take(&mut pool);
        pool.retain(block);
        pool.retain(block);
        assert_eq!((pool.refs(block), pool.shared_blocks()), (3, 1));
        pool.release(block);
        assert_eq!(pool.shared_blocks(), 1);
        pool.release(block);
        assert_eq!((pool.refs(block), pool.shared_blocks()), (1, 0));
        pool.release(block);
        assert_eq!(pool.free_blocks(), 2);
    }

    #[test]
    fn growth_adds_ids_behind_the_free_ones() {
        let mut pool = BlockPool::new(3);
        let first = take(&mut pool);
        pool.grow(5);
        pool.grow(2);
        assert_eq!(pool.usable_blocks(), 4);
        let rest: Vec<u32> = core::iter::from_fn(|| pool.take()).map(|(b, _)| b.0).collect();
        assert_eq!((first.0, rest), (1, alloc::vec![2, 3, 4]));
        pool.grow(6);
        assert_eq!(take(&mut pool), BlockId(5));
    }
}
