//! The prefix cache: which block holds which tokens after which tokens.
//!
//! A node stands for one full block of tokens after the prefix that its parent stands for, so a
//! path from a root is a token prefix and a match is exact: it is found by a chained content
//! hash, then confirmed by the parent node, the salt and the tokens. A hash collision costs a
//! comparison and never shares anything.

use crate::BlockId;
use alloc::{vec, vec::Vec};

/// No node.
const NONE: u32 = u32::MAX;

/// A node of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId(pub(crate) u32);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    hash: u64,
    salt: u64,
    parent: u32,
    /// The next node of the same bucket, or the next unused node.
    next: u32,
    /// Children, and sequences whose last full block this is.
    refs: u32,
    /// Groups that have a block with this node's content.
    held: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixCache {
    seed: u64,
    block_size: usize,
    n_group: usize,
    capacity: usize,
    /// Heads of the chains of nodes with equal low hash bits; a power of two of them.
    buckets: Vec<u32>,
    nodes: Vec<Node>,
    /// `[node][token]`.
    tokens: Vec<u32>,
    /// `[node][group]`, the null block where the group has none.
    blocks: Vec<BlockId>,
    unused_top: u32,
    live: u32,
}

impl PrefixCache {
    /// A cache of at most `capacity` nodes; they are allocated as they come into use.
    pub(crate) fn new(
        seed: u64,
        block_size: u32,
        n_group: usize,
        capacity: usize,
        expected: usize,
    ) -> Self {
        Self {
            seed,
            block_size: block_size as usize,
            n_group,
            capacity: capacity.min(NONE as usize),
            buckets: vec![NONE; expected.clamp(1, 1 << 24).next_power_of_two()],
            nodes: Vec::new(),
            tokens: Vec::new(),
            blocks: Vec::new(),
            unused_top: NONE,
            live: 0,
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Nodes in use.
    pub(crate) fn live_nodes(&self) -> u32 {
        self.live
    }

    pub(crate) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity.min(NONE as usize);
    }

    /// The content hash of `tokens` after `parent`.
    pub(crate) fn hash(&self, parent: Option<NodeId>, salt: u64, tokens: &[u32]) -> u64 {
        let chained = match parent {
            Some(node) => self.node(node).hash,
            None => fold(self.seed ^ MIX[0], salt ^ MIX[1]),
        };
        hash_tokens(chained, tokens)
    }

    /// The node of `tokens` (one full block) after `parent`.
    pub(crate) fn find(
        &self,
        parent: Option<NodeId>,
        salt: u64,
        hash: u64,
        tokens: &[u32],
    ) -> Option<NodeId> {
        let parent = parent.map_or(NONE, |node| node.0);
        let mut at = self.buckets[self.bucket(hash)];
        while let Some(node) = self.nodes.get(at as usize) {
            if node.hash == hash
                && node.parent == parent
                && node.salt == salt
                && self.tokens_of(at) == tokens
            {
                return Some(NodeId(at));
            }
            at = node.next;
        }
        None
    }

    /// A new node without blocks; `None` when all are in use. It lives as long as it is retained
    /// or holds a block, so the caller does one of these next.
    pub(crate) fn insert(
        &mut self,
        parent: Option<NodeId>,
        salt: u64,
        hash: u64,
        tokens: &[u32],
    ) -> Option<NodeId> {
        let id = if self.unused_top != NONE {
            let id = self.unused_top;
            self.unused_top = self.nodes[id as usize].next;
            let start = id as usize * self.block_size;
            self.tokens[start..start + self.block_size].copy_from_slice(tokens);
            id
        } else if self.nodes.len() < self.capacity {
            self.nodes.push(Node { hash: 0, salt: 0, parent: NONE, next: NONE, refs: 0, held: 0 });
            self.tokens.extend_from_slice(tokens);
            self.blocks.extend(core::iter::repeat_n(BlockId::NULL, self.n_group));
            self.nodes.len() as u32 - 1
        } else {
            return None;
        };
        let bucket = self.bucket(hash);
        let parent = parent.map_or(NONE, |node| node.0);
        let next = core::mem::replace(&mut self.buckets[bucket], id);
        self.nodes[id as usize] = Node { hash, salt, parent, next, refs: 0, held: 0 };
        if parent != NONE {
            self.nodes[parent as usize].refs += 1;
        }
        self.live += 1;
        Some(NodeId(id))
    }

    pub(crate) fn parent(&self, node: NodeId) -> Option<NodeId> {
        let parent = self.node(node).parent;
        (parent != NONE).then_some(NodeId(parent))
    }

    /// The block of one group with this node's content, the null block if there is none.
    pub(crate) fn block(&self, node: NodeId, group: usize) -> BlockId {
        self.blocks[node.0 as usize * self.n_group + group]
    }

    pub(crate) fn attach(&mut self, node: NodeId, group: usize, block: BlockId) {
        let at = &mut self.blocks[node.0 as usize * self.n_group + group];
        debug_assert!(at.is_null() && !block.is_null());
        *at = block;
        self.nodes[node.0 as usize].held += 1;
    }

    pub(crate) fn detach(&mut self, node: NodeId, group: usize) {
        let at = &mut self.blocks[node.0 as usize * self.n_group + group];
        debug_assert!(!at.is_null());
        *at = BlockId::NULL;
        self.nodes[node.0 as usize].held -= 1;
        self.drop_dead(node);
    }

    pub(crate) fn retain(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].refs += 1;
    }

