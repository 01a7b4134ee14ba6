//! Source to the stream and back.

mod common;

use common::{Random, packed};
use proptest::prelude::*;
use q4k_soa::{
    Error, LayoutId, LayoutVersion, PackedLayout, PackedMatrix, Shape, StreamUnits, WeightType,
    pack_rows_into, pack_rows_planes, unpack, unpack_rows,
};

const TYPES: [WeightType; 3] = [WeightType::Q4K, WeightType::Q6K, WeightType::Q8_0];

/// Widths below, at and beyond a unit, in blocks of the type, with odd numbers of groups.
fn any_source() -> impl Strategy<Value = (PackedLayout, Vec<u8>)> {
    (prop::sample::select(TYPES.to_vec()), 1u32..20, 1u32..40).prop_flat_map(|(ty, n_out, n)| {
        let n_in = if ty.block_elems() == 256 { (n % 9 + 1) * 256 } else { n * 32 };
        let layout = PackedLayout::stream(ty, Shape { n_out, n_in }).unwrap();
        let n_bytes = layout.source_bytes() as usize;
        (Just(layout), prop::collection::vec(any::<u8>(), n_bytes))
    })
}

fn unpacked(layout: &PackedLayout, packed: &[u8]) -> Vec<u8> {
    let mut source = vec![0x55; layout.source_bytes() as usize];
    unpack(layout, packed, &mut source).unwrap();
    source
}

proptest! {
    #[test]
    fn s17_unpack_inverts_pack_for_any_bytes((layout, source) in any_source()) {
        prop_assert_eq!(unpacked(&layout, &packed(&layout, &source)), source);
    }

    #[test]
    fn s17_blocks_of_rows_packed_and_unpacked_alone_equal_the_whole(
        (layout, source) in any_source(),
        cut in any::<prop::sample::Index>(),
    ) {
        let n_out = layout.shape().n_out;
        let blocks = layout.units().unwrap().n_blocks;
        let cut = (cut.index(blocks as usize + 1) as u32 * StreamUnits::ROWS).min(n_out);
        let row_bytes = layout.row_bytes() as usize;
        let whole = packed(&layout, &source);
        let mut by_rows = vec![0xaa; whole.len()];
        let mut by_pieces = by_rows.clone();
        for rows in [cut..n_out, 0..cut] {
            let source_rows = &source[rows.start as usize * row_bytes..rows.end as usize * row_bytes];
            pack_rows_into(&layout, rows.clone(), source_rows, &mut by_rows).unwrap();

            let piece = layout.pieces(rows.clone()).unwrap()[0];
            let mut staging = vec![0x33; piece.len_bytes as usize];
            let pieces = pack_rows_planes(&layout, rows.clone(), source_rows, &mut staging).unwrap();
            prop_assert_eq!(&pieces[..], &[piece][..]);
            by_pieces[piece.offset_bytes as usize..][..staging.len()].copy_from_slice(&staging);

            let mut unpacked = vec![0; source_rows.len()];
            unpack_rows(&layout, rows, &whole, &mut unpacked).unwrap();
            prop_assert_eq!(unpacked, source_rows);
        }
        prop_assert_eq!(&by_rows, &whole);
        prop_assert_eq!(&by_pieces, &whole);
    }
}

#[test]
fn s17_a_large_matrix_is_packed_in_parallel() {
    for ty in TYPES {
        let layout = PackedLayout::stream(ty, Shape { n_out: 1031, n_in: 1536 }).unwrap();
        let source = Random::new(9).bytes(layout.source_bytes() as usize);
        let whole = packed(&layout, &source);
        assert!(unpacked(&layout, &whole) == source, "{ty}");

        let mut by_rows = vec![0; whole.len()];
        let (before, after) = source.split_at(696 * layout.row_bytes() as usize);
        pack_rows_into(&layout, 0..696, before, &mut by_rows).unwrap();
        pack_rows_into(&layout, 696..1031, after, &mut by_rows).unwrap();
        assert!(by_rows == whole, "{ty}");
    }
}

