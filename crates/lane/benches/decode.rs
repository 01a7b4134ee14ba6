//! The embedded model on the host: one decode step, and loading.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lane::{DriveMode, GenerateOptions, LaneOptions, ModelFile, Sampling};

fn decode(c: &mut Criterion) {
    let file = ModelFile::open(None).unwrap();
    let lane = file.load(&LaneOptions::default(), &mut |_| {}).unwrap();
    let prompt = [0, 35, 452, 443];
    // Enough tokens that the prompt is nothing beside them; the ring keeps the depth bounded.
    const TOKENS: u32 = 256;
    let mut group = c.benchmark_group("host step, embedded model");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    for (name, drive) in [("self", DriveMode::SelfAdvance), ("host", DriveMode::Host)] {
        group.bench_function(name, |b| {
            b.iter(|| {
                let options = GenerateOptions {
                    n_tokens: TOKENS,
                    sampling: Sampling::GREEDY,
                    drive,
                    ignore_end: true,
                    ..Default::default()
                };
                lane.generate(&prompt, options).unwrap().map(|token| token.unwrap().id).sum::<u32>()
            });
        });
    }
    group.finish();
}

fn load(c: &mut Criterion) {
    let file = ModelFile::open(None).unwrap();
    let mut group = c.benchmark_group("load, embedded model");
    group.throughput(Throughput::Bytes(file.model.matrices().map(|m| m.n_bytes()).sum()));
    group.bench_function("host", |b| {
        b.iter(|| file.load(&LaneOptions::default(), &mut |_| {}).unwrap());
    });
    group.finish();
}

criterion_group!(benches, decode, load);
criterion_main!(benches);
