//! The block tables of many sequences in one buffer, and which row of a step has which.

/// Entries of a buffer of tables.
pub(super) fn entries(n_sequences: u64, table_stride: u64, n_logical: u64) -> u64 {
    n_sequences.saturating_sub(1) * table_stride + n_logical
}

/// The block tables of the rows of a step.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    entries: &'a [u32],
    /// Of each row.
    sequences: &'a [u32],
    stride: usize,
    len: usize,
}

impl<'a> Tables<'a> {
    pub(super) fn new(
        entries: &'a [u32],
        sequences: &'a [u32],
        stride: u32,
        n_logical: u32,
    ) -> Self {
        Self { entries, sequences, stride: stride as usize, len: n_logical as usize }
    }

    /// The one table of a step of one row.
    pub(super) fn of_one(entries: &'a [u32]) -> Self {
        Self { entries, sequences: &[0], stride: 0, len: entries.len() }
    }

    /// The table of a row; of the last sequence, if the row's is beyond.
    pub(super) fn of_row(&self, row: usize) -> &'a [u32] {
        let first = self.sequences[row] as usize * self.stride;
        &self.entries[first.min(self.entries.len() - self.len)..][..self.len]
    }
}
