//! The sequences that live now, one per row of the device table.

use crate::{PlanError, SequenceId, prefix::NodeId};
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

/// No row.
const NONE: u32 = u32::MAX;

/// One row: a sequence, or what the last one left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequence {
    generation: u32,
    live: bool,
    next_unused: u32,
    /// When it was created, as a count of creations: preemption takes the youngest.
    pub(crate) age: u64,
    pub(crate) salt: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) max_tokens: u32,
    /// Every token that was appended. The buffer stays with the row, so that a planner in steady
    /// state allocates nothing.
    pub(crate) tokens: Vec<u32>,
    pub(crate) committed: u32,
    /// The node of the last committed full block that the prefix cache knows.
    pub(crate) tip: Option<NodeId>,
    /// Blocks from the start to that node. Less than the committed full blocks where the cache
    /// had no room; what comes behind is then not cached.
    pub(crate) tip_depth: u32,
    pub(crate) swapped: bool,
}

impl Sequence {
    pub(crate) fn len(&self) -> u32 {
        // Appending keeps it at most `max_tokens`.
        self.tokens.len() as u32
    }

    pub(crate) fn uncommitted(&self) -> u32 {
        self.len() - self.committed
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequences {
    rows: Vec<Sequence>,
    unused_top: u32,
    live: u32,
    created: u64,
}

impl Sequences {
    pub(crate) fn new(max_sequences: u32) -> Self {
        let row = |row| Sequence {
            generation: 0,
            live: false,
            next_unused: if row + 1 < max_sequences { row + 1 } else { NONE },
            age: 0,
            salt: 0,
            prompt_tokens: 0,
            max_tokens: 0,
            tokens: Vec::new(),
            committed: 0,
            tip: None,
            tip_depth: 0,
            swapped: false,
        };
        Self { rows: (0..max_sequences).map(row).collect(), unused_top: 0, live: 0, created: 0 }
    }

    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    pub(crate) fn max(&self) -> u32 {
        self.rows.len() as u32
    }

    /// An empty sequence in an unused row.
    pub(crate) fn open(&mut self) -> Result<SequenceId, PlanError> {
        let row = self.unused_top;
        let max_sequences = self.max();
        let Some(sequence) = self.rows.get_mut(row as usize) else {
            return Err(PlanError::OutOfSequences { max_sequences });
        };
        self.unused_top = sequence.next_unused;
        sequence.live = true;
        sequence.age = self.created;
        self.created += 1;
        self.live += 1;
        Ok(SequenceId { row, generation: sequence.generation })
    }

    pub(crate) fn close(&mut self, row: usize) {
        let sequence = &mut self.rows[row];
        sequence.live = false;
        sequence.generation = sequence.generation.wrapping_add(1);
        sequence.tokens.clear();
        sequence.committed = 0;
        sequence.tip = None;
        sequence.tip_depth = 0;
        sequence.swapped = false;
        sequence.next_unused = self.unused_top;
        self.unused_top = row as u32;
        self.live -= 1;
    }

    /// The row of a live sequence.
    pub(crate) fn find(&self, id: SequenceId) -> Result<usize, PlanError> {
        match self.rows.get(id.row as usize) {
            Some(s) if s.live && s.generation == id.generation => Ok(id.row as usize),
            _ => Err(PlanError::UnknownSequence { sequence: id }),
        }
    }

    /// The row of a live sequence on the device.
    pub(crate) fn find_resident(&self, id: SequenceId) -> Result<usize, PlanError> {
        let row = self.find(id)?;
        if self.rows[row].swapped {
            return Err(PlanError::SwappedOut { sequence: id });
        }
        Ok(row)
    }

    /// Live sequences by row.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        (0..)
            .zip(&self.rows)
            .filter(|(_, s)| s.live)
            .map(|(row, s)| (SequenceId { row, generation: s.generation }, s))
    }
}

impl Index<usize> for Sequences {
    type Output = Sequence;

    fn index(&self, row: usize) -> &Sequence {
        &self.rows[row]
    }
}

impl IndexMut<usize> for Sequences {
    fn index_mut(&mut self, row: usize) -> &mut Sequence {
        &mut self.rows[row]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_does_not_outlive_its_sequence() {
        let mut sequences = Sequences::new(2);
        let first = sequences.open().unwrap();
        sequences.close(sequences.find(first).unwrap());
        let second = sequences.open().unwrap();
        assert_eq!(first.row(), second.row());
        assert_eq!(sequences.find(first), Err(PlanError::UnknownSequence { sequence: first }));
        assert_eq!(sequences.find(second), Ok(0));
    }

    #[test]
    fn rows_run_out() {
        let mut sequences = Sequences::new(2);
        let (a, b) = (sequences.open().unwrap(), sequences.open().unwrap());
        assert_eq!((a.row(), b.row()), (0, 1));
        assert_eq!(sequences.open(), Err(PlanError::OutOfSequences { max_sequences: 2 }));
        assert_eq!(sequences.iter().map(|(id, _)| id).collect::<Vec<_>>(), [a, b]);
    }
}
