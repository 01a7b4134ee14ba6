//! A chunk's bytes, made on any thread.

use std::ops::Range;

use q4k_soa::pack_rows_planes;

use super::cache::Cache;
use super::chunk::{Chunk, Matrix, weight_error};
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::model::{ScaleScan, TensorRef, non_finite_scales};

/// Buffers that chunk after chunk goes through.
#[derive(Default)]
pub(super) struct Slot {
    /// The rows as the file stores them, where that is another type than they are computed with.
    stored: Vec<u8>,
    /// The rows in the type that they are computed with; empty when they came packed.
    pub(super) source: Vec<u8>,
    /// The pieces of the packed rows, back to back.
    pub(super) packed: Vec<u8>,
    /// What looking for scales that are no numbers found.
    pub(super) scan: ScaleScan,
}

/// Where chunks come from.
pub(super) struct Origin<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) matrices: &'a [Matrix],
    pub(super) chunks: &'a [Chunk],
    pub(super) cache: Option<&'a Cache>,
}

impl Origin<'_> {
    /// Fills a slot with chunk number `index`: from the cache if there is one and the chunk in it
    /// is whole, else from the model.
    pub(super) fn fill(&self, index: usize, slot: &mut Slot) -> Result<(), LaneError> {
        let chunk = &self.chunks[index];
        slot.packed.resize(chunk.packed_bytes(), 0);
        slot.scan = ScaleScan::default();
        if self.cache.is_some_and(|cache| cache.read(index, &mut slot.packed)) {
            slot.source.clear();
            return Ok(());
        }
        self.pack(chunk, slot)
    }

    fn pack(&self, chunk: &Chunk, slot: &mut Slot) -> Result<(), LaneError> {
        let matrix = &self.matrices[chunk.matrix];
        let (rows, Slot { stored, source, .. }) = (chunk.rows.clone(), &mut *slot);
        slot.scan = read_rows(self.gguf, &matrix.tensor, rows.clone(), stored, source)?;
        pack_rows_planes(&matrix.layout, rows, &slot.source, &mut slot.packed)
            .map_err(|error| weight_error(&matrix.name, error))?;
        Ok(())
    }
}

/// A whole matrix in the type that it is computed with.
pub fn read_matrix(gguf: &Gguf, tensor: &TensorRef) -> Result<Vec<u8>, LaneError> {
    let mut source = Vec::new();
    read_rows(gguf, tensor, 0..tensor.n_out, &mut Vec::new(), &mut source)?;
    Ok(source)
}

/// Reads rows into `source`, by way of `stored` where that is another type.
fn read_rows(
    gguf: &Gguf,
    tensor: &TensorRef,
    rows: Range<u32>,
    stored: &mut Vec<u8>,
    source: &mut Vec<u8>,
) -> Result<ScaleScan, LaneError> {
    let n_rows = u64::from(rows.end - rows.start);
    source.resize((n_rows * tensor.resident_row_bytes()) as usize, 0);
    let as_stored = match tensor.stored_as {
        None => &mut *source,
        Some(_) => {
            stored.resize((n_rows * tensor.row_bytes()) as usize, 0);
            &mut *stored
        }
    };
    let info = tensor.info(gguf);
    let first_byte = tensor.first_byte() + u64::from(rows.start) * tensor.row_bytes();
    gguf.read_tensor(info, first_byte, as_stored)?;
    let scan = non_finite_scales(tensor, as_stored);
    if let Some(ty) = tensor.stored_as {
        ty.transcode(stored, source).map_err(|error| weight_error(info.name(), error))?;
    }
    Ok(scan)
}
