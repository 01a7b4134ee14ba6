//! The rows that are read, packed and uploaded together.

use std::ops::Range;

use decode_graph::WeightRef;
use q4k_soa::{PackedLayout, PlanePieces};

use crate::model::TensorRef;
use crate::residency::ResidencyError;

/// Bytes of a chunk, source or packed, about: many for each thread even in a small model, and
/// within a core's caches between reading, packing and hashing.
const CHUNK_BYTES: u64 = 1 << 20;

/// A weight matrix on its way from the file to its place.
pub(super) struct Matrix {
    pub(super) name: Box<str>,
    pub(super) tensor: TensorRef,
    pub(super) layout: PackedLayout,
    /// Its room, not written yet.
    pub(super) weight: WeightRef,
}

/// Some rows of a matrix.
pub(super) struct Chunk {
    /// Place of the matrix in the list.
    pub(super) matrix: usize,
    pub(super) rows: Range<u32>,
    /// Where the rows go.
    pub(super) pieces: PlanePieces,
    /// Whether they are the matrix's last.
    pub(super) last: bool,
}

impl Chunk {
    /// Bytes of all pieces together.
    pub(super) fn packed_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len_bytes as usize).sum()
    }

    pub(super) fn n_rows(&self) -> u64 {
        u64::from(self.rows.end - self.rows.start)
    }
}

/// Cuts matrices into chunks, in order.
pub(super) fn cut(matrices: &[Matrix]) -> Result<Vec<Chunk>, ResidencyError> {
    let mut chunks = Vec::new();
    for (index, matrix) in matrices.iter().enumerate() {
        let layout = &matrix.layout;
        let (n_out, per_block) = (layout.shape().n_out, layout.rows_per_block());
        let block_bytes = layout.row_bytes() * u64::from(per_block);
        let n_blocks = (CHUNK_BYTES / block_bytes.max(1)).max(1);
        let n_rows = u32::try_from(n_blocks * u64::from(per_block)).unwrap_or(n_out);
        let mut start = 0;
        while start < n_out {
            let rows = start..start.saturating_add(n_rows).min(n_out);
            let pieces =
                layout.pieces(rows.clone()).map_err(|source| weight_error(&matrix.name, source))?;
            start = rows.end;
            chunks.push(Chunk { matrix: index, rows, pieces, last: start == n_out });
        }
    }
    Ok(chunks)
}

pub(super) fn weight_error(name: &str, source: q4k_soa::Error) -> ResidencyError {
    ResidencyError::Weight { name: name.into(), source }
}
