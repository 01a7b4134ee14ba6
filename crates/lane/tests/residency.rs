//! The residency manager by itself: the capabilities S1 to S13 that need no model file.

use decode_graph::{Drive, Head, HostBackend, ModelWeights, Numerics, RopePlan, StepPlan};
use decode_graph::{LayerWeights, ModelDims};
use gpu_slab::{DEFAULT_LADDER, HostMemory, Slab, SlabError, testing::host_memory_up_to};
use kernels_ptx::{DeviceProfile, RopePairing, SamplingPack, TokenParams};
use kv_paged::{BlockTable, PagedKvConfig};
use lane::residency::{Limits, Residency, ResidencyError, WeightSource};
use q4k_soa::{LayoutId, Shape, WeightType};

type HostResidency = Residency<HostBackend>;

fn residency(bytes: u64) -> HostResidency {
    Residency::new(HostBackend, HostMemory::new(bytes).unwrap(), Limits::default())
}

/// Blocks of `rows × n_in` weights that differ by `salt`; every byte string is a valid matrix.
fn source_bytes(ty: WeightType, rows: u32, n_in: u32, salt: u8) -> Vec<u8> {
    let len = u64::from(rows) * ty.row_bytes(n_in).unwrap();
    (0..len).map(|i| (i as u8).wrapping_mul(37).wrapping_add(salt) & 0x3b).collect()
}

fn weight<'a>(name: &'a str, bytes: &'a [u8], n_out: u32, n_in: u32) -> WeightSource<'a> {
    WeightSource {
        name,
        weight_type: WeightType::Q4K,
        shape: Shape { n_out, n_in },
        layout: LayoutId::PLANES,
        bytes,
    }
}

#[test]
fn s1_the_first_size_that_the_device_grants_is_used() {
    let slab = Slab::with_sizes(&DEFAULT_LADDER, host_memory_up_to(3 << 29)).unwrap();
    assert_eq!(slab.capacity_bytes(), 1 << 30);
    let residency = Residency::over(HostBackend, slab, Limits::default());
    assert_eq!(residency.telemetry().capacity_bytes, 1 << 30);
}

#[test]
fn s3_preloading_twice_costs_nothing_and_a_bad_entry_does_not_stop_the_rest() {
    let mut residency = residency(1 << 20);
    let (a, b) =
        (source_bytes(WeightType::Q4K, 8, 256, 1), source_bytes(WeightType::Q4K, 4, 512, 2));
    let list = [
        weight("a", &a, 8, 256),
        weight("short", &a[1..], 8, 256),
        weight("not whole blocks", &a, 8, 255),
        weight("b", &b, 4, 512),
        weight("a again", &a, 8, 256),
    ];
    let report = residency.preload(&list);
    assert_eq!((report.newly_resident, report.already_resident), (2, 1));
    let refused: Vec<usize> = report.refused.iter().map(|(index, _)| *index).collect();
    assert_eq!(refused, [1, 2]);
    let before = residency.slab().counters();
    let used = residency.slab().used_bytes();
    let again = residency.preload(&list);
    assert_eq!((again.newly_resident, again.already_resident), (0, 3));
    assert_eq!(residency.slab().counters().h2d_bytes, before.h2d_bytes, "nothing was copied");
    assert_eq!(residency.slab().used_bytes(), used, "nothing was allocated");
    assert_eq!(residency.telemetry().resident_weights, 2);
}

#[test]
fn s3_the_same_bytes_in_another_shape_are_another_weight() {
    let mut residency = residency(1 << 20);
    let bytes = source_bytes(WeightType::Q4K, 8, 256, 1);
    let report =
        residency.preload(&[weight("tall", &bytes, 8, 256), weight("wide", &bytes, 4, 512)]);
    assert_eq!(report.newly_resident, 2);
}

