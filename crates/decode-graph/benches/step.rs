//! Whole decode steps of a 1B, a 3B and an 8B model, with few and with many tokens in the cache;
//! capturing a step; what a replay costs beside its kernels.

#[path = "../examples/gpu_step/model.rs"]
#[allow(dead_code, reason = "it serves the example, too")]
mod model;
mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use model::SHAPES;
use support::{Gpu, bytes_of};

fn steps(criterion: &mut Criterion) {
    let Some(mut gpu) = Gpu::open("step") else { return };
    let mut group = criterion.benchmark_group("step");
    group.sample_size(20);
    for shape in SHAPES {
        let Some(mut step) = gpu.step("step", shape) else { continue };
        let launches = step.launches.clone();
        for depth in [0, 4000] {
            let bytes = bytes_of(&launches, &step.model, depth);
            group.throughput(Throughput::Bytes(bytes));
            let mut graph = gpu.capture(&mut step, &launches);
            group.bench_function(BenchmarkId::new(shape.name, depth), |bencher| {
                bencher.iter_custom(|runs| gpu.run(&mut step, &mut graph, depth, runs));
            });
        }
        group.bench_function(BenchmarkId::new("capture-and-instantiate", shape.name), |bencher| {
            bencher.iter_with_large_drop(|| gpu.capture(&mut step, &launches));
        });
        if shape.name == "1b" {
            let mut graph = gpu.capture(&mut step, &launches[..1]);
            group.bench_function("replay-of-one-node", |bencher| {
                bencher.iter_custom(|runs| gpu.run(&mut step, &mut graph, 0, runs));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
