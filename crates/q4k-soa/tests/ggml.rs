//! Comparison with ggml, through what it answered: see `tools/reference_errors.py`.

mod common;

use common::{Random, finite_blocks};
use q4k_soa::{WeightType, dequantize, quantize};

/// Lines of a CSV file without its comment and its header.
fn lines(csv: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    csv.lines().skip(2).map(|line| line.split(',').collect())
}

fn type_named(name: &str) -> WeightType {
    WeightType::ALL.into_iter().find(|ty| ty.name() == name).unwrap()
}

#[test]
fn dequantised_weights_are_ggmls_bit_for_bit() {
    let mut types = 0;
    for line in lines(include_str!("data/ggml_dequantised.csv")) {
        let ty = type_named(line[0]);
        let source = finite_blocks(ty, 1024 / ty.block_elems() as usize, &mut Random::new(2));
        let mut weights = [0.0; 1024];
        dequantize(ty, &source, &mut weights).unwrap();
        for (weight, expected) in weights.iter().zip(&line[2..]) {
            assert_eq!(*weight, expected.parse::<f32>().unwrap(), "{ty}");
        }
        let hash = fnv1a(weights.iter().flat_map(|weight| weight.to_le_bytes()));
        assert_eq!(format!("{hash:016x}"), line[1], "{ty}");
        types += 1;
    }
    assert_eq!(types, WeightType::ALL.len());
}

fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes
        .fold(0xcbf29ce484222325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

#[test]
fn quantisers_err_at_most_2_percent_more_than_ggmls() {
    const N: usize = 32 * 1024;
    for (distribution, draw) in [
        ("gaussian", Random::gaussian as fn(&mut Random) -> f64),
        ("student_t3", Random::student_t3),
    ] {
        let mut random = Random::new(1);
        let values: Vec<f32> = (0..N).map(|_| (0.02 * draw(&mut random)) as f32).collect();
        let mut types = 0;
        for line in lines(include_str!("data/ggml_errors.csv")) {
            if line[1] != distribution {
                continue;
            }
            let ty = type_named(line[0]);
            let expected: f64 = line[2].parse().unwrap();
            let error = relative_rms_error(ty, &values);
            println!(
                "{ty:5} {distribution:10} {error:.6}, ggml {expected:.6}: {:.4}",
                error / expected
            );
            assert!(error < 1.02 * expected, "{ty} {distribution}: {error} against {expected}");
            types += 1;
        }
        assert_eq!(types, WeightType::ALL.len() - 1, "all but F32, which errs by nothing");
    }
}

fn relative_rms_error(ty: WeightType, values: &[f32]) -> f64 {
    let mut source = vec![0; ty.row_bytes(values.len() as u32).unwrap() as usize];
    quantize(ty, values, &mut source).unwrap();
    let mut weights = vec![0.0; values.len()];
    dequantize(ty, &source, &mut weights).unwrap();
    let squares = |of: &dyn Fn(usize) -> f32| -> f64 {
        (0..values.len()).map(|i| f64::from(of(i)).powi(2)).sum()
    };
    (squares(&|i| weights[i] - values[i]) / squares(&|i| values[i])).sqrt()
}
