//! Dot products.

mod common;

use common::{Random, finite_blocks, finite_matrix, odd_n_in, packed};
use q4k_soa::matvec::{rows_dot_f32_scalar, rows_dot_q8_scalar};
use q4k_soa::{
    PackedLayout, PackedMatrix, Q8Group, Shape, WeightType, dequantize, matvec_f32, matvec_q8,
    quantize_q8, rows_dot_f32, rows_dot_q8,
};

/// Row lengths around the edges of octets, as far as the type has them.
fn row_lengths(ty: WeightType) -> Vec<u32> {
    [1, 31, 32, 33, 64, 224, 256, 288, 576, 768, 1536]
        .into_iter()
        .filter(|n_in| n_in % ty.block_elems() == 0)
        .collect()
}

fn activation(n: usize, random: &mut Random) -> (Vec<f32>, Vec<i8>, Vec<Q8Group>) {
    let x = random.floats(n);
    let (mut quants, mut groups) = (vec![0; n], vec![Q8Group::default(); n.div_ceil(32)]);
    quantize_q8(&x, &mut quants, &mut groups);
    (x, quants, groups)
}

#[test]
fn fast_means_avx2_where_there_is_avx2() {
    #[cfg(target_arch = "x86_64")]
    let has_it = cfg!(feature = "std")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    let has_it = false;
    assert_eq!(q4k_soa::matvec::instructions(), if has_it { "avx2" } else { "portable" });
}

/// The sum of the magnitudes of what is added, the measure for what rounding may do.
fn magnitude(weights: &[f32], x: impl Fn(usize) -> f64) -> f64 {
    weights.iter().enumerate().map(|(i, &weight)| (f64::from(weight) * x(i)).abs()).sum()
}

#[test]
fn fast_and_plain_8_bit_products_agree_with_f64() {
    let mut random = Random::new(4);
    for ty in WeightType::ALL {
        for n_in in row_lengths(ty) {
            let (layout, source, whole) = finite_matrix(ty, 4, n_in);
            let matrix = PackedMatrix::new(layout, &whole).unwrap();
            let (_, quants, groups) = activation(n_in as usize, &mut random);
            let mut weights = vec![0.0; 4 * n_in as usize];
            dequantize(ty, &source, &mut weights).unwrap();

            let (mut fast, mut plain) = ([f32::NAN; 4], [f32::NAN; 4]);
            rows_dot_q8(&matrix, 0..4, &quants, &groups, &mut fast);
            rows_dot_q8_scalar(&matrix, 0..4, &quants, &groups, &mut plain);
            for (row, weights) in weights.chunks(n_in as usize).enumerate() {
                let x = |i: usize| f64::from(groups[i / 32].scale) * f64::from(quants[i]);
                let exact: f64 =
                    weights.iter().enumerate().map(|(i, &weight)| f64::from(weight) * x(i)).sum();
                let tolerance = 1e-5 * magnitude(weights, x);
                for result in [fast[row], plain[row]] {
                    let error = (f64::from(result) - exact).abs();
                    assert!(error <= tolerance, "{ty} {n_in}: {result} against {exact}");
                }
            }
        }
    }
}

/// With scales that are powers of two, every f32 operation is exact, so equal results mean equal
/// integers. Activations take all of i8, -128 too.
#[test]
fn fast_and_plain_8_bit_products_have_the_same_integers() {
    let mut random = Random::new(5);
    for ty in WeightType::ALL {
        if ty.block_elems() == 1 {
            continue; // no integers
        }
        let one = 0x3c00u16.to_le_bytes();
        for (n_in, extreme) in
            row_lengths(ty).into_iter().flat_map(|n_in| [(n_in, false), (n_in, true)])
        {
            let layout = PackedLayout::planes(ty, Shape { n_out: 3, n_in }).unwrap();
            let n_blocks = layout.source_bytes() as usize / ty.block_bytes() as usize;
            let mut source = finite_blocks(ty, n_blocks, &mut random);
            if extreme {
                source.fill(if ty == WeightType::Q8_0 { 0x80 } else { 0xff });
            }
            for block in source.chunks_exact_mut(ty.block_bytes() as usize) {
                for &high in common::exponent_bytes(ty) {
                    block[high - 1..=high].copy_from_slice(&one);
                }
            }
            let quant = |random: &mut Random| if extreme { -128 } else { random.byte() as i8 };
            let quants: Vec<i8> = (0..n_in).map(|_| quant(&mut random)).collect();
            let groups: Vec<Q8Group> = quants
                .chunks(32)
                .map(|quants| {
                    let sum: i32 = quants.iter().map(|&quant| i32::from(quant)).sum();
                    Q8Group { scale: 1.0, scaled_sum: sum as f32 }
                })
                .collect();

            let whole = packed(&layout, &source);
            let mut weights = vec![0.0; 3 * n_in as usize];
            dequantize(ty, &source, &mut weights).unwrap();
            let exact: Vec<f64> = weights
                .chunks(n_in as usize)
                .map(|row| {
                    row.iter().zip(&quants).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
                })
                .collect();
            let matrix = PackedMatrix::new(layout, &whole).unwrap();
            // A sum of 2^24 and more would have to be rounded.
            let limit = 2f64.powi(24);
            let fits = weights
                .chunks(n_in as usize)
                .all(|row| magnitude(row, |i| f64::from(quants[i])) < limit);
            let (mut fast, mut plain) = ([0.0; 3], [0.0; 3]);
            rows_dot_q8(&matrix, 0..3, &quants, &groups, &mut fast);
            rows_dot_q8_scalar(&matrix, 0..3, &quants, &groups, &mut plain);
            for row in 0..3 {
                let (fast, plain) = (f64::from(fast[row]), f64::from(plain[row]));
                if fits {
                    assert_eq!((fast, plain), (exact[row], exact[row]), "{ty} {n_in}");
                } else {
                    let tolerance = 1e-6 * exact[row].abs().max(limit);
                    assert!((fast - exact[row]).abs() < tolerance, "{ty} {n_in}");
                    assert!((plain - exact[row]).abs() < tolerance, "{ty} {n_in}");
                }
            }
            // Whatever else happens, the short rows are within the limit.
            assert!(fits || extreme || n_in > 64 || ty == WeightType::Q6K, "{ty} {n_in}");
        }
    }
}

