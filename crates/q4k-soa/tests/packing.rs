//! Source to planes and back.

mod common;

use common::{Random, finite_matrix, odd_n_in, packed};
use proptest::prelude::*;
use q4k_soa::{
    Error, LayoutId, LayoutVersion, PackedLayout, PackedMatrix, Shape, WeightType, dequantize,
    pack, pack_rows_into, pack_rows_planes, unpack, unpack_rows,
};

fn any_type() -> impl Strategy<Value = WeightType> {
    prop::sample::select(WeightType::ALL.to_vec())
}

/// A type, a layout of it and any bytes of the right length.
fn any_source() -> impl Strategy<Value = (PackedLayout, Vec<u8>)> {
    (any_type(), 1u32..6, 1u32..4).prop_flat_map(|(ty, n_out, n_blocks)| {
        let n_in = n_blocks * ty.block_elems();
        let layout = PackedLayout::planes(ty, Shape { n_out, n_in }).unwrap();
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
    fn s17_rows_packed_and_unpacked_alone_equal_the_whole(
        (layout, source) in any_source(),
        cut in any::<prop::sample::Index>(),
    ) {
        let n_out = layout.shape().n_out;
        let cut = cut.index(n_out as usize + 1) as u32;
        let row_bytes = layout.row_bytes() as usize;
        let whole = packed(&layout, &source);

        let mut by_rows = whole.clone();
        by_rows.fill(0);
        let mut by_pieces = by_rows.clone();
        for rows in [cut..n_out, 0..cut] {
            let source_rows = &source[rows.start as usize * row_bytes..rows.end as usize * row_bytes];
            pack_rows_into(&layout, rows.clone(), source_rows, &mut by_rows).unwrap();

            let mut staging = vec![0; source_rows.len()];
            let pieces = pack_rows_planes(&layout, rows.clone(), source_rows, &mut staging).unwrap();
            prop_assert_eq!(pieces.len(), layout.plane_list().len());
            for piece in pieces.iter() {
                by_pieces[piece.offset_bytes as usize..][..piece.len_bytes as usize]
                    .copy_from_slice(&staging[piece.staging()]);
            }

            let mut unpacked = vec![0; source_rows.len()];
            unpack_rows(&layout, rows, &whole, &mut unpacked).unwrap();
            prop_assert_eq!(unpacked, source_rows);
        }
        prop_assert_eq!(&by_rows, &whole);
        prop_assert_eq!(&by_pieces, &whole);
    }

    #[test]
    fn wrong_lengths_are_errors_and_nothing_else(
        (layout, source) in any_source(),
        source_bytes in 0usize..2000,
        packed_bytes in 0usize..2000,
        (start, end) in (0u32..8, 0u32..8),
    ) {
        let right_source = source_bytes == source.len();
        let right_packed = packed_bytes == layout.len_bytes() as usize;
        let result = pack(&layout, &vec![0; source_bytes], &mut vec![0; packed_bytes]);
        prop_assert_eq!(result.is_ok(), right_source && right_packed);
        let result = unpack(&layout, &vec![0; packed_bytes], &mut vec![0; source_bytes]);
        prop_assert_eq!(result.is_ok(), right_source && right_packed);

        let right_rows = start <= end && end <= layout.shape().n_out;
        let rows_bytes = end.saturating_sub(start) as usize * layout.row_bytes() as usize;
        let mut whole = vec![0; layout.len_bytes() as usize];
        let result = pack_rows_into(&layout, start..end, &vec![0; rows_bytes], &mut whole);
        prop_assert_eq!(result.is_ok(), right_rows);
        let result = unpack_rows(&layout, start..end, &whole, &mut vec![0; rows_bytes]);
        prop_assert_eq!(result.is_ok(), right_rows);
        let result = pack_rows_planes(
            &layout, start..end, &vec![0; rows_bytes], &mut vec![0; source_bytes]);
        prop_assert_eq!(result.is_ok(), right_rows && source_bytes == rows_bytes);
    }
}

/// Bytes that mean NaN, infinity, the largest and smallest scales, and every single bit.
#[test]
fn s17_adversarial_bytes_survive_in_every_type() {
    for ty in WeightType::ALL {
        let block_bytes = ty.block_bytes() as usize;
        let layout = PackedLayout::planes(ty, Shape { n_out: 2, n_in: ty.block_elems() }).unwrap();
        let repeated = [0x00, 0xff, 0x7f, 0x80, 0x7c, 0xfc, 0x7e, 0x0f, 0xf0, 0x55, 0xaa];
        for byte in repeated {
            let source = vec![byte; 2 * block_bytes];
            assert_eq!(unpacked(&layout, &packed(&layout, &source)), source, "{ty} {byte:#x}");
        }
        for bit in 0..8 * block_bytes {
            let mut source = vec![0; 2 * block_bytes];
            source[bit / 8] = 1 << (bit % 8);
            source[block_bytes..].fill(0xff);
            source[block_bytes + bit / 8] &= !(1 << (bit % 8));
            assert_eq!(unpacked(&layout, &packed(&layout, &source)), source, "{ty} bit {bit}");
        }
    }
}

#[test]
fn s17_a_matrix_large_enough_for_several_threads_round_trips() {
    for ty in WeightType::ALL {
        let layout = PackedLayout::planes(ty, Shape { n_out: 1031, n_in: 1536 }).unwrap();
        let source = Random::new(9).bytes(layout.source_bytes() as usize);
        let whole = packed(&layout, &source);
        assert_eq!(unpacked(&layout, &whole), source, "{ty}");

        // The rows before and after are packed apart, so that the threads cut elsewhere.
        let row_bytes = layout.row_bytes() as usize;
        let mut by_rows = vec![0; whole.len()];
        let (before, after) = source.split_at(700 * row_bytes);
        pack_rows_into(&layout, 0..700, before, &mut by_rows).unwrap();
        pack_rows_into(&layout, 700..1031, after, &mut by_rows).unwrap();
        assert!(by_rows == whole, "{ty}");
    }
}

#[test]
fn planes_hold_what_the_front_page_says() {
    // One weight's bits at a time: weight 21 of group 3 of a Q6_K super-block.
    let (group, weight) = (3, 21);
    let layout = PackedLayout::planes(WeightType::Q6K, Shape { n_out: 1, n_in: 256 }).unwrap();
    let mut source = vec![0; 210];
    source[32 + weight] = 0xb0; // low bits 11, in the high nibble of the second 32 bytes
    source[128 + weight] = 0b10 << 6; // high bits 2
    let whole = packed(&layout, &source);
    assert_eq!(whole[16 * group + weight - 16], 0xb0);
    let high = layout.plane_list()[1].offset_bytes as usize;
    assert_eq!(whole[high + 8 * group + weight % 8], 0b10 << 4);
    assert_eq!(whole.iter().filter(|&&byte| byte != 0).count(), 2);

    // The fifth bit of weight 21 of group 3 of a Q5_K super-block.
    let layout = PackedLayout::planes(WeightType::Q5K, Shape { n_out: 1, n_in: 256 }).unwrap();
    let mut source = vec![0; 176];
    source[16 + weight] = 1 << group;
    let whole = packed(&layout, &source);
    let high = layout.plane_list()[1].offset_bytes as usize;
    let word = u32::from_le_bytes(whole[high + 4 * group..][..4].try_into().unwrap());
    assert_eq!(word, 1 << weight);
}

#[test]
fn both_forms_dequantise_to_the_same_floats() {
    for ty in WeightType::ALL {
        let (layout, source, whole) = finite_matrix(ty, 5, odd_n_in(ty));
        let n_in = layout.shape().n_in as usize;
        let matrix = PackedMatrix::new(layout, &whole).unwrap();
        let mut expected = vec![0.0; 5 * n_in];
        dequantize(ty, &source, &mut expected).unwrap();
        for (row, expected) in expected.chunks(n_in).enumerate() {
            let mut weights = vec![f32::NAN; n_in];
            matrix.dequantize_row(row as u32, &mut weights);
            let bits = |floats: &[f32]| floats.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&weights), bits(expected), "{ty} row {row}");
        }
    }
}