#[test]
fn s3_a_weight_that_does_not_fit_is_refused_with_the_shortage_and_evicts_nothing() {
    let mut residency = residency(4096);
    let (small, large) =
        (source_bytes(WeightType::Q4K, 8, 256, 1), source_bytes(WeightType::Q4K, 64, 256, 2));
    let (resident, _) = residency.make_resident(&weight("small", &small, 8, 256)).unwrap();
    let mut before = vec![0; resident.view.len_bytes() as usize];
    residency.slab().read_view(resident.view, 0, &mut before).unwrap();
    let used = residency.slab().used_bytes();

    let error = residency.make_resident(&weight("large", &large, 64, 256)).unwrap_err();
    let ResidencyError::Slab(SlabError::OutOfMemory {
        name, requested_bytes, shortage_bytes, ..
    }) = &error
    else {
        panic!("{error}")
    };
    assert_eq!((name.as_str(), *requested_bytes), ("large", 64 * 144));
    assert!(*shortage_bytes > 0);
    assert_eq!(residency.slab().used_bytes(), used);
    let mut after = vec![0; before.len()];
    residency.slab().read_view(resident.view, 0, &mut after).unwrap();
    assert_eq!(before, after);
}

#[test]
fn s4_blobs_are_kept_by_key_and_wrong_ones_refused() {
    let mut residency = residency(1 << 20);
    let view = residency.blob(7, "norm", &[1; 64]).unwrap();
    assert_eq!(residency.blob(7, "norm", &[1; 64]).unwrap(), view);
    let refused = |result: Result<_, ResidencyError>| result.unwrap_err();
    assert!(matches!(refused(residency.blob(0, "x", &[1])), ResidencyError::ZeroKey { .. }));
    assert!(matches!(refused(residency.blob(8, "x", &[])), ResidencyError::Empty { .. }));
    let taken = refused(residency.blob(7, "norm", &[2; 64]));
    assert!(matches!(taken, ResidencyError::KeyTaken { key: 7, held_bytes: 64, .. }));
    let limits = Limits { max_blob_bytes: 63, ..Limits::default() };
    let mut small = Residency::new(HostBackend, HostMemory::new(4096).unwrap(), limits);
    let over = refused(small.blob(7, "norm", &[1; 64]));
    assert!(matches!(over, ResidencyError::Limit { found: 64, limit: 63, .. }));
}

#[test]
fn s5_the_sticky_slot_skips_equal_content_and_grows_without_moving() {
    let mut residency = residency(1 << 20);
    let first = residency.write_sticky(&[1.0; 100]).unwrap();
    assert!(first.copied);
    assert!(!residency.write_sticky(&[1.0; 100]).unwrap().copied);
    let second = residency.write_sticky(&[2.0; 8192]).unwrap();
    assert!(second.copied);
    assert_eq!(second.view.offset_bytes(), first.view.offset_bytes(), "the same place");
    assert!(residency.write_sticky(&[2.0; 8191]).unwrap().copied, "another length");

    let larger = residency.write_sticky(&[3.0; 8193]).unwrap();
    assert_ne!(larger.view.offset_bytes(), first.view.offset_bytes());
    let mut old = [0.0f32; 1];
    residency.slab().read_view(first.view, 0, bytemuck::cast_slice_mut(&mut old)).unwrap();
    assert_eq!(old, [2.0], "what was there stays");
}

#[test]
fn s6_the_kv_arena_is_made_once_and_another_shape_is_refused() {
    let mut residency = residency(1 << 20);
    let config = PagedKvConfig::new(2, 2, 64, 64).unwrap();
    let kv = residency.kv_arena(config, None).unwrap();
    let used = residency.slab().used_bytes();
    assert_eq!(residency.kv_arena(config, None).unwrap(), kv);
    assert_eq!(residency.slab().used_bytes(), used);
    let mut table = [9u32; 8];
    residency.slab().read_view(kv.table, 0, bytemuck::cast_slice_mut(&mut table)).unwrap();
    assert_eq!(table, [0, 1, 2, 3, 0, 1, 2, 3], "[layer][logical], identity");

    let shuffled = BlockTable::from_permutation(&config, vec![3, 2, 1, 0, 0, 2, 1, 3]).unwrap();
    residency.kv_arena(config, Some(&shuffled)).unwrap();
    residency.slab().read_view(kv.table, 0, bytemuck::cast_slice_mut(&mut table)).unwrap();
    assert_eq!(table, [3, 2, 1, 0, 0, 2, 1, 3]);

    let other = PagedKvConfig::new(2, 2, 64, 128).unwrap();
    let error = residency.kv_arena(other, None).unwrap_err();
    assert!(matches!(error, ResidencyError::OtherShape { what: "KV arena", .. }));
}