#[test]
fn exact_products_are_the_same_bits_everywhere_and_right() {
    let mut random = Random::new(6);
    for ty in WeightType::ALL {
        for n_in in row_lengths(ty) {
            let (layout, source, whole) = finite_matrix(ty, 3, n_in);
            let matrix = PackedMatrix::new(layout, &whole).unwrap();
            let x = random.floats(n_in as usize);
            let mut weights = vec![0.0; 3 * n_in as usize];
            dequantize(ty, &source, &mut weights).unwrap();
            let (mut fast, mut plain) = ([f32::NAN; 3], [f32::NAN; 3]);
            rows_dot_f32(&matrix, 0..3, &x, &mut fast);
            rows_dot_f32_scalar(&matrix, 0..3, &x, &mut plain);
            for (row, weights) in weights.chunks(n_in as usize).enumerate() {
                assert_eq!(fast[row].to_bits(), plain[row].to_bits(), "{ty} {n_in}");
                let exact: f64 =
                    weights.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                let error = (f64::from(fast[row]) - exact).abs();
                let scale = magnitude(weights, |i| f64::from(x[i]));
                // Floats are added in f64.
                let part = if ty.block_elems() == 1 { 1e-13 } else { 1e-6 };
                assert!(error <= 1e-7 * exact.abs() + part * scale, "{ty} {n_in}");
            }
        }
    }
}

#[test]
fn row_ranges_are_rows_of_the_whole() {
    let mut random = Random::new(7);
    for ty in WeightType::ALL {
        let n_in = odd_n_in(ty);
        let (layout, _, whole) = finite_matrix(ty, 300, n_in);
        let matrix = PackedMatrix::new(layout, &whole).unwrap();
        let (x, quants, groups) = activation(n_in as usize, &mut random);
        let (mut q8, mut exact) = ([0.0; 300], [0.0; 300]);
        matvec_q8(&matrix, &quants, &groups, &mut q8);
        matvec_f32(&matrix, &x, &mut exact);
        for rows in [0..300, 0..0, 0..1, 17..19, 299..300] {
            let places = rows.start as usize..rows.end as usize;
            let mut out = vec![f32::NAN; rows.len()];
            rows_dot_q8(&matrix, rows.clone(), &quants, &groups, &mut out);
            assert_eq!(out, q8[places.clone()], "{ty} {rows:?}");
            rows_dot_f32(&matrix, rows.clone(), &x, &mut out);
            assert_eq!(out, exact[places], "{ty} {rows:?}");
        }
    }
}

#[test]
fn an_activation_that_is_not_finite_makes_the_result_not_a_number() {
    for ty in WeightType::ALL {
        let n_in = odd_n_in(ty);
        let (layout, _, whole) = finite_matrix(ty, 1, n_in);
        let matrix = PackedMatrix::new(layout, &whole).unwrap();
        let mut x = vec![1.0; n_in as usize];
        x[n_in as usize - 1] = f32::INFINITY;
        let (mut quants, mut groups) =
            (vec![0; x.len()], vec![Q8Group::default(); x.len().div_ceil(32)]);
        quantize_q8(&x, &mut quants, &mut groups);
        let mut out = [0.0; 1];
        rows_dot_q8(&matrix, 0..1, &quants, &groups, &mut out);
        assert!(out[0].is_nan(), "{ty}");
        rows_dot_q8_scalar(&matrix, 0..1, &quants, &groups, &mut out);
        assert!(out[0].is_nan(), "{ty}");
    }
}

#[test]
fn broken_contracts_panic_with_their_names() {
    let (layout, _, whole) = finite_matrix(WeightType::Q4K, 2, 256);
    let matrix = PackedMatrix::new(layout, &whole).unwrap();
    let panics = |dot: &(dyn Fn() + std::panic::RefUnwindSafe), contract: &str| {
        let panic = std::panic::catch_unwind(dot).unwrap_err();
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap();
        assert!(text.contains(contract), "{text}");
    };
    let groups = [Q8Group::default(); 8];
    panics(&|| rows_dot_q8(&matrix, 1..3, &[0; 256], &groups, &mut [0.0; 2]), "rows of the matrix");
    panics(&|| rows_dot_q8(&matrix, 0..2, &[0; 256], &groups, &mut [0.0; 1]), "one result per row");
    panics(&|| rows_dot_q8(&matrix, 0..1, &[0; 255], &groups, &mut [0.0]), "quant per input");
    panics(&|| rows_dot_q8(&matrix, 0..1, &[0; 256], &groups[1..], &mut [0.0]), "group per 32");
    panics(&|| rows_dot_f32(&matrix, 0..1, &[0.0; 257], &mut [0.0]), "activation per input");
    panics(&|| matrix.dequantize_row(2, &mut [0.0; 256]), "a row of the matrix");
}
