//! Steps of many rows on a GPU: the host's results, and nobody's but one's own.

use decode_graph::batch::{NO_ROW, PADDING, Row};
use decode_graph::{
    Backend, CudaBackend, Drive, Graph, Head, HostBackend, KvArena, Numerics, StepArena, StepPlan,
    record,
};
use gpu_slab::HostMemory;
use kernels_ptx::TokenParams;
use kv_paged::{KvType, LayerGroup, PlannerConfig};

use crate::device::{self, say};
use crate::support::{CONTEXT, DIMS, MEMORY_BYTES, Tiny};

const BLOCK_SIZE: u32 = 8;
const MAX_SEQUENCES: u32 = 34;

/// A cache for many and the buffers of some plans, in one slab with the tiny model.
struct Many<B: Backend> {
    tiny: Tiny<B::Memory>,
    kv: KvArena,
    arena: StepArena,
    plans: Vec<StepPlan>,
}

impl<B: Backend> Many<B> {
    /// `rows`: of each plan, with the tokens of a run.
    fn new(mut tiny: Tiny<B::Memory>, rows: &[[u32; 2]]) -> Self {
        let per_sequence = CONTEXT.div_ceil(BLOCK_SIZE);
        let blocks = MAX_SEQUENCES * per_sequence + 1;
        let groups = vec![LayerGroup::full(DIMS.n_layer, blocks)];
        let config = PlannerConfig::new(groups, MAX_SEQUENCES, CONTEXT).unwrap();
        let config = config.with_block_size(BLOCK_SIZE).unwrap();
        tiny.plan.head = Head::Greedy;
        let plans: Vec<StepPlan> = rows
            .iter()
            .map(|&[tokens, run]| match run {
                1 => tiny.plan.for_batch(tokens, config.clone(), &tiny.profile),
                _ => tiny.plan.for_chunk(tokens, Some(config.clone()), &tiny.profile),
            })
            .collect();
        let kv = KvArena::for_plan(&mut tiny.slab, &plans[0]).unwrap();
        let arena = StepArena::for_plans(&mut tiny.slab, &plans).unwrap();
        arena.zero(&mut tiny.slab).unwrap();
        tiny.slab.fill_view(kv.blocks, 0).unwrap();
        // Blocks of sequences mixed, so that a wrong table is a wrong result.
        let owned = MAX_SEQUENCES * per_sequence;
        let mut table: Vec<u32> = (0..owned).map(|i| 1 + i * 5 % owned).collect();
        table.resize(table.len() + per_sequence as usize, 0);
        tiny.slab.write_view(kv.table, 0, bytemuck::cast_slice(&table)).unwrap();
        Self { tiny, kv, arena, plans }
    }

    fn capture(&mut self, backend: &mut B, plan: usize) -> Graph<B> {
        let Tiny { weights, profile, slab, .. } = &mut self.tiny;
        let recording = record(&self.plans[plan], weights, &self.kv, &self.arena, profile).unwrap();
        Graph::capture(backend, slab, &recording).unwrap()
    }

    fn step(&mut self, backend: &mut B, graph: &mut Graph<B>, rows: &[Row], outputs: &[u32]) {
        self.arena.write_rows(&mut self.tiny.slab, 0, rows).unwrap();
        self.arena.write_outputs(&mut self.tiny.slab, 0, outputs).unwrap();
        graph.replay(backend, &mut self.tiny.slab, Drive::SelfAdvance).unwrap();
    }

    fn logits(&mut self, output: u32) -> Vec<f32> {
        let mut logits = vec![0.0f32; DIMS.n_vocab as usize];
        let at = u64::from(output * DIMS.n_vocab) * 4;
        let bytes = bytemuck::cast_slice_mut(&mut logits);
        self.tiny.slab.read_view(self.arena.logits, at, bytes).unwrap();
        logits
    }
}

fn row(sequence: u32, position: u32) -> Row {
    let token_id = (sequence * 31 + position * 37 + 11) % DIMS.n_vocab;
    let params = TokenParams { absolute_position: position, ring_slot: position, token_id };
    Row { sequence, params }
}

fn on_gpu(gpu: &CudaBackend, rows: &[[u32; 2]], numerics: Numerics) -> Many<CudaBackend> {
    let memory = gpu.allocate(4 * MEMORY_BYTES).unwrap();
    let kv_type = if numerics == Numerics::Q8 { KvType::F16 } else { KvType::F32 };
    Many::new(Tiny::in_memory(memory, gpu.profile(), numerics, kv_type, false, 1), rows)
}

