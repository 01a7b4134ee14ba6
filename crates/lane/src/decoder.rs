//! A model loaded onto a backend.

use decode_graph::{Backend, Drive, Head, ModelWeights, StepPlan, WeightRef};
use gpu_slab::{QueuedRead, Slab, View};
use kernels_ptx::SamplingPack;
use q4k_soa::{LayoutId, Shape};
use rayon::prelude::*;

use crate::batch::{BatchDevice, Many, SchedulerOptions};
use crate::decode::Decode;
use crate::generate::token_params;
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::layout::{self, Visit};
use crate::memory_plan::MemoryPlan;
use crate::model::{Model, Rope, TensorRef, VectorRef, non_finite_scales};
use crate::residency::{Residency, ResidencyError, StepName, Telemetry, WeightSource};

/// Told while weights are loaded.
pub type Progress<'a> = &'a mut dyn FnMut(LoadProgress<'_>);

/// How far loading is.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress<'a> {
    /// The matrix just made resident.
    pub name: &'a str,
    /// Bytes of the file done.
    pub done_bytes: u64,
    /// Bytes of the file to do.
    pub total_bytes: u64,
}

/// A resident model with its step.
pub struct Decoder<B: Backend> {
    pub(crate) residency: Residency<B>,
    pub(crate) weights: ModelWeights,
    pub(crate) plan: StepPlan,
    /// Steps of prompt chunks, the longest first.
    chunks: Vec<StepPlan>,
    /// Of a cache that many sequences share.
    pub(crate) many: Option<Many>,
}

impl<B: Backend> Decoder<B> {
    /// Makes the model resident in `memory` as planned, captures the greedy step and warms up.
    pub fn load(
        backend: B,
        memory: B::Memory,
        gguf: &Gguf,
        model: &Model,
        plan: &MemoryPlan,
        progress: Progress<'_>,
    ) -> Result<Self, LaneError> {
        let mut residency = Residency::over(backend, Slab::new(memory), plan.limits(model));
        let weights = residency.transaction(|residency| {
            let weights = load_weights(residency, gguf, model, &plan.step, progress)?;
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
            Ok::<_, LaneError>(weights)
        })?;
        residency.seal();
        let many = plan.batch.as_ref().map(|batch| Many::new(&plan.step, batch)).transpose()?;
        let mut decoder =
            Self { residency, weights, plan: plan.step.clone(), chunks: plan.chunks.clone(), many };
        if decoder.many.is_some() {
            decoder.warm_up_batch()?;
        } else {
            decoder.residency.prepare_graph(&plan.step, &decoder.weights)?;
            decoder.residency.warm_up()?;
        }
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

/// Reads, fingerprints, packs and uploads the weights of a model that `step` needs, as it wants
/// them.
pub fn load_weights<B: Backend>(
    residency: &mut Residency<B>,
    gguf: &Gguf,
    model: &Model,
    step: &StepPlan,
    progress: Progress<'_>,
) -> Result<ModelWeights, LaneError> {
    let total_bytes = model.matrices().map(|matrix| matrix.n_bytes()).sum();
    let layout = layout::layout_id(step.fusion);
    let mut load =
        Load { residency, gguf, layout, progress, buffer: Vec::new(), done_bytes: 0, total_bytes };
    let weights = layout::walk(gguf, model, step.kv.max_context_tokens(), &mut load)?;
    // Bytes read before a file changed and bytes read after it are not one model.
    gguf.check_unchanged()?;
    Ok(weights)
}

/// Bytes that one thread reads at a time.
const READ_BYTES: usize = 4 << 20;

struct Load<'a, 'p, B: Backend> {
    residency: &'a mut Residency<B>,
    gguf: &'a Gguf,
    layout: LayoutId,
    progress: Progress<'p>,
    /// The one matrix that is held outside the slab.
    buffer: Vec<u8>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<B: Backend> Visit for Load<'_, '_, B> {
    type Error = LaneError;

    fn matrix(&mut self, name: &str, matrix: TensorRef) -> Result<WeightRef, LaneError> {
        let info = matrix.info(self.gguf);
        self.buffer.resize(matrix.n_bytes() as usize, 0);
        // One thread copies from the page cache slower than the rest of loading goes.
        self.buffer.par_chunks_mut(READ_BYTES).enumerate().try_for_each(|(index, chunk)| {
            let at = matrix.first_byte() + (index * READ_BYTES) as u64;
            self.gguf.read_tensor(info, at, chunk)
        })?;
        let bytes = &self.buffer;
        let scan = non_finite_scales(matrix.ty, bytes);
        if scan.non_finite > 0 {
            log::warn!(
                target: "lane",
                "{name}: {} of {} scales are NaN or infinite",
                scan.non_finite,
                scan.n_scales
            );
        }
        let shape = Shape { n_out: matrix.n_out, n_in: matrix.n_in };
        let layout = self.layout;
        let source = WeightSource { name, weight_type: matrix.ty, shape, layout, bytes };
        let (weight, _) = self.residency.make_resident(&source)?;
        self.done_bytes += matrix.n_bytes();
        (self.progress)(LoadProgress {
            name,
            done_bytes: self.done_bytes,
            total_bytes: self.total_bytes,
        });
        Ok(weight)
    }

    fn vectors(&mut self, name: &str, parts: &[VectorRef]) -> Result<View, LaneError> {
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend(self.gguf.tensor_to_vec(part.info(self.gguf))?);
        }
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
        let wrong = values.iter().filter(|value| !value.is_finite()).count();
        if wrong > 0 {
            let n = values.len();
            log::warn!(target: "lane", "{name}: {wrong} of {n} values are NaN or infinite");
        }
        Ok(self.residency.blob(blob_key(name), name, &bytes)?)
    }

    fn frequencies(
        &mut self,
        name: &str,
        rope: &Rope,
        factors: Option<VectorRef>,
    ) -> Result<View, LaneError> {
        let factors = match factors {
            Some(factors) => Some(self.gguf.tensor_to_vec(factors.info(self.gguf))?),
            None => None,
        };
        let factors: Option<Vec<f32>> = factors.map(|bytes| bytemuck::pod_collect_to_vec(&bytes));
        let frequencies = rope.inverse_frequencies(factors.as_deref());
        Ok(self.residency.blob(blob_key(name), name, bytemuck::cast_slice(&frequencies))?)
    }
}

/// Blobs of a model are keyed by their tensor's name.
fn blob_key(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes()).max(1)
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
        if !self.residency.use_graph(StepName::from(chunk)) {
            self.residency.prepare_graph(chunk, &self.weights)?;
        }
        let params: Vec<_> = (position..)
            .zip(&ids[..n_tokens])
            .map(|(position, &id)| token_params(position, max_context_tokens, id))
            .collect();
        self.residency.replay(Drive::Host(&params))?;
        self.residency.use_graph(StepName::from(&self.plan));
        Ok(n_tokens)
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
        self.residency.fingerprint()
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

    fn telemetry(&self) -> Telemetry {
        self.residency.telemetry()
    }

    fn report(&self) -> gpu_slab::Report {
        self.residency.slab().report()
    }
}
