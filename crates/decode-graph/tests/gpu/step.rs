//! The recorded step on a GPU: the host's results, from the same recording.

use decode_graph::{
    Backend, CudaBackend, Drive, Graph, GraphError, Head, HostBackend, Numerics, StepArena,
};
use gpu_slab::cuda::{CudaMemory, CudaStream};
use gpu_slab::{DeviceMemory, SlabError};
use kernels_ptx::TokenParams;
use kv_paged::KvType;

use crate::device::{self, say};
use crate::fake::is_fake;
use crate::support::{CONTEXT, DIMS, MEMORY_BYTES, Tiny};

type GpuTiny = Tiny<CudaMemory>;

fn params(position: u32, token_id: u32) -> TokenParams {
    TokenParams { absolute_position: position, ring_slot: position % CONTEXT, token_id }
}

fn tiny(backend: &CudaBackend, numerics: Numerics, kv_type: KvType, shuffled: bool) -> GpuTiny {
    let memory = backend.allocate(MEMORY_BYTES).unwrap();
    Tiny::in_memory(memory, backend.profile(), numerics, kv_type, shuffled, 1)
}

/// The host's model with the GPU's plan: the same segments and slices, and so the same sums.
fn host_tiny(backend: &CudaBackend, numerics: Numerics, kv_type: KvType) -> Tiny {
    let memory = gpu_slab::HostMemory::new(MEMORY_BYTES).unwrap();
    Tiny::in_memory(memory, backend.profile(), numerics, kv_type, false, 1)
}

/// One step driven by the host; the token that it chose, and the logits.
fn step<B: Backend>(
    backend: &mut B,
    tiny: &mut Tiny<B::Memory>,
    graph: &mut Graph<B>,
    drive: Drive<'_>,
) -> (u32, Vec<f32>) {
    graph.replay(backend, &mut tiny.slab, drive).unwrap();
    (tiny.u32(tiny.arena.token), tiny.logits())
}

fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

/// How far the best logit is ahead.
fn margin(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}

#[test]
fn s19_greedy_ids_are_the_hosts_over_200_tokens_with_exact_numerics() {
    let Some(mut gpu) = device::gpu("greedy ids over 200 tokens") else { return };
    let gpu = &mut *gpu;
    let mut ours = tiny(gpu, Numerics::Exact, KvType::F32, true);
    let mut hosts = host_tiny(gpu, Numerics::Exact, KvType::F32);
    let (mut our_graph, mut host_graph) =
        (ours.capture_on(gpu, Head::Greedy), hosts.capture(Head::Greedy));
    let mut worst = 0.0f32;
    for position in 0..200 {
        let first = [params(0, 17)];
        let drive = if position == 0 { Drive::Host(&first) } else { Drive::SelfAdvance };
        let (token, logits) = step(gpu, &mut ours, &mut our_graph, drive);
        let (expected, host_logits) = step(&mut HostBackend, &mut hosts, &mut host_graph, drive);
        let error = relative_error(&logits, &host_logits);
        worst = worst.max(error);
        assert!(error < 1e-4, "position {position}: logits differ by {error}");
        if token != expected {
            let margin = margin(&host_logits);
            assert!(margin < 1e-3, "position {position}: {token}, not {expected}, margin {margin}");
            say(&format!(
                "greedy ids: the same for {position} tokens, then a margin of {margin}\n"
            ));
            return;
        }
    }
    say(&format!("greedy ids: the same for 200 tokens, logits within {worst:.1e}\n"));
}

#[test]
fn q8_numerics_follow_the_host() {
    let Some(mut gpu) = device::gpu("q8 numerics follow the host") else { return };
    let gpu = &mut *gpu;
    let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, true);
    let mut hosts = host_tiny(gpu, Numerics::Q8, KvType::F16);
    let (mut our_graph, mut host_graph) =
        (ours.capture_on(gpu, Head::Greedy), hosts.capture(Head::Greedy));
    let mut errors = Vec::new();
    for position in 0..100u32 {
        let given = [params(position, (position * 37 + 11) % DIMS.n_vocab)];
        let (_, logits) = step(gpu, &mut ours, &mut our_graph, Drive::Host(&given));
        let (_, expected) =
            step(&mut HostBackend, &mut hosts, &mut host_graph, Drive::Host(&given));
        errors.push(relative_error(&logits, &expected));
    }
    // Until a last bit of an f32 tips the rounding of an i8 or an f16 the two are the same; from
    // then on their caches differ by as much as q8 numerics differ from exact ones.
    errors.sort_by(f32::total_cmp);
    // What is no number comes last.
    let worst = errors[99];
    say(&format!("q8 numerics: logits within {worst:.1e}, half of them {:.1e}\n", errors[50]));
    assert!(errors[0] < 1e-5 && worst < 3e-2, "{errors:?}");
}

