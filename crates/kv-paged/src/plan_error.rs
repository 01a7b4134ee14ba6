//! What the planner refuses. A refused call has changed nothing.

use crate::{GroupId, KvError, SequenceId};

/// A refused planner configuration or call, with the numbers that refused it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A dimension of the configuration is zero.
    #[error("{what} must be at least 1")]
    ZeroDim {
        /// The dimension.
        what: &'static str,
    },
    /// A configuration with no layer group or too many.
    #[error("{groups} layer groups, must be 1 to {max}")]
    GroupCount {
        /// Groups in the configuration.
        groups: usize,
        /// Groups that a planner can have.
        max: usize,
    },
    /// A pool without room for the null block and one more.
    #[error("group {}: {blocks} blocks, must be at least 2 (the null block and one more)", group.0)]
    PoolTooSmall {
        /// The group.
        group: GroupId,
        /// Its blocks.
        blocks: u32,
    },
    /// A device block table with more entries than an index can name.
    #[error(
        "block table: {rows} rows x {groups} groups x {blocks_per_sequence} blocks do not fit 32 bits"
    )]
    TableTooLarge {
        /// One for each sequence and one null row.
        rows: u64,
        /// Layer groups.
        groups: u64,
        /// Logical blocks of the longest sequence.
        blocks_per_sequence: u64,
    },
    /// A sequence that was never created, or was freed.
    #[error("unknown sequence: row {}, generation {}", sequence.row, sequence.generation)]
    UnknownSequence {
        /// The id.
        sequence: SequenceId,
    },
    /// A group that the configuration does not have.
    #[error("unknown group {}, there are {groups}", group.0)]
    UnknownGroup {
        /// The id.
        group: GroupId,
        /// Groups that there are.
        groups: u32,
    },
    /// Every row of the device block table is in use.
    #[error("all {max_sequences} sequences are in use")]
    OutOfSequences {
        /// Sequences that can live at the same time.
        max_sequences: u32,
    },
    /// A group's pool has too few blocks that are free or can be evicted.
    #[error("group {}: {needed} blocks needed, {free} free and {evictable} evictable", group.0)]
    OutOfBlocks {
        /// The group.
        group: GroupId,
        /// Blocks that the call needs.
        needed: u32,
        /// Blocks that hold nothing.
        free: u32,
        /// Unreferenced blocks that hold a cached prefix.
        evictable: u32,
    },
    /// A group's host pool has too few free blocks.
    #[error("group {}: {needed} host blocks needed, {free} free", group.0)]
    OutOfHostBlocks {
        /// The group.
        group: GroupId,
        /// Host blocks that the call needs.
        needed: u32,
        /// Host blocks that are free.
        free: u32,
    },
    /// A sequence would become longer than it may.
    #[error("{len_tokens} tokens and {more_tokens} more are over the maximum of {max_tokens}")]
    OverMaxContext {
        /// Tokens that the sequence has.
        len_tokens: u64,
        /// Tokens that were to be added.
        more_tokens: u64,
        /// Tokens that it may have.
        max_tokens: u64,
    },
    /// More tokens were committed than were appended.
    #[error("{n_tokens} tokens cannot be committed, {uncommitted_tokens} are uncommitted")]
    OverCommit {
        /// Tokens to commit.
        n_tokens: u32,
        /// Tokens that were appended and not committed.
        uncommitted_tokens: u32,
    },
    /// A truncation to more tokens than the sequence has.
    #[error("cannot truncate to {to_tokens} tokens, the sequence has {len_tokens}")]
    TruncateBeyondEnd {
        /// Tokens to keep.
        to_tokens: u32,
        /// Tokens that there are.
        len_tokens: u32,
    },
    /// A truncation after which the sliding window would need blocks that have been released.
    #[error(
        "group {}: cannot truncate to {to_tokens} tokens, the window has released what is needed below {min_tokens}",
        group.0
    )]
    TruncateBehindWindow {
        /// The group.
        group: GroupId,
        /// Tokens to keep.
        to_tokens: u32,
        /// The least number of tokens that would have been possible.
        min_tokens: u32,
    },
    /// The sequence is in host memory.
    #[error("sequence in row {} is swapped out", sequence.row)]
    SwappedOut {
        /// The sequence.
        sequence: SequenceId,
    },
    /// The sequence is not in host memory.
    #[error("sequence in row {} is not swapped out", sequence.row)]
    NotSwappedOut {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A swap-out of tokens that were not computed; commit or truncate them first.
    #[error("sequence in row {} has {uncommitted_tokens} uncommitted tokens", sequence.row)]
    Uncommitted {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens that were appended and not committed.
        uncommitted_tokens: u32,
    },
    /// A caller's buffer that cannot hold the answer.
    #[error("{what}: buffer of {got_elems} elements, {needed_elems} needed")]
    BufferTooSmall {
        /// The buffer.
        what: &'static str,
        /// Elements that the answer has.
        needed_elems: u64,
        /// Elements that the buffer has.
        got_elems: u64,
    },
    /// Table rows or columns that would lie on top of each other, or too few columns.
    #[error("{what} is {got_elems} elements, at least {needed_elems} needed")]
    StrideTooSmall {
        /// The stride or count.
        what: &'static str,
        /// What it must be at least.
        needed_elems: u64,
        /// What it is.
        got_elems: u64,
    },
    /// Positions that the sequence does not have.
    #[error("positions {start}..{end} asked for, the sequence has {len_tokens} tokens")]
    OutOfPositions {
        /// The first position.
        start: u32,
        /// Behind the last position.
        end: u32,
        /// Tokens that there are.
        len_tokens: u32,
    },
    /// The cache's shape is refused.
    #[error(transparent)]
    Shape(#[from] KvError),
}
