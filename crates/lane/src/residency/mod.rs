//! Device residency: one type that owns the slab and everything in it that a decode step needs,
//! each thing loaded once and never moved (S1–S13).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use decode_graph::{
    Backend, ByteRange, Drive, Fusion, Graph, GraphError, GraphTelemetry, Head, KvArena, Launch,
    ModelWeights, OpTime, PersistentOptions, Probe, Recording, StepArena, StepPlan, WeightRef,
    clear_persistent_failure, persistent_failure, read_bandwidth, record, record_persistent,
};
use gpu_slab::{DeviceMemory, QueuedRead, Slab, View};
use kernels_ptx::{MAX_CANDIDATES, SamplingPack, TokenParams};
use kv_paged::{BlockTable, PagedKvConfig, PlannerConfig};
use q4k_soa::Fingerprint;

mod error;
mod limits;
mod state;
mod sticky;
mod weights;

pub use error::ResidencyError;
pub use limits::Limits;
pub use sticky::StickyWrite;
pub use weights::{PreloadReport, WeightSource};

pub(crate) use weights::{allocate_weight, packed_layout};

/// Half of what the watchdog of a persistent step allows.
const SUSPICIOUS: Duration = Duration::from_millis(500);

/// Owns the slab, the resident weights, blobs, the sticky slot, the KV arena, the step arena,
/// the parameter packs, and the graphs over them.
pub struct Residency<B: Backend> {
    // Graphs first: they are dropped before the memory they point at.
    graphs: HashMap<StepName, Graph<B>>,
    live: Option<StepName>,
    captures: u64,
    backend: B,
    slab: Slab<B::Memory>,
    limits: Limits,
    weights: HashMap<Fingerprint, WeightRef>,
    resident_weight_bytes: u64,
    blobs: HashMap<u64, weights::Blob>,
    sticky: Option<sticky::Slot>,
    kv: Option<KvArena>,
    /// The planner of a KV arena of many sequences.
    pools: Option<PlannerConfig>,
    step: Option<(Vec<StepPlan>, StepArena)>,
    packs: HashMap<View, u64>,
    d2h_bytes_per_token: Option<u64>,
    /// The last of the candidates that are drawn from.
    last_candidate: u32,
}

/// Which of the steps over one cache and one set of buffers: how it ends, and its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepName {
    /// How it ends.
    pub head: Head,
    /// Its rows.
    pub n_tokens: u32,
    /// Rows that follow each other in one sequence.
    pub run_tokens: u32,
}

impl From<&StepPlan> for StepName {
    fn from(plan: &StepPlan) -> Self {
        Self { head: plan.head, n_tokens: plan.n_tokens, run_tokens: plan.run_tokens }
    }
}

/// Everything that can be watched, copied out: nobody can launch or change a graph with it
/// (S10).
#[derive(Clone, Debug, PartialEq)]
pub struct Telemetry {
    /// The graph that runs, `None` before the first capture.
    pub graph: Option<GraphTelemetry>,
    /// Graphs captured so far.
    pub captures: u64,
    /// Bytes read back for the last token.
    pub d2h_bytes_per_token: Option<u64>,
    /// Weights resident.
    pub resident_weights: usize,
    /// Packed bytes of the weights resident.
    pub resident_weight_bytes: u64,
    /// Whether a KV arena is resident.
    pub kv_ready: bool,
    /// Bytes of the slab.
    pub capacity_bytes: u64,
    /// End of the permanent region.
    pub permanent_end_bytes: u64,
    /// Most bytes ever in use.
    pub high_water_bytes: u64,
}

impl<B: Backend> Residency<B> {
    /// An empty residency over `memory`.
    pub fn new(backend: B, memory: B::Memory, limits: Limits) -> Self {
        Self::over(backend, Slab::new(memory), limits)
    }

