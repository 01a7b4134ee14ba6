//! Dequantising, quantising, and activations to 8 bits, on one core.

mod common;

use common::{TYPES, large, on_one_core};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use q4k_soa::{PackedMatrix, Q8Group};

fn dequantize(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("dequantize");
    for ty in TYPES {
        let (layout, source) = large(ty);
        let rows = &source[..64 * layout.row_bytes() as usize];
        let mut weights = vec![0.0; 64 * 4096];
        group.throughput(Throughput::Bytes(rows.len() as u64));
        group.bench_function(format!("source/{ty}"), |bencher| {
            bencher.iter(|| q4k_soa::dequantize(ty, rows, &mut weights).unwrap());
        });

        let mut packed = vec![0; layout.len_bytes() as usize];
        q4k_soa::pack(&layout, &source, &mut packed).unwrap();
        let matrix = PackedMatrix::new(layout, &packed).unwrap();
        group.bench_function(format!("packed/{ty}"), |bencher| {
            bencher.iter(|| {
                for (row, weights) in weights.chunks_exact_mut(4096).enumerate() {
                    matrix.dequantize_row(row as u32, weights);
                }
            });
        });
    }
}

fn quantize(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("quantize");
    let values: Vec<f32> = (0..64 * 4096).map(|i| (i as f32 * 0.7).sin()).collect();
    for ty in TYPES {
        let mut out = vec![0; 64 * ty.row_bytes(4096).unwrap() as usize];
        group.throughput(Throughput::Elements(values.len() as u64));
        group.bench_function(ty.name(), |bencher| {
            on_one_core(|| {
                bencher.iter(|| q4k_soa::quantize(ty, &values, &mut out).unwrap());
            });
        });
    }
}

fn activation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("quantize_q8");
    let x: Vec<f32> = (0..4096).map(|i| (i as f32 * 0.7).sin()).collect();
    let (mut quants, mut groups) = (vec![0; 4096], vec![Q8Group::default(); 128]);
    group.throughput(Throughput::Elements(4096));
    group.bench_function("4096", |bencher| {
        bencher.iter(|| q4k_soa::quantize_q8(&x, &mut quants, &mut groups));
    });
}

criterion_group!(benches, dequantize, quantize, activation);
criterion_main!(benches);