    pub(crate) fn release(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].refs -= 1;
        self.drop_dead(node);
    }

    /// Drops a node that nothing refers to, and each ancestor that only it kept.
    fn drop_dead(&mut self, node: NodeId) {
        let mut at = node.0;
        while at != NONE {
            let Node { hash, parent, next, refs, held, .. } = self.nodes[at as usize];
            if refs > 0 || held > 0 {
                return;
            }
            let bucket = self.bucket(hash);
            if self.buckets[bucket] == at {
                self.buckets[bucket] = next;
            } else {
                let mut before = self.buckets[bucket];
                while self.nodes[before as usize].next != at {
                    before = self.nodes[before as usize].next;
                }
                self.nodes[before as usize].next = next;
            }
            self.nodes[at as usize].next = self.unused_top;
            self.unused_top = at;
            self.live -= 1;
            if parent != NONE {
                self.nodes[parent as usize].refs -= 1;
            }
            at = parent;
        }
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn tokens_of(&self, node: u32) -> &[u32] {
        let start = node as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }
}

/// Odd constants without structure (digits of pi).
const MIX: [u64; 4] =
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7345, 0xa409_3822_299f_31d1, 0x082e_fa98_ec4e_6c89];

/// Both halves of the 128-bit product: every input bit reaches every output bit.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

fn hash_tokens(chained: u64, tokens: &[u32]) -> u64 {
    let mut hash = chained;
    for pair in tokens.chunks(2) {
        let high = pair.get(1).map_or(0, |&token| u64::from(token) << 32);
        hash = fold(hash ^ u64::from(pair[0]) ^ high, MIX[2]) ^ MIX[0];
    }
    fold(hash ^ tokens.len() as u64, MIX[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache in which all hashes meet in one bucket.
    fn one_bucket() -> PrefixCache {
        PrefixCache::new(1, 2, 2, 8, 1)
    }

    fn insert(cache: &mut PrefixCache, parent: Option<NodeId>, tokens: &[u32]) -> NodeId {
        let hash = cache.hash(parent, 5, tokens);
        let node = cache.insert(parent, 5, hash, tokens).unwrap();
        cache.retain(node);
        node
    }

    #[test]
    fn equal_hashes_share_nothing_unless_the_tokens_are_equal() {
        let mut cache = one_bucket();
        let node = cache.insert(None, 5, 42, &[1, 2]).unwrap();
        cache.retain(node);
        assert_eq!(cache.find(None, 5, 42, &[1, 2]), Some(node));
        assert_eq!(cache.find(None, 5, 42, &[1, 3]), None);
        assert_eq!(cache.find(None, 6, 42, &[1, 2]), None);
        assert_eq!(cache.find(Some(node), 5, 42, &[1, 2]), None);
    }

    #[test]
    fn a_node_lives_while_a_child_a_sequence_or_a_block_needs_it() {
        let mut cache = one_bucket();
        let root = insert(&mut cache, None, &[1, 2]);
        let leaf = insert(&mut cache, Some(root), &[3, 4]);
        cache.release(root);
        assert_eq!(cache.live_nodes(), 2);
        cache.attach(leaf, 1, BlockId(9));
        cache.release(leaf);
        assert_eq!(cache.live_nodes(), 2);
        assert_eq!((cache.block(leaf, 0), cache.block(leaf, 1)), (BlockId::NULL, BlockId(9)));
        cache.detach(leaf, 1);
        assert_eq!(cache.live_nodes(), 0);
        assert_eq!(cache.find(None, 5, cache.hash(None, 5, &[1, 2]), &[1, 2]), None);
    }

    #[test]
    fn nodes_are_used_again_and_never_beyond_the_capacity() {
        let mut cache = one_bucket();
        let nodes: Vec<NodeId> = (0..8).map(|t| insert(&mut cache, None, &[t, t])).collect();
        assert_eq!(cache.insert(None, 5, 0, &[9, 9]), None);
        cache.release(nodes[3]);
        assert_eq!(insert(&mut cache, None, &[9, 9]), nodes[3]);
        assert_eq!(cache.nodes.len(), 8);
    }

    #[test]
    fn the_hash_depends_on_every_token_their_order_the_salt_the_seed_and_the_parent() {
        let mut cache = one_bucket();
        let base = cache.hash(None, 0, &[1, 2]);
        assert_ne!(base, cache.hash(None, 0, &[2, 1]));
        assert_ne!(base, cache.hash(None, 0, &[1, 3]));
        assert_ne!(base, cache.hash(None, 1, &[1, 2]));
        assert_ne!(base, PrefixCache::new(2, 2, 2, 8, 1).hash(None, 0, &[1, 2]));
        let parent = insert(&mut cache, None, &[1, 2]);
        assert_ne!(base, cache.hash(Some(parent), 0, &[1, 2]));
    }
}