    /// A residency over a slab that may already hold things of the caller's; they stay.
    pub fn over(backend: B, slab: Slab<B::Memory>, limits: Limits) -> Self {
        Self {
            graphs: HashMap::new(),
            live: None,
            captures: 0,
            backend,
            slab,
            limits,
            weights: HashMap::new(),
            resident_weight_bytes: 0,
            blobs: HashMap::new(),
            sticky: None,
            kv: None,
            pools: None,
            step: None,
            packs: HashMap::new(),
            d2h_bytes_per_token: None,
            last_candidate: 0,
        }
    }

    /// Runs `load` all or nothing: when it fails, the slab and everything resident are as they
    /// were before.
    pub fn transaction<T, E>(
        &mut self,
        load: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let checkpoint = self.slab.checkpoint();
        let result = load(self);
        if result.is_err() {
            // Fails only if something was sealed meanwhile, and then it is meant to stay.
            let rewound = self.slab.rewind(checkpoint);
            log::debug!(target: "lane", "load undone: {rewound:?}");
            self.forget_stale();
        }
        result
    }

    /// Drops every record of things whose memory has been rewound.
    fn forget_stale(&mut self) {
        let slab = &self.slab;
        let alive = |view: View| slab.resolve(view).is_ok();
        self.weights.retain(|_, weight| alive(weight.view));
        self.resident_weight_bytes = self.weights.values().map(|w| w.view.len_bytes()).sum();
        self.blobs.retain(|_, blob| alive(blob.view));
        self.packs.retain(|view, _| alive(*view));
        self.sticky = self.sticky.take().filter(|slot| alive(slot.view()));
        self.kv = self.kv.filter(|kv| alive(kv.blocks) && alive(kv.table));
        self.pools = self.pools.take().filter(|_| self.kv.is_some());
        self.step = self.step.take().filter(|(_, arena)| alive(arena.quants));
    }

    /// The KV arena of `config`, zeroed, with `table` or the identity (S6). The same shape again
    /// is free and keeps the contents; another shape is refused; a failure leaves nothing behind.
    pub fn kv_arena(
        &mut self,
        config: PagedKvConfig,
        table: Option<&BlockTable>,
    ) -> Result<KvArena, ResidencyError> {
        if let Some(kv) = self.kv {
            if kv.config != config {
                return Err(ResidencyError::OtherShape {
                    what: "KV arena",
                    resident: format!("{:?}", kv.config),
                    asked: format!("{config:?}"),
                });
            }
            if let Some(table) = table {
                upload_table(&mut self.slab, &kv, table)?;
            }
            return Ok(kv);
        }
        if config.total_elems() > self.limits.max_kv_elems {
            return Err(ResidencyError::Limit {
                name: "kv".into(),
                what: "elements",
                found: config.total_elems(),
                limit: self.limits.max_kv_elems,
            });
        }
        let kv = self.slab.transaction(|slab| {
            let kv = KvArena::allocate(slab, config)?;
            slab.fill_view(kv.blocks, 0)?;
            match table {
                Some(table) => upload_table(slab, &kv, table)?,
                None => upload_table(slab, &kv, &BlockTable::identity(&config))?,
            }
            Ok::<_, ResidencyError>(kv)
        })?;
        self.kv = Some(kv);
        Ok(kv)
    }

    /// The KV arena of a plan of many sequences: the pools of its planner, and its table, zeroed,
    /// which is the null block. The same shape again is free and keeps the contents; another shape
    /// is refused.
    pub fn kv_pools(&mut self, plan: &StepPlan) -> Result<KvArena, ResidencyError> {
        if let Some(kv) = self.kv {
            return if self.pools == plan.sequences {
                Ok(kv)
            } else {
                Err(ResidencyError::OtherShape {
                    what: "KV arena",
                    resident: format!("{:?}", self.pools),
                    asked: format!("{:?}", plan.sequences),
                })
            };
        }
        let kv = self.slab.transaction(|slab| {
            let kv = KvArena::for_plan(slab, plan)?;
            slab.fill_view(kv.blocks, 0)?;
            slab.fill_view(kv.table, 0)?;
            Ok::<_, ResidencyError>(kv)
        })?;
        self.kv = Some(kv);
        self.pools = plan.sequences.clone();
        Ok(kv)
    }