fn on_host(gpu: &CudaBackend, rows: &[[u32; 2]], numerics: Numerics) -> Many<HostBackend> {
    let memory = HostMemory::new(4 * MEMORY_BYTES).unwrap();
    let kv_type = if numerics == Numerics::Q8 { KvType::F16 } else { KvType::F32 };
    Many::new(Tiny::in_memory(memory, gpu.profile(), numerics, kv_type, false, 1), rows)
}

fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

/// Steps of a batch, each row of another sequence. No row's logits may be further than `tolerance` from
/// the host's; how far they are at most.
fn follow_the_host(gpu: &mut CudaBackend, rows: u32, numerics: Numerics, tolerance: f32) -> f32 {
    let (mut ours, mut hosts) =
        (on_gpu(gpu, &[[rows, 1]], numerics), on_host(gpu, &[[rows, 1]], numerics));
    let (mut our_graph, mut host_graph) =
        (ours.capture(gpu, 0), hosts.capture(&mut HostBackend, 0));
    let mut worst = 0.0f32;
    for step in 0..6 {
        // Every row has come from the start, so that its cache is its own.
        let given: Vec<Row> = (0..rows).map(|s| row(s, step)).collect();
        let outputs: Vec<u32> = (0..rows).rev().collect();
        ours.step(gpu, &mut our_graph, &given, &outputs);
        hosts.step(&mut HostBackend, &mut host_graph, &given, &outputs);
        for output in 0..rows {
            let error = relative_error(&ours.logits(output), &hosts.logits(output));
            // Here, because a maximum passes over what is no number.
            assert!(error < tolerance, "{rows} rows, step {step}, row {output}: {error}");
            worst = worst.max(error);
        }
    }
    worst
}

#[test]
fn batches_follow_the_host() {
    let Some(mut gpu) = device::gpu("batches follow the host") else { return };
    for rows in [2, 8, 9, 32] {
        let worst = follow_the_host(&mut gpu, rows, Numerics::Q8, 1e-3);
        say(&format!("batch of {rows}: logits within {worst:.1e}\n"));
    }
    let worst = follow_the_host(&mut gpu, 3, Numerics::Exact, 1e-4);
    say(&format!("batch of 3 in exact numerics: logits within {worst:.1e}\n"));
}

#[test]
fn who_shares_a_batch_changes_no_bit() {
    let Some(mut gpu) = device::gpu("who shares a batch changes no bit") else { return };
    let gpu = &mut *gpu;
    for rows in [8, 32] {
        let mut run = |others: bool| {
            let mut many = on_gpu(gpu, &[[rows, 1]], Numerics::Q8);
            let mut graph = many.capture(gpu, 0);
            let mut bits = Vec::new();
            for step in 0..20 {
                let given: Vec<Row> = (0..rows)
                    .map(|s| if s == 5 || others { row(s, step) } else { PADDING })
                    .collect();
                let outputs: Vec<u32> =
                    (0..rows).map(|s| if s == 5 || others { s } else { NO_ROW }).collect();
                many.step(gpu, &mut graph, &given, &outputs);
                bits.extend(many.logits(5).into_iter().map(f32::to_bits));
            }
            bits
        };
        assert_eq!(run(false), run(true), "{rows} rows");
    }
}

#[test]
fn a_chunk_leaves_the_cache_that_single_steps_leave() {
    let Some(mut gpu) = device::gpu("chunks") else { return };
    let gpu = &mut *gpu;
    // One token at a time through the step of one row, and chunks of several sizes.
    let n = 40;
    let plans = [[2, 1], [16, 16], [40, 40], [n + 8, n + 8]];
    let mut many = on_gpu(gpu, &plans, Numerics::Q8);
    let mut single = many.capture(gpu, 0);
    for position in 0..n {
        many.step(gpu, &mut single, &[row(0, position), PADDING], &[0, NO_ROW]);
    }
    let expected = many.logits(0);
    for (plan, &[tokens, _]) in plans.iter().enumerate().skip(1) {
        let mut graph = many.capture(gpu, plan);
        let mut first = 0;
        while first < n {
            let here = tokens.min(n - first);
            // The same tokens, in the cache of another sequence.
            let mut rows: Vec<Row> = (first..first + here)
                .map(|position| Row { sequence: plan as u32, ..row(0, position) })
                .collect();
            rows.resize(tokens as usize, PADDING);
            many.step(gpu, &mut graph, &rows, &[here - 1]);
            first += here;
        }
        let error = relative_error(&many.logits(0), &expected);
        say(&format!("chunks of {tokens}: logits within {error:.1e} of single steps\n"));
        assert!(error < 5e-3, "chunks of {tokens}: {error}");
    }
}
