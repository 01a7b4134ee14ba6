//! Times the decode step of models with random weights on a GPU, and each of its kernels.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_step -- 3b
//! cargo run --release --features cuda --example gpu_step -- 1b 3b 8b --vary
//! ```
//!
//! Options, after any of `1b`, `3b`, `8b` (all three if none is named), or `tiny`:
//!
//! ```text
//! --depths 0,4096    tokens in the cache
//! --context 8192     tokens that the cache holds
//! --steps 128        steps per measurement; the median of --repeats of them counts
//! --repeats 7
//! --target 80        PTX for compute_80, which has no programmatic launch
//! --trigger before   let the next kernel's blocks in before waiting for inputs; after; never
//! --blocks 2         multiplies the grids of matrix products
//! --vary             also a line for each combination of the three above
//! --no-kernels       no table of kernels
//! ```

mod model;
mod variant;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use decode_graph::{Backend, ByteRange, CudaBackend, Graph, Launch, record};
use gpu_slab::DeviceMemory;
use kernels_ptx::{Arg, TokenParams};

use model::{Model, SHAPES, Shape, TINY};
use variant::{Trigger, Variant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    shapes: Vec<Shape>,
    depths: Vec<u32>,
    context: u32,
    steps: u32,
    repeats: usize,
    vary: bool,
    kernels: bool,
    change: Change,
}

/// What is different from the step as the library makes it.
#[derive(Clone, Copy)]
struct Change {
    target: Option<u32>,
    trigger: Trigger,
    blocks: u32,
}

impl Change {
    const NONE: Self = Self { target: None, trigger: Trigger::After, blocks: 1 };

    /// The kernels to be loaded for it; `None`: those of the backend.
    fn variant(self, backend: &CudaBackend) -> Result<Option<Arc<Variant>>> {
        if self.target.is_none() && self.trigger == Trigger::After {
            return Ok(None);
        }
        let newest = backend.profile().compute_capability;
        Variant::load(backend, self.target.unwrap_or(newest), self.trigger).map(Some)
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let target = self.target.map_or("own".into(), |target| format!("compute_{target}"));
        let trigger = match self.trigger {
            Trigger::After => "after",
            Trigger::Before => "before",
            Trigger::Never => "never",
        };
        write!(f, "PTX {target}, trigger {trigger}, blocks x{}", self.blocks)
    }
}

fn options() -> Result<Options> {
    let mut options = Options {
        shapes: Vec::new(),
        depths: vec![0, 4096],
        context: 8192,
        steps: 128,
        repeats: 7,
        vary: false,
        kernels: true,
        change: Change::NONE,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg}: a value is missing"));
        match arg.as_str() {
            "--depths" => {
                let depths = value()?;
                options.depths =
                    depths.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
            }
            "--context" => options.context = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--repeats" => options.repeats = value()?.parse()?,
            "--target" => options.change.target = Some(value()?.parse()?),
            "--trigger" => {
                options.change.trigger = match value()?.as_str() {
                    "before" => Trigger::Before,
                    "never" => Trigger::Never,
                    _ => Trigger::After,
                };
            }
            "--blocks" => options.change.blocks = value()?.parse()?,
            "--vary" => options.vary = true,
            "--no-kernels" => options.kernels = false,
            name => {
                let shape = SHAPES.iter().chain([&TINY]).find(|shape| shape.name == name);
                options.shapes.push(*shape.ok_or(format!("{name}: no such option or shape"))?);
            }
        }
    }
    if options.shapes.is_empty() {
        options.shapes = SHAPES.to_vec();
    }
    Ok(options)
}

