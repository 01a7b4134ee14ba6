//! What the device has to do to catch up with the planner.

use crate::{BlockId, GroupId, HostBlockId};
use alloc::{vec, vec::Vec};

/// A block to move, in every layer of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// Device to device: a shared block is about to be written (copy-on-write).
    Copy {
        /// The group.
        group: GroupId,
        /// The shared block.
        from: BlockId,
        /// The sequence's own block.
        to: BlockId,
    },
    /// Device to host: a sequence is swapped out.
    Out {
        /// The group.
        group: GroupId,
        /// The block it had.
        from: BlockId,
        /// Where it waits.
        to: HostBlockId,
    },
    /// Host to device: a sequence is swapped in.
    In {
        /// The group.
        group: GroupId,
        /// Where it waited.
        from: HostBlockId,
        /// The block it has now.
        to: BlockId,
    },
}

/// One run of neighbouring table entries that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaRun<'a> {
    /// The first entry, as an index into the device table.
    pub index: u32,
    /// The new values.
    pub values: &'a [u32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    index: u32,
    start: u32,
}

/// Everything that changed since the last one was taken: first perform the transfers, in order,
/// then write the runs into the device table.
///
/// The order of the transfers matters (a block that one of them reads may be written by a later
/// one), and is what one stream gives anyway. A `Delta` keeps its buffers from step to step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    pub(crate) transfers: Vec<Transfer>,
    runs: Vec<Run>,
    values: Vec<u32>,
}

impl Delta {
    /// An empty one, to be filled by [`Planner::take_delta`](crate::Planner::take_delta).
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the device is up to date.
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty() && self.values.is_empty()
    }

    /// Blocks to move, in the order in which to move them.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// Changed table entries, by ascending index, no two runs adjacent.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = DeltaRun<'_>> {
        (0..self.runs.len()).map(|i| {
            let end = self.runs.get(i + 1).map_or(self.values.len(), |next| next.start as usize);
            let run = self.runs[i];
            DeltaRun { index: run.index, values: &self.values[run.start as usize..end] }
        })
    }

    /// Bytes of the changed entries: what one copy per run uploads.
    pub fn value_bytes(&self) -> u64 {
        4 * self.values.len() as u64
    }

    /// Bytes of `(index, value)` pairs: what [`write_pairs`](Self::write_pairs) fills.
    pub fn pair_bytes(&self) -> u64 {
        2 * self.value_bytes()
    }

    /// The changed entries as `index, value, index, value, …`, for one upload and a scatter
    /// kernel. Returns the pairs written; `None` if `out` is shorter than
    /// [`pair_bytes`](Self::pair_bytes).
    pub fn write_pairs(&self, out: &mut [u32]) -> Option<u32> {
        let out = out.get_mut(..2 * self.values.len())?;
        let mut pairs = out.chunks_exact_mut(2);
        for run in self.runs() {
            for ((index, &value), pair) in (run.index..).zip(run.values).zip(&mut pairs) {
                pair.copy_from_slice(&[index, value]);
            }
        }
        Some(self.values.len() as u32)
    }

    /// Writes the runs into a table in host memory. `None`, and nothing written, if the table is
    /// shorter than the planner's.
    pub fn apply(&self, table: &mut [u32]) -> Option<()> {
        if let Some(last) = self.runs().last() {
            table.get(last.index as usize + last.values.len() - 1)?;
        }
        for run in self.runs() {
            let start = run.index as usize;
            table[start..start + run.values.len()].copy_from_slice(run.values);
        }
        Some(())
    }

    pub(crate) fn clear(&mut self) {
        self.transfers.clear();
        self.runs.clear();
        self.values.clear();
    }

    /// Indices must come in ascending order.
    fn push(&mut self, index: u32, value: u32) {
        let continues = self.runs.last().is_some_and(|run| {
            u64::from(run.index) + (self.values.len() as u64 - u64::from(run.start))
                == u64::from(index)
        });
        if !continues {
            self.runs.push(Run { index, start: self.values.len() as u32 });
        }
        self.values.push(value);
    }
}

/// The planner's copy of the device table, `[row][group][logical block]`, and which of its
/// entries the device does not have yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceTable {
    entries: Vec<u32>,
    dirty: DirtySet,
    n_group: usize,
    columns: usize,
}

impl DeviceTable {
    pub(crate) fn new(rows: usize, n_group: usize, columns: usize) -> Self {
        let len = rows * n_group * columns;
        Self { entries: vec![BlockId::NULL.0; len], dirty: DirtySet::new(len), n_group, columns }
    }

    pub(crate) fn entries(&self) -> &[u32] {
        &self.entries
    }

    /// The entries of one row and group.
    pub(crate) fn row(&self, row: usize, group: usize) -> &[u32] {
        let start = self.start(row, group);
        &self.entries[start..start + self.columns]
    }

