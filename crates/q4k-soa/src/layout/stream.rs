//! Layout 2: the stream, for kernels that copy weights through shared memory in one long read.

use super::{LayoutId, LayoutVersion, PackedLayout, Plane, Shape};
use crate::block::k_scales::{from_scales_and_mins, scales_and_mins};
use crate::block::{MAX_PLANES, PlanesMut};
use crate::{Error, GROUP_ELEMS, Result, WeightType};

/// Geometry of a matrix in layout 2, *stream*.
///
/// The matrix is cut into blocks of 8 rows and each block into units of 1024 columns; the last
/// unit of a block may be narrower, and rows that the last block lacks are zero. A unit holds
/// everything that its weights need and starts at a multiple of 16 bytes; the units of a block
/// follow each other along the columns, the blocks along the rows, without gaps.
///
/// A unit of c groups of 32 columns is read by lanes: lane (half, k) has rows `4 half .. 4 half + 4`
/// and groups 2k and 2k + 1. For each of its 4 rows and then for each of the two groups, the 16
/// bytes of all lanes of the warp lie side by side, first those of half 0; so a warp reads 512
/// consecutive bytes with one instruction and no two lanes meet in a bank. With V(r, g) =
/// `2c (r mod 4) + (g odd: 2⌈c/2⌉) + (⌈c/2⌉, or ⌊c/2⌋ for odd g) ⌊r/4⌋ + ⌊g/2⌋`,
/// L(r, g) = `⌊r/4⌋ c/2 + ⌊g/2⌋` and D(r, g) = `⌊r/4⌋ c/8 + ⌊g/8⌋`, in bytes:
///
/// | type | bytes | at | what |
/// |---|---|---|---|
/// | Q4_K | 128 c | 16 V | quants of the group as in layout 1 |
/// | | 16 c | 16 L + 4 (r mod 4) + 2 (g mod 2) | scale and min of the group, a byte each |
/// | | 4 c | 16 D + 4 (r mod 4) | d, dmin of the super-block |
/// | Q6_K | 128 c | 16 V | low bits of the group as in layout 1 |
/// | | 64 c | 16 (c (r mod 4) + L) + 8 (g mod 2) | high bits as in layout 1 |
/// | | 16 c | 16 L + 4 (r mod 4) + 2 (g mod 2) | the group's two scales |
/// | | 2 c | 8 D + 2 (r mod 4) | d of the super-block |
/// | Q8_0 | 256 c | 16 V', and 16 (V' + 2c) for the upper 16 of the group | quants |
/// | | 16 c | 8 (⌊r/4⌋ c + g) + 2 (r mod 4) | d |
///
/// where V' is V with 4c (r mod 4) in place of 2c (r mod 4). The twelve bytes of scales and mins of a
/// Q4_K super-block are a bijection of the eight scales and eight mins, so the way back is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamUnits {
    /// Groups of 32 columns in a row.
    pub row_groups: u32,
    /// Blocks of [`Self::ROWS`] rows.
    pub n_blocks: u32,
    /// Bytes that 8 rows of one group take, scales included.
    pub group_bytes: u32,
}

impl StreamUnits {
    /// Rows of a unit.
    pub const ROWS: u32 = 8;
    /// Groups of 32 columns in every unit of a block but the last.
    pub const GROUPS: u32 = 32;

    /// Units of a block.
    pub const fn per_block(&self) -> u32 {
        self.row_groups.div_ceil(Self::GROUPS)
    }

    /// Bytes of a block: its units together.
    pub const fn block_bytes(&self) -> u64 {
        self.row_groups as u64 * self.group_bytes as u64
    }

    /// Bytes of the largest unit.
    pub const fn unit_bytes(&self) -> u32 {
        let groups = if self.row_groups < Self::GROUPS { self.row_groups } else { Self::GROUPS };
        groups * self.group_bytes
    }
}