#[test]
fn not_a_number_and_infinity_as_scales_stay_what_they_are() {
    for ty in WeightType::ALL {
        for (high_byte, is_it) in
            [(0x7fu8, (|w: f32| w.is_nan()) as fn(f32) -> bool), (0x7c, |w: f32| !w.is_finite())]
        {
            if matches!(ty, WeightType::F32 | WeightType::Bf16) {
                continue; // not a half, and each weight is its own scale
            }
            let mut source = vec![0x11; ty.block_bytes() as usize];
            let d = common::exponent_bytes(ty)[0];
            (source[d - 1], source[d]) = (if high_byte == 0x7c { 0 } else { 1 }, high_byte);
            let layout =
                PackedLayout::planes(ty, Shape { n_out: 1, n_in: ty.block_elems() }).unwrap();
            let whole = packed(&layout, &source);
            assert_eq!(unpacked(&layout, &whole), source);
            let mut weights = vec![0.0; ty.block_elems() as usize];
            PackedMatrix::new(layout, &whole).unwrap().dequantize_row(0, &mut weights);
            assert!(weights.iter().all(|&weight| is_it(weight)), "{ty}: {weights:?}");
        }
    }
}

#[test]
fn concatenated_rows_are_the_rows_of_the_whole() {
    for ty in WeightType::ALL {
        let n_in = odd_n_in(ty);
        let parts = [3, 1, 4].map(|n_out| finite_matrix(ty, n_out, n_in));
        let layouts = parts.each_ref().map(|(layout, ..)| *layout);
        let layout = PackedLayout::concat(&layouts).unwrap();
        assert_eq!(layout, PackedLayout::planes(ty, Shape { n_out: 8, n_in }).unwrap());

        let mut by_parts = vec![0; layout.len_bytes() as usize];
        let mut row = 0;
        for (part, source, _) in &parts {
            let end = row + part.shape().n_out;
            pack_rows_into(&layout, row..end, source, &mut by_parts).unwrap();
            row = end;
        }
        let source = parts.each_ref().map(|(_, source, _)| source.as_slice()).concat();
        assert_eq!(by_parts, packed(&layout, &source));
    }
}

