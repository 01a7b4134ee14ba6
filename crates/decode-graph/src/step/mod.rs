//! The decode step as one function of a plan: the list of launches that turns token ids and
//! positions into logits and the next token. Host, eager CUDA and capture all consume it (S19).

use gpu_slab::View;
use kernels_ptx::{DeviceProfile, Geometry, Kernel, ParamError, ops};

use crate::batch::LayerCache;
use crate::launch::{Label, Launch};
use crate::plan::{Fusion, KvArena, ModelWeights, StepArena, StepPlan};

/// Appends a launch: arguments are checked, geometry is asked of the operation.
macro_rules! launch {
    ($recorder:expr, $what:expr, $kernel:expr, $args:expr) => {{
        let (recorder, kernel, args) = (&mut *$recorder, $kernel, $args);
        let geometry: Geometry = args.geometry(recorder.device);
        let label = recorder.label($what);
        let list = args.list(kernel, |view: View| view.len_bytes());
        let args = list.map_err(|source| RecordError::Param { label, source })?;
        recorder.launches.push(Launch { kernel, geometry, args, label });
    }};
}

mod attention;
mod head;
mod products;

/// Why a step cannot be recorded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// An argument does not fit its kernel.
    #[error("{label}: {source}")]
    Param {
        /// Place in the step.
        label: Label,
        /// What does not fit.
        source: ParamError,
    },
    /// A view is too short for a part of it to be taken.
    #[error("{label}: {source}")]
    View {
        /// Place in the step.
        label: Label,
        /// What the slab said.
        source: gpu_slab::SlabError,
    },
    /// The plan contradicts itself or its weights.
    #[error("{what}: plan says {expected}, found {found}")]
    Plan {
        /// Which number.
        what: &'static str,
        /// From the plan.
        expected: u64,
        /// From the weights or buffers.
        found: u64,
    },
    /// No kernel is made for this.
    #[error("no kernel for {0}")]
    Unsupported(String),
    /// A matrix is packed in another way than the step reads.
    #[error("{label}: the step reads layout {expected}, the matrix has layout {found}")]
    Layout {
        /// Place in the step.
        label: Label,
        /// The step's.
        expected: q4k_soa::LayoutId,
        /// The matrix's.
        found: q4k_soa::LayoutId,
    },
    /// There is no persistent step for the model or on the device.
    #[error(transparent)]
    Schedule(#[from] kernels_ptx::schedule::ScheduleError),
    /// The slab refused the schedule of a persistent step, or a view of it.
    #[error("schedule: {0}")]
    Slab(gpu_slab::SlabError),
}

/// The launches of a step, and the buffer that its per-token parameters are written to.
#[derive(Clone, Debug)]
pub struct Recording {
    /// In order of execution.
    pub launches: Vec<Launch>,
    /// [`kernels_ptx::TokenParams`] `[n_tokens]`.
    pub tokens: View,
}

/// Records the step of `plan` over the given weights, cache and buffers.
pub fn record(
    plan: &StepPlan,
    weights: &ModelWeights,
    kv: &KvArena,
    arena: &StepArena,
    device: &DeviceProfile,
) -> Result<Recording, RecordError> {
    expect("layers", plan.dims.n_layer.into(), weights.layers.len() as u64)?;
    expect("query heads per key head, rest", 0, (plan.dims.n_head % plan.dims.n_kv_head).into())?;
    if plan.kv != kv.config {
        let (expected, found) = (plan.kv.total_bytes(), kv.config.total_bytes());
        return Err(RecordError::Plan { what: "KV bytes (and shape)", expected, found });
    }
    crate::batch::check(plan)?;
    if plan.fusion != Fusion::Ops {
        return Err(RecordError::Unsupported("a persistent step: record_persistent does".into()));
    }
    let windows: Vec<u32> = weights.layers.iter().map(|layer| layer.window).collect();
    let caches = LayerCache::of_layers(plan, kv, &windows)?;
    let launches = Vec::new();
    let mut recorder = Recorder { plan, arena, device, launches, layer: None, caches };
    recorder.embed(weights)?;
    for (index, layer) in weights.layers.iter().enumerate() {
        recorder.layer = Some(index as u32);
        let frequencies = layer.inverse_frequencies.unwrap_or(weights.inverse_frequencies);
        recorder.attention(index as u32, layer, frequencies)?;
        recorder.feed_forward(layer)?;
    }
    recorder.layer = None;
    recorder.head(weights)?;
    Ok(Recording { launches: recorder.launches, tokens: arena.tokens })
}

/// The launches behind the logits.
pub(crate) fn choose_and_advance(
    plan: &StepPlan,
    arena: &StepArena,
    device: &DeviceProfile,
) -> Result<Vec<Launch>, RecordError> {
    let (launches, caches) = (Vec::new(), Vec::new());
    let mut recorder = Recorder { plan, arena, device, launches, layer: None, caches };
    recorder.choose_and_advance()?;
    Ok(recorder.launches)
}

pub(crate) fn expect(what: &'static str, expected: u64, found: u64) -> Result<(), RecordError> {
    if expected == found { Ok(()) } else { Err(RecordError::Plan { what, expected, found }) }
}

struct Recorder<'a> {
    plan: &'a StepPlan,
    arena: &'a StepArena,
    device: &'a DeviceProfile,
    launches: Vec<Launch>,
    layer: Option<u32>,
    /// The places of layers in the cache.
    caches: Vec<LayerCache>,
}

impl Recorder<'_> {
    fn label(&self, what: &'static str) -> Label {
        Label { layer: self.layer, what }
    }

    fn slice(
        &self,
        what: &'static str,
        view: View,
        range: std::ops::Range<u64>,
    ) -> Result<View, RecordError> {
        let label = self.label(what);
        view.slice(range).map_err(|source| RecordError::View { label, source })
    }

    fn embed(&mut self, weights: &ModelWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let embed = weights.embed;
        self.planes("embed", &embed)?;
        expect("embedding rows", plan.dims.n_vocab.into(), embed.shape.n_out.into())?;
        expect("embedding row length", plan.dims.n_embd.into(), embed.shape.n_in.into())?;
        let args = ops::embed::Args {
            table: embed.view,
            tokens: arena.tokens,
            x: arena.hidden_a,
            ggml_type: embed.weight_type.ggml_id(),
            n_tokens: plan.n_tokens,
            n_vocab: plan.dims.n_vocab,
            n_embd: plan.dims.n_embd,
            scale: plan.embed_scale,
        };
        launch!(self, "embed", Kernel::Embed, args);
        Ok(())
    }
}
