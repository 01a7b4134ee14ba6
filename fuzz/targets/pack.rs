//! Any bytes as weights of any type, in any layout: packed, unpacked and used.
#![no_main]

use libfuzzer_sys::fuzz_target;
use q4k_soa::{
    PackedLayout, PackedMatrix, Shape, StreamUnits, WeightType, dequantize, pack, pack_rows_into,
    pack_rows_planes, unpack, unpack_rows,
};

fuzz_target!(|data: &[u8]| {
    let Some((&[ty, n_out, n_blocks, cut], bytes)) = data.split_first_chunk() else { return };
    let ty = WeightType::ALL[usize::from(ty) % WeightType::ALL.len()];
    let shape = Shape {
        n_out: u32::from(n_out) % 20 + 1,
        n_in: (u32::from(n_blocks) % 9 + 1) * ty.block_elems(),
    };
    let planes = PackedLayout::planes(ty, shape).expect("whole blocks");
    let source: Vec<u8> =
        bytes.iter().chain(&[0]).copied().cycle().take(planes.source_bytes() as usize).collect();

    round_trip(&planes, &source, u32::from(cut) % (shape.n_out + 1));
    if let Ok(stream) = PackedLayout::stream(ty, shape) {
        let cut = u32::from(cut) * StreamUnits::ROWS % (shape.n_out + StreamUnits::ROWS);
        round_trip(&stream, &source, cut.min(shape.n_out) / StreamUnits::ROWS * StreamUnits::ROWS);
    }
    same_weights(&planes, &source);
});

/// Whole and in two ranges of rows, there and back.
fn round_trip(layout: &PackedLayout, source: &[u8], cut: u32) {
    let n_out = layout.shape().n_out;
    let row_bytes = layout.row_bytes() as usize;
    let mut whole = vec![0; layout.len_bytes() as usize];
    pack(layout, source, &mut whole).expect("right lengths");
    let mut unpacked = vec![0x55; source.len()];
    unpack(layout, &whole, &mut unpacked).expect("right lengths");
    assert!(unpacked == source, "unpack(pack(x)) is x");

    let mut by_rows = whole.clone();
    let mut by_pieces = whole.clone();
    for rows in [cut..n_out, 0..cut] {
        let at = rows.start as usize * row_bytes..rows.end as usize * row_bytes;
        pack_rows_into(layout, rows.clone(), &source[at.clone()], &mut by_rows).expect("rows");
        let pieces = layout.pieces(rows.clone()).expect("rows");
        let staging_bytes = pieces.iter().map(|piece| piece.len_bytes as usize).sum();
        let mut staging = vec![0; staging_bytes];
        let pieces = pack_rows_planes(layout, rows.clone(), &source[at.clone()], &mut staging)
            .expect("rows");
        for piece in pieces.iter() {
            by_pieces[piece.offset_bytes as usize..][..piece.len_bytes as usize]
                .copy_from_slice(&staging[piece.staging()]);
        }
        let mut unpacked = vec![0; at.len()];
        unpack_rows(layout, rows, &whole, &mut unpacked).expect("rows");
        assert!(unpacked == source[at]);
    }
    assert!(by_rows == whole && by_pieces == whole, "rows alone are the rows of the whole");
}

/// Both forms mean the same numbers.
fn same_weights(layout: &PackedLayout, source: &[u8]) {
    let n_in = layout.shape().n_in as usize;
    let mut whole = vec![0; layout.len_bytes() as usize];
    pack(layout, source, &mut whole).expect("right lengths");
    let matrix = PackedMatrix::new(*layout, &whole).expect("right length");
    let mut expected = vec![0.0; n_in * layout.shape().n_out as usize];
    dequantize(layout.weight_type(), source, &mut expected).expect("right lengths");
    let mut weights = vec![0.0; n_in];
    for (row, expected) in (0..).zip(expected.chunks(n_in)) {
        matrix.dequantize_row(row, &mut weights);
        for (a, b) in weights.iter().zip(expected) {
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{a} is not {b}");
        }
    }
}