fn main() -> Result<()> {
    let options = options()?;
    match gpu_slab::cuda::device_count() {
        Ok(0) | Err(_) => {
            println!("gpu_step: skipped, no CUDA device");
            return Ok(());
        }
        Ok(_) => {}
    }
    let mut backend = CudaBackend::new(0)?;
    println!("{}; {}", backend.cuda_device(), backend.load_report()?);
    backend.warm_up(Duration::from_millis(300))?;
    for shape in &options.shapes {
        let memory = backend.allocate_growing(backend.memory_bytes()?.0)?;
        let start = Instant::now();
        let mut model = Model::new(memory, &backend.profile(), *shape, options.context)?;
        println!(
            "\n{}: {:.3} GB of weights per token, made in {:.1} s",
            shape.name,
            model.weight_bytes() as f64 / 1e9,
            start.elapsed().as_secs_f64()
        );
        let variant = options.change.variant(&backend)?;
        println!("{}", options.change);
        let mut bench = Bench::new(&mut backend, &mut model, options.change, variant)?;
        bench.step(&options, true)?;
        if options.kernels {
            bench.kernels(&options)?;
        }
        if options.vary {
            vary(&mut backend, &mut model, &options)?;
        }
    }
    Ok(())
}

/// Every combination of target, trigger and grid size.
fn vary(backend: &mut CudaBackend, model: &mut Model, options: &Options) -> Result<()> {
    let mut changes = vec![(None, Trigger::After), (Some(80), Trigger::After)];
    if backend.load_report()?.target != "compute_80" {
        changes.splice(1..1, [(None, Trigger::Before), (None, Trigger::Never)]);
    }
    for (target, trigger) in changes {
        let variant = Change { target, trigger, blocks: 1 }.variant(backend)?;
        for blocks in [1, 2, 3] {
            let change = Change { target, trigger, blocks };
            println!("{change}");
            Bench::new(backend, model, change, variant.clone())?.step(options, false)?;
        }
    }
    Ok(())
}

/// Makes the grid of a matrix product larger. Where a kernel is told how blocks are shared among
/// matrices, it is told anew.
fn multiply_blocks(launch: &mut Launch<ByteRange>, factor: u32) {
    let source = launch.kernel.source();
    if !source.starts_with("gemv") && source != "head" {
        return;
    }
    launch.geometry.grid[0] *= factor;
    for (arg, param) in launch.args.iter_mut().zip(launch.kernel.params()) {
        if let (Arg::U32(blocks), true) = (arg, param.name.starts_with("blocks")) {
            *blocks *= factor;
        }
    }
}

struct Bench<'a> {
    backend: &'a mut CudaBackend,
    model: &'a mut Model,
    variant: Option<Arc<Variant>>,
    launches: Vec<Launch<ByteRange>>,
}

impl<'a> Bench<'a> {
    fn new(
        backend: &'a mut CudaBackend,
        model: &'a mut Model,
        change: Change,
        variant: Option<Arc<Variant>>,
    ) -> Result<Self> {
        let Model { plan, weights, kv, arena, slab } = &*model;
        let recording = record(plan, weights, kv, arena, &backend.profile())?;
        let (mut launches, _) = Graph::bind(backend, slab, &recording)?;
        launches.iter_mut().for_each(|launch| multiply_blocks(launch, change.blocks));
        Ok(Self { backend, model, variant, launches })
    }

