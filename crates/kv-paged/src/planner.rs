//! Many sequences over one cache: the planner's life of a sequence.

use crate::{
    BlockId, BlockPool, Delta, GroupId, MAX_GROUPS, PlanError, PlannerConfig, SequenceId, Transfer,
    delta::DeviceTable,
    group::Span,
    prefix::{NodeId, PrefixCache},
    report::PrefixStats,
    sequence::Sequences,
    swap::HostPool,
};
use alloc::vec::Vec;

/// A sequence to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The tokens that it starts with; may be empty.
    pub prompt: &'a [u32],
    /// Tokens that it may have at most, the prompt included.
    pub max_tokens: u32,
    /// What its blocks depend on besides the tokens (an adapter, a tenant): sequences of
    /// different salts never share a block.
    pub salt: u64,
}

/// A new sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// Its id.
    pub id: SequenceId,
    /// Tokens of the prompt that are in the cache already, a multiple of the block size and less
    /// than the prompt, so that at least one position is left to compute logits from. The
    /// sequence starts with them; append the rest.
    pub cached_tokens: u32,
}

/// The longest cached prefix of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) blocks: u32,
    pub(crate) tip: Option<NodeId>,
}

/// Plans which physical blocks hold which tokens of which sequence. See the crate's front page
/// for the life of a sequence and for what the device has to do.
///
/// Equality and `Clone` are of the whole state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planner {
    pub(crate) config: PlannerConfig,
    pub(crate) pools: Vec<BlockPool>,
    pub(crate) hosts: Vec<HostPool>,
    pub(crate) spans: Vec<Span>,
    pub(crate) sequences: Sequences,
    /// `[row][group]`: blocks from the sinks up to here have left the window.
    pub(crate) released_to: Vec<u32>,
    /// `[row][group]`: the first host block of a swapped-out sequence.
    pub(crate) host_heads: Vec<u32>,
    pub(crate) prefix: PrefixCache,
    pub(crate) table: DeviceTable,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) stats: PrefixStats,
}

impl Planner {
    /// A planner without sequences. The device table is all zeros, which is the null block.
    pub fn new(config: PlannerConfig) -> Self {
        let groups = config.groups();
        let block_size = config.block_size_tokens();
        let rows = config.max_sequences() as usize;
        let columns = config.blocks_per_sequence() as usize;
        let blocks = groups.iter().map(|g| g.blocks as usize).fold(0, usize::saturating_add);
        let nodes = config.prefix_nodes() as usize;
        Self {
            pools: groups.iter().map(|g| BlockPool::new(g.blocks)).collect(),
            hosts: groups.iter().map(|g| HostPool::new(g.host_blocks)).collect(),
            spans: groups.iter().map(|g| Span::new(g, block_size)).collect(),
            sequences: Sequences::new(config.max_sequences()),
            released_to: alloc::vec![0; rows * groups.len()],
            host_heads: alloc::vec![u32::MAX; rows * groups.len()],
            prefix: PrefixCache::new(
                config.hash_seed(),
                block_size,
                groups.len(),
                nodes,
                nodes.min(blocks),
            ),
            table: DeviceTable::new(rows + 1, groups.len(), columns),
            transfers: Vec::new(),
            stats: PrefixStats::default(),
            config,
        }
    }

    /// The configuration, with pools as large as they are now.
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// Starts a sequence with the longest prefix of its prompt that is cached.
    pub fn create(&mut self, request: &Request<'_>) -> Result<Created, PlanError> {
        self.check_request(request)?;
        let found = self.longest_match(request.prompt, request.salt);
        let id = self.sequences.open()?;
        let row = id.row as usize;
        let cached_tokens = found.blocks * self.config.block_size_tokens();

        let sequence = &mut self.sequences[row];
        sequence.salt = request.salt;
        sequence.prompt_tokens = request.prompt.len() as u32;
        sequence.max_tokens = request.max_tokens;
        sequence.tokens.extend_from_slice(&request.prompt[..cached_tokens as usize]);
        sequence.committed = cached_tokens;
        (sequence.tip, sequence.tip_depth) = (found.tip, found.blocks);
        if let Some(tip) = found.tip {
            self.prefix.retain(tip);
        }
        for group in 0..self.pools.len() {
            let span = self.spans[group];
            let from = span.first_needed(cached_tokens);
            self.set_released_to(row, group, from);
            let mut node = found.tip;
            for logical in (0..found.blocks).rev() {
                let Some(at) = node else { break };
                if logical < span.sink_blocks || logical >= from {
                    let block = self.prefix.block(at, group);
                    self.pools[group].retain(block);
                    self.table.set(row, group, logical, block);
                }
                node = self.prefix.parent(at);
            }
        }
        self.stats.queries += 1;
        self.stats.asked_tokens += request.prompt.len() as u64;
        self.stats.hit_tokens += u64::from(cached_tokens);
        Ok(Created { id, cached_tokens })
    }

