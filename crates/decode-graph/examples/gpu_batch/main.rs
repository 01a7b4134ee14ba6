//! Times steps of many rows on a GPU, models with random weights: batches of sequences and chunks
//! of a prompt, and each of their kernels.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_batch -- 3b
//! cargo run --release --features cuda --example gpu_batch -- 3b --batches 8,32 --chunks 512
//! ```
//!
//! Options, after `1b`, `3b`, `8b` or `tiny`:
//!
//! ```text
//! --batches 2,4,8,16,32    sequences decoded together
//! --chunks 128,256,512     tokens of a prompt computed together
//! --depth 0                tokens in the cache of each sequence
//! --prompt 2048            tokens of the prompt
//! --steps 128              steps per measurement; the median of --repeats of them counts
//! --repeats 5
//! --no-kernels             no table of kernels
//! ```

#[allow(dead_code, reason = "gpu_step needs more of it")]
#[path = "../gpu_step/model.rs"]
mod model;

use std::error::Error;
use std::time::{Duration, Instant};

use decode_graph::batch::Row;
use decode_graph::{
    Backend, ByteRange, CudaBackend, Graph, KvArena, Launch, StepArena, StepPlan, record,
};
use kernels_ptx::TokenParams;
use kv_paged::{LayerGroup, PlannerConfig};

use model::{Model, SHAPES, Shape, TINY};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    shape: Shape,
    batches: Vec<u32>,
    chunks: Vec<u32>,
    depth: u32,
    prompt: u32,
    steps: u32,
    repeats: usize,
    kernels: bool,
}

fn options() -> Result<Options> {
    let mut options = Options {
        shape: SHAPES[1],
        batches: vec![2, 4, 8, 16, 32],
        chunks: vec![128, 256, 512],
        depth: 0,
        prompt: 2048,
        steps: 128,
        repeats: 5,
        kernels: true,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg}: a value is missing"));
        match arg.as_str() {
            "--batches" => options.batches = list(&value()?)?,
            "--chunks" => options.chunks = list(&value()?)?,
            "--depth" => options.depth = value()?.parse()?,
            "--prompt" => options.prompt = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--repeats" => options.repeats = value()?.parse()?,
            "--no-kernels" => options.kernels = false,
            name => {
                let shape = SHAPES.iter().chain([&TINY]).find(|shape| shape.name == name);
                options.shape = *shape.ok_or(format!("{name}: no such option or shape"))?;
            }
        }
    }
    Ok(options)
}

fn list(text: &str) -> Result<Vec<u32>> {
    Ok(text.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?)
}

fn main() -> Result<()> {
    let options = options()?;
    match gpu_slab::cuda::device_count() {
        Ok(0) | Err(_) => {
            println!("gpu_batch: skipped, no CUDA device");
            return Ok(());
        }
        Ok(_) => {}
    }
    let mut backend = CudaBackend::new(0)?;
    println!("{}; {}", backend.cuda_device(), backend.load_report()?);
    backend.warm_up(Duration::from_millis(300))?;
    let memory = backend.allocate_growing(backend.memory_bytes()?.0)?;
    let context = options.prompt.max(options.depth + options.steps + 1).next_multiple_of(64);
    let model = Model::new(memory, &backend.profile(), options.shape, context)?;
    let weight_bytes = model.weight_bytes();
    println!("{}: {:.3} GB of weights per step", options.shape.name, weight_bytes as f64 / 1e9);
    let mut bench = Bench::new(backend, model, &options)?;
    for &rows in &options.batches {
        let plan = bench.model.plan.for_batch(rows, bench.planner.clone(), &bench.profile());
        let launches = bench.launches(&plan)?;
        let us = bench.batch(&launches, rows, options.steps)?;
        println!(
            "batch {rows:4}: {us:8.1} us, {:8.1} tok/s, {:5.0} GB/s of weights, {} nodes, logits {:.4}",
            f64::from(rows) * 1e6 / us,
            weight_bytes as f64 / us / 1e3,
            launches.len(),
            bench.logits()?,
        );
        if options.kernels {
            bench.kernels(&launches, rows, 1)?;
        }
    }
    for &tokens in &options.chunks {
        let planner = Some(bench.planner.clone());
        let plan = bench.model.plan.for_chunk(tokens, planner, &bench.profile());
        let launches = bench.launches(&plan)?;
        let us = bench.prompt(&launches, tokens)?;
        println!(
            "chunk {tokens:4}: prompt of {} in {:.2} ms, {:8.1} tok/s, {} nodes, logits {:.4}",
            options.prompt,
            us / 1e3,
            f64::from(options.prompt) * 1e6 / us,
            launches.len(),
            bench.logits()?,
        );
        if options.kernels {
            bench.kernels(&launches, tokens, tokens)?;
        }
    }
    Ok(())
}

