//! A GPU, and steps of models on it.

use std::time::{Duration, Instant};

use decode_graph::backend::cuda::CudaGraph;
use decode_graph::{Backend, ByteRange, CudaBackend, Graph, Launch, record};
use kernels_ptx::TokenParams;

use crate::model::{Model, Shape};

/// Tokens that the cache holds.
const CONTEXT: u32 = 4096;

pub(crate) struct Gpu {
    backend: CudaBackend,
}

/// The launches of a model's step, bound to its memory.
pub(crate) struct Step {
    pub(crate) model: Model,
    pub(crate) launches: Vec<Launch<ByteRange>>,
}

impl Gpu {
    /// Device 0, warmed up; `None` where there is none, which is said.
    pub(crate) fn open(bench: &str) -> Option<Self> {
        if !gpu_slab::cuda::device_count().is_ok_and(|count| count > 0) {
            eprintln!("{bench}: skipped, no CUDA device");
            return None;
        }
        let mut backend = CudaBackend::new(0).expect("a device that can be used");
        backend.warm_up(Duration::from_millis(300)).expect("64 MiB and a device that works");
        eprintln!("{}", backend.cuda_device());
        Some(Self { backend })
    }

    /// The step of a model; `None` where the device has no room for it, which is said.
    pub(crate) fn step(&mut self, bench: &str, shape: Shape) -> Option<Step> {
        let free = self.backend.memory_bytes().expect("a device that works").0;
        let memory = self.backend.allocate_growing(free).expect("addresses");
        let profile = self.backend.profile();
        let model = match Model::new(memory, &profile, shape, CONTEXT) {
            Ok(model) => model,
            Err(error) => {
                eprintln!("{bench}, {}: skipped, {error}", shape.name);
                return None;
            }
        };
        let Model { plan, weights, kv, arena, slab } = &model;
        let recording = record(plan, weights, kv, arena, &profile).expect("a possible model");
        let (launches, _) = Graph::bind(&self.backend, slab, &recording).expect("its own slab");
        Some(Step { model, launches })
    }

    pub(crate) fn capture(&mut self, step: &mut Step, launches: &[Launch<ByteRange>]) -> CudaGraph {
        let memory = step.model.slab.memory_mut();
        self.backend.capture(memory, launches).expect("launches of a step")
    }

    /// Time of `runs` replays, the first with `depth` tokens in the cache.
    pub(crate) fn run(
        &mut self,
        step: &mut Step,
        graph: &mut CudaGraph,
        depth: u32,
        runs: u64,
    ) -> Duration {
        let params = TokenParams { absolute_position: depth, ring_slot: depth, token_id: 1 };
        let (slab, tokens) = (&mut step.model.slab, step.model.arena.tokens);
        slab.write_view(tokens, 0, bytemuck::bytes_of(&params)).expect("12 bytes");
        self.backend.synchronize().expect("a device that works");
        let start = Instant::now();
        for _ in 0..runs {
            self.backend.replay(slab.memory_mut(), graph).expect("a device that works");
        }
        self.backend.synchronize().expect("a device that works");
        start.elapsed()
    }
}

/// Weights, and of attention the live cache, that the launches read.
pub(crate) fn bytes_of(launches: &[Launch<ByteRange>], model: &Model, depth: u32) -> u64 {
    let one = |launch: &Launch<ByteRange>| {
        let matrices = ["w", "w0", "w1", "w2", "gate", "up"];
        let buffers = launch.buffers().filter(|(name, ..)| matrices.contains(name));
        let weights: u64 = buffers.map(|(_, _, range)| range.len_bytes).sum();
        let attention = launch.kernel.source().starts_with("attention");
        let layers = u64::from(model.plan.dims.n_layer);
        weights + if attention { model.kv_bytes(depth) / layers } else { 0 }
    };
    launches.iter().map(one).sum()
}