impl PackedLayout {
    /// Layout 2 for a matrix of Q4_K, Q6_K or Q8_0; the rule is [`StreamUnits`]'s.
    pub fn stream(ty: WeightType, shape: Shape) -> Result<Self> {
        let Shape { n_out, n_in } = shape;
        if n_out == 0 || n_in == 0 {
            return Err(Error::EmptyShape { n_out, n_in });
        }
        let row_bytes = ty.row_bytes(n_in)?;
        let format = Format::of(ty).ok_or(Error::NoUnits { ty })?;
        let row_groups = u64::from(n_in) / GROUP_ELEMS as u64;
        let row_stride_bytes = row_groups * u64::from(format.group_bytes()) / 8;
        let rows = u64::from(n_out).next_multiple_of(u64::from(StreamUnits::ROWS));
        let len_bytes = row_stride_bytes
            .checked_mul(rows)
            .filter(|&len| len <= i64::MAX as u64)
            .ok_or(Error::TooLarge { ty, n_out, n_in })?;
        let unused = Plane { name: "", offset_bytes: 0, row_stride_bytes: 0, len_bytes: 0 };
        let mut planes = [unused; MAX_PLANES];
        planes[0] = Plane { name: "units", offset_bytes: 0, row_stride_bytes, len_bytes };
        Ok(Self {
            id: LayoutId::STREAM,
            version: LayoutVersion::STREAM,
            ty,
            shape,
            row_bytes,
            rows_per_block: StreamUnits::ROWS,
            planes,
            n_planes: 1,
        })
    }

    /// The geometry of a stream; `None` for another layout.
    pub fn units(&self) -> Option<StreamUnits> {
        let format = Format::of(self.ty).filter(|_| self.id == LayoutId::STREAM)?;
        Some(StreamUnits {
            row_groups: self.shape.n_in / GROUP_ELEMS as u32,
            n_blocks: self.shape.n_out.div_ceil(StreamUnits::ROWS),
            group_bytes: format.group_bytes(),
        })
    }
}

/// The types that have units.
#[derive(Clone, Copy)]
enum Format {
    Q4K,
    Q6K,
    Q8_0,
}

/// A row and a group in a unit of `groups` groups.
#[derive(Clone, Copy)]
struct At {
    groups: usize,
    row: usize,
    group: usize,
}

impl At {
    /// V of [`StreamUnits`] with `row_vectors` in place of 2c.
    fn vector(self, row_vectors: usize) -> usize {
        let (even, odd) = (self.groups.div_ceil(2), self.groups / 2);
        let (before, lanes) =
            if self.group.is_multiple_of(2) { (0, even) } else { (2 * even, odd) };
        self.row % 4 * row_vectors + before + self.row / 4 * lanes + self.group / 2
    }

    fn lane(self) -> usize {
        self.row / 4 * (self.groups / 2) + self.group / 2
    }

    fn super_block(self) -> usize {
        self.row / 4 * (self.groups / 8) + self.group / 8
    }
}

impl Format {
    fn of(ty: WeightType) -> Option<Self> {
        Some(match ty {
            WeightType::Q4K => Self::Q4K,
            WeightType::Q6K => Self::Q6K,
            WeightType::Q8_0 => Self::Q8_0,
            _ => return None,
        })
    }

    const fn group_bytes(self) -> u32 {
        match self {
            Self::Q4K => 148,
            Self::Q6K => 210,
            Self::Q8_0 => 272,
        }
    }

    /// Calls `f` with every run of bytes that moves as it is: its plane, its place there and in the
    /// unit, its length. `at` is the first group of a block.
    fn runs(self, at: At, mut f: impl FnMut(usize, usize, usize, usize)) {
        let c = at.groups;
        let groups = || (0..8).map(|i| (i, At { group: at.group + i, ..at }));
        match self {
            Self::Q4K => {
                groups().for_each(|(i, at)| f(0, 16 * i, 16 * at.vector(2 * c), 16));
                f(2, 0, 144 * c + 16 * at.super_block() + 4 * (at.row % 4), 4);
            }
            Self::Q6K => {
                for (i, at) in groups() {
                    let part = 4 * (at.row % 4) + 2 * (at.group % 2);
                    let high = 16 * (c * (at.row % 4) + at.lane()) + 8 * (at.group % 2);
                    f(0, 16 * i, 16 * at.vector(2 * c), 16);
                    f(1, 8 * i, 128 * c + high, 8);
                    f(2, 2 * i, 192 * c + 16 * at.lane() + part, 2);
                }
                f(3, 0, 208 * c + 8 * at.super_block() + 2 * (at.row % 4), 2);
            }
            Self::Q8_0 => {
                for half in 0..2 {
                    f(0, 16 * half, 16 * (at.vector(4 * c) + 2 * c * half), 16);
                }
                f(1, 0, 256 * c + 8 * (at.row / 4 * c + at.group) + 2 * (at.row % 4), 2);
            }
        }
    }

