//! Resident weights (S3) and blobs (S4).

use std::collections::hash_map::Entry;

use decode_graph::{Backend, WeightRef};
use gpu_slab::{Allocate, SlabError, View};
use q4k_soa::{
    Fingerprint, LayoutId, PackedLayout, Shape, WeightType, fingerprint, pack_rows_planes,
};

use super::{Residency, ResidencyError};

/// A weight matrix as a GGUF file stores it.
#[derive(Clone, Copy, Debug)]
pub struct WeightSource<'a> {
    /// Name for reports and errors.
    pub name: &'a str,
    /// Quantisation.
    pub weight_type: WeightType,
    /// Rows and row length.
    pub shape: Shape,
    /// How it is to be packed.
    pub layout: LayoutId,
    /// The blocks, row by row.
    pub bytes: &'a [u8],
}

/// What a preload did.
#[derive(Debug, Default, PartialEq)]
pub struct PreloadReport {
    /// Weights that became resident.
    pub newly_resident: usize,
    /// Weights that already were: nothing was packed or copied for them.
    pub already_resident: usize,
    /// Entries refused, by index in the list, with the reason.
    pub refused: Vec<(usize, ResidencyError)>,
}

/// Source bytes packed and uploaded at a time: bounds the staging memory, and keeps a chunk
/// within the caches between packing and copying.
const CHUNK_BYTES: u64 = 4 << 20;

/// The layout with this id.
pub(crate) fn packed_layout(
    layout: LayoutId,
    weight_type: WeightType,
    shape: Shape,
) -> q4k_soa::Result<PackedLayout> {
    if layout == LayoutId::STREAM {
        return PackedLayout::stream(weight_type, shape);
    }
    PackedLayout::planes(weight_type, shape)
}

/// Room for a packed matrix; the one place that decides it, for plans and for loading.
pub(crate) fn allocate_weight(
    memory: &mut impl Allocate,
    name: &str,
    layout: &PackedLayout,
) -> Result<View, SlabError> {
    memory.allocate(name, layout.len_bytes())
}

/// A blob that is resident.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blob {
    pub(super) view: View,
    pub(super) content_hash: u64,
}

