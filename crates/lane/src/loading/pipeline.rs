//! Windows of chunks, in three stages at once: while one window is uploaded and hashed, the next
//! one is read and packed by all threads.

use std::ops::Range;
use std::path::Path;

use decode_graph::Backend;
use q4k_soa::{Fingerprint, FingerprintHasher};
use rayon::prelude::*;

use super::cache::{Cache, CacheWriter, Identity};
use super::chunk::{self, Chunk, Matrix};
use super::fill::{Origin, Slot};
use super::{LoadProgress, Progress};
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::model::ScaleScan;
use crate::residency::Residency;

/// Most chunks of a window: bounds what is held outside of the slab on machines with many cores.
const MAX_WINDOW_CHUNKS: usize = 16;

/// Fills the reserved weights and makes them resident.
pub(super) fn run<B: Backend>(
    residency: &mut Residency<B>,
    gguf: &Gguf,
    matrices: &[Matrix],
    cache: Option<&Path>,
    progress: Progress<'_>,
) -> Result<(), LaneError> {
    let chunks = chunk::cut(matrices)?;
    let identity = cache.map(|_| Identity::of(gguf, matrices, &chunks)).transpose()?;
    let kept = cache.zip(identity.as_ref()).and_then(|(path, id)| Cache::open(path, id));
    let mut writer = match (cache.zip(identity.as_ref()), &kept) {
        (Some((path, identity)), None) => CacheWriter::create(path, identity),
        _ => None,
    };

    let origin = Origin { gguf, matrices, chunks: &chunks, cache: kept.as_ref() };
    let mut fingerprints = Fingerprints::default();
    let mut upload = Upload::new(residency, matrices, progress);
    let n = rayon::current_num_threads().clamp(2, MAX_WINDOW_CHUNKS);
    let windows = (0..chunks.len()).step_by(n).map(|start| start..(start + n).min(chunks.len()));
    let slots = || Vec::from_iter((0..n).map(|_| Slot::default()));
    let (mut ready, mut next) = (slots(), slots());
    let mut filled: Option<Range<usize>> = None;
    // One round more than there are windows: the last one has nothing left to fill.
    for window in windows.map(Some).chain([None]) {
        let mut outcome = Ok(());
        rayon::in_place_scope(|scope| {
            if let Some(window) = window.clone() {
                let (next, outcome, origin) = (&mut next, &mut outcome, &origin);
                scope.spawn(move |_| *outcome = fill(origin, window, next));
            }
            let Some(filled) = filled.clone() else { return Ok(()) };
            let slots = &ready[..filled.len()];
            let done = &chunks[filled];
            if kept.is_none() {
                let fingerprints = &mut fingerprints;
                scope.spawn(move |_| fingerprints.update(matrices, done, slots));
            }
            if let Some(writer) = &mut writer {
                scope.spawn(move |_| slots.iter().for_each(|slot| writer.append(&slot.packed)));
            }
            upload.write(done, slots)
        })?;
        outcome?;
        std::mem::swap(&mut ready, &mut next);
        filled = window;
    }

    let warned = upload.warned;
    // Bytes read before a file changed and bytes read after it are not one model.
    gguf.check_unchanged()?;
    let keys = match &kept {
        Some(cache) => cache.fingerprints(),
        None => &fingerprints.done,
    };
    for (matrix, &key) in matrices.iter().zip(keys) {
        residency.adopt_weight(key, matrix.weight);
    }
    // Of a model whose scales are no numbers nothing is kept: the next start warns again.
    if let Some(writer) = writer.filter(|_| !warned) {
        writer.finish(keys);
    }
    if let Some(cache) = kept {
        cache.close();
    }
    Ok(())
}

/// Fills one slot for each chunk of a window, on all threads.
fn fill(origin: &Origin<'_>, window: Range<usize>, slots: &mut [Slot]) -> Result<(), LaneError> {
    let slots = &mut slots[..window.len()];
    slots.par_iter_mut().zip(window).try_for_each(|(slot, index)| origin.fill(index, slot))
}

/// The fingerprints of matrices whose chunks come past in order.
#[derive(Default)]
struct Fingerprints {
    current: Option<FingerprintHasher>,
    done: Vec<Fingerprint>,
}

impl Fingerprints {
    fn update(&mut self, matrices: &[Matrix], chunks: &[Chunk], slots: &[Slot]) {
        for (chunk, slot) in chunks.iter().zip(slots) {
            let layout = &matrices[chunk.matrix].layout;
            let hasher = self.current.get_or_insert_with(|| FingerprintHasher::new(layout));
            hasher.update(&slot.source);
            if chunk.last {
                self.done.push(hasher.finish());
                self.current = None;
            }
        }
    }
}

/// Packed chunks on their way to the device, and what is said about them.
struct Upload<'a, 'p, B: Backend> {
    residency: &'a mut Residency<B>,
    matrices: &'a [Matrix],
    progress: Progress<'p>,
    scan: ScaleScan,
    warned: bool,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a, 'p, B: Backend> Upload<'a, 'p, B> {
    fn new(
        residency: &'a mut Residency<B>,
        matrices: &'a [Matrix],
        progress: Progress<'p>,
    ) -> Self {
        let total_bytes = matrices.iter().map(|matrix| matrix.tensor.n_bytes()).sum();
        let scan = ScaleScan::default();
        Self { residency, matrices, progress, scan, warned: false, done_bytes: 0, total_bytes }
    }

    fn write(&mut self, chunks: &[Chunk], slots: &[Slot]) -> Result<(), LaneError> {
        for (chunk, slot) in chunks.iter().zip(slots) {
            let matrix = &self.matrices[chunk.matrix];
            for piece in chunk.pieces.iter() {
                let packed = &slot.packed[piece.staging()];
                self.residency.write_weight(&matrix.weight, piece.offset_bytes, packed)?;
            }
            self.scan.add(slot.scan);
            if chunk.last {
                self.warn(&matrix.name);
            }
            self.done_bytes += chunk.n_rows() * matrix.tensor.row_bytes();
            let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
            (self.progress)(LoadProgress { name: &matrix.name, done_bytes, total_bytes });
        }
        Ok(())
    }

    fn warn(&mut self, name: &str) {
        let ScaleScan { n_scales, non_finite } = std::mem::take(&mut self.scan);
        if non_finite > 0 {
            self.warned = true;
            log::warn!(
                target: "lane",
                "{name}: {non_finite} of {n_scales} scales are NaN or infinite"
            );
        }
    }
}