#[test]
fn s10_s18_a_step_uploads_12_bytes_or_none_and_nothing_else_happens() {
    let Some(mut gpu) = device::gpu("H2D bytes, node count, counters") else { return };
    let gpu = &mut *gpu;
    let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let launches = ours.record().launches.len();
    let mut graph = ours.capture_on(gpu, Head::Greedy);
    assert_eq!(graph.telemetry().nodes, launches);
    let mut hosts = host_tiny(gpu, Numerics::Q8, KvType::F16);
    assert_eq!(graph.telemetry().nodes, hosts.capture(Head::Greedy).telemetry().nodes);

    for (name, bytes) in [("host", 12), ("self", 0)] {
        for position in 0..20 {
            let given = [params(position, 5)];
            let drive = if bytes == 12 { Drive::Host(&given) } else { Drive::SelfAdvance };
            let before = gpu.counters();
            graph.replay(gpu, &mut ours.slab, drive).unwrap();
            let replayed = gpu.counters().since(before);
            ours.u32(ours.arena.token);
            let with_token = gpu.counters().since(before);
            if position == 0 {
                continue; // staging memory is allocated
            }
            assert_eq!(graph.telemetry().h2d_bytes_per_token, Some(bytes), "{name}");
            assert_eq!(replayed.allocations, 0, "{name}");
            assert_eq!(replayed.synchronizations, 0, "{name}: a replay never waits");
            assert_eq!(replayed.launches, 1, "{name}");
            assert_eq!((with_token.allocations, with_token.synchronizations), (0, 1), "{name}");
        }
    }
}

#[test]
fn s9_ten_thousand_replays_drift_nowhere() {
    // Fewer under compute-sanitizer.
    let fewer = std::env::var("GPU_TESTS_REPLAYS").ok().and_then(|replays| replays.parse().ok());
    let replays = fewer.unwrap_or(if is_fake() { 1000 } else { 10_000 });
    let Some(mut gpu) = device::gpu("10 000 replays") else { return };
    let gpu = &mut *gpu;
    let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let mut graph = ours.capture_on(gpu, Head::Greedy);
    let mut run = |gpu: &mut CudaBackend, ours: &mut GpuTiny| {
        let start = std::time::Instant::now();
        graph.replay(gpu, &mut ours.slab, Drive::Host(&[params(0, 3)])).unwrap();
        for _ in 1..replays {
            graph.replay(gpu, &mut ours.slab, Drive::SelfAdvance).unwrap();
        }
        gpu.synchronize().unwrap();
        let microseconds = start.elapsed().as_secs_f64() * 1e6 / f64::from(replays);
        say(&format!("{replays} replays: {microseconds:.1} µs each, {:?}\n", graph.telemetry()));
        let bits: Vec<u32> = ours.logits().iter().map(|x| x.to_bits()).collect();
        (bits, ours.u32(ours.arena.token), ours.slab.used_bytes(), graph.telemetry().nodes)
    };
    // So that both runs count from the same number.
    ours.slab.fill_view(ours.arena.step_count, 0).unwrap();
    let first = run(gpu, &mut ours);
    let (free, counters) = (gpu.memory_bytes().unwrap().0, gpu.counters());
    let second = run(gpu, &mut ours);
    assert_eq!(first, second);
    assert_eq!(ours.u32(ours.arena.step_count), 2 * replays);
    assert_eq!(gpu.counters().since(counters).allocations, 0);
    let free_after = gpu.memory_bytes().unwrap().0;
    assert!(free_after.abs_diff(free) <= 16 << 20, "{free} bytes free before, {free_after} after");
}

#[test]
fn s19_launch_by_launch_is_the_same_step() {
    let Some(mut gpu) = device::gpu("launch by launch") else { return };
    let gpu = &mut *gpu;
    let first = [params(0, 17)];
    let mut captured = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let mut graph = captured.capture_on(gpu, Head::Greedy);
    graph.replay(gpu, &mut captured.slab, Drive::Host(&first)).unwrap();

    let mut eager = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let graph = eager.capture_on(gpu, Head::Greedy);
    eager.slab.write_view(eager.arena.tokens, 0, bytemuck::cast_slice(&first)).unwrap();
    graph.run_eagerly::<GraphError>(gpu, &mut eager.slab, |_, _, _| Ok(())).unwrap();
    assert_eq!(captured.logits(), eager.logits());
}

