//! The seam under the engine: whoever computes steps of many sequences.

use kernels_ptx::SamplingPack;
use kv_paged::Transfer;

use crate::residency::ResidencyError;

/// What the rows of a step have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// One row of each of several sequences.
    #[default]
    Decode,
    /// Rows of one sequence, at consecutive positions.
    Chunk,
}

/// Rows that a step is padded to, a power of two: there is a graph for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket(u32);

impl Bucket {
    /// The smallest that holds so many rows.
    pub fn of(rows: u32) -> Self {
        Self(rows.max(1).next_power_of_two())
    }

    /// Its rows.
    pub fn rows(self) -> u32 {
        self.0
    }
}

/// A row of a step: a token to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// Row of the sequence in the device's block table.
    pub sequence: u32,
    /// Tokens before it in the sequence.
    pub position: u32,
    /// The token.
    pub token: u32,
}

/// A row whose next token is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// Which row.
    pub row: u32,
    /// How the token is chosen.
    pub sampling: SamplingPack,
}

/// Computes steps over a paged cache with a block table `[sequence][group][logical block]`, whose
/// last sequence is all null block: padding.
///
/// Calls take effect in the order in which they are made. After an error nothing is known about the
/// cache.
pub trait BatchStep: Send {
    /// Tokens of the vocabulary.
    fn n_vocab(&self) -> u32;

    /// Moves a block, in every layer of its group.
    fn transfer(&mut self, transfer: Transfer) -> Result<(), ResidencyError>;

    /// Writes entries of the block table, from `index` on.
    fn write_table(&mut self, index: u32, values: &[u32]) -> Result<(), ResidencyError>;

    /// Computes `rows`, at most as many as the bucket has, and appends the tokens chosen for `wanted`
    /// to `chosen`, in order. What a row computes depends on its sequence, and on kind and bucket;
    /// not on the other rows.
    fn run(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        rows: &[Row],
        wanted: &[Wanted],
        chosen: &mut Vec<u32>,
    ) -> Result<(), ResidencyError>;
}

impl<S: BatchStep + ?Sized> BatchStep for Box<S> {
    fn n_vocab(&self) -> u32 {
        (**self).n_vocab()
    }

    fn transfer(&mut self, transfer: Transfer) -> Result<(), ResidencyError> {
        (**self).transfer(transfer)
    }

    fn write_table(&mut self, index: u32, values: &[u32]) -> Result<(), ResidencyError> {
        (**self).write_table(index, values)
    }

    fn run(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        rows: &[Row],
        wanted: &[Wanted],
        chosen: &mut Vec<u32>,
    ) -> Result<(), ResidencyError> {
        (**self).run(kind, bucket, rows, wanted, chosen)
    }
}