    /// Tokens of a prompt that a sequence created now would start with. Looking does not count as
    /// use.
    pub fn cached_prefix_tokens(&self, prompt: &[u32], salt: u64) -> u32 {
        self.longest_match(prompt, salt).blocks * self.config.block_size_tokens()
    }

    /// Adds tokens that the next step is to compute, and the blocks that they need. A block that
    /// another sequence refers to is copied before it is written.
    pub fn append(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), PlanError> {
        let row = self.sequences.find_resident(id)?;
        let block_size = self.config.block_size_tokens();
        let sequence = &self.sequences[row];
        let len = sequence.len();
        if tokens.len() as u64 > u64::from(sequence.max_tokens - len) {
            return Err(PlanError::OverMaxContext {
                len_tokens: u64::from(len),
                more_tokens: tokens.len() as u64,
                max_tokens: u64::from(sequence.max_tokens),
            });
        }
        let new_len = len + tokens.len() as u32;
        let (fresh, end) = (len.div_ceil(block_size), new_len.div_ceil(block_size));
        let partial =
            (!len.is_multiple_of(block_size) && new_len > len).then_some(len / block_size);

        for (group, pool) in self.pools.iter().enumerate() {
            let copied =
                partial.is_some_and(|logical| pool.refs(self.table.get(row, group, logical)) > 1);
            let needed = end - fresh + u32::from(copied);
            if needed > pool.available_blocks() {
                return Err(self.out_of_blocks(group, needed));
            }
        }
        for group in 0..self.pools.len() {
            if let Some(logical) = partial {
                self.make_writable(row, group, logical);
            }
            for logical in fresh..end {
                let block = self.take(group);
                self.table.set(row, group, logical, block);
            }
        }
        self.sequences[row].tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// The next `n_tokens` appended tokens have been computed, or will have been before anything
    /// that is planned from now on. Their full blocks can be shared, and a block that the cache
    /// has already is given back in favour of that one. Blocks that left the window return to
    /// their pool.
    pub fn commit(&mut self, id: SequenceId, n_tokens: u32) -> Result<(), PlanError> {
        let row = self.sequences.find_resident(id)?;
        let sequence = &mut self.sequences[row];
        let uncommitted_tokens = sequence.uncommitted();
        if n_tokens > uncommitted_tokens {
            return Err(PlanError::OverCommit { n_tokens, uncommitted_tokens });
        }
        let block_size = self.config.block_size_tokens();
        let full_before = sequence.committed / block_size;
        sequence.committed += n_tokens;
        let committed = sequence.committed;
        for logical in full_before..committed / block_size {
            self.register(row, logical);
        }
        for group in 0..self.pools.len() {
            self.slide(row, group, committed);
        }
        Ok(())
    }

    /// Keeps the first `len_tokens` tokens: rejects speculated ones, or goes back.
    pub fn truncate(&mut self, id: SequenceId, len_tokens: u32) -> Result<(), PlanError> {
        let row = self.sequences.find_resident(id)?;
        let block_size = self.config.block_size_tokens();
        let sequence = &self.sequences[row];
        let len = sequence.len();
        if len_tokens > len {
            return Err(PlanError::TruncateBeyondEnd { to_tokens: len_tokens, len_tokens: len });
        }
        let committed = sequence.committed.min(len_tokens);
        let kept = len_tokens.div_ceil(block_size);
        for (group, span) in self.spans.iter().enumerate() {
            let released_to = self.released_to(row, group);
            let first_needed = span.first_needed(committed);
            if first_needed < released_to.min(committed.div_ceil(block_size)) {
                return Err(PlanError::TruncateBehindWindow {
                    group: GroupId(group as u32),
                    to_tokens: len_tokens,
                    min_tokens: span.min_tokens(released_to),
                });
            }
        }

        for group in 0..self.pools.len() {
            for logical in (kept..len.div_ceil(block_size)).rev() {
                self.drop_block(row, group, logical);
            }
            let sink_blocks = self.spans[group].sink_blocks;
            let released_to = self.released_to(row, group).min(kept).max(sink_blocks);
            self.set_released_to(row, group, released_to);
        }
        let sequence = &mut self.sequences[row];
        sequence.tokens.truncate(len_tokens as usize);
        sequence.committed = committed;
        while self.sequences[row].tip_depth > committed / block_size {
            let tip = self.sequences[row].tip;
            let parent = tip.and_then(|node| self.prefix.parent(node));
            self.set_tip(row, parent, self.sequences[row].tip_depth - 1);
        }
        Ok(())
    }

    /// A new sequence with the committed tokens of `id`, sharing every block of them. Whoever
    /// first writes into a last, partial block gets a copy of it.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, PlanError> {
        let parent = self.sequences.find_resident(id)?;
        let child_id = self.sequences.open()?;
        let child = child_id.row as usize;

        let mut tokens = core::mem::take(&mut self.sequences[child].tokens);
        let from = &self.sequences[parent];
        let committed = from.committed;
        tokens.extend_from_slice(&from.tokens[..committed as usize]);
        let (salt, prompt_tokens, max_tokens) = (from.salt, from.prompt_tokens, from.max_tokens);
        let (tip, tip_depth) = (from.tip, from.tip_depth);

        let sequence = &mut self.sequences[child];
        sequence.tokens = tokens;
        sequence.committed = committed;
        (sequence.salt, sequence.prompt_tokens, sequence.max_tokens) =
            (salt, prompt_tokens, max_tokens);
        self.set_tip(child, tip, tip_depth);
        for group in 0..self.pools.len() {
            self.set_released_to(child, group, self.released_to(parent, group));
            for logical in self.kept(child, group) {
                let block = self.table.get(parent, group, logical);
                self.pools[group].retain(block);
                self.table.set(child, group, logical, block);
            }
        }
        Ok(child_id)
    }

