//! Layout 1: planes one after the other.

use super::{LayoutId, LayoutVersion, PackedLayout, Plane, Shape};
use crate::block::MAX_PLANES;
use crate::{Error, Result, WeightType};

/// Every plane starts at a multiple of this from the start of the matrix.
const PLANE_ALIGNMENT_BYTES: u64 = 256;

impl PackedLayout {
    /// Layout 1 for a matrix; the rule is in the type's documentation.
    pub fn planes(ty: WeightType, shape: Shape) -> Result<Self> {
        let Shape { n_out, n_in } = shape;
        if n_out == 0 || n_in == 0 {
            return Err(Error::EmptyShape { n_out, n_in });
        }
        let row_bytes = ty.row_bytes(n_in)?;
        let too_large = Error::TooLarge { ty, n_out, n_in };
        let blocks_per_row = u64::from(n_in / ty.block_elems());

        let unused = Plane { name: "", offset_bytes: 0, row_stride_bytes: 0, len_bytes: 0 };
        let mut planes = [unused; MAX_PLANES];
        let specs = ty.entry().planes;
        let mut end_bytes = 0u64;
        for (plane, spec) in planes.iter_mut().zip(specs) {
            let offset_bytes = end_bytes.next_multiple_of(PLANE_ALIGNMENT_BYTES);
            let row_stride_bytes = blocks_per_row * u64::from(spec.block_bytes);
            let len_bytes = row_stride_bytes.checked_mul(u64::from(n_out)).ok_or(too_large)?;
            end_bytes = offset_bytes
                .checked_add(len_bytes)
                .filter(|&end| end <= i64::MAX as u64)
                .ok_or(too_large)?;
            *plane = Plane { name: spec.name, offset_bytes, row_stride_bytes, len_bytes };
        }
        Ok(Self {
            id: LayoutId::PLANES,
            version: LayoutVersion::PLANES,
            ty,
            shape,
            row_bytes,
            rows_per_block: 1,
            planes,
            n_planes: specs.len() as u8,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offsets_of_a_small_q4_k_matrix() {
        let layout = PackedLayout::planes(WeightType::Q4K, Shape { n_out: 3, n_in: 512 }).unwrap();
        let planes: alloc::vec::Vec<_> = layout
            .plane_list()
            .iter()
            .map(|plane| (plane.name, plane.offset_bytes, plane.row_stride_bytes, plane.len_bytes))
            .collect();
        assert_eq!(
            planes,
            [("quants", 0, 256, 768), ("scales", 768, 24, 72), ("d, dmin", 1024, 8, 24)]
        );
        assert_eq!(layout.len_bytes(), 1048);
        assert_eq!(layout.row_bytes(), 288);
        assert_eq!(layout.source_bytes(), 864);
    }

    #[test]
    fn no_type_grows_by_more_than_the_alignment_of_its_planes() {
        for ty in WeightType::ALL {
            let shape = Shape { n_out: 7, n_in: 768 };
            let layout = PackedLayout::planes(ty, shape).unwrap();
            assert_eq!(layout.row_bytes(), ty.row_bytes(768).unwrap());
            assert!(layout.plane_list().iter().all(|plane| plane.offset_bytes % 256 == 0));
            let gaps_bytes = layout.len_bytes() - layout.source_bytes();
            assert!(gaps_bytes < 256 * layout.plane_list().len() as u64);
        }
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let empty = PackedLayout::planes(WeightType::F32, Shape { n_out: 0, n_in: 32 });
        assert_eq!(empty, Err(Error::EmptyShape { n_out: 0, n_in: 32 }));
        let n = u32::MAX;
        let huge = PackedLayout::planes(WeightType::F32, Shape { n_out: n, n_in: n });
        assert_eq!(huge, Err(Error::TooLarge { ty: WeightType::F32, n_out: n, n_in: n }));
    }
}
