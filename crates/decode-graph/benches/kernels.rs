//! Each kernel of the decode step at the shapes of a 1B, a 3B and an 8B model, in microseconds a
//! launch: the launches of eight layers back to back in one graph, so that weights come from memory
//! and not from the cache.

#[path = "../examples/gpu_step/model.rs"]
#[allow(dead_code, reason = "it serves the example, too")]
mod model;
mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use decode_graph::{ByteRange, Launch, ModelDims};

use model::{SHAPES, Shape};
use support::{Gpu, bytes_of};

const DEPTHS: [u32; 2] = [0, 4000];

fn kernels(criterion: &mut Criterion) {
    let Some(mut gpu) = Gpu::open("kernels") else { return };
    for shape in SHAPES {
        let dims = ModelDims { n_layer: 8, ..shape.dims };
        let Some(mut step) = gpu.step("kernels", Shape { dims, ..shape }) else { continue };
        let mut group = criterion.benchmark_group(shape.name);
        group.sample_size(20);
        for (what, launches) in kinds(&step.launches) {
            let attention = launches[0].kernel.source().starts_with("attention");
            for depth in if attention { &DEPTHS[..] } else { &DEPTHS[..1] } {
                let bytes = bytes_of(&launches, &step.model, *depth) / launches.len() as u64;
                group.throughput(Throughput::Bytes(bytes));
                let id = BenchmarkId::new(what.replace(' ', "-"), depth);
                let mut graph = gpu.capture(&mut step, &launches);
                group.bench_function(id, |bencher| {
                    bencher.iter_custom(|iterations| {
                        let runs = iterations.div_ceil(launches.len() as u64);
                        let took = gpu.run(&mut step, &mut graph, *depth, runs);
                        took.mul_f64(iterations as f64 / (runs * launches.len() as u64) as f64)
                    });
                });
            }
        }
        group.finish();
    }
}

/// The launches by what they compute, those that a step has once several times.
fn kinds(launches: &[Launch<ByteRange>]) -> Vec<(&'static str, Vec<Launch<ByteRange>>)> {
    let mut kinds: Vec<(&str, Vec<Launch<ByteRange>>)> = Vec::new();
    for launch in launches {
        match kinds.iter_mut().find(|(what, _)| *what == launch.label.what) {
            Some((_, same)) => same.push(launch.clone()),
            None => kinds.push((launch.label.what, vec![launch.clone()])),
        }
    }
    for (_, same) in &mut kinds {
        if let [only] = &same[..] {
            *same = vec![only.clone(); 8];
        }
    }
    kinds
}

criterion_group!(benches, kernels);
criterion_main!(benches);