#[test]
fn s18_sampling_on_the_device_draws_what_the_host_draws() {
    let Some(mut gpu) = device::gpu("sampling") else { return };
    let gpu = &mut *gpu;
    let pack = kernels_ptx::SamplingPack {
        temperature: 1.2,
        top_p: 0.95,
        min_p: 0.01,
        top_k: 50,
        seed_low: device::seed() as u32,
        seed_high: 1,
    };
    let mut ours = tiny(gpu, Numerics::Exact, KvType::F32, false);
    let mut hosts = host_tiny(gpu, Numerics::Exact, KvType::F32);
    ours.slab.write_view(ours.arena.sampling, 0, bytemuck::bytes_of(&pack)).unwrap();
    hosts.slab.write_view(hosts.arena.sampling, 0, bytemuck::bytes_of(&pack)).unwrap();
    let (mut our_graph, mut host_graph) =
        (ours.capture_on(gpu, Head::Sampled), hosts.capture(Head::Sampled));
    let mut differing = 0;
    for position in 0..100u32 {
        let given = [params(position, (position * 13 + 2) % DIMS.n_vocab)];
        let (token, _) = step(gpu, &mut ours, &mut our_graph, Drive::Host(&given));
        let (expected, _) =
            step(&mut HostBackend, &mut hosts, &mut host_graph, Drive::Host(&given));
        differing += u32::from(token != expected);
    }
    // The logits differ in their last bits, so a draw at the edge of two tokens may.
    say(&format!("sampling: {differing} of 100 draws differ\n"));
    assert!(differing <= 2, "KERNELS_SEED={}: {differing} draws differ", device::seed());
}

#[test]
fn a_chunk_of_tokens_leaves_the_cache_that_single_steps_leave() {
    let Some(mut gpu) = device::gpu("a chunk of tokens") else { return };
    let gpu = &mut *gpu;
    let all: Vec<TokenParams> =
        (0..16).map(|position| params(position, (position * 37 + 5) % DIMS.n_vocab)).collect();
    let mut single = tiny(gpu, Numerics::Exact, KvType::F32, true);
    let mut graph = single.capture_on(gpu, Head::Greedy);
    for params in &all {
        let drive = Drive::Host(std::slice::from_ref(params));
        graph.replay(gpu, &mut single.slab, drive).unwrap();
    }
    let memory = gpu.allocate(MEMORY_BYTES).unwrap();
    let mut chunked = Tiny::in_memory(memory, gpu.profile(), Numerics::Exact, KvType::F32, true, 8);
    chunked.arena.write_outputs(&mut chunked.slab, 0, &[7]).unwrap();
    let mut graph = chunked.capture_on(gpu, Head::Greedy);
    for chunk in all.chunks(8) {
        graph.replay(gpu, &mut chunked.slab, Drive::Host(chunk)).unwrap();
    }
    let error = relative_error(&chunked.logits(), &single.logits());
    assert!(error < 1e-5, "{error}");
}

#[test]
fn s15_a_graph_whose_memory_was_rewound_refuses_to_launch() {
    let Some(mut gpu) = device::gpu("a rewound graph refuses") else { return };
    let gpu = &mut *gpu;
    let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let checkpoint = ours.slab.checkpoint();
    ours.arena = StepArena::allocate(&mut ours.slab, &ours.plan).unwrap();
    ours.arena.zero(&mut ours.slab).unwrap();
    let mut graph = ours.capture_on(gpu, Head::Greedy);
    let drive = Drive::Host(&[TokenParams { absolute_position: 0, ring_slot: 0, token_id: 1 }]);
    graph.replay(gpu, &mut ours.slab, drive).unwrap();
    ours.slab.rewind(checkpoint).unwrap();
    StepArena::allocate(&mut ours.slab, &ours.plan).unwrap();
    let launched = gpu.counters().launches;
    let error = graph.replay(gpu, &mut ours.slab, drive).unwrap_err();
    assert!(matches!(error, GraphError::Stale(SlabError::StaleView { .. })), "{error}");
    assert_eq!(gpu.counters().launches, launched);
}

