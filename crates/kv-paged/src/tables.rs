//! What engines read: tables, page lists and slots, written into a caller's buffer.
//!
//! A batch is a list of rows, `Some(sequence)` or `None` for padding. Padding sees the null block
//! and one token, so that attention over it stays finite.

use crate::{BlockId, GroupId, PlanError, Planner, SequenceId};
use core::ops::Range;

/// The slot of a token that must not be written: vLLM's `PAD_SLOT_ID`.
pub const PAD_SLOT: i64 = -1;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for i32 {}
}

/// The integers in which tables can be written: `u32` and `i32`.
pub trait TableInt: Copy + sealed::Sealed {
    /// The integer of a block id or count; both fit 31 bits wherever memory could hold them.
    fn from_index(index: u32) -> Self;
}

impl TableInt for u32 {
    fn from_index(index: u32) -> Self {
        index
    }
}

impl TableInt for i32 {
    fn from_index(index: u32) -> Self {
        index as Self
    }
}

/// Where a dense table's rows lie in the caller's buffer, in elements. Logical blocks are always
/// adjacent.
///
/// `[sequence][group][logical]` has `sequence = groups x columns, group = columns`; one table per
/// group, as vLLM has it, is `sequence = columns, group = sequences x columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DenseStrides {
    /// From a sequence to the next.
    pub sequence: usize,
    /// From a group to the next.
    pub group: usize,
}

/// Which blocks a page list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Listed {
    /// Every logical block, with the null block where the window has released one: page `i` holds
    /// positions from `i x block_size` on.
    Logical,
    /// Only the sinks and the window.
    Held,
}

/// The page lists of a batch, in the caller's buffers: the `paged_kv_indptr`, `paged_kv_indices`
/// and `paged_kv_last_page_len` of FlashInfer.
#[derive(Debug)]
pub struct CsrBuffers<'a, T> {
    /// Where each row's pages start in `indices`, and behind the last row where they end.
    pub indptr: &'a mut [T],
    /// The pages of all rows.
    pub indices: &'a mut [T],
    /// Tokens in the last page of each row: 1 to the block size, 0 for a sequence without tokens.
    pub last_block_len: &'a mut [T],
}

impl Planner {
    /// The device block table as it should be, `[row][group][logical block]` with
    /// `max_sequences + 1` rows; the last row is all null, for padding. Deltas keep a device copy
    /// of it up to date.
    pub fn table(&self) -> &[u32] {
        self.table.entries()
    }

    /// The row that is always null.
    pub fn null_row(&self) -> u32 {
        self.sequences.max()
    }

    /// Bytes of the device block table.
    pub fn table_bytes(&self) -> u64 {
        4 * self.table.entries().len() as u64
    }

    /// Writes `columns` entries for each row of the batch and each group; entries without a block
    /// are the null block. As `i32` this is vLLM's block table. Nothing between the rows is
    /// touched.
    pub fn write_dense<T: TableInt>(
        &self,
        batch: &[Option<SequenceId>],
        columns: usize,
        strides: DenseStrides,
        out: &mut [T],
    ) -> Result<(), PlanError> {
        let groups = self.pools.len();
        self.check_strides(batch.len(), groups, columns, strides)?;
        let mut longest = 0;
        for id in batch.iter().flatten() {
            let row = self.sequences.find_resident(*id)?;
            longest = longest.max(self.blocks_of(row));
        }
        if longest > columns {
            return Err(too_small_stride("columns", longest, columns));
        }
        if batch.is_empty() {
            return Ok(());
        }
        let needed = (batch.len() - 1)
            .saturating_mul(strides.sequence)
            .saturating_add((groups - 1).saturating_mul(strides.group))
            .saturating_add(columns);
        check_len("dense table", needed, out.len())?;

        for (i, id) in batch.iter().enumerate() {
            for group in 0..groups {
                let start = i * strides.sequence + group * strides.group;
                let row = self.table.row(id.map_or(self.null_row(), |id| id.row) as usize, group);
                let known = columns.min(row.len());
                let (entries, beyond) = out[start..start + columns].split_at_mut(known);
                for (entry, &block) in entries.iter_mut().zip(row) {
                    *entry = T::from_index(block);
                }
                beyond.fill(T::from_index(BlockId::NULL.0));
            }
        }
        Ok(())
    }

