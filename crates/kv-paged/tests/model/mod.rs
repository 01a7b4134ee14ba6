//! A naive engine around the planner: it keeps device memory, writes a "key" into it for each
//! token that it computes, and after every operation checks that each sequence reads back its
//! own history and that every count is what counting from scratch gives.
//!
//! The key of a position is a hash of the salt and of every token up to it, as a real key is a
//! function of these, so a block that is shared wrongly, used twice, copied too late or named by
//! a stale table is read back as a wrong key.

use kv_paged::{
    Delta, GroupId, LayerGroup, PlanError, Planner, PlannerConfig, Request, SequenceId, Transfer,
};
use std::collections::{BTreeMap, HashMap, HashSet};

pub(crate) const BLOCK_SIZE: u32 = 4;
pub(crate) const MAX_CONTEXT: u32 = 48;
pub(crate) const MAX_SEQUENCES: u32 = 6;

/// One operation; numbers are reduced to what exists.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Create { prompt: u32, len: u32, salt: u64 },
    Append { pick: u32, text: u32, n: u32 },
    Commit { pick: u32, n: u32 },
    OverCommit { pick: u32 },
    Truncate { pick: u32, back: u32 },
    Fork { pick: u32 },
    Free { pick: u32 },
    SwapOut { pick: u32 },
    SwapIn { pick: u32 },
    Step,
    Invalidate,
    DropCached,
    Grow { group: u32 },
}

/// A sequence as the naive engine knows it.
#[derive(Clone, Debug)]
struct Known {
    salt: u64,
    tokens: Vec<u32>,
    committed: u32,
    max_tokens: u32,
    swapped: bool,
}

/// The text number `text`: few of them and few different tokens, so that prefixes meet often.
fn token(text: u32, position: u32) -> u32 {
    if position < 4 + 3 * text { position % 3 } else { (text + position / 5) % 3 }
}

