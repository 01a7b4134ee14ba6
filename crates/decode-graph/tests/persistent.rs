//! The persistent step on the host: its twin against the step of operations, what recording it
//! uploads and refuses.

mod persistent_model;

use decode_graph::{
    Activation, Drive, Graph, Head, HostBackend, PersistentOptions, RecordError,
    clear_persistent_failure, persistent_failure, record, record_persistent,
};
use gpu_slab::HostMemory;
use kernels_ptx::{DeviceProfile, schedule};
use kv_paged::KvType;
use persistent_model::{
    MARGIN, Pair, Spec, TINY, VARIANTS, Which, margin, memory_bytes, relative_error,
};
use q4k_soa::{LayoutId, WeightType};

/// A device that the host twin can be scheduled for: few blocks, the shared memory of a Hopper.
const DEVICE: DeviceProfile =
    DeviceProfile { sm_count: 9, shared_per_block_bytes: 232_448, ..DeviceProfile::A2000 };

fn pair(spec: Spec) -> Pair<HostMemory> {
    Pair::new(HostMemory::new(memory_bytes(&spec)).unwrap(), DEVICE, spec)
}

/// Runs both steps and the exact one over the same tokens; how far each is from the exact one, over
/// the logits of all positions from `first` on.
fn errors(pair: &mut Pair<HostMemory>, steps: u32, first: u32) -> [f32; 2] {
    let backend = &mut HostBackend;
    let mut graphs = WHICH.map(|which| pair.capture(backend, which));
    assert_eq!(graphs[1].telemetry().nodes, 1);
    let mut logits = [const { Vec::new() }; 3];
    for position in 0..steps {
        let given = [pair.params(position, position * 37 % pair.spec.dims.n_vocab)];
        for (i, which) in WHICH.into_iter().enumerate() {
            let found = pair.step(backend, &mut graphs[i], which, Drive::Host(&given)).1;
            if position >= first {
                logits[i].extend(found);
            }
        }
    }
    [0, 1].map(|i| relative_error(&logits[i], &logits[2]))
}

const WHICH: [Which; 3] = [Which::Ops, Which::Persistent, Which::Exact];

#[test]
fn s19_the_persistent_step_is_as_near_to_the_exact_one_as_the_step_of_operations() {
    for spec in VARIANTS {
        // Past the context, once around the ring, where it is short.
        let steps = (spec.context + 12).min(70);
        let [ops, persistent] = errors(&mut pair(spec), steps, 0);
        assert!(persistent < 1.2 * ops + 1e-3, "{}: {persistent}, not {ops}", spec.name);
        assert_ne!(persistent, ops, "{}: the exchange rounds", spec.name);
    }
}

#[test]
fn many_segments_join_to_the_same_result() {
    let spec = VARIANTS.iter().find(|spec| spec.context == 1000).copied().unwrap();
    let [ops, persistent] = errors(&mut pair(spec), 450, 400);
    assert!(persistent < 1.2 * ops + 1e-3, "{persistent}, not {ops}");
}

#[test]
fn greedy_tokens_are_those_of_the_step_of_operations_but_for_near_ties() {
    for spec in [TINY, VARIANTS[3]] {
        let mut pair = pair(spec);
        let backend = &mut HostBackend;
        let [mut ops, mut persistent] =
            [Which::Ops, Which::Persistent].map(|which| pair.capture(backend, which));
        let (mut token, mut same, steps) = (17, 0, 200);
        for position in 0..steps {
            // What the step of operations chose, so that one near tie ends nothing.
            let given = [pair.params(position, token)];
            let drive = Drive::Host(&given);
            let (expected, logits) = pair.step(backend, &mut ops, Which::Ops, drive);
            let found = pair.step(backend, &mut persistent, Which::Persistent, drive).0;
            same += u32::from(found == expected);
            let margin = margin(&logits);
            assert!(found == expected || margin < MARGIN, "{}, {position}: {margin}", spec.name);
            token = expected;
        }
        assert!(same > steps / 2, "{}: {same} of {steps} the same", spec.name);
    }
}

#[test]
fn s18_it_advances_by_itself_and_counts_its_steps() {
    let mut pair = pair(TINY);
    let recording = pair.record_persistent(Head::Greedy, PersistentOptions::default());
    let mut graph = Graph::capture(&mut HostBackend, &mut pair.slab, &recording).unwrap();
    let first = [pair.params(0, 17)];
    let mut token =
        pair.step(&mut HostBackend, &mut graph, Which::Persistent, Drive::Host(&first)).0;
    for position in 1..60 {
        let arena = pair.persistent.arena;
        let mut words = [0u32; 3];
        pair.slab.read_view(arena.tokens, 0, bytemuck::cast_slice_mut(&mut words)).unwrap();
        assert_eq!(words, [position, position % TINY.context, token]);
        assert_eq!(pair.u32(arena.step_count), position);
        assert_eq!(pair.u32(arena.persistent.unwrap().exchange), position, "epoch");
        token = pair.step(&mut HostBackend, &mut graph, Which::Persistent, Drive::SelfAdvance).0;
        assert_eq!(graph.telemetry().h2d_bytes_per_token, Some(0));
    }
}