    pub(crate) fn get(&self, row: usize, group: usize, logical: u32) -> BlockId {
        BlockId(self.entries[self.start(row, group) + logical as usize])
    }

    pub(crate) fn set(&mut self, row: usize, group: usize, logical: u32, block: BlockId) {
        let index = self.start(row, group) + logical as usize;
        if self.entries[index] != block.0 {
            self.entries[index] = block.0;
            self.dirty.insert(index);
        }
    }

    /// Moves what is dirty into `delta`.
    pub(crate) fn drain(&mut self, delta: &mut Delta) {
        let entries = &self.entries;
        self.dirty.drain(|index| delta.push(index as u32, entries[index]));
    }

    pub(crate) fn mark_all(&mut self) {
        (0..self.entries.len()).for_each(|index| self.dirty.insert(index));
    }

    fn start(&self, row: usize, group: usize) -> usize {
        (row * self.n_group + group) * self.columns
    }
}

/// A set of indices that is drained in ascending order in time proportional to what is in it:
/// one bit per index, and above each level one bit per word of it that is not zero.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DirtySet {
    /// The lowest level first; the last has one word.
    levels: Vec<Vec<u64>>,
}

impl DirtySet {
    fn new(len: usize) -> Self {
        let mut levels = vec![vec![0; len.div_ceil(64).max(1)]];
        while levels[levels.len() - 1].len() > 1 {
            let words = levels[levels.len() - 1].len().div_ceil(64);
            levels.push(vec![0; words]);
        }
        Self { levels }
    }

    fn insert(&mut self, mut index: usize) {
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            let known_above = *word != 0;
            *word |= 1 << (index % 64);
            if known_above {
                return;
            }
            index /= 64;
        }
    }

    fn drain(&mut self, mut each: impl FnMut(usize)) {
        while self.levels[self.levels.len() - 1][0] != 0 {
            let first_word = self.levels[1..]
                .iter()
                .rev()
                .fold(0, |word, level| word * 64 + level[word].trailing_zeros() as usize);
            let mut bits = core::mem::take(&mut self.levels[0][first_word]);
            while bits != 0 {
                each(first_word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
            let mut index = first_word;
            for level in &mut self.levels[1..] {
                let word = &mut level[index / 64];
                *word &= !(1 << (index % 64));
                if *word != 0 {
                    break;
                }
                index /= 64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_dirty_set_is_an_ordered_set(
            len in 1_usize..20_000,
            rounds in proptest::collection::vec(proptest::collection::vec(0_usize..20_000, 0..40), 1..4),
        ) {
            let mut set = DirtySet::new(len);
            for round in rounds {
                let model: BTreeSet<usize> = round.iter().map(|index| index % len).collect();
                round.iter().for_each(|index| set.insert(index % len));
                let mut drained = Vec::new();
                set.drain(|index| drained.push(index));
                prop_assert_eq!(drained, model.into_iter().collect::<Vec<_>>());
            }
            prop_assert_eq!(set, DirtySet::new(len));
        }
    }

    fn delta() -> Delta {
        let mut delta = Delta::new();
        for (index, value) in [(3, 30), (4, 40), (9, 90), (10, 100), (12, 120)] {
            delta.push(index, value);
        }
        delta
    }

    #[test]
    fn neighbours_make_one_run() {
        let delta = delta();
        let runs: Vec<_> = delta.runs().map(|run| (run.index, run.values.to_vec())).collect();
        assert_eq!(runs, [(3, vec![30, 40]), (9, vec![90, 100]), (12, vec![120])]);
        assert_eq!((delta.value_bytes(), delta.pair_bytes()), (20, 40));
    }

    #[test]
    fn pairs_and_runs_say_the_same() {
        let delta = delta();
        let mut pairs = vec![0; 10];
        assert_eq!(delta.write_pairs(&mut pairs), Some(5));
        assert_eq!(pairs, [3, 30, 4, 40, 9, 90, 10, 100, 12, 120]);
        assert_eq!(delta.write_pairs(&mut [0; 9]), None);
        let mut table = vec![0; 13];
        delta.apply(&mut table).unwrap();
        assert_eq!(table, [0, 0, 0, 30, 40, 0, 0, 0, 0, 90, 100, 0, 120]);
        let mut short = vec![0; 12];
        assert_eq!(delta.apply(&mut short), None);
        assert_eq!(short, [0; 12]);
    }

    #[test]
    fn setting_an_entry_to_what_it_is_changes_nothing() {
        let mut table = DeviceTable::new(2, 2, 3);
        table.set(0, 1, 2, BlockId::NULL);
        let mut delta = Delta::new();
        table.drain(&mut delta);
        assert!(delta.is_empty());
        table.set(1, 1, 2, BlockId(7));
        table.drain(&mut delta);
        assert_eq!(delta.runs().map(|run| run.index).collect::<Vec<_>>(), [11]);
    }
}