fn key(salt: u64, tokens: &[u32]) -> u64 {
    let mut hash = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    for &token in tokens {
        hash = (hash ^ u64::from(token + 1)).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash
}

pub(crate) struct Engine {
    pub(crate) planner: Planner,
    known: BTreeMap<SequenceId, Known>,
    ended: Vec<SequenceId>,
    delta: Delta,
    /// The device's copy of the table.
    table: Vec<u32>,
    /// `[group][block][token]`.
    device: Vec<Vec<[u64; BLOCK_SIZE as usize]>>,
    host: Vec<Vec<[u64; BLOCK_SIZE as usize]>>,
    /// Calls that were refused, by the name of the error.
    pub(crate) refused: BTreeMap<&'static str, u64>,
    pub(crate) uploaded_bytes: u64,
}

pub(crate) fn groups() -> Vec<LayerGroup> {
    vec![
        LayerGroup::full(3, 30).with_host_blocks(14),
        LayerGroup::sliding(2, 22, 9, 0).with_host_blocks(14),
        LayerGroup::sliding(1, 26, 6, 5).with_host_blocks(14),
    ]
}

impl Engine {
    pub(crate) fn new(groups: Vec<LayerGroup>, prefix_nodes: Option<u32>) -> Self {
        let mut config = PlannerConfig::new(groups.clone(), MAX_SEQUENCES, MAX_CONTEXT)
            .and_then(|config| config.with_block_size(BLOCK_SIZE))
            .unwrap();
        if let Some(nodes) = prefix_nodes {
            config = config.with_prefix_nodes(nodes);
        }
        let planner = Planner::new(config);
        let blank = [0; BLOCK_SIZE as usize];
        Self {
            table: vec![0; planner.table().len()],
            device: groups.iter().map(|g| vec![blank; g.blocks as usize]).collect(),
            host: groups.iter().map(|g| vec![blank; g.host_blocks as usize]).collect(),
            planner,
            known: BTreeMap::new(),
            ended: Vec::new(),
            delta: Delta::new(),
            refused: BTreeMap::new(),
            uploaded_bytes: 0,
        }
    }

    fn group(&self, group: usize) -> LayerGroup {
        self.planner.config().groups()[group]
    }

    fn pick(&self, pick: u32) -> Option<SequenceId> {
        let n = self.known.len().max(1);
        self.known.keys().nth(pick as usize % n).copied()
    }

    /// References to each block of a group, counted from the table.
    fn references(&self, group: usize) -> HashMap<u32, u32> {
        let columns = MAX_CONTEXT.div_ceil(BLOCK_SIZE) as usize;
        let n_group = self.device.len();
        let mut references = HashMap::new();
        for row in 0..MAX_SEQUENCES as usize {
            let start = (row * n_group + group) * columns;
            for &block in &self.planner.table()[start..start + columns] {
                if block != 0 {
                    *references.entry(block).or_insert(0) += 1;
                }
            }
        }
        references
    }

    fn entry(&self, id: SequenceId, group: usize, logical: u32) -> u32 {
        let columns = MAX_CONTEXT.div_ceil(BLOCK_SIZE) as usize;
        let start = (id.row() as usize * self.device.len() + group) * columns;
        self.planner.table()[start + logical as usize]
    }

    /// Whether position `position` is still read once `committed` positions are computed.
    fn is_read(group: LayerGroup, position: u32, committed: u32) -> bool {
        match group.window_tokens {
            None => true,
            Some(window) => position < group.sink_tokens || position + window > committed,
        }
    }

    /// Does what one step does before its kernels run.
    fn step(&mut self) {
        self.planner.take_delta(&mut self.delta);
        for transfer in self.delta.transfers() {
            match *transfer {
                Transfer::Copy { group: GroupId(g), from, to } => {
                    self.device[g as usize][to.0 as usize] =
                        self.device[g as usize][from.0 as usize];
                }
                Transfer::Out { group: GroupId(g), from, to } => {
                    self.host[g as usize][to.0 as usize] = self.device[g as usize][from.0 as usize];
                }
                Transfer::In { group: GroupId(g), from, to } => {
                    self.device[g as usize][to.0 as usize] = self.host[g as usize][from.0 as usize];
                }
            }
        }
        let changed = self.delta.runs().map(|run| 4 * run.values.len() as u64).sum::<u64>();
        assert_eq!(self.delta.value_bytes(), changed);
        self.uploaded_bytes += changed;
        self.delta.apply(&mut self.table).unwrap();
        assert_eq!(self.table, self.planner.table(), "deltas and a rebuilt table differ");
        self.check_history();
    }

    /// Every position that is still read holds its own key, read through the device's table.
    fn check_history(&self) {
        let columns = MAX_CONTEXT.div_ceil(BLOCK_SIZE) as usize;
        for (id, known) in self.known.iter().filter(|(_, known)| !known.swapped) {
            for group in 0..self.device.len() {
                let start = (id.row() as usize * self.device.len() + group) * columns;
                for position in 0..known.committed {
                    if !Self::is_read(self.group(group), position, known.committed) {
                        continue;
                    }
                    let block = self.table[start + (position / BLOCK_SIZE) as usize];
                    assert_ne!(block, 0, "{id:?} group {group} lost position {position}");
                    assert_eq!(
                        self.device[group][block as usize][(position % BLOCK_SIZE) as usize],
                        key(known.salt, &known.tokens[..=position as usize]),
                        "{id:?} group {group} reads a foreign key at {position}"
                    );
                }
            }
        }
    }

    /// Counts from scratch.
    fn check_counts(&self) {
        let report = self.planner.report();
        assert_eq!(report.sequences as usize, self.known.len());
        for (group, counted) in report.groups.iter().enumerate() {
            let references = self.references(group);
            let pool = self.planner.pool(GroupId(group as u32)).unwrap();
            for (&block, &n) in &references {
                assert_eq!(pool.refs(kv_paged::BlockId(block)), n, "group {group} block {block}");
            }
            let used = references.len() as u32;
            let shared = references.values().filter(|&&n| n > 1).count() as u32;
            assert_eq!((counted.used_blocks, counted.shared_blocks), (used, shared));
            assert_eq!(used + counted.cached_blocks + counted.free_blocks, counted.usable_blocks);
            assert_eq!(counted.saved_blocks, u64::from(references.values().sum::<u32>() - used));
            // A block is shared only between sequences of one salt, and each has the same tokens
            // up to where both have computed.
            let mut owner: HashMap<u32, (SequenceId, u32)> = HashMap::new();
            for (&id, known) in self.known.iter().filter(|(_, known)| !known.swapped) {
                for logical in 0..(known.tokens.len() as u32).div_ceil(BLOCK_SIZE) {
                    let block = self.entry(id, group, logical);
                    if block == 0 {
                        continue;
                    }
                    let (first, at) = *owner.entry(block).or_insert((id, logical));
                    let first = &self.known[&first];
                    assert_eq!((first.salt, at), (known.salt, logical));
                    let both = first.committed.min(known.committed).min((logical + 1) * BLOCK_SIZE);
                    assert_eq!(first.tokens[..both as usize], known.tokens[..both as usize]);
                }
            }
            let free_swapped: u32 = self
                .known
                .iter()
                .filter(|(_, known)| known.swapped)
                .map(|(id, _)| {
                    self.planner.sequence_report(*id, GroupId(group as u32)).unwrap().blocks
                })
                .sum();
            assert_eq!(counted.host_used_blocks, free_swapped, "group {group} host blocks");
        }
        for (&id, known) in &self.known {
            assert_eq!(self.planner.tokens(id).unwrap(), known.tokens);
            assert_eq!(self.planner.committed_tokens(id), Ok(known.committed));
            assert_eq!(self.planner.is_swapped_out(id), Ok(known.swapped));
        }
    }

    fn refuse(&mut self, error: &PlanError) {
        let name = match error {
            PlanError::OutOfSequences { .. } => "sequences",
            PlanError::OutOfBlocks { .. } => "blocks",
            PlanError::OutOfHostBlocks { .. } => "host blocks",
            PlanError::OverMaxContext { .. } => "context",
            PlanError::OverCommit { .. } => "commit",
            PlanError::TruncateBehindWindow { .. } => "window",
            PlanError::TruncateBeyondEnd { .. } => "end",
            PlanError::SwappedOut { .. } => "swapped",
            PlanError::NotSwappedOut { .. } => "not swapped",
            PlanError::Uncommitted { .. } => "uncommitted",
            PlanError::UnknownSequence { .. } => "unknown",
            other => panic!("unexpected: {other}"),
        };
        *self.refused.entry(name).or_default() += 1;
    }

    /// Runs one operation and checks everything. `compare` also checks that a refused call
    /// changed nothing, which costs a copy of the planner.
    pub(crate) fn run(&mut self, op: Op, compare: bool) {
        let before = compare.then(|| self.planner.clone());
        if let Err(error) = self.call(op) {
            self.refuse(&error);
            if let Some(before) = before {
                assert!(
                    before == self.planner,
                    "{op:?} was refused ({error}) and changed something"
                );
            }
        }
        self.check_counts();
    }

    fn call(&mut self, op: Op) -> Result<(), PlanError> {
        match op {
            Op::Create { prompt, len, salt } => {
                let max_tokens = MAX_CONTEXT - prompt % 9;
                let tokens: Vec<u32> =
                    (0..len % (MAX_CONTEXT + 2)).map(|p| token(prompt, p)).collect();
                let request = Request { prompt: &tokens, max_tokens, salt };
                let refusal = if tokens.len() as u32 > max_tokens {
                    Some("context")
                } else if self.known.len() as u32 == MAX_SEQUENCES {
                    Some("sequences")
                } else {
                    None
                };
                let created = self.planner.create(&request);
                assert_eq!(created.is_err(), refusal.is_some(), "{created:?} {refusal:?}");
                let created = created?;
                assert_eq!(created.cached_tokens % BLOCK_SIZE, 0);
                assert!(created.cached_tokens < len.max(1));
                let tokens = tokens[..created.cached_tokens as usize].to_vec();
                let committed = created.cached_tokens;
                let known = Known { salt, tokens, committed, max_tokens, swapped: false };
                assert!(self.known.insert(created.id, known).is_none(), "an id came twice");
            }
            Op::Append { pick, text, n } => {
                let Some(id) = self.pick(pick) else {
                    return self.stale(pick, |p, id| p.append(id, &[1]));
                };
                let known = &self.known[&id];
                let len = known.tokens.len() as u32;
                let tokens: Vec<u32> = (len..len + n).map(|p| token(text, p)).collect();
                let must_fail = known.swapped
                    || len + n > known.max_tokens
                    || (0..self.device.len()).any(|group| {
                        let references = self.references(group);
                        let fresh = (len + n).div_ceil(BLOCK_SIZE) - len.div_ceil(BLOCK_SIZE);
                        let copied = n > 0
                            && !len.is_multiple_of(BLOCK_SIZE)
                            && references[&self.entry(id, group, len / BLOCK_SIZE)] > 1;
                        let room = self.group(group).blocks - 1 - references.len() as u32;
                        fresh + u32::from(copied) > room
                    });
                let result = self.planner.append(id, &tokens);
                assert_eq!(result.is_err(), must_fail, "{result:?}");
                result?;
                self.known.get_mut(&id).unwrap().tokens.extend(tokens);
            }
            Op::Commit { pick, n } => {
                let Some(id) = self.pick(pick) else {
                    return self.stale(pick, |p, id| p.commit(id, 1));
                };
                let known = self.known[&id].clone();
                if known.swapped {
                    return self.planner.commit(id, 0);
                }
                let n = n.min(known.tokens.len() as u32 - known.committed);
                self.step();
                for position in known.committed..known.committed + n {
                    let key = key(known.salt, &known.tokens[..=position as usize]);
                    for group in 0..self.device.len() {
                        let block = self.entry(id, group, position / BLOCK_SIZE);
                        assert_ne!(block, 0, "no block to compute into");
                        self.device[group][block as usize][(position % BLOCK_SIZE) as usize] = key;
                    }
                }
                // What was just written is nobody else's history.
                self.check_history();
                self.planner.commit(id, n)?;
                self.known.get_mut(&id).unwrap().committed += n;
            }
            Op::OverCommit { pick } => {
                let Some(id) = self.pick(pick) else { return Ok(()) };
                let known = &self.known[&id];
                let result =
                    self.planner.commit(id, known.tokens.len() as u32 - known.committed + 1);
                assert!(result.is_err());
                result?;
            }
            Op::Truncate { pick, back } => {
                let Some(id) = self.pick(pick) else {
                    return self.stale(pick, |p, id| p.truncate(id, 0));
                };
                let known = &self.known[&id];
                let len = known.tokens.len() as u32;
                let to = len.saturating_sub(back);
                let committed = known.committed.min(to);
                // Behind the window if a position that would be read again has no block, or the
                // partial block that the next position is to be written into is gone.
                let lost = (0..self.device.len()).any(|group| {
                    let gone = |position| self.entry(id, group, position / BLOCK_SIZE) == 0;
                    let read =
                        |&position: &u32| Self::is_read(self.group(group), position, committed);
                    (0..committed).filter(read).any(gone)
                        || (!to.is_multiple_of(BLOCK_SIZE) && gone(to))
                });
                let result = self.planner.truncate(id, to);
                assert_eq!(result.is_err(), known.swapped || lost, "{result:?}");
                result?;
                let known = self.known.get_mut(&id).unwrap();
                known.tokens.truncate(to as usize);
                known.committed = committed;
            }
            Op::Fork { pick } => {
                let Some(id) = self.pick(pick) else {
                    return self.stale(pick, |p, id| p.fork(id).map(drop));
                };
                let mut known = self.known[&id].clone();
                let must_fail = known.swapped || self.known.len() as u32 == MAX_SEQUENCES;
                let used: Vec<u32> =
                    self.planner.report().groups.iter().map(|g| g.used_blocks).collect();
                let child = self.planner.fork(id);
                assert_eq!(child.is_err(), must_fail, "{child:?}");
                let child = child?;
                let after: Vec<u32> =
                    self.planner.report().groups.iter().map(|g| g.used_blocks).collect();
                assert_eq!(used, after, "a fork took blocks");
                known.tokens.truncate(known.committed as usize);
                assert!(self.known.insert(child, known).is_none(), "an id came twice");
            }
            Op::Free { pick } => {
                let Some(id) = self.pick(pick) else { return self.stale(pick, |p, id| p.free(id)) };
                self.planner.free(id)?;
                self.known.remove(&id);
                self.ended.push(id);
            }
            Op::SwapOut { pick } => {
                let Some(id) = self.pick(pick) else { return Ok(()) };
                let known = &self.known[&id];
                let must_fail = known.swapped
                    || known.tokens.len() as u32 > known.committed
                    || self.planner.report().groups.iter().any(|g| {
                        let needed = self.planner.sequence_report(id, g.group).unwrap().blocks;
                        needed > g.host_blocks - g.host_used_blocks
                    });
                let result = self.planner.swap_out(id);
                assert_eq!(result.is_err(), must_fail, "{result:?}");
                result?;
                self.known.get_mut(&id).unwrap().swapped = true;
            }
            Op::SwapIn { pick } => {
                let Some(id) = self.pick(pick) else { return Ok(()) };
                // At most every block that it keeps is needed: the cache may still have some.
                let fits = self.planner.report().groups.iter().all(|g| {
                    let kept = self.planner.sequence_report(id, g.group).unwrap().blocks;
                    kept <= g.cached_blocks + g.free_blocks
                });
                let moved = self.planner.swap_in(id);
                if !self.known[&id].swapped {
                    assert_eq!(moved, Err(PlanError::NotSwappedOut { sequence: id }));
                } else {
                    assert!(moved.is_ok() || !fits, "{moved:?}");
                }
                moved?;
                self.known.get_mut(&id).unwrap().swapped = false;
            }
            Op::Step => self.step(),
            Op::Invalidate => {
                self.table.fill(u32::MAX);
                self.planner.invalidate_table();
                self.step();
            }
            Op::DropCached => {
                self.planner.drop_cached();
                let report = self.planner.report();
                assert!(report.groups.iter().all(|g| g.cached_blocks == 0));
            }
            Op::Grow { group } => {
                let group = group as usize % self.device.len();
                let blocks = (self.group(group).blocks + 1).min(40);
                self.planner.grow_pool(GroupId(group as u32), blocks)?;
                self.device[group].resize(blocks as usize, [0; BLOCK_SIZE as usize]);
            }
        }
        Ok(())
    }

    /// An id of the past is refused whatever is asked.
    fn stale(
        &mut self,
        pick: u32,
        call: impl FnOnce(&mut Planner, SequenceId) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let n = self.ended.len().max(1);
        let Some(&id) = self.ended.get(pick as usize % n) else { return Ok(()) };
        let result = call(&mut self.planner, id);
        assert_eq!(result, Err(PlanError::UnknownSequence { sequence: id }));
        result
    }

    /// Ends every sequence: nothing may be left but what the cache keeps, and then nothing.
    pub(crate) fn finish(mut self) {
        while !self.known.is_empty() {
            self.run(Op::Free { pick: 0 }, false);
        }
        self.step();
        assert!(self.table.iter().all(|&entry| entry == 0));
        self.planner.drop_cached();
        let report = self.planner.report();
        for g in &report.groups {
            assert_eq!((g.free_blocks, g.host_used_blocks), (g.usable_blocks, 0), "leak: {g:?}");
        }
        assert_eq!(report.prefix_nodes, 0, "nodes leaked");
        let mut blocks = HashSet::new();
        let id = self
            .planner
            .create(&Request { prompt: &[], max_tokens: MAX_CONTEXT, salt: 0 })
            .unwrap()
            .id;
        self.planner.append(id, &[0; MAX_CONTEXT as usize]).unwrap();
        for (_, block) in self.planner.blocks(id, GroupId(0)).unwrap() {
            assert!(!block.is_null() && blocks.insert(block), "a block came twice");
        }
    }
}