    /// Where the scales and mins of a Q4_K super-block lie: a pair of bytes for each group.
    fn pairs(at: At) -> impl Iterator<Item = usize> {
        (0..8).map(move |i| {
            let at = At { group: at.group + i, ..at };
            128 * at.groups + 16 * at.lane() + 4 * (at.row % 4) + 2 * (at.group % 2)
        })
    }

    fn pack(self, planes: &[[u8; 128]; MAX_PLANES], unit: &mut [u8], at: At) {
        self.runs(at, |plane, from, to, len| {
            unit[to..to + len].copy_from_slice(&planes[plane][from..from + len]);
        });
        if let Self::Q4K = self {
            let packed = core::array::from_fn(|i| planes[1][i]);
            let [scales, mins] = scales_and_mins(&packed).map(u64::to_le_bytes);
            for (i, to) in Self::pairs(at).enumerate() {
                unit[to..to + 2].copy_from_slice(&[scales[i], mins[i]]);
            }
        }
    }

    fn unpack(self, unit: &[u8], planes: &mut [[u8; 128]; MAX_PLANES], at: At) {
        self.runs(at, |plane, to, from, len| {
            planes[plane][to..to + len].copy_from_slice(&unit[from..from + len]);
        });
        if let Self::Q4K = self {
            let (mut scales, mut mins) = ([0; 8], [0; 8]);
            for (i, from) in Self::pairs(at).enumerate() {
                (scales[i], mins[i]) = (unit[from], unit[from + 1]);
            }
            planes[1][..12].copy_from_slice(&from_scales_and_mins(&scales, &mins));
        }
    }
}

/// One row of a block of rows, block of weights by block of weights: calls `f` with the unit's
/// bytes as a range of the block of rows, the place in the unit, and the index of the block.
fn for_blocks(
    units: &StreamUnits,
    block_groups: u32,
    row: usize,
    mut f: impl FnMut(core::ops::Range<usize>, At, usize),
) {
    for first in (0..units.row_groups).step_by(StreamUnits::GROUPS as usize) {
        let groups = (units.row_groups - first).min(StreamUnits::GROUPS);
        let start = (first * units.group_bytes) as usize;
        let bytes = start..start + (groups * units.group_bytes) as usize;
        for group in (0..groups).step_by(block_groups as usize) {
            let at = At { groups: groups as usize, row, group: group as usize };
            f(bytes.clone(), at, ((first + group) / block_groups) as usize);
        }
    }
}

/// Packs the rows of one block of rows; rows beyond the source become zero.
pub(crate) fn pack_block(layout: &PackedLayout, source_rows: &[u8], packed: &mut [u8]) {
    let (Some(units), Some(format)) = (layout.units(), Format::of(layout.ty)) else { return };
    let entry = layout.ty.entry();
    let (block_bytes, block_groups) =
        (entry.block_bytes as usize, entry.block_elems / GROUP_ELEMS as u32);
    let row_bytes = layout.row_bytes as usize;
    if source_rows.len() < row_bytes * StreamUnits::ROWS as usize {
        packed.fill(0);
    }
    let mut planes = [[0; 128]; MAX_PLANES];
    for (row, source) in source_rows.chunks_exact(row_bytes).enumerate() {
        for_blocks(&units, block_groups, row, |unit, at, block| {
            let source = &source[block * block_bytes..][..block_bytes];
            let mut slices: PlanesMut<'_> = Default::default();
            for ((slice, plane), spec) in slices.iter_mut().zip(&mut planes).zip(entry.planes) {
                *slice = &mut plane[..spec.block_bytes as usize];
            }
            (entry.pack)(source, slices);
            format.pack(&planes, &mut packed[unit], at);
        });
    }
}

