//! What the allocator costs on the host: nothing here may be felt in a decode step.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use gpu_slab::{Allocate, HostMemory, Plan, Slab, SlabError, View};

fn slab() -> Slab<HostMemory> {
    Slab::new(HostMemory::new(64 << 20).unwrap())
}

fn allocate_and_rewind(c: &mut Criterion) {
    let mut slab = slab();
    slab.allocate("weights", 1 << 20).unwrap();
    slab.seal();
    let step = slab.checkpoint();
    c.bench_function("allocate + rewind", |b| {
        b.iter(|| {
            let view = slab.allocate(black_box("attention out"), black_box(4096)).unwrap();
            slab.rewind(step).unwrap();
            view
        });
    });
    c.bench_function("16 allocations + rewind", |b| {
        b.iter(|| {
            for _ in 0..16 {
                black_box(slab.allocate(black_box("attention out"), black_box(4096)).unwrap());
            }
            slab.rewind(step).unwrap();
        });
    });
}

/// A history of 1000 rewinds none of which hides another: the longest search there is.
fn check_views(c: &mut Criterion) {
    let mut slab = slab();
    let oldest = slab.allocate("weights", 256).unwrap();
    for _ in 0..1000 {
        slab.allocate("kept", 256).unwrap();
        let kept = slab.checkpoint();
        slab.allocate("temporary", 256).unwrap();
        slab.rewind(kept).unwrap();
    }
    let newest = slab.allocate("hidden", 256).unwrap();
    c.bench_function("device_ptr, nothing rewound since", |b| {
        b.iter(|| slab.device_ptr(black_box(newest)).unwrap());
    });
    c.bench_function("device_ptr, 1000 rewinds since", |b| {
        b.iter(|| slab.device_ptr(black_box(oldest)).unwrap());
    });
}

fn write_step_parameters(c: &mut Criterion) {
    let mut slab = slab();
    let step = slab.allocate_zeroed("position, slot, token", 12).unwrap();
    c.bench_function("write_view of 12 bytes", |b| {
        b.iter(|| slab.write_view(black_box(step), 0, black_box(&[7; 12])).unwrap());
    });
}

fn plan_a_model(c: &mut Criterion) {
    fn layout(arena: &mut impl Allocate) -> Result<Vec<View>, SlabError> {
        (0..300).map(|index| arena.allocate("layer matrix", 1000 * index)).collect()
    }
    c.bench_function("plan of 300 allocations", |b| {
        b.iter_batched(
            || (),
            |()| Plan::of(|arena| layout(black_box(arena))).unwrap(),
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, allocate_and_rewind, check_views, write_step_parameters, plan_a_model);
criterion_main!(benches);