#[test]
fn s6_a_kv_arena_that_does_not_fit_leaves_nothing_behind() {
    // Room for the blocks, not for the table behind them.
    let config = PagedKvConfig::new(2, 2, 64, 64).unwrap();
    let mut residency = residency(config.total_bytes());
    assert!(residency.kv_arena(config, None).is_err());
    assert_eq!(residency.slab().used_bytes(), 0);
    assert!(!residency.telemetry().kv_ready);
}

#[test]
fn s12_limits_are_enforced_with_numbers() {
    let limits = Limits { max_rows: 4, max_kv_elems: 100, ..Limits::default() };
    let mut residency = Residency::new(HostBackend, HostMemory::new(1 << 20).unwrap(), limits);
    let bytes = source_bytes(WeightType::Q4K, 8, 256, 1);
    let error = residency.make_resident(&weight("a", &bytes, 8, 256)).unwrap_err();
    assert_eq!(error.to_string(), "`a`: 8 rows, the limit is 4");
    let config = PagedKvConfig::new(1, 1, 64, 64).unwrap();
    let error = residency.kv_arena(config, None).unwrap_err();
    assert!(matches!(error, ResidencyError::Limit { found: 8192, limit: 100, .. }), "{error}");
    assert_eq!(Limits::default().max_rows, 131_072);
    assert_eq!(Limits::default().max_blob_bytes, 256 << 20);
    assert_eq!(Limits::default().max_kv_elems, 128 << 20);
}

fn tiny_plan() -> StepPlan {
    let dims = ModelDims {
        n_layer: 1,
        n_embd: 256,
        n_head: 2,
        n_kv_head: 1,
        head_dim: 128,
        n_ff: 256,
        n_vocab: 64,
    };
    let kv = PagedKvConfig::new(1, 1, 128, 32).unwrap();
    let rope = RopePlan { pairing: RopePairing::Halves, n_pairs: 64, magnitude: 1.0 };
    StepPlan::new(dims, kv, Numerics::Q8, rope, 1e-5, &DeviceProfile::A2000)
}

/// A residency with a one-layer model, ready to record.
fn tiny_model() -> (HostResidency, StepPlan, ModelWeights) {
    let mut residency = residency(2 << 20);
    let plan = tiny_plan();
    let mut salt = 0;
    let mut matrix = |residency: &mut HostResidency, n_out: u32| {
        salt += 1;
        let bytes = source_bytes(WeightType::Q4K, n_out, 256, salt);
        residency.make_resident(&weight("matrix", &bytes, n_out, 256)).unwrap().0
    };
    let ones = vec![1.0f32; 256];
    let norm = residency.blob(1, "norm", bytemuck::cast_slice(&ones)).unwrap();
    let frequencies = vec![0.5f64; 64];
    let inverse_frequencies =
        residency.blob(2, "rope", bytemuck::cast_slice(&frequencies)).unwrap();
    let mut m = |n_out| matrix(&mut residency, n_out);
    let embed = m(64);
    let layer = LayerWeights {
        attn_norm: norm,
        q: m(256),
        k: m(128),
        v: m(128),
        qkv_bias: None,
        q_norm: None,
        k_norm: None,
        o: m(256),
        ffn_norm: norm,
        gate: m(256),
        up: m(256),
        down: m(256),
        post_attn_norm: None,
        post_ffn_norm: None,
        inverse_frequencies: None,
        window: 0,
    };
    let weights = ModelWeights {
        embed,
        inverse_frequencies,
        layers: vec![layer],
        output_norm: norm,
        output: embed,
    };
    (residency, plan, weights)
}

#[test]
fn s7_the_step_arena_is_made_once_and_other_dimensions_are_refused() {
    let mut residency = residency(1 << 20);
    let plan = tiny_plan();
    let arena = residency.step_arena(&plan).unwrap();
    assert_eq!(residency.step_arena(&plan).unwrap(), arena);
    let mut wider = plan.clone();
    wider.dims.n_ff = 512;
    let error = residency.step_arena(&wider).unwrap_err();
    assert!(matches!(error, ResidencyError::OtherShape { what: "step arena", .. }));
}