impl<B: Backend> Residency<B> {
    /// Makes weights resident. A bad entry does not stop the rest; a weight that does not fit is
    /// refused with the shortage, and nothing resident is evicted.
    pub fn preload(&mut self, list: &[WeightSource<'_>]) -> PreloadReport {
        let mut report = PreloadReport::default();
        for (index, source) in list.iter().enumerate() {
            match self.make_resident(source) {
                Ok((_, true)) => report.newly_resident += 1,
                Ok((_, false)) => report.already_resident += 1,
                Err(error) => report.refused.push((index, error)),
            }
        }
        report
    }

    /// Makes one weight resident; true if it was not before.
    pub fn make_resident(
        &mut self,
        source: &WeightSource<'_>,
    ) -> Result<(WeightRef, bool), ResidencyError> {
        let name = source.name;
        let layout = packed_layout(source.layout, source.weight_type, source.shape)
            .map_err(|source| ResidencyError::Weight { name: name.into(), source })?;
        self.check_weight(name, &layout)?;
        let key = fingerprint(&layout, source.bytes)
            .map_err(|source| ResidencyError::Weight { name: name.into(), source })?;
        if let Some(weight) = self.weights.get(&key) {
            return Ok((*weight, false));
        }
        let view = self.slab.transaction(|slab| {
            let view = allocate_weight(slab, name, &layout)?;
            upload(slab, view, &layout, source)?;
            Ok::<_, ResidencyError>(view)
        })?;
        let weight = weight_ref(view, &layout);
        self.adopt_weight(key, weight);
        Ok((weight, true))
    }

    /// Takes the room of a weight whose packed bytes come later and in pieces
    /// ([`write_weight`](Self::write_weight)). Once they are there it is to be adopted under its
    /// fingerprint.
    pub(crate) fn reserve_weight(
        &mut self,
        name: &str,
        layout: &PackedLayout,
    ) -> Result<WeightRef, ResidencyError> {
        self.check_weight(name, layout)?;
        Ok(weight_ref(allocate_weight(&mut self.slab, name, layout)?, layout))
    }

    /// Writes packed bytes to their place in a reserved weight.
    pub(crate) fn write_weight(
        &mut self,
        weight: &WeightRef,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), ResidencyError> {
        Ok(self.slab.write_view(weight.view, offset_bytes, bytes)?)
    }

    /// From now on the weight is the one with this fingerprint, unless there is one already.
    pub(crate) fn adopt_weight(&mut self, key: Fingerprint, weight: WeightRef) {
        if let Entry::Vacant(vacant) = self.weights.entry(key) {
            self.resident_weight_bytes += weight.view.len_bytes();
            vacant.insert(weight);
        }
    }

    fn check_weight(&self, name: &str, layout: &PackedLayout) -> Result<(), ResidencyError> {
        let (rows, limits) = (layout.shape().n_out, self.limits);
        self.check_limit(name, "rows", rows.into(), limits.max_rows.into())?;
        self.check_limit(name, "bytes", layout.source_bytes(), limits.max_blob_bytes)
    }

    /// The resident weight with this fingerprint.
    pub fn weight(&self, key: Fingerprint) -> Option<WeightRef> {
        self.weights.get(&key).copied()
    }

    /// Makes a small immutable array resident under the caller's key. The same key with the same
    /// bytes is free; key 0, no bytes, or more than the limit is refused.
    pub fn blob(&mut self, key: u64, name: &str, bytes: &[u8]) -> Result<View, ResidencyError> {
        if key == 0 {
            return Err(ResidencyError::ZeroKey { name: name.into() });
        }
        if bytes.is_empty() {
            return Err(ResidencyError::Empty { name: name.into() });
        }
        self.check_limit(name, "bytes", bytes.len() as u64, self.limits.max_blob_bytes)?;
        let content_hash = xxhash_rust::xxh3::xxh3_64(bytes);
        if let Some(blob) = self.blobs.get(&key) {
            let held_bytes = blob.view.len_bytes();
            if (blob.content_hash, held_bytes) == (content_hash, bytes.len() as u64) {
                return Ok(blob.view);
            }
            return Err(ResidencyError::KeyTaken { name: name.into(), key, held_bytes });
        }
        let view = self.slab.allocate_and_write(name, bytes)?;
        self.blobs.insert(key, Blob { view, content_hash });
        Ok(view)
    }

    fn check_limit(
        &self,
        name: &str,
        what: &'static str,
        found: u64,
        limit: u64,
    ) -> Result<(), ResidencyError> {
        if found <= limit {
            return Ok(());
        }
        Err(ResidencyError::Limit { name: name.into(), what, found, limit })
    }
}

fn weight_ref(view: View, layout: &PackedLayout) -> WeightRef {
    WeightRef {
        view,
        weight_type: layout.weight_type(),
        shape: layout.shape(),
        layout: layout.layout_id(),
    }
}

/// Packs chunk by chunk, so that no second copy of the matrix is ever held.
fn upload<M: gpu_slab::DeviceMemory>(
    slab: &mut gpu_slab::Slab<M>,
    view: View,
    layout: &PackedLayout,
    source: &WeightSource<'_>,
) -> Result<(), ResidencyError> {
    let weight_error = |error| ResidencyError::Weight { name: source.name.into(), source: error };
    let (row_bytes, per_block) = (layout.row_bytes(), u64::from(layout.rows_per_block()));
    let blocks = (CHUNK_BYTES / (row_bytes * per_block).max(1)).max(1);
    let rows_per_chunk = (blocks * per_block).min(u64::from(u32::MAX)) as u32;
    let n_out = source.shape.n_out;
    let mut staging = Vec::new();
    let mut first = 0;
    while first < n_out {
        let end = first.saturating_add(rows_per_chunk).min(n_out);
        let bytes = (u64::from(first) * row_bytes) as usize..(u64::from(end) * row_bytes) as usize;
        let pieces = layout.pieces(first..end).map_err(weight_error)?;
        staging.resize(pieces.iter().map(|piece| piece.len_bytes as usize).sum(), 0);
        pack_rows_planes(layout, first..end, &source.bytes[bytes], &mut staging)
            .map_err(weight_error)?;
        for piece in pieces.iter() {
            slab.write_view(view, piece.offset_bytes, &staging[piece.staging()])?;
        }
        first = end;
    }
    Ok(())
}