    /// The step arena of `plan`, zeroed (S7). The same dimensions again are free, others are
    /// refused.
    pub fn step_arena(&mut self, plan: &StepPlan) -> Result<StepArena, ResidencyError> {
        self.step_arenas(std::slice::from_ref(plan))
    }

    /// One step arena that each of `plans` can use, plans of one model and at least one.
    pub fn step_arenas(&mut self, plans: &[StepPlan]) -> Result<StepArena, ResidencyError> {
        if let Some((resident, arena)) = &self.step {
            let same = resident.len() == plans.len()
                && resident.iter().zip(plans).all(|(resident, plan)| {
                    StepPlan { head: resident.head, ..plan.clone() } == *resident
                });
            if same {
                return Ok(*arena);
            }
            let dims = |plans: &[StepPlan]| format!("{:?}", plans.first().map(|plan| plan.dims));
            return Err(ResidencyError::OtherShape {
                what: "step arena",
                resident: dims(resident),
                asked: dims(plans),
            });
        }
        let arena = self.slab.transaction(|slab| {
            let arena = StepArena::for_plans(slab, plans)?;
            arena.zero(slab)?;
            Ok::<_, ResidencyError>(arena)
        })?;
        self.step = Some((plans.to_vec(), arena));
        Ok(arena)
    }

    /// Writes a parameter pack, unless the same bytes are there already (S8); true if it wrote.
    pub fn upload_pack(&mut self, view: View, bytes: &[u8]) -> Result<bool, ResidencyError> {
        let hash = xxhash_rust::xxh3::xxh3_64(bytes);
        if self.packs.get(&view) == Some(&hash) {
            return Ok(false);
        }
        self.slab.write_view(view, 0, bytes)?;
        self.packs.insert(view, hash);
        Ok(true)
    }

    /// Uploads sampling parameters for the steps to come.
    pub fn set_sampling(&mut self, pack: &SamplingPack) -> Result<bool, ResidencyError> {
        let StepArena { sampling: view, logits, .. } = *self.arena()?;
        self.last_candidate = last_candidate(pack, (logits.len_bytes() / 4) as u32);
        self.upload_pack(view, bytemuck::bytes_of(pack))
    }

    /// Makes everything resident so far permanent: from here on steps may only use what lies
    /// behind it, and rewind to it (S2).
    pub fn seal(&mut self) {
        self.slab.seal();
    }

    /// Captures the step of `plan`, if no graph with its key is there, and makes it the live one
    /// (S9). Weights, KV arena and step arena must be resident.
    pub fn prepare_graph(
        &mut self,
        plan: &StepPlan,
        weights: &ModelWeights,
    ) -> Result<(), ResidencyError> {
        let recording = self.record(plan, weights)?;
        let (_, key) = Graph::bind(&self.backend, &self.slab, &recording)?;
        let name = StepName::from(plan);
        if self.graphs.get(&name).is_none_or(|graph| graph.key() != key) {
            let graph = Graph::capture(&mut self.backend, &mut self.slab, &recording)?;
            self.captures += 1;
            self.graphs.insert(name, graph);
        }
        self.live = Some(name);
        Ok(())
    }

    /// Makes the graph that was captured under this name the live one; false if there is none.
    pub fn use_graph(&mut self, name: StepName) -> bool {
        let found = self.graphs.contains_key(&name);
        if found {
            self.live = Some(name);
        }
        found
    }