struct Bench<'a> {
    backend: CudaBackend,
    model: Model,
    planner: PlannerConfig,
    kv: KvArena,
    arena: StepArena,
    options: &'a Options,
}

impl<'a> Bench<'a> {
    fn new(backend: CudaBackend, mut model: Model, options: &'a Options) -> Result<Self> {
        let profile = backend.profile();
        let sequences = options.batches.iter().copied().max().unwrap_or(1);
        let (context, n_layer) = (model.plan.kv.max_context_tokens(), model.plan.dims.n_layer);
        let per_sequence = model.plan.kv.blocks_per_layer();
        let groups = vec![LayerGroup::full(n_layer, sequences * per_sequence + 1)];
        let planner = PlannerConfig::new(groups, sequences, context)?;
        let plans: Vec<StepPlan> = (options.batches.iter())
            .map(|&rows| model.plan.for_batch(rows, planner.clone(), &profile))
            .chain(
                options
                    .chunks
                    .iter()
                    .map(|&tokens| model.plan.for_chunk(tokens, Some(planner.clone()), &profile)),
            )
            .collect();
        let kv = KvArena::for_plan(&mut model.slab, &plans[0])?;
        let arena = StepArena::for_plans(&mut model.slab, &plans)?;
        arena.zero(&mut model.slab)?;
        model.slab.fill_view(kv.blocks, 0)?;
        // Sequence s has the blocks behind those of s - 1; the last row is all null block.
        let mut table: Vec<u32> = (1..=sequences * per_sequence).collect();
        table.resize(table.len() + per_sequence as usize, 0);
        model.slab.write_view(kv.table, 0, bytemuck::cast_slice(&table))?;
        Ok(Self { backend, model, planner, kv, arena, options })
    }

    fn profile(&self) -> kernels_ptx::DeviceProfile {
        self.backend.profile()
    }

    fn launches(&self, plan: &StepPlan) -> Result<Vec<Launch<ByteRange>>> {
        let recording = record(plan, &self.model.weights, &self.kv, &self.arena, &self.profile())?;
        Ok(Graph::bind(&self.backend, &self.model.slab, &recording)?.0)
    }

    /// Rows in runs of one sequence each, from `position` on.
    fn write_rows(&mut self, rows: u32, run: u32, position: u32) -> Result<()> {
        let rows: Vec<Row> = (0..rows)
            .map(|row| {
                let position = position + row % run;
                let (sequence, token_id) = (row / run, row * 97 % 400);
                let params =
                    TokenParams { absolute_position: position, ring_slot: position, token_id };
                Row { sequence, params }
            })
            .collect();
        self.arena.write_rows(&mut self.model.slab, 0, &rows)?;
        let outputs: Vec<u32> = match run {
            1 => (0..rows.len() as u32).collect(),
            _ => vec![rows.len() as u32 - 1],
        };
        Ok(self.arena.write_outputs(&mut self.model.slab, 0, &outputs)?)
    }

