//! Source bytes per second and core of matrix-vector products.

mod common;

use common::{TYPES, large};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use q4k_soa::matvec::rows_dot_q8_scalar;
use q4k_soa::{PackedMatrix, Q8Group, rows_dot_f32, rows_dot_q8};

fn matvec(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("matvec");
    let x: Vec<f32> = (0..4096).map(|i| (i as f32 * 0.7).sin()).collect();
    let (mut quants, mut groups) = (vec![0; 4096], vec![Q8Group::default(); 128]);
    q4k_soa::quantize_q8(&x, &mut quants, &mut groups);
    for ty in TYPES {
        let (layout, source) = large(ty);
        let mut packed = vec![0; layout.len_bytes() as usize];
        q4k_soa::pack(&layout, &source, &mut packed).unwrap();
        let matrix = PackedMatrix::new(layout, &packed).unwrap();
        let mut out = vec![0.0; matrix.n_out() as usize];
        group.throughput(Throughput::Bytes(source.len() as u64));
        group.bench_function(format!("q8/{ty}"), |bencher| {
            bencher.iter(|| rows_dot_q8(&matrix, matrix.rows(), &quants, &groups, &mut out));
        });
        group.bench_function(format!("q8_scalar/{ty}"), |bencher| {
            bencher.iter(|| rows_dot_q8_scalar(&matrix, matrix.rows(), &quants, &groups, &mut out));
        });
        group.bench_function(format!("f32/{ty}"), |bencher| {
            bencher.iter(|| rows_dot_f32(&matrix, matrix.rows(), &x, &mut out));
        });
    }
}

criterion_group!(benches, matvec);
criterion_main!(benches);