    fn record(
        &mut self,
        plan: &StepPlan,
        weights: &ModelWeights,
    ) -> Result<Recording, ResidencyError> {
        let kv = self.kv.ok_or(ResidencyError::Missing("KV arena"))?;
        let (arena, device) = (*self.arena()?, self.backend.profile());
        let recording = match plan.fusion {
            Fusion::Ops => record(plan, weights, &kv, &arena, &device),
            Fusion::Persistent => {
                let (slab, options) = (&mut self.slab, PersistentOptions::default());
                record_persistent(slab, plan, weights, &kv, &arena, &device, options)
            }
        };
        Ok(recording?)
    }

    /// The launches of the live graph, for tools that step through them.
    pub fn launches(&self) -> &[Launch<ByteRange>] {
        let live = self.live.and_then(|name| self.graphs.get(&name));
        live.map_or(&[], Graph::launches)
    }

    /// Times the launches of the live graph, each kind by itself, and the whole of it. Leaves the
    /// step's buffers and the last slot of the cache with whatever comes of it.
    pub fn time_ops(&mut self, probe: &Probe) -> Result<(Vec<OpTime>, f64), ResidencyError> {
        let graph = self
            .live
            .and_then(|head| self.graphs.get(&head))
            .ok_or(ResidencyError::Missing("graph"))?;
        let ops = graph.time_ops(&mut self.backend, &mut self.slab, probe)?;
        let step_seconds = graph.time_step(&mut self.backend, &mut self.slab, probe)?;
        Ok((ops, step_seconds))
    }

    /// Bytes per second at which the backend reads memory that no cache holds.
    pub fn read_bandwidth(&mut self, len_bytes: u64) -> Result<f64, ResidencyError> {
        read_bandwidth(&mut self.backend, len_bytes).map_err(|e| GraphError::from(e).into())
    }

    /// Runs one of [`Self::launches`] by itself and waits for it.
    pub fn run_launch(&mut self, launch: &Launch<ByteRange>) -> Result<(), ResidencyError> {
        let done = self.backend.launch(self.slab.memory_mut(), launch);
        done.and_then(|()| self.backend.synchronize()).map_err(|e| GraphError::from(e).into())
    }

    /// The KV arena and the step arena, if they are resident.
    pub fn arenas(&self) -> Option<(&KvArena, &StepArena)> {
        Some((self.kv.as_ref()?, self.step.as_ref().map(|(_, arena)| arena)?))
    }

    /// Replays the live graph once.
    pub fn replay(&mut self, drive: Drive<'_>) -> Result<(), ResidencyError> {
        let graph = self
            .live
            .and_then(|name| self.graphs.get_mut(&name))
            .ok_or(ResidencyError::Missing("graph"))?;
        Ok(graph.replay(&mut self.backend, &mut self.slab, drive)?)
    }

    /// Waits for the queued steps and reads the token that the last one chose.
    pub fn read_token(&mut self) -> Result<u32, ResidencyError> {
        let queued = self.queue_token()?;
        self.finish_token(queued)
    }

    /// Queues the reading of the token that the step queued last will choose: another step can be
    /// queued behind it, and the device need not wait for the host.
    pub fn queue_token(&mut self) -> Result<QueuedRead, ResidencyError> {
        let view = self.arena()?.token;
        let before = self.slab.counters().d2h_bytes;
        let queued = self.slab.queue_read_view(view)?;
        self.d2h_bytes_per_token = Some(self.slab.counters().d2h_bytes - before);
        Ok(queued)
    }

    /// Waits for a queued token.
    pub fn finish_token(&mut self, queued: QueuedRead) -> Result<u32, ResidencyError> {
        let started = Instant::now();
        let mut token = 0u32;
        self.slab.finish_read(queued, bytemuck::bytes_of_mut(&mut token))?;
        // No step takes this long unless its watchdog ended it: only then is asking worth a read.
        if started.elapsed() >= SUSPICIOUS {
            let arena = *self.arena()?;
            if let Some(failure) = persistent_failure(&mut self.slab, &arena)? {
                clear_persistent_failure(&mut self.slab, &arena)?;
                return Err(ResidencyError::Persistent(failure));
            }
        }
        self.check_number(0, token, self.last_candidate)?;
        Ok(token)
    }