    /// Ends a sequence. Its cached blocks stay until they are evicted, so ending one and creating
    /// it again later (preemption by recomputing) costs little while there is room.
    pub fn free(&mut self, id: SequenceId) -> Result<(), PlanError> {
        let row = self.sequences.find(id)?;
        if self.sequences[row].swapped {
            self.drop_host_blocks(row);
        } else {
            for group in 0..self.pools.len() {
                // The last block first: a prefix is worth more than what follows it.
                for logical in self.kept(row, group).rev() {
                    self.drop_block(row, group, logical);
                }
            }
        }
        self.set_tip(row, None, 0);
        self.sequences.close(row);
        Ok(())
    }

    /// Fills `delta` with everything that changed since the last call. When the device did not
    /// get it after all, see [`invalidate_table`](Self::invalidate_table).
    pub fn take_delta(&mut self, delta: &mut Delta) {
        delta.clear();
        core::mem::swap(&mut delta.transfers, &mut self.transfers);
        self.table.drain(delta);
    }

    /// The next delta will hold the whole table, as for a device that lost its copy.
    pub fn invalidate_table(&mut self) {
        self.table.mark_all();
    }

    /// Makes a group's pool larger, to `blocks` per layer with the null block; every block keeps
    /// its id. A smaller number changes nothing.
    pub fn grow_pool(&mut self, group: GroupId, blocks: u32) -> Result<(), PlanError> {
        let index = self.check_group(group)?;
        if blocks > self.config.groups()[index].blocks {
            self.pools[index].grow(blocks);
            self.config.grow_pool(index, blocks);
            self.prefix.set_capacity(self.config.prefix_nodes() as usize);
        }
        Ok(())
    }

    /// Forgets every cached block that no sequence refers to.
    pub fn drop_cached(&mut self) {
        for group in 0..self.pools.len() {
            while self.evict(group) {}
        }
    }

