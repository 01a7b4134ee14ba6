//! A model loaded onto a backend.

use std::path::Path;
use std::time::Instant;

use decode_graph::{Backend, Drive, Head, ModelWeights, OpTime, Probe, StepPlan};
use gpu_slab::{QueuedRead, Slab};
use kernels_ptx::{SamplingPack, TokenParams};

use crate::batch::{BatchDevice, Many, SchedulerOptions};
use crate::decode::Decode;
use crate::generate::token_params;
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::loading::{Progress, load_weights};
use crate::memory_plan::MemoryPlan;
use crate::model::Model;
use crate::residency::{Residency, ResidencyError, StepName, Telemetry};

/// A resident model with its step.
pub struct Decoder<B: Backend> {
    pub(crate) residency: Residency<B>,
    pub(crate) weights: ModelWeights,
    /// Where prompt chunks read another layout than the step of a token.
    chunk_weights: Option<ModelWeights>,
    pub(crate) plan: StepPlan,
    /// Steps of prompt chunks, the longest first.
    chunks: Vec<StepPlan>,
    /// Of a cache that many sequences share.
    pub(crate) many: Option<Many>,
}

impl<B: Backend> Decoder<B> {
    /// Makes the model resident in `memory` as planned, captures the greedy step and warms up. The
    /// packed weights are kept in a file named `cache`, if one is named.
    pub fn load(
        backend: B,
        memory: B::Memory,
        gguf: &Gguf,
        model: &Model,
        plan: &MemoryPlan,
        cache: Option<&Path>,
        progress: Progress<'_>,
    ) -> Result<Self, LaneError> {
        let started = Instant::now();
        let mut residency = Residency::over(backend, Slab::new(memory), plan.limits(model));
        let (weights, chunk_weights) = residency.transaction(|residency| {
            let weights = load_weights(residency, gguf, model, &plan.step, cache, progress)?;
            let fusion = plan.step.fusion;
            let chunk_weights = match plan.chunks.iter().find(|chunk| chunk.fusion != fusion) {
                None => None,
                // The file keeps the weights of one layout.
                Some(chunk) => Some(load_weights(residency, gguf, model, chunk, None, progress)?),
            };
            match &plan.batch {
                None => {
                    residency.kv_arena(plan.step.kv, None)?;
                    residency.step_arenas(&plan.steps())?;
                }
                Some(batch) => {
                    residency.kv_pools(&batch.steps[0])?;
                    residency.step_arenas(&batch.steps)?;
                }
            }
            Ok::<_, LaneError>((weights, chunk_weights))
        })?;
        residency.seal();
        let resident = Instant::now();
        let many = plan.batch.as_ref().map(|batch| Many::new(&plan.step, batch)).transpose()?;
        let (step, chunks) = (plan.step.clone(), plan.chunks.clone());
        let mut decoder = Self { residency, weights, chunk_weights, plan: step, chunks, many };
        if decoder.many.is_some() {
            decoder.warm_up_batch()?;
        } else {
            decoder.residency.prepare_graph(&plan.step, &decoder.weights)?;
            decoder.residency.warm_up()?;
        }
        log::info!(
            target: "lane",
            "weights and buffers resident in {} ms, steps ready after {} more",
            (resident - started).as_millis(),
            resident.elapsed().as_millis()
        );
        Ok(decoder)
    }

    /// What is resident.
    pub fn residency(&self) -> &Residency<B> {
        &self.residency
    }

    /// What is resident, to be changed.
    pub fn residency_mut(&mut self) -> &mut Residency<B> {
        &mut self.residency
    }
}

