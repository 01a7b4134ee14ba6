//! Types that become Q8_0: their formulas as the Python package `gguf` has them (see
//! `tools/reference/make_blocks.py`), and what becoming Q8_0 costs.

mod common;

use common::Random;
use q4k_soa::{Error, TranscodedType, WeightType, dequantize, ggml_type_block, ggml_type_name};

const ROW_ELEMS: usize = 256;

fn dequantized(ty: TranscodedType, source: &[u8]) -> Vec<f32> {
    let blocks = source.len() / ty.block_bytes() as usize;
    let mut weights = vec![f32::NAN; blocks * ty.block_elems() as usize];
    ty.dequantize(source, &mut weights).unwrap();
    weights
}

/// The weights after becoming Q8_0.
fn transcoded(ty: TranscodedType, source: &[u8]) -> Vec<f32> {
    let mut weights = dequantized(ty, source);
    let row_bytes = WeightType::Q8_0.row_bytes(weights.len() as u32).unwrap();
    let mut q8_0 = vec![0xaa; row_bytes as usize];
    ty.transcode(source, &mut q8_0).unwrap();
    dequantize(WeightType::Q8_0, &q8_0, &mut weights).unwrap();
    weights
}

/// Offsets of the high bytes of a block's halves.
fn exponent_bytes(ty: TranscodedType) -> &'static [usize] {
    match ty {
        TranscodedType::Q2K => &[81, 83],
        TranscodedType::Q3K => &[109],
        _ => &[1],
    }
}

/// Random blocks whose halves have every finite value.
fn finite_blocks(ty: TranscodedType, n_weights: usize, random: &mut Random) -> Vec<u8> {
    let mut source =
        random.bytes(n_weights / ty.block_elems() as usize * ty.block_bytes() as usize);
    for block in source.chunks_exact_mut(ty.block_bytes() as usize) {
        for &at in exponent_bytes(ty) {
            if block[at] & 0x7c == 0x7c {
                block[at] ^= 0x40;
            }
        }
    }
    source
}

#[test]
fn dequantised_weights_are_the_python_packages_bit_for_bit() {
    let mut types = Vec::new();
    for line in include_str!("data/gguf_transcoded.csv").lines().skip(2) {
        let [name, blocks, weights] = line.split(',').collect::<Vec<_>>().try_into().unwrap();
        let ty = TranscodedType::ALL.into_iter().find(|ty| ty.name() == name).unwrap();
        let hex = |i: usize| u8::from_str_radix(&blocks[i..i + 2], 16).unwrap();
        let source: Vec<u8> = (0..blocks.len()).step_by(2).map(hex).collect();
        let expected: Vec<f32> = weights.split(' ').map(|weight| weight.parse().unwrap()).collect();
        assert_eq!(dequantized(ty, &source), expected, "{ty}");
        types.push(ty);
    }
    assert_eq!(types, TranscodedType::ALL);
}

#[test]
fn becoming_q8_0_costs_what_the_documentation_says() {
    // A half rounds a scale by 2^-11 of it, as long as it is normal.
    let half_rounding = 1.0 / 2048.0;
    // Relative to the largest weight of 32, which 127 scales are.
    let allowed = |ty| match ty {
        // Half a step of the quants; the scale itself is rounded before they are.
        TranscodedType::Q2K => (1.0 + half_rounding) / 254.0,
        // The quants stay and their scale is rounded.
        TranscodedType::Iq4Xs => half_rounding,
        _ => 0.0,
    };
    // The largest weight is 1 to 127 scales: within these bounds every scale is a normal half.
    let of_normal_scales = 127.0 * half::f16::MIN_POSITIVE.to_f32()..=half::f16::MAX.to_f32();
    for ty in TranscodedType::ALL {
        let mut random = Random::new(3);
        let (mut worst, mut rows) = (0.0f32, 0);
        while rows < 2000 {
            let source = finite_blocks(ty, ROW_ELEMS, &mut random);
            let (before, after) = (dequantized(ty, &source), transcoded(ty, &source));
            for (before, after) in before.chunks(32).zip(after.chunks(32)) {
                let amax = before.iter().fold(0.0f32, |amax, weight| amax.max(weight.abs()));
                if allowed(ty) > 0.0 && !of_normal_scales.contains(&amax) {
                    continue;
                }
                for (before, after) in before.iter().zip(after) {
                    if allowed(ty) == 0.0 {
                        assert_eq!(before, after, "{ty}: nothing is lost");
                    } else {
                        worst = worst.max((before - after).abs() / amax);
                    }
                }
            }
            rows += 1;
        }
        println!("{ty}: {worst}");
        assert!(worst <= allowed(ty), "{ty}: {worst}");
    }
}

#[test]
fn scales_that_are_no_numbers_stay_none_in_every_weight_they_reach() {
    for ty in TranscodedType::ALL {
        for &at in exponent_bytes(ty) {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut source = vec![0xff; ty.block_bytes() as usize];
                for &at in exponent_bytes(ty) {
                    source[at] = 0x3c;
                }
                source[at - 1..=at].copy_from_slice(&half::f16::from_f32(bad).to_le_bytes());
                for (before, after) in dequantized(ty, &source).iter().zip(transcoded(ty, &source))
                {
                    assert_eq!(before.is_finite(), after.is_finite(), "{ty} {at} {bad}");
                }
            }
        }
    }
}

#[test]
fn any_bytes_are_taken() {
    let mut random = Random::new(4);
    for ty in TranscodedType::ALL {
        for _ in 0..1000 {
            let source = random.bytes(8 * ty.block_bytes() as usize);
            transcoded(ty, &source);
        }
    }
}

#[test]
fn lengths_that_do_not_agree_are_refused() {
    let ty = TranscodedType::Q3K;
    let error = ty.transcode(&[0; 109], &mut [0; 272]).unwrap_err();
    assert_eq!(error.to_string(), "Q3_K blocks are 110 bytes; 109 bytes leave 109");
    assert_eq!(
        ty.transcode(&[0; 110], &mut [0; 34]),
        Err(Error::SourceLength { expected_bytes: 272, actual_bytes: 34 })
    );
    assert_eq!(
        ty.dequantize(&[0; 110], &mut [0.0; 32]),
        Err(Error::ValuesLength { expected_elems: 256, actual_elems: 32 })
    );
}

#[test]
fn every_type_agrees_with_the_list_of_ggml_types_and_is_computed_with_by_no_other_name() {
    for ty in TranscodedType::ALL {
        let id = ty.ggml_id();
        assert_eq!(TranscodedType::from_ggml_id(id), Some(ty));
        assert_eq!(WeightType::from_ggml_id(id), None);
        assert_eq!(ggml_type_name(id), Some(ty.name()));
        assert_eq!(ggml_type_block(id), Some((ty.block_elems(), ty.block_bytes())));
    }
}
