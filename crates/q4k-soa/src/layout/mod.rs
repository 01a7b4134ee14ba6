//! What packed bytes look like: the layout's identity, the matrix's shape, the planes.

mod planes;
mod stream;

use core::fmt;
use core::ops::{Deref, Range};

use crate::block::{MAX_PLANES, Planes, PlanesMut};
use crate::{Error, Result, WeightType};

pub use self::stream::StreamUnits;
pub(crate) use self::stream::{pack_block, unpack_block};

/// Number of a layout: 1 is planes, 2 is a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutId(u32);

impl LayoutId {
    /// The whole matrix, one plane after the other.
    pub const PLANES: Self = Self(1);
    /// Units of 8 rows and 1024 columns, each with everything that its weights need.
    pub const STREAM: Self = Self(2);

    /// A number read from somewhere.
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Version of a layout: a change of meaning is a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutVersion(u32);

impl LayoutVersion {
    /// The only version of [`LayoutId::PLANES`].
    pub const PLANES: Self = Self(1);
    /// The only version of [`LayoutId::STREAM`].
    pub const STREAM: Self = Self(1);

    /// A number read from somewhere.
    pub const fn new(version: u32) -> Self {
        Self(version)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for LayoutId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for LayoutVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rows and row length of a weight matrix, stored row after row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows, which are outputs.
    pub n_out: u32,
    /// Weights per row, which are inputs.
    pub n_in: u32,
}

/// Place of a plane in [`PackedLayout::planes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneId(u8);

impl PlaneId {
    /// The place.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One array of the packed form. Rows are contiguous: row r is at `offset_bytes + r *
/// row_stride_bytes` from the start of the matrix and `row_stride_bytes` long. In a stream, where
/// rows come in blocks, that holds for the blocks ([`PackedLayout::rows_per_block`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plane {
    /// What it holds, such as `quants`.
    pub name: &'static str,
    /// From the start of the matrix; a multiple of 256.
    pub offset_bytes: u64,
    /// From one row to the next, and the length of a row.
    pub row_stride_bytes: u64,
    /// `n_out * row_stride_bytes`, in a stream with `n_out` rounded up to whole blocks.
    pub len_bytes: u64,
}

/// The place of every packed byte: a pure function of weight type, shape and layout.
///
/// Layout 1, *planes*: the type's planes one after the other,
/// `offset_0 = 0`, `offset_{k+1} = align256(offset_k + n_out * row_stride_k)`, where
/// `align256(x) = (x + 255) & !255` and `row_stride_k = n_in / block_elems * bytes of one block in
/// plane k`. The matrix ends where its last plane ends.
///
/// Layout 2, *stream*: see [`StreamUnits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    id: LayoutId,
    version: LayoutVersion,
    ty: WeightType,
    shape: Shape,
    /// Of one row in the source.
    row_bytes: u64,
    rows_per_block: u32,
    planes: [Plane; MAX_PLANES],
    n_planes: u8,
}

impl PackedLayout {
    /// The layout with this identity, if it is one that this crate knows.
    pub fn new(id: LayoutId, version: LayoutVersion, ty: WeightType, shape: Shape) -> Result<Self> {
        match (id, version) {
            (LayoutId::PLANES, LayoutVersion::PLANES) => Self::planes(ty, shape),
            (LayoutId::STREAM, LayoutVersion::STREAM) => Self::stream(ty, shape),
            _ => Err(Error::UnknownLayout { id, version }),
        }
    }

    /// For matrices laid one after the other by rows, such as q, k and v: the layout of the whole.
    /// The parts have the same type and row length; part i starts at the row where the ones before
    /// it end, for [`pack_rows_into`](crate::pack_rows_into).
    pub fn concat(parts: &[Self]) -> Result<Self> {
        let first = parts.first().ok_or(Error::ConcatEmpty)?;
        let mut n_out = 0u32;
        for (index, part) in parts.iter().enumerate() {
            first.require(part.id, part.version)?;
            let (ty, n_in) = (part.ty, part.shape.n_in);
            if (ty, n_in) != (first.ty, first.shape.n_in) {
                return Err(Error::ConcatMismatch {
                    index,
                    ty,
                    n_in,
                    first_ty: first.ty,
                    first_n_in: first.shape.n_in,
                });
            }
            if !n_out.is_multiple_of(first.rows_per_block) {
                let rows_per_block = first.rows_per_block;
                return Err(Error::CutBlock { start: 0, end: n_out, rows_per_block });
            }
            n_out = n_out.checked_add(part.shape.n_out).ok_or(Error::TooLarge {
                ty,
                n_out: u32::MAX,
                n_in,
            })?;
        }
        Self::new(first.id, first.version, first.ty, Shape { n_out, n_in: first.shape.n_in })
    }

    /// Which layout.
    pub fn layout_id(&self) -> LayoutId {
        self.id
    }

    /// Which version of it.
    pub fn layout_version(&self) -> LayoutVersion {
        self.version
    }

    /// How the weights are stored.
    pub fn weight_type(&self) -> WeightType {
        self.ty
    }

    /// Rows and row length.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of the packed matrix: where its last plane ends.
    pub fn len_bytes(&self) -> u64 {
        self.plane_list().last().map_or(0, |plane| plane.offset_bytes + plane.len_bytes)
    }

    /// The planes in order of their offsets.
    pub fn plane_list(&self) -> &[Plane] {
        &self.planes[..usize::from(self.n_planes)]
    }

