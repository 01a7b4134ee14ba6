//! What a step costs on the host: planning one sequence, and the life of many.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_paged::{
    BlockTable, Delta, GroupId, LayerGroup, Listed, PagedKvConfig, Planner, PlannerConfig, Request,
    SequenceId,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

const CONTEXT: u32 = 8192;
const LONG: u32 = 4096;

fn planner() -> Planner {
    let groups = vec![LayerGroup::full(28, 64 * 512)];
    Planner::new(PlannerConfig::new(groups, 128, CONTEXT).unwrap())
}

fn text(salt: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i ^ salt).wrapping_mul(2_654_435_761) % 128_000).collect()
}

fn create(planner: &mut Planner, prompt: &[u32]) -> SequenceId {
    planner.create(&Request { prompt, max_tokens: CONTEXT, salt: 0 }).unwrap().id
}

/// A sequence whose first `LONG` tokens are computed.
fn computed(planner: &mut Planner, text: &[u32]) -> SequenceId {
    let id = create(planner, &[]);
    planner.append(id, text).unwrap();
    planner.commit(id, text.len() as u32).unwrap();
    id
}

fn one_sequence(c: &mut Criterion) {
    let mut group = c.benchmark_group("one sequence");
    let config = PagedKvConfig::new(28, 8, 128, CONTEXT).unwrap();
    group.bench_function("configuration and layout", |b| {
        b.iter(|| PagedKvConfig::new(black_box(28), 8, 128, black_box(CONTEXT)).unwrap().layout());
    });
    group.bench_function("identity table, 28 x 512", |b| b.iter(|| BlockTable::identity(&config)));
    let entries: Vec<u32> =
        BlockTable::identity(&config).entries().iter().map(|e| (e * 5 + 3) % 512).collect();
    group.bench_function("table from a permutation, 28 x 512", |b| {
        b.iter(|| BlockTable::from_permutation(&config, entries.clone()).unwrap());
    });
    group.finish();
}

fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append");
    group.throughput(Throughput::Elements(1));
    for commit in [false, true] {
        let name = if commit { "1 token and commit" } else { "1 token" };
        group.bench_function(name, |b| {
            let mut planner = planner();
            let text = text(1, LONG);
            let id = create(&mut planner, &[]);
            let mut delta = Delta::new();
            b.iter_custom(|iterations| {
                let (mut left, mut spent) = (iterations, Duration::ZERO);
                while left > 0 {
                    let n = left.min(u64::from(LONG));
                    let start = Instant::now();
                    for token in &text[..n as usize] {
                        planner.append(id, core::slice::from_ref(token)).unwrap();
                        if commit {
                            planner.commit(id, 1).unwrap();
                        }
                    }
                    spent += start.elapsed();
                    left -= n;
                    planner.truncate(id, 0).unwrap();
                    planner.drop_cached();
                    planner.take_delta(&mut delta);
                }
                spent
            });
        });
    }
    group.finish();
}

/// Times `timed` alone; `undo` brings the planner back.
fn bench_undone<T>(
    b: &mut criterion::Bencher<'_>,
    planner: &mut Planner,
    mut timed: impl FnMut(&mut Planner) -> T,
    mut undo: impl FnMut(&mut Planner, T),
) {
    b.iter_custom(|iterations| {
        let mut spent = Duration::ZERO;
        for _ in 0..iterations {
            let start = Instant::now();
            let made = timed(planner);
            spent += start.elapsed();
            undo(planner, made);
        }
        spent
    });
}

fn sharing(c: &mut Criterion) {
    let mut group = c.benchmark_group("sharing");
    let mut delta = Delta::new();
    group.bench_function("fork of 4096 tokens", |b| {
        let mut planner = planner();
        let parent = computed(&mut planner, &text(1, LONG));
        bench_undone(
            b,
            &mut planner,
            |p| p.fork(parent).unwrap(),
            |p, child| {
                p.free(child).unwrap();
                p.take_delta(&mut delta);
            },
        );
    });
    group.bench_function("prefix match of 4096 tokens", |b| {
        let mut planner = planner();
        // Other sequences' blocks lie between, as they would.
        let others: Vec<SequenceId> =
            (2..8).map(|salt| computed(&mut planner, &text(salt, LONG))).collect();
        let first = computed(&mut planner, &text(1, LONG));
        others.into_iter().chain([first]).for_each(|id| planner.free(id).unwrap());
        let prompt = text(1, LONG + 1);
        bench_undone(
            b,
            &mut planner,
            |p| {
                let created =
                    p.create(&Request { prompt: &prompt, max_tokens: CONTEXT, salt: 0 }).unwrap();
                assert_eq!(created.cached_tokens, LONG);
                created.id
            },
            |p, id| {
                p.free(id).unwrap();
                p.take_delta(&mut delta);
            },
        );
    });
    group.bench_function("free of 4096 tokens", |b| {
        let mut planner = planner();
        let parent = computed(&mut planner, &text(1, LONG));
        let mut child = planner.fork(parent).unwrap();
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                let start = Instant::now();
                planner.free(child).unwrap();
                spent += start.elapsed();
                child = planner.fork(parent).unwrap();
            }
            spent
        });
    });
    group.finish();
}

fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode step of 64 sequences");
    group.throughput(Throughput::Elements(64));
    group.bench_function("append, delta, commit", |b| {
        let mut planner = planner();
        let ids: Vec<SequenceId> =
            (0..64).map(|salt| computed(&mut planner, &text(salt, 1000 + salt))).collect();
        let mut delta = Delta::new();
        let mut steps = 0_u32;
        b.iter(|| {
            for &id in &ids {
                planner.append(id, &[steps]).unwrap();
            }
            planner.take_delta(&mut delta);
            for &id in &ids {
                planner.commit(id, 1).unwrap();
            }
            steps += 1;
            if steps.is_multiple_of(4096) {
                for &id in &ids {
                    planner.truncate(id, 1000).unwrap();
                }
            }
            delta.value_bytes()
        });
    });
    group.bench_function("page lists", |b| {
        let mut planner = planner();
        let batch: Vec<Option<SequenceId>> =
            (0..64).map(|salt| Some(computed(&mut planner, &text(salt, 1000 + salt)))).collect();
        let (mut indptr, mut indices, mut last) = (vec![0_i32; 65], vec![0; 64 * 512], vec![0; 64]);
        b.iter(|| {
            let out = kv_paged::CsrBuffers {
                indptr: &mut indptr,
                indices: &mut indices,
                last_block_len: &mut last,
            };
            planner.write_csr(&batch, GroupId(0), Listed::Logical, out).unwrap()
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = one_sequence, append, sharing, step
}
criterion_main!(benches);