/// The inverse of [`pack_block`], for as many rows as `source_rows` has.
pub(crate) fn unpack_block(layout: &PackedLayout, packed: &[u8], source_rows: &mut [u8]) {
    let (Some(units), Some(format)) = (layout.units(), Format::of(layout.ty)) else { return };
    let entry = layout.ty.entry();
    let (block_bytes, block_groups) =
        (entry.block_bytes as usize, entry.block_elems / GROUP_ELEMS as u32);
    let mut planes = [[0; 128]; MAX_PLANES];
    for (row, source) in source_rows.chunks_exact_mut(layout.row_bytes as usize).enumerate() {
        for_blocks(&units, block_groups, row, |unit, at, block| {
            format.unpack(&packed[unit], &mut planes, at);
            let mut slices = [&[][..]; MAX_PLANES];
            for ((slice, plane), spec) in slices.iter_mut().zip(&planes).zip(entry.planes) {
                *slice = &plane[..spec.block_bytes as usize];
            }
            (entry.unpack)(slices, &mut source[block * block_bytes..][..block_bytes]);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_table() {
        for (ty, unit_bytes) in
            [(WeightType::Q4K, 4736), (WeightType::Q6K, 6720), (WeightType::Q8_0, 8704)]
        {
            let layout = PackedLayout::stream(ty, Shape { n_out: 24, n_in: 3072 }).unwrap();
            let units = layout.units().unwrap();
            assert_eq!((units.unit_bytes(), units.per_block(), units.n_blocks), (unit_bytes, 3, 3));
            assert_eq!(layout.len_bytes(), u64::from(unit_bytes) * 9);
            let larger = layout.len_bytes() as f64 / layout.source_bytes() as f64;
            assert!(larger <= 1.03, "{ty}: {larger}");
            assert!((units.group_bytes * 8).is_multiple_of(16));
        }
        // The rows of a short last block are there, as zeros.
        let layout = PackedLayout::stream(WeightType::Q8_0, Shape { n_out: 9, n_in: 96 }).unwrap();
        assert_eq!(layout.len_bytes(), 2 * 3 * 272);
        assert_eq!(layout.source_bytes(), 9 * 3 * 34);
    }

    #[test]
    fn a_unit_has_a_place_for_every_byte_and_none_twice() {
        for (format, block_groups) in [(Format::Q4K, 8), (Format::Q6K, 8), (Format::Q8_0, 1)] {
            for groups in (block_groups..=32).step_by(block_groups) {
                let mut taken = alloc::vec![0u8; groups * format.group_bytes() as usize];
                for row in 0..8 {
                    for group in (0..groups).step_by(block_groups) {
                        let at = At { groups, row, group };
                        format.runs(at, |_, _, to, len| {
                            taken[to..to + len].iter_mut().for_each(|taken| *taken += 1);
                        });
                        if let Format::Q4K = format {
                            Format::pairs(at).for_each(|to| {
                                taken[to] += 1;
                                taken[to + 1] += 1;
                            });
                        }
                    }
                }
                assert!(taken.iter().all(|&taken| taken == 1), "{groups} groups");
            }
        }
    }

    #[test]
    fn the_lanes_of_a_warp_read_512_bytes_side_by_side() {
        for row in 0..4 {
            for parity in 0..2 {
                for lane in 0..32 {
                    let (half, k) = (lane / 16, lane % 16);
                    let at = At { groups: 32, row: 4 * half + row, group: 2 * k + parity };
                    assert_eq!(at.vector(64), 64 * row + 32 * parity + lane);
                }
            }
        }
    }

    #[test]
    fn types_without_units_are_refused() {
        let shape = Shape { n_out: 8, n_in: 256 };
        let ty = WeightType::Q5K;
        assert_eq!(PackedLayout::stream(ty, shape), Err(Error::NoUnits { ty }));
    }
}
