//! Source bytes to the packed form and back, whole or by rows.

use core::ops::Range;

use crate::block::{Entry, MAX_PLANES, Planes, PlanesMut};
use crate::layout::{pack_block, unpack_block};
use crate::{LayoutId, PackedLayout, PlanePieces, Result};

/// Packs a whole matrix. The bytes between planes become zero, so that equal sources give equal
/// packed bytes. With `std` the rows are shared among rayon's threads.
pub fn pack(layout: &PackedLayout, source: &[u8], packed: &mut [u8]) -> Result<()> {
    pack_rows_into(layout, layout.all_rows(), source, packed)?;
    let mut end_bytes = 0;
    for plane in layout.plane_list() {
        packed[end_bytes..plane.offset_bytes as usize].fill(0);
        end_bytes = (plane.offset_bytes + plane.len_bytes) as usize;
    }
    Ok(())
}

/// Packs some rows into their places in the whole packed matrix and writes nothing else.
pub fn pack_rows_into(
    layout: &PackedLayout,
    rows: Range<u32>,
    source_rows: &[u8],
    packed_whole: &mut [u8],
) -> Result<()> {
    layout.check_source(&rows, source_rows.len())?;
    layout.check_packed(packed_whole.len())?;
    if layout.layout_id() == LayoutId::STREAM {
        let piece = layout.pieces(rows)?[0];
        let (start, len) = (piece.offset_bytes as usize, piece.len_bytes as usize);
        pack_stream(layout, source_rows, &mut packed_whole[start..start + len]);
        return Ok(());
    }
    let planes = layout.slices_mut(packed_whole, rows);
    pack_blocks(layout.weight_type().entry(), source_rows, planes);
    Ok(())
}

/// Packs some rows for an uploader that has the matrix elsewhere: the pieces of the planes lie
/// back to back in `staging`, and the result says where each belongs. `staging` is as long as
/// [`PackedLayout::pieces`] of the rows: with planes, as the source.
///
/// ```
/// use q4k_soa::{PackedLayout, Shape, WeightType, pack, pack_rows_planes};
///
/// let layout = PackedLayout::planes(WeightType::Q8_0, Shape { n_out: 4, n_in: 64 })?;
/// let source: Vec<u8> = (0..layout.source_bytes()).map(|i| i as u8).collect();
/// let mut device = vec![0; layout.len_bytes() as usize];
///
/// let row_bytes = layout.row_bytes() as usize;
/// let mut staging = vec![0; 2 * row_bytes];
/// for (first_row, rows) in [0, 2].into_iter().zip(source.chunks(2 * row_bytes)) {
///     for piece in pack_rows_planes(&layout, first_row..first_row + 2, rows, &mut staging)?.iter() {
///         let offset = piece.offset_bytes as usize;
///         device[offset..][..piece.staging().len()].copy_from_slice(&staging[piece.staging()]);
///     }
/// }
///
/// let mut whole = vec![0; device.len()];
/// pack(&layout, &source, &mut whole)?;
/// assert_eq!(device, whole);
/// # Ok::<(), q4k_soa::Error>(())
/// ```
pub fn pack_rows_planes(
    layout: &PackedLayout,
    rows: Range<u32>,
    source_rows: &[u8],
    staging: &mut [u8],
) -> Result<PlanePieces> {
    layout.check_source(&rows, source_rows.len())?;
    let pieces = layout.pieces(rows)?;
    let expected_bytes = pieces.iter().map(|piece| piece.len_bytes).sum();
    if staging.len() as u64 != expected_bytes {
        let actual_bytes = staging.len() as u64;
        return Err(crate::Error::StagingLength { expected_bytes, actual_bytes });
    }
    if layout.layout_id() == LayoutId::STREAM {
        pack_stream(layout, source_rows, staging);
        return Ok(pieces);
    }
    let mut planes: PlanesMut<'_> = Default::default();
    let mut rest = staging;
    for (plane, piece) in planes.iter_mut().zip(pieces.iter()) {
        (*plane, rest) = rest.split_at_mut(piece.len_bytes as usize);
    }
    pack_blocks(layout.weight_type().entry(), source_rows, planes);
    Ok(pieces)
}

/// The inverse of [`pack`], bit for bit, whatever the bytes mean as numbers.
pub fn unpack(layout: &PackedLayout, packed: &[u8], source: &mut [u8]) -> Result<()> {
    unpack_rows(layout, layout.all_rows(), packed, source)
}

/// Unpacks some rows of a whole packed matrix.
pub fn unpack_rows(
    layout: &PackedLayout,
    rows: Range<u32>,
    packed_whole: &[u8],
    source_rows: &mut [u8],
) -> Result<()> {
    layout.check_source(&rows, source_rows.len())?;
    layout.check_packed(packed_whole.len())?;
    if layout.layout_id() == LayoutId::STREAM {
        let piece = layout.pieces(rows)?[0];
        let (start, len) = (piece.offset_bytes as usize, piece.len_bytes as usize);
        unpack_stream(layout, &packed_whole[start..start + len], source_rows);
        return Ok(());
    }
    let planes = layout.slices(packed_whole, rows);
    unpack_blocks(layout.weight_type().entry(), planes, source_rows);
    Ok(())
}