    /// Bytes of one row in the source; in layout 1 as many as in all planes together.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes of the whole source.
    pub fn source_bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.shape.n_out)
    }

    /// Rows that can only be packed together: 1, or the height of a stream's units. A range to be
    /// packed or unpacked alone begins at a multiple of it and ends at one or with the matrix.
    pub fn rows_per_block(&self) -> u32 {
        self.rows_per_block
    }

    /// Where the rows of a range are: one contiguous piece in every plane.
    pub fn pieces(&self, rows: Range<u32>) -> Result<PlanePieces> {
        self.check_rows(&rows)?;
        let start = u64::from(rows.start);
        let end = u64::from(rows.end).next_multiple_of(u64::from(self.rows_per_block));
        let n_rows = if rows.is_empty() { 0 } else { end - start };
        let mut staging_offset_bytes = 0;
        let mut pieces = PlanePieces {
            pieces: [PlanePiece {
                plane: PlaneId(0),
                offset_bytes: 0,
                len_bytes: 0,
                staging_offset_bytes: 0,
            }; MAX_PLANES],
            n_pieces: self.n_planes,
        };
        for (index, (piece, plane)) in pieces.pieces.iter_mut().zip(self.plane_list()).enumerate() {
            *piece = PlanePiece {
                plane: PlaneId(index as u8),
                offset_bytes: plane.offset_bytes + start * plane.row_stride_bytes,
                len_bytes: n_rows * plane.row_stride_bytes,
                staging_offset_bytes,
            };
            staging_offset_bytes += piece.len_bytes;
        }
        Ok(pieces)
    }

    /// Refuses unless this is the layout that the caller can work with.
    pub fn require(&self, id: LayoutId, version: LayoutVersion) -> Result<()> {
        if (self.id, self.version) != (id, version) {
            return Err(Error::WrongLayout {
                needed_id: id,
                needed_version: version,
                id: self.id,
                version: self.version,
            });
        }
        Ok(())
    }

    pub(crate) fn all_rows(&self) -> Range<u32> {
        0..self.shape.n_out
    }

    pub(crate) fn check_rows(&self, rows: &Range<u32>) -> Result<()> {
        let n_out = self.shape.n_out;
        if rows.start > rows.end || rows.end > n_out {
            return Err(Error::RowRange { start: rows.start, end: rows.end, n_out });
        }
        let rows_per_block = self.rows_per_block;
        let cut = |row: u32| row != n_out && !row.is_multiple_of(rows_per_block);
        if cut(rows.start) || cut(rows.end) {
            return Err(Error::CutBlock { start: rows.start, end: rows.end, rows_per_block });
        }
        Ok(())
    }

    /// Checks the length of source bytes for rows that exist.
    pub(crate) fn check_source(&self, rows: &Range<u32>, actual: usize) -> Result<()> {
        self.check_rows(rows)?;
        let expected_bytes = u64::from(rows.end - rows.start) * self.row_bytes();
        let actual_bytes = actual as u64;
        if actual_bytes != expected_bytes {
            return Err(Error::SourceLength { expected_bytes, actual_bytes });
        }
        Ok(())
    }

    pub(crate) fn check_packed(&self, actual: usize) -> Result<()> {
        let (expected_bytes, actual_bytes) = (self.len_bytes(), actual as u64);
        if actual_bytes != expected_bytes {
            return Err(Error::PackedLength { expected_bytes, actual_bytes });
        }
        Ok(())
    }

    /// The rows' part of every plane, of a packed matrix and rows that were checked.
    #[inline]
    pub(crate) fn slices<'a>(&self, packed: &'a [u8], rows: Range<u32>) -> Planes<'a> {
        let mut slices: Planes<'a> = [&[]; MAX_PLANES];
        for (slice, plane) in slices.iter_mut().zip(self.plane_list()) {
            let row =
                |row: u32| (plane.offset_bytes + u64::from(row) * plane.row_stride_bytes) as usize;
            *slice = &packed[row(rows.start)..row(rows.end)];
        }
        slices
    }

    /// As [`slices`](Self::slices), to be written.
    pub(crate) fn slices_mut<'a>(
        &self,
        mut packed: &'a mut [u8],
        rows: Range<u32>,
    ) -> PlanesMut<'a> {
        let mut slices: PlanesMut<'a> = Default::default();
        let mut taken_bytes = 0;
        for (slice, plane) in slices.iter_mut().zip(self.plane_list()) {
            let row = |row: u32| plane.offset_bytes + u64::from(row) * plane.row_stride_bytes;
            let (start, end) = (row(rows.start), row(rows.end));
            let (_, rest) = packed.split_at_mut((start - taken_bytes) as usize);
            (*slice, packed) = rest.split_at_mut((end - start) as usize);
            taken_bytes = end;
        }
        slices
    }
}

/// A row range's bytes in one plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanePiece {
    /// Which plane.
    pub plane: PlaneId,
    /// Where the piece belongs, from the start of the packed matrix.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Where it is in a staging buffer that holds the pieces back to back.
    pub staging_offset_bytes: u64,
}

impl PlanePiece {
    /// Its place in the staging buffer, as a range for slicing.
    pub fn staging(&self) -> Range<usize> {
        let start = self.staging_offset_bytes as usize;
        start..start + self.len_bytes as usize
    }
}

/// The pieces of a row range, one for each plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanePieces {
    pieces: [PlanePiece; MAX_PLANES],
    n_pieces: u8,
}

impl Deref for PlanePieces {
    type Target = [PlanePiece];

    fn deref(&self) -> &[PlanePiece] {
        &self.pieces[..usize::from(self.n_pieces)]
    }
}
