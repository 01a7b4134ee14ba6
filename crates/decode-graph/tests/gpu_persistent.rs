//! The persistent step on a GPU: against its twin operation by operation, against the step of
//! operations token by token, with random delays, with a watchdog that fires, and its time.
//!
//! ```text
//! cargo test --release -p decode-graph --features cuda --test gpu_persistent -- --nocapture --test-threads 1
//! ```
//!
//! `PERSISTENT_SHAPES=1b,3b,8b` are the shapes that are timed (1b if unset, none if empty),
//! `PERSISTENT_DEPTHS=0,4096` the tokens in the cache, `PERSISTENT_REPLAYS=1000` the replays with
//! delays, `PERSISTENT_WATCHDOG_US=200000` the longest wait (0 under compute-sanitizer).
#![cfg(feature = "cuda")]

mod persistent_model;

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use decode_graph::{
    Backend, CudaBackend, Drive, Graph, Head, HostBackend, PersistentOptions,
    clear_persistent_failure, persistent_failure,
};
use gpu_slab::cuda::CudaMemory;
use gpu_slab::{DeviceMemory, HostMemory};
use half::f16;
use kernels_ptx::schedule::{HEADER_WORDS, Header, NONE, Op, OpKind};
use persistent_model::{
    MARGIN, Pair, SHAPES, Spec, TINY, VARIANTS, Which, best, margin, memory_bytes, relative_error,
};
use q4k_soa::PackedLayout;

fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The backend of device 0, for one test at a time; `None` where there is none that can, which is
/// said.
fn gpu(test: &str) -> Option<MutexGuard<'static, CudaBackend>> {
    static GPU: OnceLock<Result<Mutex<CudaBackend>, String>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| {
        let backend = CudaBackend::new(0).map_err(|error| error.to_string())?;
        let report = backend.load_report().map_err(|error| error.to_string())?;
        say(&format!("{}\n{report}", backend.cuda_device()));
        match backend.profile().compute_capability {
            0..90 => Err("the device is older than compute capability 9.0".to_owned()),
            _ => Ok(Mutex::new(backend)),
        }
    });
    match gpu {
        Ok(backend) => Some(backend.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(reason) => {
            say(&format!("skipped {test}: {reason}"));
            assert!(std::env::var_os("GPU_TESTS_REQUIRED").is_none(), "{test} was skipped");
            None
        }
    }
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn options() -> PersistentOptions {
    PersistentOptions { watchdog_us: number("PERSISTENT_WATCHDOG_US", 200_000), jitter_ns: 0 }
}

fn device_pair(backend: &CudaBackend, spec: Spec) -> Pair<CudaMemory> {
    let memory = backend.allocate(memory_bytes(&spec)).unwrap();
    Pair::new(memory, backend.profile(), spec)
}

fn graph<B: Backend>(
    backend: &mut B,
    pair: &mut Pair<B::Memory>,
    options: PersistentOptions,
) -> Graph<B> {
    let recording = pair.record_persistent(Head::Greedy, options);
    Graph::capture(backend, &mut pair.slab, &recording).unwrap()
}

/// Panics with the place if the watchdog fired.
fn no_failure(pair: &mut Pair<CudaMemory>, place: &str) {
    let arena = pair.persistent.arena;
    if let Some(failure) = persistent_failure(&mut pair.slab, &arena).unwrap() {
        let exchange = arena.persistent.unwrap().exchange;
        let mut words = [0u32; 8];
        pair.slab.read_view(exchange, 0, bytemuck::cast_slice_mut(&mut words)).unwrap();
        panic!("{place}: {failure}; header of the exchange: {words:?}");
    }
}

fn words<M: DeviceMemory>(pair: &mut Pair<M>, view: gpu_slab::View) -> Vec<u32> {
    let mut words = vec![0u32; view.len_bytes() as usize / 4];
    pair.slab.read_view(view, 0, bytemuck::cast_slice_mut(&mut words)).unwrap();
    words
}

fn unpacked(words: &[u32]) -> Vec<f32> {
    let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
    words.iter().flat_map(|word| [half(word & 0xfffe), half(word >> 16)]).collect()
}

/// Compares every vector that blocks exchanged in the last step, in order; a line for each that is
/// not the same to `tolerance`, and whether there was one.
fn vectors_differ<M: DeviceMemory>(
    found: &mut Pair<M>,
    expected: &mut Pair<HostMemory>,
    tolerance: f32,
) -> bool {
    let arena = found.persistent.arena.persistent.unwrap();
    let table = words(found, arena.table);
    let hosts = expected.persistent.arena.persistent.unwrap();
    assert_eq!(table, words(expected, hosts.table), "the schedules differ");
    let (ours, theirs) = (words(found, arena.exchange), words(expected, hosts.exchange));
    let (header, ops) = table.split_at(HEADER_WORDS as usize);
    let header: &Header = bytemuck::from_bytes(bytemuck::cast_slice(header));
    let ops: &[Op] = bytemuck::cast_slice(ops);
    let dim = header.head_dim;
    let n_ff = found.spec.dims.n_ff;
    let mut lines = 0;
    for op in &ops[..header.n_ops as usize] {
        let qkv = (header.n_head + 2 * header.n_kv_head) * dim;
        let vectors = match op.kind {
            0 => {
                vec![("q, k, v", op.output, qkv), ("attention", op.attention, header.n_head * dim)]
            }
            1 => vec![("output projection", op.output, header.n_embd)],
            2 => vec![("gate and up", op.output, n_ff)],
            3 => vec![("down", op.output, header.n_embd)],
            _ => vec![],
        };
        for (what, at, elems) in vectors {
            assert_ne!(at, NONE);
            let range = at as usize..(at + elems / 2) as usize;
            let (ours, theirs) = (&ours[range.clone()], &theirs[range]);
            let phases = ours.iter().zip(theirs).filter(|(a, b)| (*a ^ *b) & 1 != 0).count();
            let (ours, theirs) = (unpacked(ours), unpacked(theirs));
            let error = relative_error(&ours, &theirs);
            if phases > 0 || error.is_nan() || error > tolerance {
                let largest = theirs.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                let off = |(a, b): (&f32, &f32)| {
                    a.is_nan() || b.is_nan() || (a - b).abs() > 4.0 * tolerance * largest
                };
                let pairs = || ours.iter().zip(&theirs);
                let first = pairs().position(off).unwrap_or(0);
                let count = pairs().filter(|&pair| off(pair)).count();
                say(&format!(
                    "  layer {} {what}: relative error {error:.2e}, {phases} words of {} in the \
                     wrong phase, {count} elements off, first at {first}: found {:?}, expected {:?}",
                    op.layer,
                    elems / 2,
                    &ours[first..(first + 6).min(ours.len())],
                    &theirs[first..(first + 6).min(theirs.len())],
                ));
                lines += 1;
                if lines == 8 {
                    return true;
                }
            }
        }
        if op.kind == OpKind::Logits as u32 {
            break;
        }
    }
    lines > 0
}

/// Relative error of logits that roundings tipped the other way make.
const TIPPED: f32 = 4e-2;
/// The same of a vector that blocks exchange, which is shorter and in the midst of it.
const VECTOR_TIPPED: f32 = 0.1;

/// How near logits are to the twin's.
struct Nearness {
    /// In the first step, and its vectors.
    first: f32,
    first_vectors: f32,
    /// In half of the steps.
    half: f32,
}

/// Feeds both the same tokens and compares vectors after the first steps, logits after all.
fn follows_its_twin(backend: &mut CudaBackend, spec: Spec, steps: u32, nearness: &Nearness) {
    let mut ours = device_pair(backend, spec);
    let memory = HostMemory::new(memory_bytes(&spec)).unwrap();
    let mut hosts = Pair::new(memory, backend.profile(), spec);
    let geometry = ours.record_persistent(Head::Greedy, options()).launches[0].geometry;
    say(&format!(
        "{}: {} blocks, {} bytes of shared memory",
        spec.name, geometry.grid[0], geometry.shared_bytes
    ));
    let (mut our_graph, mut host_graph) =
        (graph(backend, &mut ours, options()), graph(&mut HostBackend, &mut hosts, options()));
    assert_eq!(our_graph.telemetry().nodes, 1);
    let mut errors = Vec::new();
    for position in 0..steps {
        let given = [ours.params(position, position * 37 % spec.dims.n_vocab)];
        let drive = Drive::Host(&given);
        let which = Which::Persistent;
        let (token, logits) = ours.step(backend, &mut our_graph, which, drive);
        no_failure(&mut ours, spec.name);
        let (expected_token, expected) =
            hosts.step(&mut HostBackend, &mut host_graph, which, drive);
        let error = relative_error(&logits, &expected);
        errors.push(error);
        // The same until a last bit tips the rounding of an activation to i8.
        let [tolerance, of_vectors] = match position {
            0 => [nearness.first, nearness.first_vectors],
            _ => [TIPPED, VECTOR_TIPPED],
        };
        let near = error < tolerance;
        if position < 4 || !near {
            let differ = vectors_differ(&mut ours, &mut hosts, of_vectors);
            assert!(!differ && near, "{}, position {position}: {error}", spec.name);
        }
        if token != expected_token {
            let margin = margin(&expected);
            assert!(margin < MARGIN, "{}: {token}, not {expected_token}, by {margin}", spec.name);
        }
    }
    let first = errors[0];
    errors.sort_by(f32::total_cmp);
    let (half, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    assert!(half < nearness.half, "{}: half of the steps differ by {half} and more", spec.name);
    say(&format!(
        "{}: logits of {steps} steps: first {first:.1e}, half within {half:.1e}, all within {worst:.1e}",
        spec.name
    ));
}

#[test]
fn a_it_follows_its_twin() {
    let Some(mut gpu) = gpu("persistent step follows its twin") else { return };
    let nearness = Nearness { first: 1e-6, first_vectors: 1e-3, half: 2e-2 };
    for spec in VARIANTS {
        let steps = if spec.context == 1000 { 450 } else { (spec.context + 12).min(70) };
        follows_its_twin(&mut gpu, spec, steps, &nearness);
    }
}

#[test]
fn b_it_follows_its_twin_at_1b_shape() {
    let Some(mut gpu) = gpu("persistent step of the 1B shape follows its twin") else { return };
    // In 16 layers of 2048 some rounding tips even in the first step.
    let nearness = Nearness { first: TIPPED, first_vectors: VECTOR_TIPPED, half: TIPPED };
    follows_its_twin(&mut gpu, Spec { context: 256, ..SHAPES[0] }, 3, &nearness);
}

/// Greedy tokens of a run by itself from a token, with a hash of the last logits, of which the last
/// token is the best.
fn greedy(
    backend: &mut CudaBackend,
    pair: &mut Pair<CudaMemory>,
    graph: &mut Graph<CudaBackend>,
    which: Which,
    steps: u32,
) -> (Vec<u32>, u64) {
    let first = [pair.params(0, 17)];
    let mut ids = Vec::new();
    for position in 0..steps {
        let drive = if position == 0 { Drive::Host(&first) } else { Drive::SelfAdvance };
        graph.replay(backend, &mut pair.slab, drive).unwrap();
        let token = pair.arena(which).token;
        ids.push(pair.u32(token));
    }
    let logits = pair.arena(which).logits;
    let logits = pair.floats(logits, pair.spec.dims.n_vocab as usize);
    assert_eq!(ids.last().copied(), Some(best(&logits)), "{}", pair.spec.name);
    (ids, xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(&logits)))
}

#[test]
fn c_greedy_tokens_are_those_of_the_step_of_operations() {
    let Some(mut gpu) = gpu("greedy tokens of both steps") else { return };
    let gpu = &mut *gpu;
    for spec in [TINY, VARIANTS[3], Spec { context: 1024, ..SHAPES[0] }] {
        let mut pair = device_pair(gpu, spec);
        let mut ops = pair.capture(gpu, Which::Ops);
        let mut persistent = graph(gpu, &mut pair, options());
        // Each is fed what the step of operations chose, so that one near tie ends nothing.
        let (mut same, mut ties, mut worst) = (0, 0, 0.0f32);
        let mut token = 17;
        for position in 0..400 {
            let given = [pair.params(position, token)];
            let drive = Drive::Host(&given);
            let (expected, logits) = pair.step(gpu, &mut ops, Which::Ops, drive);
            let (found, ours) = pair.step(gpu, &mut persistent, Which::Persistent, drive);
            no_failure(&mut pair, spec.name);
            worst = worst.max(relative_error(&ours, &logits));
            if found == expected {
                same += 1;
            } else {
                ties += 1;
                let margin = margin(&logits);
                assert!(margin < MARGIN, "{}, {position}: margin {margin}", spec.name);
            }
            token = expected;
        }
        assert!(same > ties, "{}: {ties} of 400 greedy tokens differ", spec.name);
        say(&format!(
            "{}: {same} of 400 greedy tokens the same, {ties} near ties, logits within {worst:.1e}",
            spec.name
        ));
    }
}

#[test]
fn d_nothing_depends_on_timing() {
    let Some(mut gpu) = gpu("random delays") else { return };
    let gpu = &mut *gpu;
    let replays = number("PERSISTENT_REPLAYS", 1000);
    for spec in [TINY, VARIANTS[3]] {
        let mut pair = device_pair(gpu, spec);
        let mut calm = graph(gpu, &mut pair, options());
        let steps = 40;
        let expected = greedy(gpu, &mut pair, &mut calm, Which::Persistent, steps);
        no_failure(&mut pair, spec.name);
        for jitter_ns in [300, 3000, 20_000] {
            let mut delayed = graph(gpu, &mut pair, PersistentOptions { jitter_ns, ..options() });
            for round in 0..replays / 3 / steps {
                let found = greedy(gpu, &mut pair, &mut delayed, Which::Persistent, steps);
                no_failure(&mut pair, spec.name);
                assert_eq!(found, expected, "{}: {jitter_ns} ns, round {round}", spec.name);
            }
        }
        say(&format!("{}: {replays} replays with delays, all equal", spec.name));
    }
}

#[test]
fn e_a_lost_peer_is_an_error_and_no_hang() {
    let Some(mut gpu) = gpu("watchdog") else { return };
    let gpu = &mut *gpu;
    let mut pair = device_pair(gpu, TINY);
    let options = PersistentOptions { watchdog_us: 2000, jitter_ns: 0 };
    let mut step = graph(gpu, &mut pair, options);
    let expected = greedy(gpu, &mut pair, &mut step, Which::Persistent, 5);
    no_failure(&mut pair, "before");
    let arena = pair.persistent.arena;
    let exchange = arena.persistent.unwrap().exchange;
    // An epoch that the counters have not reached: nobody's input ever comes.
    pair.slab.write_view(exchange, 0, &9u32.to_le_bytes()).unwrap();
    let start = Instant::now();
    let given = [pair.params(0, 17)];
    step.replay(gpu, &mut pair.slab, Drive::Host(&given)).unwrap();
    gpu.synchronize().unwrap();
    let failure = persistent_failure(&mut pair.slab, &arena).unwrap();
    say(&format!("after {:.1} ms: {}", start.elapsed().as_secs_f64() * 1e3, failure.unwrap()));
    assert_eq!(words(&mut pair, arena.tokens), [0, 0, 17], "no token was chosen");
    // A step that fails by itself leaves the buffer in order; this one was put out of order.
    clear_persistent_failure(&mut pair.slab, &arena).unwrap();
    pair.slab.fill_view(exchange, 0).unwrap();
    assert_eq!(greedy(gpu, &mut pair, &mut step, Which::Persistent, 5), expected);
    no_failure(&mut pair, "after");
}

/// Bytes that a token needs of the weights as the file has them, and of the cache at a depth.
fn bytes(pair: &Pair<CudaMemory>, depth: u32) -> (u64, u64) {
    let weights = &pair.ops.weights;
    let layers = weights.layers.iter().flat_map(|l| [l.q, l.k, l.v, l.o, l.gate, l.up, l.down]);
    let source = layers
        .chain([weights.output])
        .map(|w| PackedLayout::planes(w.weight_type, w.shape).unwrap().source_bytes())
        .sum();
    let kv = &pair.ops.plan.kv;
    (source, kv.total_bytes() * u64::from(depth) / u64::from(kv.max_context_tokens()))
}

#[test]
fn f_time_of_a_token() {
    let Some(mut gpu) = gpu("time of a token") else { return };
    let gpu = &mut *gpu;
    let list = |name: &str, default: &str| -> Vec<String> {
        let value = std::env::var(name).unwrap_or_else(|_| default.to_owned());
        value.split(',').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    };
    for name in list("PERSISTENT_SHAPES", "1b") {
        let Some(spec) = SHAPES.iter().find(|spec| spec.name == name) else {
            panic!("no shape {name}")
        };
        let start = Instant::now();
        let mut pair = device_pair(gpu, *spec);
        say(&format!("{name}: made in {:.1} s", start.elapsed().as_secs_f64()));
        let mut ops = pair.capture(gpu, Which::Ops);
        let mut persistent = graph(gpu, &mut pair, options());
        for depth in list("PERSISTENT_DEPTHS", "0,4096") {
            let depth: u32 = depth.parse().unwrap();
            let (weight_bytes, kv_bytes) = bytes(&pair, depth + 64);
            for (what, step) in [("ops", &mut ops), ("persistent", &mut persistent)] {
                const STEPS: u32 = 128;
                let mut times = Vec::new();
                for repeat in 0..6 {
                    let first = [pair.params(depth, 17)];
                    step.replay(gpu, &mut pair.slab, Drive::Host(&first)).unwrap();
                    gpu.synchronize().unwrap();
                    let start = Instant::now();
                    for _ in 0..STEPS {
                        step.replay(gpu, &mut pair.slab, Drive::SelfAdvance).unwrap();
                    }
                    gpu.synchronize().unwrap();
                    if repeat > 0 {
                        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(STEPS));
                    }
                }
                times.sort_by(f64::total_cmp);
                let us = times[times.len() / 2];
                say(&format!(
                    "{name} {what} at depth {depth}: {us:.1} us, {:.0} tokens/s, {:.0} GB/s \
                     ({:.3} GB weights, {:.3} GB cache), fastest {:.1} us",
                    1e6 / us,
                    (weight_bytes + kv_bytes) as f64 / us / 1e3,
                    weight_bytes as f64 / 1e9,
                    kv_bytes as f64 / 1e9,
                    times[0],
                ));
            }
            no_failure(&mut pair, &name);
        }
    }
}