/// Below this many source bytes a second thread costs more than it gains.
const STREAM_PARALLEL_BYTES: usize = 256 * 1024;
#[cfg(feature = "std")]
const PARALLEL_BYTES: usize = STREAM_PARALLEL_BYTES;

/// Where to cut a run of `blocks` in two, unless it is short.
#[cfg(feature = "std")]
fn middle(entry: &Entry, source_bytes: usize) -> Option<usize> {
    (source_bytes > PARALLEL_BYTES).then_some(source_bytes / entry.block_bytes as usize / 2)
}

#[cfg(not(feature = "std"))]
fn middle(_: &Entry, _: usize) -> Option<usize> {
    None
}

#[cfg(feature = "std")]
fn join(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    rayon::join(first, second);
}

#[cfg(not(feature = "std"))]
fn join(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    first();
    second();
}

/// Rows are contiguous in every plane, so a matrix is a run of blocks that may be cut anywhere.
fn pack_blocks(entry: &Entry, source: &[u8], planes: PlanesMut<'_>) {
    let Some(blocks) = middle(entry, source.len()) else {
        return (entry.pack)(source, planes);
    };
    let (source_0, source_1) = source.split_at(blocks * entry.block_bytes as usize);
    let (mut planes_0, mut planes_1): (PlanesMut<'_>, PlanesMut<'_>) = Default::default();
    for (index, (plane, spec)) in planes.into_iter().zip(entry.planes).enumerate() {
        (planes_0[index], planes_1[index]) = plane.split_at_mut(blocks * spec.block_bytes as usize);
    }
    join(|| pack_blocks(entry, source_0, planes_0), || pack_blocks(entry, source_1, planes_1));
}

fn unpack_blocks(entry: &Entry, planes: Planes<'_>, source: &mut [u8]) {
    let Some(blocks) = middle(entry, source.len()) else {
        return (entry.unpack)(planes, source);
    };
    let (source_0, source_1) = source.split_at_mut(blocks * entry.block_bytes as usize);
    let (mut planes_0, mut planes_1): (Planes<'_>, Planes<'_>) =
        ([&[]; MAX_PLANES], [&[]; MAX_PLANES]);
    for (index, (plane, spec)) in planes.into_iter().zip(entry.planes).enumerate() {
        (planes_0[index], planes_1[index]) = plane.split_at(blocks * spec.block_bytes as usize);
    }
    join(|| unpack_blocks(entry, planes_0, source_0), || unpack_blocks(entry, planes_1, source_1));
}

/// Bytes of a block of rows in the source and packed.
fn stream_block_bytes(layout: &PackedLayout) -> (usize, usize) {
    let rows = u64::from(layout.rows_per_block());
    let packed_row_bytes = layout.plane_list()[0].row_stride_bytes;
    ((rows * layout.row_bytes()) as usize, (rows * packed_row_bytes) as usize)
}

fn pack_stream(layout: &PackedLayout, source_rows: &[u8], packed: &mut [u8]) {
    let (source_bytes, packed_bytes) = stream_block_bytes(layout);
    let blocks = source_rows.len().div_ceil(source_bytes);
    if blocks > 1 && source_rows.len() > STREAM_PARALLEL_BYTES {
        let (source_0, source_1) = source_rows.split_at(blocks / 2 * source_bytes);
        let (packed_0, packed_1) = packed.split_at_mut(blocks / 2 * packed_bytes);
        join(
            || pack_stream(layout, source_0, packed_0),
            || pack_stream(layout, source_1, packed_1),
        );
        return;
    }
    for (source, packed) in source_rows.chunks(source_bytes).zip(packed.chunks_mut(packed_bytes)) {
        pack_block(layout, source, packed);
    }
}

fn unpack_stream(layout: &PackedLayout, packed: &[u8], source_rows: &mut [u8]) {
    let (source_bytes, packed_bytes) = stream_block_bytes(layout);
    let blocks = source_rows.len().div_ceil(source_bytes);
    if blocks > 1 && source_rows.len() > STREAM_PARALLEL_BYTES {
        let (source_0, source_1) = source_rows.split_at_mut(blocks / 2 * source_bytes);
        let (packed_0, packed_1) = packed.split_at(blocks / 2 * packed_bytes);
        join(
            || unpack_stream(layout, packed_0, source_0),
            || unpack_stream(layout, packed_1, source_1),
        );
        return;
    }
    for (source, packed) in source_rows.chunks_mut(source_bytes).zip(packed.chunks(packed_bytes)) {
        unpack_block(layout, packed, source);
    }
}