    pub(crate) fn check_request(&self, request: &Request<'_>) -> Result<(), PlanError> {
        let over = |len_tokens, more_tokens, max_tokens: u32| PlanError::OverMaxContext {
            len_tokens,
            more_tokens,
            max_tokens: u64::from(max_tokens),
        };
        let max_context = self.config.max_context_tokens();
        if request.max_tokens > max_context {
            return Err(over(0, u64::from(request.max_tokens), max_context));
        }
        let prompt_tokens = request.prompt.len() as u64;
        if prompt_tokens > u64::from(request.max_tokens) {
            return Err(over(0, prompt_tokens, request.max_tokens));
        }
        Ok(())
    }

    pub(crate) fn check_group(&self, group: GroupId) -> Result<usize, PlanError> {
        let groups = self.pools.len() as u32;
        if group.0 < groups {
            return Ok(group.0 as usize);
        }
        Err(PlanError::UnknownGroup { group, groups })
    }

    /// The longest prefix of full blocks, short of the whole prompt, of which every group has
    /// what the next position reads.
    pub(crate) fn longest_match(&self, prompt: &[u32], salt: u64) -> Match {
        let mut best = Match { blocks: 0, tip: None };
        if !self.prefix.is_enabled() {
            return best;
        }
        let block_size = self.config.block_size_tokens();
        let usable = &prompt[..prompt.len().saturating_sub(1)];
        // Per group, blocks present without a gap up to where the walk is.
        let mut present = [0_u32; MAX_GROUPS];
        let mut sinks_missing = false;
        let mut parent = None;
        for (depth, tokens) in (1..).zip(usable.chunks_exact(block_size as usize)) {
            let hash = self.prefix.hash(parent, salt, tokens);
            let Some(node) = self.prefix.find(parent, salt, hash, tokens) else { break };
            let mut enough = true;
            for (group, span) in self.spans.iter().enumerate() {
                let missing = self.prefix.block(node, group).is_null();
                if missing && (span.is_full() || depth <= span.sink_blocks) {
                    sinks_missing = true;
                }
                present[group] = if missing { 0 } else { present[group] + 1 };
                let read = depth.saturating_sub(span.first_needed(depth * block_size));
                enough &= present[group] >= read;
            }
            if sinks_missing {
                // No longer prefix can do without this block either.
                break;
            }
            parent = Some(node);
            if enough {
                best = Match { blocks: depth, tip: parent };
            }
        }
        best
    }

    /// A block with one reference, which the caller has made sure of.
    pub(crate) fn take(&mut self, group: usize) -> BlockId {
        let (block, evicted) = self.pools[group].take().expect("availability was checked");
        if let Some(node) = evicted {
            self.forget(NodeId(node), group);
        }
        block
    }

    pub(crate) fn out_of_blocks(&self, group: usize, needed: u32) -> PlanError {
        PlanError::OutOfBlocks {
            group: GroupId(group as u32),
            needed,
            free: self.pools[group].free_blocks(),
            evictable: self.pools[group].evictable_blocks(),
        }
    }

    pub(crate) fn released_to(&self, row: usize, group: usize) -> u32 {
        self.released_to[row * self.spans.len() + group]
    }

    /// Whether the sequence keeps this logical block in this group, if it is as long as that.
    pub(crate) fn keeps(&self, row: usize, group: usize, logical: u32) -> bool {
        logical < self.spans[group].sink_blocks || logical >= self.released_to(row, group)
    }

    /// The logical blocks that the sequence keeps in this group, in order.
    pub(crate) fn kept(
        &self,
        row: usize,
        group: usize,
    ) -> impl DoubleEndedIterator<Item = u32> + use<> {
        let end = self.sequences[row].len().div_ceil(self.config.block_size_tokens());
        let sinks = 0..self.spans[group].sink_blocks.min(end);
        let window = self.released_to(row, group).max(sinks.end)..end;
        sinks.chain(window)
    }

    fn set_released_to(&mut self, row: usize, group: usize, block: u32) {
        let n_group = self.spans.len();
        self.released_to[row * n_group + group] = block;
    }