    /// Microseconds of one run of the launches, captured as a graph: the median over repeats of
    /// the mean over runs. The first run begins with `depth` tokens in the cache.
    fn time(
        &mut self,
        launches: &[Launch<ByteRange>],
        depth: u32,
        runs: u32,
        repeats: usize,
    ) -> Result<f64> {
        let memory = self.model.slab.memory_mut();
        let (externals, launches) = match &self.variant {
            Some(variant) => (vec![variant.external(launches, memory.base_address())], &[][..]),
            None => (Vec::new(), launches),
        };
        self.backend.set_externals(externals);
        let mut graph = self.backend.capture(memory, launches)?;
        self.backend.set_externals(Vec::new());
        let mut times = Vec::new();
        for repeat in 0..=repeats {
            let params = TokenParams { absolute_position: depth, ring_slot: depth, token_id: 1 };
            let slab = &mut self.model.slab;
            slab.write_view(self.model.arena.tokens, 0, bytemuck::bytes_of(&params))?;
            self.backend.replay(slab.memory_mut(), &mut graph)?;
            self.backend.synchronize()?;
            let start = Instant::now();
            for _ in 0..runs {
                self.backend.replay(slab.memory_mut(), &mut graph)?;
            }
            self.backend.synchronize()?;
            if repeat > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(runs));
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn step(&mut self, options: &Options, details: bool) -> Result<()> {
        let launches = self.launches.clone();
        for &depth in &options.depths {
            let us = self.time(&launches, depth, options.steps, options.repeats)?;
            let bytes = self.model.weight_bytes() + self.model.kv_bytes(depth + options.steps / 2);
            let logits = self.logits()?;
            println!(
                "  depth {depth:5}: {us:8.1} us, {:7.1} tok/s, {:6.0} GB/s, {} nodes, logits {:.4}",
                1e6 / us,
                bytes as f64 / us / 1e3,
                launches.len(),
                logits,
            );
        }
        if details {
            let start = Instant::now();
            let graph = self.backend.capture(self.model.slab.memory_mut(), &launches)?;
            println!("  capture and instantiate: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
            drop(graph);
            let us = self.time(&launches[..1], 0, 1000, 3)?;
            println!("  a graph of one node: {us:.2} us");
        }
        Ok(())
    }

    /// Root mean square of the logits: a number that says whether anything sensible came out.
    fn logits(&mut self) -> Result<f64> {
        let mut logits = vec![0.0f32; self.model.plan.dims.n_vocab as usize];
        let bytes = bytemuck::cast_slice_mut(&mut logits);
        self.model.slab.read_view(self.model.arena.logits, 0, bytes)?;
        let sum: f64 = logits.iter().map(|x| f64::from(*x).powi(2)).sum();
        Ok((sum / logits.len() as f64).sqrt())
    }

    /// Each kind of launch by itself: all of the step's back to back, in one graph.
    fn kernels(&mut self, options: &Options) -> Result<()> {
        let mut kinds: Vec<(&str, Vec<Launch<ByteRange>>)> = Vec::new();
        for launch in &self.launches {
            match kinds.iter_mut().find(|(what, _)| *what == launch.label.what) {
                Some((_, launches)) => launches.push(launch.clone()),
                None => kinds.push((launch.label.what, vec![launch.clone()])),
            }
        }
        for &depth in &options.depths {
            println!("  alone, back to back, depth {depth}:");
            println!(
                "  {:22} {:24} {:>5} {:>12} {:>8} {:>9} {:>9} {:>7}",
                "what",
                "kernel",
                "count",
                "grid x block",
                "us each",
                "us a step",
                "MB each",
                "GB/s"
            );
            let mut total = 0.0;
            for (what, launches) in &kinds {
                let count = launches.len() as f64;
                let repeated: Vec<_> = match launches.len() {
                    1 => (0..8).flat_map(|_| launches.clone()).collect(),
                    _ => launches.clone(),
                };
                let us = self.time(&repeated, depth, 32, options.repeats)? / repeated.len() as f64;
                total += us * count;
                let bytes = self.bytes_of(launches, depth) / count;
                let geometry = launches[0].geometry;
                println!(
                    "  {what:22} {:24} {count:5} {:>12} {us:8.2} {:9.1} {:9.3} {:7.0}",
                    launches[0].kernel.name(),
                    format!(
                        "{}x{}",
                        geometry.grid.iter().product::<u32>(),
                        geometry.block.iter().product::<u32>()
                    ),
                    us * count,
                    bytes / 1e6,
                    bytes / us / 1e3,
                );
            }
            println!("  {:22} {:56} {total:9.1}", "sum", "");
        }
        Ok(())
    }

    /// Weights and live cache that the launches read.
    fn bytes_of(&self, launches: &[Launch<ByteRange>], depth: u32) -> f64 {
        let weights = launches.iter().flat_map(|launch| launch.buffers());
        let weights =
            weights.filter(|(name, ..)| ["w", "w0", "w1", "w2", "gate", "up"].contains(name));
        let bytes: u64 = weights.map(|(_, _, range)| range.len_bytes).sum();
        let attention = ["attention", "attention_step"].contains(&launches[0].kernel.source());
        let kv = if attention { self.model.kv_bytes(depth) } else { 0 };
        (bytes + kv) as f64
    }
}
