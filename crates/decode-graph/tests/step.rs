//! The decode step on the host backend: what a replay uploads, computes and refuses.

mod support;

use decode_graph::{Drive, Graph, GraphError, Head, HostBackend, Label, Numerics, RecordError};
use gpu_slab::SlabError;
use kernels_ptx::{Kernel, SamplingPack, TokenParams};
use kv_paged::KvType;
use support::{CONTEXT, DIMS, Tiny};

fn params(position: u32, token_id: u32) -> TokenParams {
    TokenParams { absolute_position: position, ring_slot: position % CONTEXT, token_id }
}

/// Feeds a fixed prompt and then `n` chosen tokens, which it returns with the last logits.
fn decode(tiny: &mut Tiny, head: Head, drive_host: bool, n: u32) -> (Vec<u32>, Vec<f32>) {
    let mut graph = tiny.capture(head);
    let prompt = [3, 141, 59, 26];
    for (position, &token) in prompt.iter().enumerate() {
        let params = [params(position as u32, token)];
        graph.replay(&mut HostBackend, &mut tiny.slab, Drive::Host(&params)).unwrap();
    }
    let mut ids = vec![tiny.u32(tiny.arena.token)];
    for i in 0..n - 1 {
        let params = [params(prompt.len() as u32 + i, ids[i as usize])];
        let drive = if drive_host { Drive::Host(&params) } else { Drive::SelfAdvance };
        graph.replay(&mut HostBackend, &mut tiny.slab, drive).unwrap();
        let expected = if drive_host { 12 } else { 0 };
        assert_eq!(graph.telemetry().h2d_bytes_per_token, Some(expected), "token {i}");
        ids.push(tiny.u32(tiny.arena.token));
    }
    (ids, tiny.logits())
}

#[test]
fn s18_both_drives_choose_the_same_tokens_and_upload_12_bytes_or_none() {
    let decode =
        |host| decode(&mut Tiny::new(Numerics::Q8, KvType::F16, false, 1), Head::Greedy, host, 30);
    assert_eq!(decode(true), decode(false));
}

#[test]
fn s18_sampling_is_a_function_of_seed_and_position_whoever_drives() {
    let run = |host, seed| {
        let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
        let pack = SamplingPack {
            temperature: 1.5,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            seed_low: seed,
            seed_high: 0,
        };
        tiny.slab.write_view(tiny.arena.sampling, 0, bytemuck::bytes_of(&pack)).unwrap();
        decode(&mut tiny, Head::Sampled, host, 20).0
    };
    assert_eq!(run(true, 5), run(false, 5));
    assert_ne!(run(true, 5), run(true, 6));
}

#[test]
fn s6_a_shuffled_block_table_changes_nothing() {
    for (numerics, kv_type) in
        [(Numerics::Q8, KvType::F16), (Numerics::Q8, KvType::Q8), (Numerics::Exact, KvType::F32)]
    {
        // 60 tokens: beyond the context of 48, around the ring.
        let decode = |shuffled| {
            decode(&mut Tiny::new(numerics, kv_type, shuffled, 1), Head::Greedy, false, 60)
        };
        assert_eq!(decode(false), decode(true));
    }
}

#[test]
fn q8_numerics_stay_near_the_exact_ones() {
    let exact =
        decode(&mut Tiny::new(Numerics::Exact, KvType::F32, false, 1), Head::Greedy, true, 1).1;
    let q8 = decode(&mut Tiny::new(Numerics::Q8, KvType::F16, false, 1), Head::Greedy, true, 1).1;
    let norm = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>().sqrt();
    let difference: Vec<f32> = exact.iter().zip(&q8).map(|(a, b)| a - b).collect();
    let error = norm(&difference) / norm(&exact);
    assert!(error > 0.0 && error < 0.03, "{error}");
}

#[test]
fn q_k_and_v_alone_can_be_exact() {
    let mut q8 = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let mut mixed = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    mixed.plan.exact_qkv = true;
    let kernels = |tiny: &Tiny| -> Vec<_> {
        tiny.record().launches.iter().map(|launch| (launch.label, launch.kernel)).collect()
    };
    let expected: Vec<_> = kernels(&q8)
        .into_iter()
        .flat_map(|(label, kernel)| match label.what {
            "qkv" => {
                let norm = Label { what: "attention norm", ..label };
                vec![(norm, Kernel::RmsNorm), (label, Kernel::GemvF32Store)]
            }
            _ => vec![(label, kernel)],
        })
        .collect();
    assert_eq!(kernels(&mixed), expected);

    let logits = |tiny: &mut Tiny| decode(tiny, Head::Greedy, true, 1).1;
    let exact = logits(&mut Tiny::new(Numerics::Exact, KvType::F32, false, 1));
    let error =
        |found: Vec<f32>| -> f32 { found.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum() };
    let (mixed, q8) = (error(logits(&mut mixed)), error(logits(&mut q8)));
    assert!(mixed < q8, "{mixed} {q8}");
}