/// One weight's bits at a time, at places computed by hand.
#[test]
fn units_hold_what_the_front_page_says() {
    let at = |ty, n_in: u32, row: usize, set: &[(usize, u8)]| {
        let layout = PackedLayout::stream(ty, Shape { n_out: 8, n_in }).unwrap();
        let mut source = vec![0; layout.source_bytes() as usize];
        for &(offset, byte) in set {
            source[row * layout.row_bytes() as usize + offset] = byte;
        }
        let whole = packed(&layout, &source);
        let set: Vec<_> =
            whole.iter().copied().enumerate().filter(|&(_, byte)| byte != 0).collect();
        set
    };
    // Row 6 (half 1, third of its rows), group 11 (odd, lane 5 of its half) of a full unit of Q4_K:
    // super-block 1, group 3, weight 21 of it.
    let vector = (2 * 64 + 32 + 16 + 5) * 16;
    let block = 144;
    let quant = at(WeightType::Q4K, 1024, 6, &[(block + 16 + 32 + 21, 0xb0)]);
    assert_eq!(quant, [(vector + 21 - 16, 0xb0)]);
    // Its scale and min, 37 and 9 of 63: byte 3 and byte 7 of the twelve.
    let pair = at(WeightType::Q4K, 1024, 6, &[(block + 4 + 3, 37), (block + 4 + 7, 9)]);
    assert_eq!(
        pair,
        [(4096 + (16 + 5) * 16 + 2 * 4 + 2, 37), (4096 + (16 + 5) * 16 + 2 * 4 + 3, 9)]
    );
    let d = at(WeightType::Q4K, 1024, 6, &[(block, 0x11), (block + 3, 0x22)]);
    assert_eq!(d, [(4608 + (4 + 1) * 16 + 2 * 4, 0x11), (4608 + (4 + 1) * 16 + 2 * 4 + 3, 0x22)]);

    // The same place in Q6_K: the high bits and the second scale of group 3 of super-block 1.
    let block = 210;
    let high = at(WeightType::Q6K, 1024, 6, &[(block + 128 + 21, 0b10 << 6)]);
    assert_eq!(high, [(4096 + (2 * 32 + 16 + 5) * 16 + 8 + 21 % 8, 0b10 << 4)]);
    let scale = at(WeightType::Q6K, 1024, 6, &[(block + 192 + 7, 0x44)]);
    assert_eq!(scale, [(6144 + (16 + 5) * 16 + 2 * 4 + 2 + 1, 0x44)]);
    let d = at(WeightType::Q6K, 1024, 6, &[(block + 208, 0x55)]);
    assert_eq!(d, [(6656 + (4 + 1) * 8 + 2 * 2, 0x55)]);

    // And in Q8_0: weight 21 of group 11, in the upper half of its quants.
    let quant = at(WeightType::Q8_0, 1024, 6, &[(11 * 34 + 2 + 21, 0x66)]);
    assert_eq!(quant, [((2 * 128 + 64 + 32 + 16 + 5) * 16 + 5, 0x66)]);
    let d = at(WeightType::Q8_0, 1024, 6, &[(11 * 34 + 1, 0x77)]);
    assert_eq!(d, [(8192 + (32 + 11) * 8 + 2 * 2 + 1, 0x77)]);
}

#[test]
fn what_does_not_fit_a_stream_is_refused() {
    let layout = PackedLayout::stream(WeightType::Q8_0, Shape { n_out: 20, n_in: 64 }).unwrap();
    assert_eq!(
        PackedLayout::new(
            LayoutId::STREAM,
            LayoutVersion::STREAM,
            WeightType::Q8_0,
            layout.shape()
        ),
        Ok(layout)
    );
    let mut whole = packed(&layout, &vec![1; layout.source_bytes() as usize]);
    let cut = pack_rows_into(&layout, 4..8, &[0; 4 * 68], &mut whole).unwrap_err();
    assert_eq!(cut.to_string(), "rows 4..8 cut a block of 8 rows that are packed together");
    assert!(unpack_rows(&layout, 8..12, &whole, &mut [0; 4 * 68]).is_err());
    assert!(matches!(PackedMatrix::new(layout, &whole), Err(Error::WrongLayout { .. })));

    let tall = PackedLayout::stream(WeightType::Q8_0, Shape { n_out: 16, n_in: 64 }).unwrap();
    assert_eq!(PackedLayout::concat(&[tall, layout]).unwrap().shape().n_out, 36);
    assert!(matches!(PackedLayout::concat(&[layout, tall]), Err(Error::CutBlock { .. })));
}
