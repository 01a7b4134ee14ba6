//! What can be refused, with the numbers that say why.

use crate::{LayoutId, LayoutVersion, WeightType};

/// Why a request was refused. Nothing was written unless the variant says so.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A row does not consist of whole blocks.
    #[error("{ty} rows are made of blocks of {block_elems} weights; n_in = {n_in} leaves {}", n_in % block_elems)]
    UnevenRow {
        /// The type asked for.
        ty: WeightType,
        /// Weights per row.
        n_in: u32,
        /// Weights per block.
        block_elems: u32,
    },
    /// A matrix without rows or without columns.
    #[error("a weight matrix needs rows and columns; got [{n_out}, {n_in}]")]
    EmptyShape {
        /// Rows.
        n_out: u32,
        /// Weights per row.
        n_in: u32,
    },
    /// The matrix's bytes cannot be counted in 63 bits.
    #[error("{ty} [{n_out}, {n_in}] is larger than any memory")]
    TooLarge {
        /// The type asked for.
        ty: WeightType,
        /// Rows.
        n_out: u32,
        /// Weights per row.
        n_in: u32,
    },
    /// The layout has no form for this type or row length.
    #[error("a stream holds Q4_K, Q6_K and Q8_0; {ty} has no units")]
    NoUnits {
        /// The type asked for.
        ty: WeightType,
    },
    /// A row range that cuts a block of rows in two.
    #[error("rows {start}..{end} cut a block of {rows_per_block} rows that are packed together")]
    CutBlock {
        /// First row.
        start: u32,
        /// One past the last.
        end: u32,
        /// [`PackedLayout::rows_per_block`](crate::PackedLayout::rows_per_block).
        rows_per_block: u32,
    },
    /// Source bytes of the wrong length.
    #[error("source: expected {expected_bytes} bytes, got {actual_bytes}")]
    SourceLength {
        /// What the layout and the rows ask for.
        expected_bytes: u64,
        /// What was given.
        actual_bytes: u64,
    },
    /// Packed bytes of the wrong length.
    #[error("packed matrix: expected {expected_bytes} bytes, got {actual_bytes}")]
    PackedLength {
        /// [`PackedLayout::len_bytes`](crate::PackedLayout::len_bytes).
        expected_bytes: u64,
        /// What was given.
        actual_bytes: u64,
    },
    /// A staging buffer of the wrong length.
    #[error("staging buffer: expected {expected_bytes} bytes, got {actual_bytes}")]
    StagingLength {
        /// What the rows need.
        expected_bytes: u64,
        /// What was given.
        actual_bytes: u64,
    },
    /// Bytes that are not whole blocks.
    #[error("{name} blocks are {block_bytes} bytes; {actual_bytes} bytes leave {}", actual_bytes % u64::from(*block_bytes))]
    PartialBlock {
        /// Name of the type asked for.
        name: &'static str,
        /// Bytes per block.
        block_bytes: u32,
        /// What was given.
        actual_bytes: u64,
    },
    /// Floats of the wrong number.
    #[error("values: expected {expected_elems}, got {actual_elems}")]
    ValuesLength {
        /// What the other arguments ask for.
        expected_elems: u64,
        /// What was given.
        actual_elems: u64,
    },
    /// Rows that the matrix does not have.
    #[error("rows {start}..{end} of a matrix with {n_out}")]
    RowRange {
        /// First row.
        start: u32,
        /// One after the last row.
        end: u32,
        /// Rows of the matrix.
        n_out: u32,
    },
    /// Nothing to concatenate.
    #[error("no matrices to concatenate")]
    ConcatEmpty,
    /// Matrices that cannot be laid one after the other.
    #[error(
        "matrix {index} is {ty} with n_in = {n_in}, the first is {first_ty} with n_in = {first_n_in}"
    )]
    ConcatMismatch {
        /// Place in the list.
        index: usize,
        /// Its type.
        ty: WeightType,
        /// Its row length.
        n_in: u32,
        /// The first one's type.
        first_ty: WeightType,
        /// The first one's row length.
        first_n_in: u32,
    },
    /// A layout that this version of the crate does not know.
    #[error("layout {id} version {version} is unknown here")]
    UnknownLayout {
        /// Layout asked for.
        id: LayoutId,
        /// Its version.
        version: LayoutVersion,
    },
    /// A function that needs another layout than the matrix has.
    #[error(
        "needs layout {needed_id} version {needed_version}, the matrix has layout {id} version {version}"
    )]
    WrongLayout {
        /// Layout needed.
        needed_id: LayoutId,
        /// Its version.
        needed_version: LayoutVersion,
        /// Layout of the matrix.
        id: LayoutId,
        /// Its version.
        version: LayoutVersion,
    },
    /// A number that no block can hold.
    #[error("cannot quantise {value} at index {index}")]
    NonFinite {
        /// Where it is.
        index: usize,
        /// What it is.
        value: f32,
    },
}