#[test]
fn a_chunk_of_tokens_leaves_the_cache_that_single_steps_leave() {
    let tokens: Vec<u32> = (0..16).map(|i| (i * 37 + 5) % DIMS.n_vocab).collect();
    let all: Vec<TokenParams> =
        tokens.iter().enumerate().map(|(p, &token)| params(p as u32, token)).collect();

    let mut single = Tiny::new(Numerics::Exact, KvType::F32, true, 1);
    let mut graph = single.capture(Head::Greedy);
    for params in &all {
        let drive = Drive::Host(std::slice::from_ref(params));
        graph.replay(&mut HostBackend, &mut single.slab, drive).unwrap();
    }

    let mut chunked = Tiny::new(Numerics::Exact, KvType::F32, true, 8);
    chunked.arena.write_outputs(&mut chunked.slab, 0, &[7]).unwrap();
    let mut graph = chunked.capture(Head::Greedy);
    for chunk in all.chunks(8) {
        graph.replay(&mut HostBackend, &mut chunked.slab, Drive::Host(chunk)).unwrap();
    }
    assert_eq!(single.logits(), chunked.logits());
    assert_eq!(single.u32(single.arena.token), chunked.u32(chunked.arena.token));
}

#[test]
fn s9_node_count_is_the_recordings_and_the_key_follows_the_plan() {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let recording = tiny.record();
    let graph = tiny.capture(Head::Greedy);
    assert_eq!(graph.telemetry().nodes, recording.launches.len());

    let key = |tiny: &Tiny| Graph::bind(&HostBackend, &tiny.slab, &tiny.record()).unwrap().1;
    assert_eq!(key(&tiny), graph.key(), "same plan, same key");
    tiny.plan.head = Head::Sampled;
    assert_ne!(key(&tiny), graph.key());
    tiny.plan.head = Head::Greedy;
    tiny.plan.norm_eps = 1e-6;
    assert_ne!(key(&tiny), graph.key());
}

#[test]
fn s15_a_graph_whose_memory_was_rewound_refuses_to_launch() {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let checkpoint = tiny.slab.checkpoint();
    let scratch = tiny.slab.allocate("a step's own temporary", 4096).unwrap();
    let mut graph = tiny.capture(Head::Greedy);
    tiny.slab.rewind(checkpoint).unwrap();
    assert!(tiny.slab.resolve(scratch).is_err());
    let drive = Drive::Host(&[TokenParams { absolute_position: 0, ring_slot: 0, token_id: 1 }]);
    graph.replay(&mut HostBackend, &mut tiny.slab, drive).expect("the rewind spared its memory");

    // Now the step arena itself is taken back.
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let checkpoint = tiny.slab.checkpoint();
    tiny.arena = decode_graph::StepArena::allocate(&mut tiny.slab, &tiny.plan).unwrap();
    let mut graph = tiny.capture(Head::Greedy);
    tiny.slab.rewind(checkpoint).unwrap();
    // The same bytes are in use again; the graph must notice all the same.
    decode_graph::StepArena::allocate(&mut tiny.slab, &tiny.plan).unwrap();
    let error = graph.replay(&mut HostBackend, &mut tiny.slab, drive).unwrap_err();
    assert!(matches!(error, GraphError::Stale(SlabError::StaleView { .. })), "{error}");
}

#[test]
fn a_graph_refuses_another_slab() {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let mut graph = tiny.capture(Head::Greedy);
    let mut other = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let error = graph.replay(&mut HostBackend, &mut other.slab, Drive::SelfAdvance).unwrap_err();
    assert!(matches!(error, GraphError::Stale(SlabError::ForeignView { .. })), "{error}");
}

#[test]
fn weights_that_contradict_the_plan_are_refused() {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    tiny.weights.layers.pop();
    let record = |tiny: &Tiny| {
        decode_graph::record(
            &tiny.plan,
            &tiny.weights,
            &tiny.kv,
            &tiny.arena,
            &kernels_ptx::DeviceProfile::A2000,
        )
        .unwrap_err()
    };
    assert!(matches!(record(&tiny), RecordError::Plan { expected: 2, found: 1, .. }));

    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    tiny.weights.output_norm = tiny.weights.output_norm.slice(0..4).unwrap();
    let error = record(&tiny).to_string();
    assert!(error.contains("logits") && error.contains("1024"), "{error}");
}

#[test]
fn launches_that_alias_are_refused() {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    tiny.arena.hidden_b = tiny.arena.hidden_a;
    let recording = tiny.record();
    let error = Graph::bind(&HostBackend, &tiny.slab, &recording).unwrap_err().to_string();
    assert!(error.contains("overlaps"), "{error}");
}

#[test]
fn eager_execution_is_the_same_step() {
    let mut captured = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let mut graph = captured.capture(Head::Greedy);
    let first = [params(0, 17)];
    graph.replay(&mut HostBackend, &mut captured.slab, Drive::Host(&first)).unwrap();

    let mut eager = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let graph = eager.capture(Head::Greedy);
    eager.slab.write_view(eager.arena.tokens, 0, bytemuck::cast_slice(&first)).unwrap();
    let mut launches = 0;
    graph
        .run_eagerly::<GraphError>(&mut HostBackend, &mut eager.slab, |_, _, _| {
            launches += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(launches, graph.telemetry().nodes);
    assert_eq!(captured.logits(), eager.logits());
}