#[test]
fn sampling_follows_as_one_more_launch() {
    let mut pair = pair(TINY);
    let recording = pair.record_persistent(Head::Sampled, PersistentOptions::default());
    let names: Vec<_> = recording.launches.iter().map(|launch| launch.kernel.name()).collect();
    assert_eq!(names, ["persistent_sm90", "sample"]);
    let mut graph = Graph::capture(&mut HostBackend, &mut pair.slab, &recording).unwrap();
    let first = [pair.params(0, 17)];
    // A temperature of zero takes the likeliest token.
    let (token, logits) =
        pair.step(&mut HostBackend, &mut graph, Which::Persistent, Drive::Host(&first));
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    assert_eq!(token, best as u32);
    assert_eq!(pair.u32(pair.persistent.arena.step_count), 1);
}

#[test]
fn the_launch_is_cooperative_and_its_key_follows_the_schedule() {
    let mut pair = pair(TINY);
    let key = |pair: &mut Pair<HostMemory>| {
        let recording = pair.record_persistent(Head::Greedy, PersistentOptions::default());
        let geometry = recording.launches[0].geometry;
        assert!(geometry.cooperative);
        assert_eq!((geometry.grid, geometry.block), ([9, 1, 1], [schedule::THREADS, 1, 1]));
        Graph::bind(&HostBackend, &pair.slab, &recording).unwrap().1
    };
    let first = key(&mut pair);
    assert_eq!(key(&mut pair), first);
    pair.persistent.plan.norm_eps = 1e-6;
    assert_ne!(key(&mut pair), first);
}

#[test]
fn a_failure_is_read_and_cleared() {
    let mut pair = pair(TINY);
    let arena = pair.persistent.arena;
    assert_eq!(persistent_failure(&mut pair.slab, &arena), Ok(None));
    let words: Vec<u8> = [1u32, 5, 3, 2].iter().flat_map(|word| word.to_le_bytes()).collect();
    let exchange = arena.persistent.unwrap().exchange;
    pair.slab.write_view(exchange, u64::from(schedule::FAILURE) * 4, &words).unwrap();
    let failure = persistent_failure(&mut pair.slab, &arena).unwrap().unwrap();
    assert_eq!(
        failure.to_string(),
        "block 5 of the persistent step waited in vain in operation 3 for queries and keys"
    );
    clear_persistent_failure(&mut pair.slab, &arena).unwrap();
    assert_eq!(persistent_failure(&mut pair.slab, &arena), Ok(None));
}

#[test]
fn what_it_cannot_do_is_refused() {
    let mut pair = pair(TINY);
    let refused = |pair: &mut Pair<HostMemory>| {
        let Pair { slab, persistent: form, profile, .. } = pair;
        let options = PersistentOptions::default();
        let (plan, weights) = (&form.plan, &form.weights);
        record_persistent(slab, plan, weights, &form.kv, &form.arena, profile, options).unwrap_err()
    };
    let good = pair.persistent.plan.clone();
    pair.persistent.plan.head = Head::None;
    assert!(refused(&mut pair).to_string().contains("without logits"));
    pair.persistent.plan = good.clone();
    pair.persistent.plan.multiprocessors = 24;
    assert!(matches!(refused(&mut pair), RecordError::Plan { .. }));
    pair.persistent.plan = good.clone();
    pair.persistent.plan.activation = Activation::GeGlu;
    assert!(refused(&mut pair).to_string().contains("GeGLU"));
    pair.persistent.plan = good.clone();
    pair.persistent.plan.exact_qkv = true;
    assert!(refused(&mut pair).to_string().contains("exact q, k and v"));
    pair.persistent.plan = good.clone();
    let layers = pair.persistent.weights.layers.clone();
    let norm = Some(layers[1].ffn_norm);
    pair.persistent.weights.layers[1].post_ffn_norm = norm;
    assert!(refused(&mut pair).to_string().contains("norms of what is added"));
    pair.persistent.weights.layers.clone_from(&layers);
    pair.persistent.weights.layers[1].inverse_frequencies = norm;
    assert!(refused(&mut pair).to_string().contains("rope frequencies of single layers"));
    pair.persistent.weights.layers = layers;

    // Weights in the other layout, either way.
    let streamed = std::mem::replace(&mut pair.persistent.weights, pair.ops.weights.clone());
    let error = refused(&mut pair);
    assert!(matches!(error, RecordError::Layout { expected: LayoutId::STREAM, .. }), "{error}");
    let form = &pair.ops;
    let error = record(&form.plan, &streamed, &form.kv, &form.arena, &pair.profile).unwrap_err();
    assert!(matches!(error, RecordError::Layout { expected: LayoutId::PLANES, .. }), "{error}");
    pair.persistent.weights = streamed;

    // A cache of another type.
    let error = refused(&mut self::pair(Spec { kv_type: KvType::F32, ..TINY }));
    assert!(error.to_string().contains("F32 KV cache"), "{error}");

    // A type that has no units.
    pair.persistent.weights.layers[1].down.weight_type = WeightType::Q5K;
    assert!(refused(&mut pair).to_string().contains("Q5_K"));
}