    pub(crate) fn drop_block(&mut self, row: usize, group: usize, logical: u32) {
        let block = self.table.get(row, group, logical);
        if !block.is_null() {
            self.pools[group].release(block);
            self.table.set(row, group, logical, BlockId::NULL);
        }
    }

    /// Makes sure that nobody else depends on a block that is about to be written.
    fn make_writable(&mut self, row: usize, group: usize, logical: u32) {
        let from = self.table.get(row, group, logical);
        if self.pools[group].refs(from) > 1 {
            let to = self.take(group);
            self.pools[group].release(from);
            self.table.set(row, group, logical, to);
            self.transfers.push(Transfer::Copy { group: GroupId(group as u32), from, to });
        } else if let Some(node) = self.pools[group].tag(from) {
            // Only the cache still promises the old content.
            self.pools[group].clear_tag(from);
            self.prefix.detach(NodeId(node), group);
        }
    }

    /// Lets the cache know a full, computed block, or takes the one it has.
    fn register(&mut self, row: usize, logical: u32) {
        let sequence = &self.sequences[row];
        if !self.prefix.is_enabled() {
            return;
        }
        if sequence.tip_depth != logical {
            self.stats.uncached_blocks += 1;
            return;
        }
        let block_size = self.config.block_size_tokens() as usize;
        let start = logical as usize * block_size;
        let (tip, salt) = (sequence.tip, sequence.salt);
        let tokens = &sequence.tokens[start..start + block_size];
        let hash = self.prefix.hash(tip, salt, tokens);
        let node = self.prefix.find(tip, salt, hash, tokens).or_else(|| self.new_node(row, hash));
        let Some(node) = node else {
            self.stats.uncached_blocks += 1;
            return;
        };
        self.set_tip(row, Some(node), logical + 1);
        for group in 0..self.pools.len() {
            let own = self.table.get(row, group, logical);
            let known = self.prefix.block(node, group);
            if own.is_null() || own == known {
                continue;
            }
            if known.is_null() {
                self.pools[group].set_tag(own, node.0);
                self.prefix.attach(node, group, own);
            } else {
                self.pools[group].retain(known);
                self.pools[group].release(own);
                self.table.set(row, group, logical, known);
                self.stats.deduplicated_blocks += 1;
            }
        }
    }

    /// A node for the block behind the sequence's tip, at the cost of cached blocks if need be.
    fn new_node(&mut self, row: usize, hash: u64) -> Option<NodeId> {
        loop {
            let block_size = self.config.block_size_tokens() as usize;
            let sequence = &self.sequences[row];
            let start = sequence.tip_depth as usize * block_size;
            let tokens = &sequence.tokens[start..start + block_size];
            if let Some(node) = self.prefix.insert(sequence.tip, sequence.salt, hash, tokens) {
                return Some(node);
            }
            let fullest = (0..self.pools.len()).max_by_key(|&g| self.pools[g].evictable_blocks());
            if !fullest.is_some_and(|group| self.evict(group)) {
                return None;
            }
        }
    }

    fn evict(&mut self, group: usize) -> bool {
        let Some((_, node)) = self.pools[group].evict_oldest() else { return false };
        self.forget(NodeId(node), group);
        true
    }

    fn forget(&mut self, node: NodeId, group: usize) {
        self.prefix.detach(node, group);
        self.stats.evicted_blocks += 1;
    }

    fn set_tip(&mut self, row: usize, tip: Option<NodeId>, depth: u32) {
        if let Some(node) = tip {
            self.prefix.retain(node);
        }
        let sequence = &mut self.sequences[row];
        sequence.tip_depth = depth;
        if let Some(before) = core::mem::replace(&mut sequence.tip, tip) {
            self.prefix.release(before);
        }
    }

    /// Gives back the blocks that no position from `committed` on will read.
    fn slide(&mut self, row: usize, group: usize, committed: u32) {
        let first_needed = self.spans[group].first_needed(committed);
        let released_to = self.released_to(row, group);
        if first_needed > released_to {
            let end = committed.div_ceil(self.config.block_size_tokens()).min(first_needed);
            for logical in released_to..end {
                self.drop_block(row, group, logical);
            }
            self.set_released_to(row, group, first_needed);
        }
    }
}
