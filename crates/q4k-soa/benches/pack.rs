//! Source bytes per second and core of packing, unpacking and fingerprinting.

mod common;

use std::hint::black_box;

use common::{TYPES, large, on_one_core};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn pack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pack");
    for ty in TYPES {
        let (layout, source) = large(ty);
        let mut packed = vec![0; layout.len_bytes() as usize];
        group.throughput(Throughput::Bytes(source.len() as u64));
        group.bench_function(ty.name(), |bencher| {
            on_one_core(|| bencher.iter(|| q4k_soa::pack(&layout, &source, &mut packed).unwrap()));
        });
    }
}

fn unpack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("unpack");
    for ty in TYPES {
        let (layout, mut source) = large(ty);
        let mut packed = vec![0; layout.len_bytes() as usize];
        q4k_soa::pack(&layout, &source, &mut packed).unwrap();
        group.throughput(Throughput::Bytes(source.len() as u64));
        group.bench_function(ty.name(), |bencher| {
            on_one_core(|| {
                bencher.iter(|| q4k_soa::unpack(&layout, &packed, &mut source).unwrap());
            });
        });
    }
}

fn fingerprint(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fingerprint");
    let (layout, source) = large(q4k_soa::WeightType::Q4K);
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function("Q4_K", |bencher| {
        bencher.iter(|| black_box(q4k_soa::fingerprint(&layout, &source).unwrap()));
    });
}

criterion_group!(benches, pack, unpack, fingerprint);
criterion_main!(benches);