    /// Refuses a token that was chosen among logits that are no numbers, of which `first_logit` is
    /// the place of the first. Of such the first or the last candidate is taken, so other tokens are
    /// not worth a read.
    pub(crate) fn check_number(
        &mut self,
        first_logit: u64,
        token: u32,
        last_candidate: u32,
    ) -> Result<(), ResidencyError> {
        if token != 0 && token != last_candidate {
            return Ok(());
        }
        let mut logit = f32::NAN;
        let (view, at) = (self.arena()?.logits, first_logit + u64::from(token));
        self.slab.read_view(view, at * 4, bytemuck::bytes_of_mut(&mut logit))?;
        if logit.is_nan() { Err(ResidencyError::NotNumbers) } else { Ok(()) }
    }

    /// Waits for the queued steps and reads the logits of the last one.
    pub fn read_logits(&mut self, logits: &mut [f32]) -> Result<(), ResidencyError> {
        let view = self.arena()?.logits;
        let before = self.slab.counters().d2h_bytes;
        self.slab.read_view(view, 0, bytemuck::cast_slice_mut(logits))?;
        self.d2h_bytes_per_token = Some(self.slab.counters().d2h_bytes - before);
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(ResidencyError::NotNumbers);
        }
        Ok(())
    }

    /// Runs the live graph once on a scratch position, so that clocks, driver, modules and page
    /// tables are ready before the first token (S11). Leaves the cache slot 0 written and the
    /// step's parameters reset.
    pub fn warm_up(&mut self) -> Result<(), ResidencyError> {
        self.replay(Drive::Host(&[TokenParams::default()]))?;
        match self.read_token() {
            // Whoever asks for text is told.
            Ok(_) | Err(ResidencyError::NotNumbers) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A copy of everything that can be watched.
    pub fn telemetry(&self) -> Telemetry {
        Telemetry {
            graph: self.live.and_then(|name| self.graphs.get(&name)).map(Graph::telemetry),
            captures: self.captures,
            d2h_bytes_per_token: self.d2h_bytes_per_token,
            resident_weights: self.weights.len(),
            resident_weight_bytes: self.resident_weight_bytes,
            kv_ready: self.kv.is_some(),
            capacity_bytes: self.slab.capacity_bytes(),
            permanent_end_bytes: self.slab.permanent_end_bytes(),
            high_water_bytes: self.slab.high_water_bytes(),
        }
    }

    /// The slab, for reports.
    pub fn slab(&self) -> &Slab<B::Memory> {
        &self.slab
    }

    /// The slab, for a step's own temporaries: they lie behind the permanent region and are
    /// rewound by whoever takes them.
    pub fn slab_mut(&mut self) -> &mut Slab<B::Memory> {
        &mut self.slab
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    fn arena(&self) -> Result<&StepArena, ResidencyError> {
        self.step.as_ref().map(|(_, arena)| arena).ok_or(ResidencyError::Missing("step arena"))
    }
}

/// The last of the candidates that are drawn from.
pub(crate) fn last_candidate(pack: &SamplingPack, n_vocab: u32) -> u32 {
    let all = MAX_CANDIDATES.min(n_vocab);
    if pack.top_k == 0 { all - 1 } else { pack.top_k.min(all) - 1 }
}

fn upload_table<M: DeviceMemory>(
    slab: &mut Slab<M>,
    kv: &KvArena,
    table: &BlockTable,
) -> Result<(), ResidencyError> {
    let bytes: &[u8] = bytemuck::cast_slice(table.entries());
    if bytes.len() as u64 != kv.table.len_bytes() {
        let (expected, found) = (kv.table.len_bytes() / 4, table.entries().len() as u64);
        return Err(ResidencyError::Table { expected, found });
    }
    Ok(slab.write_view(kv.table, 0, bytes)?)
}