    /// Microseconds of a step, each of whose rows is a sequence.
    fn batch(&mut self, launches: &[Launch<ByteRange>], rows: u32, steps: u32) -> Result<f64> {
        let mut graph = self.backend.capture(self.model.slab.memory_mut(), launches)?;
        let mut times = Vec::new();
        for repeat in 0..=self.options.repeats {
            self.write_rows(rows, 1, self.options.depth)?;
            self.backend.replay(self.model.slab.memory_mut(), &mut graph)?;
            self.backend.synchronize()?;
            let start = Instant::now();
            for _ in 0..steps {
                self.backend.replay(self.model.slab.memory_mut(), &mut graph)?;
            }
            self.backend.synchronize()?;
            if repeat > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(steps));
            }
        }
        Ok(median(times))
    }

    /// Microseconds of a whole prompt in chunks.
    fn prompt(&mut self, launches: &[Launch<ByteRange>], tokens: u32) -> Result<f64> {
        let mut graph = self.backend.capture(self.model.slab.memory_mut(), launches)?;
        let mut times = Vec::new();
        for repeat in 0..=self.options.repeats {
            self.backend.synchronize()?;
            let start = Instant::now();
            for first in (0..self.options.prompt).step_by(tokens as usize) {
                self.write_rows(tokens, tokens, first)?;
                self.backend.replay(self.model.slab.memory_mut(), &mut graph)?;
            }
            self.backend.synchronize()?;
            if repeat > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(median(times))
    }

    /// Root mean square of the first output's logits.
    fn logits(&mut self) -> Result<f64> {
        let mut logits = vec![0.0f32; self.model.plan.dims.n_vocab as usize];
        let bytes = bytemuck::cast_slice_mut(&mut logits);
        self.model.slab.read_view(self.arena.logits, 0, bytes)?;
        let sum: f64 = logits.iter().map(|x| f64::from(*x).powi(2)).sum();
        Ok((sum / logits.len() as f64).sqrt())
    }

    /// Each kind of launch by itself: all of the step's back to back, in one graph.
    fn kernels(&mut self, launches: &[Launch<ByteRange>], rows: u32, run: u32) -> Result<()> {
        let mut kinds: Vec<(&str, Vec<Launch<ByteRange>>)> = Vec::new();
        for launch in launches {
            match kinds.iter_mut().find(|(what, _)| *what == launch.label.what) {
                Some((_, launches)) => launches.push(launch.clone()),
                None => kinds.push((launch.label.what, vec![launch.clone()])),
            }
        }
        let position = if run > 1 { self.options.prompt / 2 } else { self.options.depth };
        let mut total = 0.0;
        for (what, launches) in &kinds {
            let count = launches.len();
            let repeated: Vec<_> = match count {
                1 => (0..8).flat_map(|_| launches.clone()).collect(),
                _ => launches.clone(),
            };
            let mut graph = self.backend.capture(self.model.slab.memory_mut(), &repeated)?;
            let mut times = Vec::new();
            for _ in 0..4 {
                self.write_rows(rows, run, position.min(self.options.prompt - run.max(64)))?;
                self.backend.synchronize()?;
                let start = Instant::now();
                for _ in 0..8 {
                    self.backend.replay(self.model.slab.memory_mut(), &mut graph)?;
                }
                self.backend.synchronize()?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / 8.0);
            }
            let us = median(times) / repeated.len() as f64;
            total += us * count as f64;
            let weights = launches.iter().flat_map(|launch| launch.buffers());
            let bytes: u64 = weights
                .filter(|(name, ..)| ["w", "w0", "w1", "w2", "gate", "up"].contains(name))
                .map(|(_, _, range)| range.len_bytes)
                .sum();
            let bytes = bytes as f64 / count as f64;
            let g = launches[0].geometry;
            println!(
                "    {what:24} {:20} {count:4} {:>12} {us:9.2} us each {:9.1} a step {:8.3} MB {:6.0} GB/s",
                launches[0].kernel.name(),
                format!("{}x{}", g.grid.iter().product::<u32>(), g.block.iter().product::<u32>()),
                us * count as f64,
                bytes / 1e6,
                bytes / us / 1e3,
            );
        }
        println!("    sum {total:9.1} us");
        Ok(())
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