#[test]
fn s8_a_parameter_pack_is_uploaded_only_when_it_changes() {
    let mut residency = residency(1 << 20);
    residency.step_arena(&tiny_plan()).unwrap();
    let mut pack = SamplingPack {
        temperature: 0.8,
        top_p: 0.9,
        min_p: 0.0,
        top_k: 40,
        seed_low: 1,
        seed_high: 0,
    };
    assert!(residency.set_sampling(&pack).unwrap());
    let before = residency.slab().counters().h2d_bytes;
    assert!(!residency.set_sampling(&pack).unwrap());
    assert_eq!(residency.slab().counters().h2d_bytes, before);
    pack.seed_low = 2;
    assert!(residency.set_sampling(&pack).unwrap());
    assert_eq!(residency.slab().counters().h2d_bytes, before + 24);
}

#[test]
fn s9_the_same_key_is_not_captured_again() {
    let (mut residency, plan, weights) = tiny_model();
    assert!(matches!(
        residency.prepare_graph(&plan, &weights),
        Err(ResidencyError::Missing("KV arena"))
    ));
    residency.kv_arena(plan.kv, None).unwrap();
    residency.step_arena(&plan).unwrap();
    residency.prepare_graph(&plan, &weights).unwrap();
    residency.prepare_graph(&plan, &weights).unwrap();
    assert_eq!(residency.telemetry().captures, 1);
    let sampled = StepPlan { head: Head::Sampled, ..plan.clone() };
    residency.prepare_graph(&sampled, &weights).unwrap();
    residency.prepare_graph(&plan, &weights).unwrap();
    assert_eq!(residency.telemetry().captures, 2, "both graphs are kept");
}

#[test]
fn s10_telemetry_tells_what_is_and_none_before_a_capture() {
    let (mut residency, plan, weights) = tiny_model();
    let telemetry = residency.telemetry();
    assert_eq!(telemetry.graph, None);
    assert!(!telemetry.kv_ready);
    residency.kv_arena(plan.kv, None).unwrap();
    residency.step_arena(&plan).unwrap();
    residency.prepare_graph(&plan, &weights).unwrap();
    for position in 0..3 {
        let params =
            [TokenParams { absolute_position: position, ring_slot: position, token_id: 5 }];
        residency.replay(Drive::Host(&params)).unwrap();
        residency.read_token().unwrap();
    }
    let telemetry = residency.telemetry();
    let graph = telemetry.graph.unwrap();
    assert_eq!((graph.replays, graph.h2d_bytes_per_token), (3, Some(12)));
    assert_eq!(telemetry.d2h_bytes_per_token, Some(4));
    assert!(telemetry.kv_ready && graph.nodes > 0);
    assert_eq!(telemetry.resident_weights, 8);
}

#[test]
fn s11_warm_up_runs_the_step_once() {
    let (mut residency, plan, weights) = tiny_model();
    residency.kv_arena(plan.kv, None).unwrap();
    residency.step_arena(&plan).unwrap();
    assert!(matches!(residency.warm_up(), Err(ResidencyError::Missing("graph"))));
    residency.prepare_graph(&plan, &weights).unwrap();
    residency.warm_up().unwrap();
    assert_eq!(residency.telemetry().graph.unwrap().replays, 1);
}

#[test]
fn s2_s13_a_failed_load_leaves_everything_as_it_was() {
    let (mut residency, plan, _) = tiny_model();
    residency.seal();
    let before = residency.telemetry();
    let failed: Result<(), ResidencyError> = residency.transaction(|residency| {
        let bytes = source_bytes(WeightType::Q4K, 16, 256, 99);
        residency.make_resident(&weight("new", &bytes, 16, 256))?;
        residency.blob(77, "new blob", &[1; 16])?;
        residency.kv_arena(plan.kv, None)?;
        let huge = PagedKvConfig::new(1, 1, 128, 1 << 20).unwrap();
        residency.kv_arena(huge, None).map(|_| ())
    });
    assert!(matches!(failed, Err(ResidencyError::OtherShape { .. })));
    let after = residency.telemetry();
    assert_eq!(after.resident_weights, before.resident_weights);
    assert_eq!(after.resident_weight_bytes, before.resident_weight_bytes);
    assert_eq!(after.permanent_end_bytes, before.permanent_end_bytes);
    assert!(!after.kv_ready);
    assert_eq!(residency.slab().used_bytes(), residency.slab().permanent_end_bytes());
    // The blob's key is free again, and the next try with enough memory succeeds.
    residency.blob(77, "another blob", &[2; 16]).unwrap();
    residency.kv_arena(plan.kv, None).unwrap();
}