#[test]
fn matrices_that_do_not_fit_together_are_refused() {
    let layout = |ty, n_in| PackedLayout::planes(ty, Shape { n_out: 2, n_in }).unwrap();
    let first = layout(WeightType::Q4K, 256);
    assert_eq!(PackedLayout::concat(&[]), Err(Error::ConcatEmpty));
    for other in [layout(WeightType::Q6K, 256), layout(WeightType::Q4K, 512)] {
        let error = PackedLayout::concat(&[first, other]).unwrap_err();
        assert!(matches!(error, Error::ConcatMismatch { index: 1, .. }), "{error}");
    }
    let tall = PackedLayout::planes(WeightType::Q4K, Shape { n_out: u32::MAX, n_in: 256 }).unwrap();
    assert!(matches!(PackedLayout::concat(&[tall, first]), Err(Error::TooLarge { .. })));
}

#[test]
fn layouts_that_are_not_known_are_refused_by_number() {
    let shape = Shape { n_out: 1, n_in: 256 };
    let of = |id, version| {
        PackedLayout::new(LayoutId::new(id), LayoutVersion::new(version), WeightType::Q4K, shape)
    };
    let layout = of(1, 1).unwrap();
    let error = of(3, 1).unwrap_err();
    assert_eq!(error.to_string(), "layout 3 version 1 is unknown here");
    assert!(matches!(of(1, 2), Err(Error::UnknownLayout { .. })));
    let error = layout.require(LayoutId::new(2), LayoutVersion::new(1)).unwrap_err();
    assert_eq!(error.to_string(), "needs layout 2 version 1, the matrix has layout 1 version 1");
}

#[test]
fn errors_say_the_numbers() {
    let layout = PackedLayout::planes(WeightType::Q8_0, Shape { n_out: 2, n_in: 64 }).unwrap();
    let mut whole = vec![0; layout.len_bytes() as usize];
    let text = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert_eq!(text(pack(&layout, &[0; 135], &mut whole)), "source: expected 136 bytes, got 135");
    assert_eq!(
        text(pack(&layout, &[0; 136], &mut whole[1..])),
        "packed matrix: expected 264 bytes, got 263"
    );
    assert_eq!(
        text(pack_rows_into(&layout, 1..3, &[0; 136], &mut whole)),
        "rows 1..3 of a matrix with 2"
    );
    assert_eq!(
        text(dequantize(WeightType::Q8_0, &[0; 35], &mut [0.0; 32])),
        "Q8_0 blocks are 34 bytes; 35 bytes leave 1"
    );
    assert_eq!(
        text(dequantize(WeightType::Q8_0, &[0; 34], &mut [0.0; 31])),
        "values: expected 32, got 31"
    );
    let error = PackedMatrix::new(layout, &whole[1..]).unwrap_err();
    assert_eq!(error, Error::PackedLength { expected_bytes: 264, actual_bytes: 263 });
}