impl<B> Decode for Decoder<B>
where
    B: Backend + Send + 'static,
    B::Memory: Send,
    B::Executable: Send,
{
    fn backend(&self) -> &'static str {
        self.residency.backend().name()
    }

    fn device(&self) -> String {
        self.residency.backend().device()
    }

    fn is_asynchronous(&self) -> bool {
        self.residency.backend().is_asynchronous()
    }

    fn n_vocab(&self) -> u32 {
        self.plan.dims.n_vocab
    }

    fn max_context_tokens(&self) -> u32 {
        self.plan.kv.max_context_tokens()
    }

    fn kv(&self) -> kv_paged::PagedKvConfig {
        self.plan.kv
    }

    fn prepare(&mut self, head: Head) -> Result<(), ResidencyError> {
        self.plan.head = head;
        if self.residency.use_graph(StepName::from(&self.plan)) {
            return Ok(());
        }
        self.residency.prepare_graph(&self.plan, &self.weights)
    }

    fn set_sampling(&mut self, pack: &SamplingPack) -> Result<(), ResidencyError> {
        self.residency.set_sampling(pack).map(|_| ())
    }

    fn prefill(&mut self, position: u32, ids: &[u32]) -> Result<usize, ResidencyError> {
        let max_context_tokens = self.max_context_tokens();
        // A chunk does not go around the ring.
        let room = (max_context_tokens.saturating_sub(position) as usize).min(ids.len());
        let fits = |chunk: &&StepPlan| chunk.n_tokens as usize <= room;
        let Some(chunk) = self.chunks.iter().find(fits) else { return Ok(0) };
        let n_tokens = chunk.n_tokens as usize;
        let params: Vec<_> = (position..)
            .zip(&ids[..n_tokens])
            .map(|(position, &id)| token_params(position, max_context_tokens, id))
            .collect();
        let weights = self.chunk_weights.as_ref().unwrap_or(&self.weights);
        let done = if self.residency.use_graph(StepName::from(chunk)) {
            Ok(())
        } else {
            self.residency.prepare_graph(chunk, weights)
        };
        let done = done.and_then(|()| self.residency.replay(Drive::Host(&params)));
        // Steps of a token follow, even after an error.
        self.residency.use_graph(StepName::from(&self.plan));
        done.map(|()| n_tokens)
    }

    fn step(&mut self, drive: Drive<'_>) -> Result<(), ResidencyError> {
        self.residency.replay(drive)
    }

    fn token(&mut self) -> Result<u32, ResidencyError> {
        self.residency.read_token()
    }

    fn queue_token(&mut self) -> Result<QueuedRead, ResidencyError> {
        self.residency.queue_token()
    }

    fn finish_token(&mut self, queued: QueuedRead) -> Result<u32, ResidencyError> {
        self.residency.finish_token(queued)
    }

    fn logits(&mut self, logits: &mut [f32]) -> Result<(), ResidencyError> {
        self.residency.read_logits(logits)
    }

    fn fingerprint(&self) -> u64 {
        self.residency.fingerprint(self.weights.output.layout)
    }

    fn read_cache(&mut self, n_tokens: u32) -> Result<Vec<u8>, ResidencyError> {
        self.residency.read_blocks(n_tokens.div_ceil(self.plan.kv.block_size_tokens()))
    }

    fn write_cache(&mut self, n_tokens: u32, blocks: &[u8]) -> Result<(), ResidencyError> {
        let n_blocks = n_tokens.div_ceil(self.plan.kv.block_size_tokens());
        self.residency.write_blocks(n_blocks, blocks)
    }

    fn into_batch(self: Box<Self>) -> Option<(SchedulerOptions, Box<dyn BatchDevice>)> {
        let options = self.many.as_ref()?.scheduler.clone();
        Some((options, self))
    }

    fn time_ops(
        &mut self,
        depth: u32,
        repetitions: u32,
    ) -> Result<(Vec<OpTime>, f64), ResidencyError> {
        let kv = self.plan.kv;
        let bytes_per_token = kv.total_bytes()
            / u64::from(kv.n_layer())
            / u64::from(kv.blocks_per_layer())
            / u64::from(kv.block_size_tokens());
        let token = TokenParams {
            absolute_position: depth,
            ring_slot: depth % kv.max_context_tokens(),
            token_id: 0,
        };
        let kv_bytes_per_layer = bytes_per_token * u64::from(depth + 1);
        self.residency.time_ops(&Probe { token, kv_bytes_per_layer, repetitions })
    }

    fn read_bandwidth(&mut self) -> Result<f64, ResidencyError> {
        // Larger than caches, which a GPU needs more for; less where it has no more.
        let on_host = self.residency.backend().name() == "host";
        for len_bytes in [1 << 30, 512 << 20].into_iter().filter(|_| !on_host) {
            if let Ok(found) = self.residency.read_bandwidth(len_bytes) {
                return Ok(found);
            }
        }
        self.residency.read_bandwidth(128 << 20)
    }

    fn telemetry(&self) -> Telemetry {
        self.residency.telemetry()
    }

    fn report(&self) -> gpu_slab::Report {
        self.residency.slab().report()
    }
}
