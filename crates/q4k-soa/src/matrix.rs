//! A packed matrix to compute with.

use core::ops::Range;

use crate::block::Planes;
use crate::{LayoutId, LayoutVersion, PackedLayout, Result, WeightType};

/// Packed bytes together with the layout that gives them meaning. The arithmetic of this crate
/// reads layout 1, planes, so a matrix in another is refused here.
#[derive(Debug, Clone, Copy)]
pub struct PackedMatrix<'a> {
    layout: PackedLayout,
    bytes: &'a [u8],
}

impl<'a> PackedMatrix<'a> {
    /// Refuses a layout other than planes, and bytes of another length than the layout's.
    pub fn new(layout: PackedLayout, bytes: &'a [u8]) -> Result<Self> {
        layout.require(LayoutId::PLANES, LayoutVersion::PLANES)?;
        layout.check_packed(bytes.len())?;
        Ok(Self { layout, bytes })
    }

    /// The layout of the bytes.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The packed bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// How the weights are stored.
    pub fn weight_type(&self) -> WeightType {
        self.layout.weight_type()
    }

    /// Rows.
    pub fn n_out(&self) -> u32 {
        self.layout.shape().n_out
    }

    /// Weights per row.
    pub fn n_in(&self) -> u32 {
        self.layout.shape().n_in
    }

    /// All of its rows, as a range.
    pub fn rows(&self) -> Range<u32> {
        self.layout.all_rows()
    }

    /// Writes the weights of a row as the type's formula gives them, the same floats as
    /// [`dequantize`](crate::dequantize) makes of the source.
    ///
    /// # Panics
    /// Unless the matrix has the row and `out` is one row long.
    pub fn dequantize_row(&self, row: u32, out: &mut [f32]) {
        assert!(row < self.n_out(), "dequantize_row: a row of the matrix");
        assert_eq!(out.len(), self.n_in() as usize, "dequantize_row: one place per weight");
        (self.weight_type().entry().dequantize_row)(self.row_planes(row), out);
    }

    /// Writes the weights of a row as arithmetic in f16 gives them: the scale of each weight (with
    /// the super-block's) and the offset rounded to f16, `scale × quant + offset` rounded again. A
    /// weight that is a float itself is rounded once. All are given as f32.
    ///
    /// # Panics
    /// Unless the matrix has the row and `out` is one row long.
    pub fn dequantize_row_f16(&self, row: u32, out: &mut [f32]) {
        assert!(row < self.n_out(), "dequantize_row_f16: a row of the matrix");
        assert_eq!(out.len(), self.n_in() as usize, "dequantize_row_f16: one place per weight");
        (self.weight_type().entry().dequantize_row_f16)(self.row_planes(row), out);
    }

    /// One row, in a matrix of planes that has it.
    #[inline]
    pub(crate) fn row_planes(&self, row: u32) -> Planes<'a> {
        self.layout.slices(self.bytes, row..row + 1)
    }
}
