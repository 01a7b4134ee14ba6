//! Names of the things that the planner hands out.

/// A layer group, by its place in the planner's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// A physical block of one layer group: the same place in each of the group's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The block that no sequence owns. Padded batch rows write into it, and table entries
    /// without a block name it, so that a kernel never meets an address outside the cache.
    pub const NULL: Self = Self(0);

    /// Whether this is [`NULL`](Self::NULL).
    pub const fn is_null(self) -> bool {
        self.0 == Self::NULL.0
    }
}

/// A block of one layer group in host memory, where swapped-out sequences wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostBlockId(pub u32);

/// A sequence of tokens. An id is never handed out twice, so one that outlives its sequence is
/// an error instead of another sequence (until 2^32 sequences have used the same row).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    pub(crate) row: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// The sequence's row in the device block table, its own for as long as it lives.
    pub const fn row(self) -> u32 {
        self.row
    }
}