#[test]
fn s16_a_slab_grows_under_a_live_graph() {
    let Some(mut gpu) = device::gpu("a slab grows under a live graph") else { return };
    let gpu = &mut *gpu;
    let memory = gpu.allocate_growing(1 << 30).unwrap();
    let mut ours = Tiny::in_memory(memory, gpu.profile(), Numerics::Q8, KvType::F16, false, 1);
    let mut graph = ours.capture_on(gpu, Head::Greedy);
    let first = step(gpu, &mut ours, &mut graph, Drive::Host(&[params(0, 9)]));
    let (base, key) = (ours.slab.memory().base_address(), graph.key());
    for mib in [1, 3, 64, 200] {
        // Growing while the step runs.
        graph.replay(gpu, &mut ours.slab, Drive::Host(&[params(0, 9)])).unwrap();
        ours.slab.allocate_zeroed("more", mib << 20).unwrap();
        assert_eq!(ours.slab.memory().base_address(), base);
    }
    let again = step(gpu, &mut ours, &mut graph, Drive::Host(&[params(0, 9)]));
    assert_eq!(first, again);
    let recording = ours.record();
    assert_eq!(Graph::bind(gpu, &ours.slab, &recording).unwrap().1, key, "no new capture");
}

#[test]
fn memory_and_stream_of_another_library_serve_as_well() {
    let Some(mut gpu) = device::gpu("memory and stream of another library") else { return };
    let expected = {
        let gpu = &mut *gpu;
        let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, false);
        let mut graph = ours.capture_on(gpu, Head::Greedy);
        step(gpu, &mut ours, &mut graph, Drive::Host(&[params(0, 9)]))
    };
    let context = gpu.stream().context().clone();
    let theirs = CudaStream::new(&context).unwrap();
    // SAFETY: `theirs` lives to the end of this test, after everything made with it.
    let stream = unsafe { CudaStream::from_raw(&context, theirs.as_raw()) };
    let owner = CudaMemory::new(&theirs, MEMORY_BYTES).unwrap();
    let mut backend = CudaBackend::on_stream(stream.clone()).unwrap();
    // SAFETY: the bytes are `owner`'s, which nobody else uses and which lives longer.
    let memory = unsafe { CudaMemory::from_raw(&stream, owner.base_address(), MEMORY_BYTES) };
    let mut ours = Tiny::in_memory(memory, backend.profile(), Numerics::Q8, KvType::F16, false, 1);
    let mut graph = ours.capture_on(&mut backend, Head::Greedy);
    let found = step(&mut backend, &mut ours, &mut graph, Drive::Host(&[params(0, 9)]));
    assert_eq!(found, expected);

    // The first backend has another stream: order would be lost.
    let recording = ours.record();
    let Err(error) = Graph::capture(&mut *gpu, &mut ours.slab, &recording) else {
        panic!("captured over memory of another stream")
    };
    assert!(error.to_string().contains("another stream"), "{error}");
}

#[test]
fn s1_two_lanes_on_one_device_do_not_disturb_each_other() {
    let Some(mut gpu) = device::gpu("two lanes on one device") else { return };
    let decode = |backend: &mut CudaBackend, token: u32| {
        let mut ours = tiny(backend, Numerics::Q8, KvType::F16, false);
        let mut graph = ours.capture_on(backend, Head::Greedy);
        let mut ids = Vec::new();
        for position in 0..100 {
            let first = [params(0, token)];
            let drive = if position == 0 { Drive::Host(&first) } else { Drive::SelfAdvance };
            ids.push(step(backend, &mut ours, &mut graph, drive).0);
        }
        ids
    };
    let alone = [5, 6].map(|token| decode(&mut gpu, token));
    let lanes = std::thread::scope(|scope| {
        let lane = |token| scope.spawn(move || decode(&mut CudaBackend::new(0).unwrap(), token));
        [5, 6].map(lane).map(|lane| lane.join().unwrap())
    });
    assert_eq!(alone, lanes);
}

#[test]
fn s11_after_warm_up_the_first_token_is_as_quick_as_the_tenth() {
    let Some(mut gpu) = device::gpu("warm-up") else { return };
    let gpu = &mut *gpu;
    gpu.warm_up(std::time::Duration::from_millis(50)).unwrap();
    let mut ours = tiny(gpu, Numerics::Q8, KvType::F16, false);
    let mut graph = ours.capture_on(gpu, Head::Greedy);
    gpu.synchronize().unwrap();
    let times: Vec<f64> = (0..10)
        .map(|position| {
            let start = std::time::Instant::now();
            let given = [params(position, 1)];
            graph.replay(gpu, &mut ours.slab, Drive::Host(&given)).unwrap();
            ours.u32(ours.arena.token);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    say(&format!("warm-up: token times in µs {times:.0?}\n"));
    if is_fake() {
        say(
            "warm-up: skipped the comparison of times, which are those of threads that play a device\n",
        );
        return;
    }
    // The model is so small that a hundred microseconds are nothing.
    assert!(times[0] < times[9] * 1.2 + 100.0, "{times:?}");
}