    /// Elements of `indices` that [`write_csr`](Self::write_csr) fills for a batch.
    pub fn csr_indices_elems(
        &self,
        batch: &[Option<SequenceId>],
        group: GroupId,
        listed: Listed,
    ) -> Result<usize, PlanError> {
        let group = self.check_group(group)?;
        batch.iter().try_fold(0, |sum, id| {
            Ok(sum
                + match id {
                    None => 1,
                    Some(id) => {
                        let row = self.sequences.find_resident(*id)?;
                        match listed {
                            Listed::Logical => self.blocks_of(row),
                            Listed::Held => self.kept(row, group).count(),
                        }
                    }
                })
        })
    }

    /// Writes the page lists of one group for a batch, appended tokens included. Returns the
    /// elements of `indices` written.
    pub fn write_csr<T: TableInt>(
        &self,
        batch: &[Option<SequenceId>],
        group: GroupId,
        listed: Listed,
        out: CsrBuffers<'_, T>,
    ) -> Result<usize, PlanError> {
        let total = self.csr_indices_elems(batch, group, listed)?;
        check_len("indptr", batch.len() + 1, out.indptr.len())?;
        check_len("indices", total, out.indices.len())?;
        check_len("last_block_len", batch.len(), out.last_block_len.len())?;

        let (group, block_size) = (group.0 as usize, self.config.block_size_tokens());
        let mut end = 0;
        out.indptr[0] = T::from_index(0);
        for (i, id) in batch.iter().enumerate() {
            let mut push = |block: BlockId| {
                out.indices[end] = T::from_index(block.0);
                end += 1;
            };
            let last = match id {
                None => {
                    push(BlockId::NULL);
                    1
                }
                Some(id) => {
                    let row = id.row as usize;
                    let block = |logical| self.table.get(row, group, logical);
                    match listed {
                        Listed::Logical => {
                            (0..self.blocks_of(row) as u32).map(block).for_each(push);
                        }
                        Listed::Held => self.kept(row, group).map(block).for_each(push),
                    }
                    match self.sequences[row].len() {
                        0 => 0,
                        len => (len - 1) % block_size + 1,
                    }
                }
            };
            out.indptr[i + 1] = T::from_index(end as u32);
            out.last_block_len[i] = T::from_index(last);
        }
        Ok(total)
    }

    /// Writes the slot of each position, `block x block_size + offset`: vLLM's `slot_mapping`.
    /// Positions that the window has released give [`PAD_SLOT`].
    pub fn write_slots(
        &self,
        id: SequenceId,
        group: GroupId,
        positions: Range<u32>,
        out: &mut [i64],
    ) -> Result<(), PlanError> {
        let row = self.sequences.find_resident(id)?;
        let group = self.check_group(group)?;
        let Range { start, end } = positions;
        let len_tokens = self.sequences[row].len();
        if start > end || end > len_tokens {
            return Err(PlanError::OutOfPositions { start, end, len_tokens });
        }
        check_len("slots", (end - start) as usize, out.len())?;
        let block_size = self.config.block_size_tokens();
        for (slot, position) in out.iter_mut().zip(positions) {
            let block = self.table.get(row, group, position / block_size);
            *slot = if block.is_null() {
                PAD_SLOT
            } else {
                i64::from(block.0) * i64::from(block_size) + i64::from(position % block_size)
            };
        }
        Ok(())
    }

    fn blocks_of(&self, row: usize) -> usize {
        self.sequences[row].len().div_ceil(self.config.block_size_tokens()) as usize
    }

    /// Rows must not overlap: of the two strides, the smaller holds a row and the larger holds
    /// all rows of the smaller.
    fn check_strides(
        &self,
        sequences: usize,
        groups: usize,
        columns: usize,
        strides: DenseStrides,
    ) -> Result<(), PlanError> {
        let sequence = ("sequence stride", strides.sequence, sequences);
        let group = ("group stride", strides.group, groups);
        let (inner, outer) =
            if strides.sequence <= strides.group { (sequence, group) } else { (group, sequence) };
        let mut needed = columns;
        for (what, stride, count) in [inner, outer] {
            if count > 1 {
                if stride < needed {
                    return Err(too_small_stride(what, needed, stride));
                }
                needed = needed.saturating_add((count - 1).saturating_mul(stride));
            }
        }
        Ok(())
    }
}

fn too_small_stride(what: &'static str, needed: usize, got: usize) -> PlanError {
    PlanError::StrideTooSmall { what, needed_elems: needed as u64, got_elems: got as u64 }
}

fn check_len(what: &'static str, needed: usize, got: usize) -> Result<(), PlanError> {
    if got >= needed {
        return Ok(());
    }
    Err(PlanError::BufferTooSmall { what, needed_elems: needed as u64, got_elems: got as u64 })
}
