//! From a model and a memory budget to a context length and a byte-exact plan, before anything
//! is allocated (S14).

use decode_graph::{Fusion, Head, ModelDims, Numerics, RopePlan, StepPlan};
use gpu_slab::Plan;
use kernels_ptx::DeviceProfile;
use kv_paged::{KvType, PagedKvConfig};
use q4k_soa::WeightType;

use crate::batch::{BatchOptions, BatchPlan, most_tokens};
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::layout;
use crate::model::{Activation, Layer, Model};
use crate::residency::{Limits, ResidencyError};

/// How many tokens the KV cache should hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContextSize {
    /// The smaller of the file's context and 8192; less when the budget does not allow it.
    #[default]
    Auto,
    /// The file's context.
    Max,
    /// Exactly this many, or none at all.
    Tokens(u32),
}

/// How much of a step one kernel does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FusionChoice {
    /// The persistent kernel where device and model allow it, a kernel an operation elsewhere.
    #[default]
    Auto,
    /// A kernel for each operation.
    Ops,
    /// One kernel for the whole step, or nothing.
    Persistent,
}

/// Oldest device with what the persistent kernel is made of: bulk copies, barriers on them.
const PERSISTENT_CAPABILITY: u32 = 90;

impl FusionChoice {
    fn decide(self, model: &Model, device: &DeviceProfile, plan: &StepPlan) -> Fusion {
        let streams = |ty| matches!(ty, WeightType::Q4K | WeightType::Q6K | WeightType::Q8_0);
        let suits = device.compute_capability >= PERSISTENT_CAPABILITY
            && plan.numerics == Numerics::Q8
            && plan.kv.kv_type() == KvType::F16
            && model.config.activation == Activation::SwiGlu
            && model.config.local_rope.is_none()
            && !model.layers.iter().any(Layer::has_post_norms)
            && model.matrices().all(|matrix| streams(matrix.ty));
        match self {
            FusionChoice::Ops => Fusion::Ops,
            FusionChoice::Auto if !suits => Fusion::Ops,
            FusionChoice::Auto | FusionChoice::Persistent => Fusion::Persistent,
        }
    }
}

/// Whether 8 bits move a model's logits by more than answers differ by, and f32 costs little because
/// so little is computed.
fn is_narrow(model: &Model) -> bool {
    model.config.n_embd <= 1024
}

/// The numerics that suit a model: exact ones a narrow one. The persistent kernel has 8 bits.
pub fn suitable_numerics(model: &Model, fusion: FusionChoice) -> Numerics {
    let narrow = is_narrow(model);
    if narrow && fusion != FusionChoice::Persistent { Numerics::Exact } else { Numerics::Q8 }
}

/// Most tokens that [`ContextSize::Auto`] takes.
const AUTO_TOKENS: u32 = 8192;

/// What decides the plan besides the model.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Context.
    pub context: ContextSize,
    /// Matrix products; [`suitable_numerics`] says what suits a model.
    pub numerics: Numerics,
    /// Launches of the step.
    pub fusion: FusionChoice,
    /// KV element type; by default f16 with q8 numerics, f32 with exact ones.
    pub kv_type: Option<KvType>,
    /// Bytes that may be used; `None`: no bound.
    pub usable_bytes: Option<u64>,
    /// Tokens of a prompt that one step computes at most.
    pub chunk_tokens: u32,
    /// Whether weights may be resident in two layouts, where there is room for both: a persistent
    /// step reads another than prompt chunks do, and without the second its prompts are computed
    /// token by token.
    pub two_layouts: bool,
    /// Many sequences in one cache; `None`: one sequence owns it.
    pub batch: Option<BatchOptions>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            context: ContextSize::Auto,
            numerics: Numerics::Q8,
            fusion: FusionChoice::Auto,
            kv_type: None,
            usable_bytes: None,
            chunk_tokens: DEFAULT_CHUNK_TOKENS,
            two_layouts: false,
            batch: None,
        }
    }
}

/// Tokens of a prompt that one step computes unless something else is asked for.
pub const DEFAULT_CHUNK_TOKENS: u32 = 1024;

/// Longer chunks are for speed alone (1.4 times that of this one, on an H200): only where they leave
/// the context as it was wanted.
const SPACIOUS_CHUNK: u32 = 512;

/// Each shorter chunk has this part of the tokens of the next longer one, down to the shortest;
/// what is longer than [`SPACIOUS_CHUNK`], half.
const CHUNK_STEP: u32 = 4;
const SHORTEST_CHUNK: u32 = 8;

/// A plan that fits.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// The step.
    pub step: StepPlan,
    /// Steps of prompt chunks over the same cache and buffers, the longest first.
    pub chunks: Vec<StepPlan>,
    /// Every allocation by name.
    pub bytes: Plan,
    /// The context that was wanted, where the budget allowed only less.
    pub shrunk_from: Option<u32>,
    /// What many sequences add.
    pub batch: Option<BatchPlan>,
}

/// A model that does not fit, and what would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoesNotFit {
    /// Bytes of the plan.
    pub needed_bytes: u64,
    /// Bytes of the budget.
    pub usable_bytes: u64,
    /// The option that says how many tokens the cache has.
    pub option: &'static str,
    /// The largest context that fits, if any does.
    pub fitting_context: Option<u32>,
}

impl std::fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let needed = self.needed_bytes.div_ceil(1 << 20);
        let usable = self.usable_bytes >> 20;
        let short = needed.saturating_sub(usable);
        write!(f, "needs {needed} MiB, usable {usable}: {short} short; ")?;
        match self.fitting_context {
            Some(tokens) => write!(f, "{} {tokens} fits", self.option),
            None => write!(f, "no context fits, take a smaller model or quantisation"),
        }
    }
}

impl MemoryPlan {
    /// Plans `model` on `device`, or says what is short.
    pub fn new(
        gguf: &Gguf,
        model: &Model,
        device: &DeviceProfile,
        options: &PlanOptions,
    ) -> Result<Self, LaneError> {
        let plan = Self::with_chunks(gguf, model, device, options);
        let short = match &plan {
            Ok(plan) => plan.shrunk_from.is_some(),
            Err(error) => matches!(error, LaneError::DoesNotFit(_)),
        };
        if short && options.chunk_tokens > SPACIOUS_CHUNK {
            let options = PlanOptions { chunk_tokens: SPACIOUS_CHUNK, ..*options };
            return Self::with_chunks(gguf, model, device, &options);
        }
        plan
    }

    fn with_chunks(
        gguf: &Gguf,
        model: &Model,
        device: &DeviceProfile,
        options: &PlanOptions,
    ) -> Result<Self, LaneError> {
        let max = model.config.context_length;
        let wanted = match options.context {
            ContextSize::Auto => max.min(AUTO_TOKENS),
            ContextSize::Max => max,
            ContextSize::Tokens(0) => {
                let (what, value) = ("context", "0".to_owned());
                return Err(LaneError::Option { what, value, allowed: "at least 1 token" });
            }
            ContextSize::Tokens(tokens) => tokens,
        };
        if let Some(batch) = &options.batch {
            return Self::of_batch(gguf, model, device, options, batch, wanted);
        }
        let attempt = |tokens: u32, two_layouts: bool| -> Result<Self, LaneError> {
            let step = step_plan(model, device, options, tokens)?;
            let chunks = match step.fusion == Fusion::Ops || two_layouts {
                true => chunk_plans(&step, options.chunk_tokens, device),
                false => Vec::new(),
            };
            let steps = all_steps(&step, &chunks);
            let bytes = layout::count(gguf, model, &steps).map_err(ResidencyError::from)?;
            let shrunk_from = (tokens < wanted).then_some(wanted);
            Ok(Self { step, chunks, bytes, shrunk_from, batch: None })
        };
        let usable_bytes = options.usable_bytes.unwrap_or(u64::MAX);
        if options.two_layouts {
            let plan = attempt(wanted, true)?;
            if plan.bytes.total_bytes() <= usable_bytes {
                return Ok(plan);
            }
        }
        let attempt = |tokens: u32| attempt(tokens, false);
        let plan = attempt(wanted)?;
        let needed_bytes = plan.bytes.total_bytes();
        if needed_bytes <= usable_bytes {
            return Ok(plan);
        }
        let fits = |tokens: u32| {
            attempt(tokens).is_ok_and(|plan| plan.bytes.total_bytes() <= usable_bytes)
        };
        let fitting_context = largest_fitting(plan.step.kv.block_size_tokens(), wanted, fits);
        match (options.context, fitting_context) {
            (ContextSize::Auto, Some(tokens)) => attempt(tokens),
            _ => Err(LaneError::DoesNotFit(DoesNotFit {
                needed_bytes,
                usable_bytes,
                option: "-c",
                fitting_context,
            })),
        }
    }

    /// The plan of a cache that many sequences of `context_tokens` at most share.
    fn of_batch(
        gguf: &Gguf,
        model: &Model,
        device: &DeviceProfile,
        options: &PlanOptions,
        batch: &BatchOptions,
        context_tokens: u32,
    ) -> Result<Self, LaneError> {
        if options.fusion == FusionChoice::Persistent {
            let (what, value) = ("fusion", "persistent".to_owned());
            let allowed = "auto or ops where many sequences decode";
            return Err(LaneError::Option { what, value, allowed });
        }
        let options = PlanOptions { fusion: FusionChoice::Ops, ..*options };
        let step = step_plan(model, device, &options, context_tokens)?;
        let windows: Vec<u32> = model.layers.iter().map(|layer| layer.window_tokens).collect();
        let attempt = |total: u32| -> Result<(BatchPlan, Plan), LaneError> {
            let plan = batch.plan(&step, &windows, total, options.chunk_tokens, device)?;
            let bytes = layout::count(gguf, model, &plan.steps).map_err(ResidencyError::from)?;
            Ok((plan, bytes))
        };
        let block_size = step.kv.block_size_tokens();
        // Sequences share no block that is not full.
        let whole_blocks = context_tokens.div_ceil(block_size).saturating_mul(block_size);
        let wanted = whole_blocks.saturating_mul(batch.max_batch);
        let wanted = batch.ctx_total_tokens.unwrap_or(wanted);
        let usable_bytes = options.usable_bytes.unwrap_or(u64::MAX);
        let (plan, bytes) = attempt(wanted)?;
        let needed_bytes = bytes.total_bytes();
        let whole = |plan, bytes| {
            let chunks = Vec::new();
            Self { step: step.clone(), chunks, bytes, shrunk_from: None, batch: Some(plan) }
        };
        if needed_bytes <= usable_bytes {
            return Ok(whole(plan, bytes));
        }
        let fitting = most_tokens(wanted, block_size, usable_bytes, |total| {
            attempt(total).map(|(_, bytes)| bytes)
        });
        match (batch.ctx_total_tokens, fitting) {
            (None, Some(total)) => {
                let (plan, bytes) = attempt(total)?;
                Ok(whole(plan, bytes))
            }
            (_, fitting_context) => Err(LaneError::DoesNotFit(DoesNotFit {
                needed_bytes,
                usable_bytes,
                option: "--ctx-total",
                fitting_context,
            })),
        }
    }

    /// The steps of one sequence: of a token, and of prompt chunks.
    pub(crate) fn steps(&self) -> Vec<StepPlan> {
        all_steps(&self.step, &self.chunks)
    }

    /// Limits that let this plan in and nothing larger.
    pub fn limits(&self, model: &Model) -> Limits {
        let rows = model.matrices().map(|matrix| matrix.n_out).max().unwrap_or(0);
        let matrix = model.matrices().map(|matrix| matrix.resident_bytes()).max().unwrap_or(0);
        let vector = model.vectors().map(|vector| vector.n_bytes()).max().unwrap_or(0);
        Limits {
            max_rows: rows,
            // Three vectors of a bias are joined to one array.
            max_blob_bytes: matrix.max(3 * vector),
            max_kv_elems: self.step.kv.total_elems(),
        }
    }
}

/// The largest whole number of blocks below `wanted` tokens that fits. Need grows with context,
/// so halving finds it.
fn largest_fitting(block: u32, wanted: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut good, mut bad) = (0, wanted.div_ceil(block));
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle * block) { good = middle } else { bad = middle }
    }
    (good > 0).then_some(good * block)
}

fn all_steps(step: &StepPlan, chunks: &[StepPlan]) -> Vec<StepPlan> {
    std::iter::once(step).chain(chunks).cloned().collect()
}

/// Steps of a prompt's chunks, the longest first. A chunk is whole, for one that was filled up would
/// write where the sequence has tokens; what is shorter than the shortest is computed one by one.
fn chunk_plans(step: &StepPlan, chunk_tokens: u32, device: &DeviceProfile) -> Vec<StepPlan> {
    let longest = chunk_tokens.min(step.kv.max_context_tokens());
    let step_from = |tokens: u32| if tokens > SPACIOUS_CHUNK { 2 } else { CHUNK_STEP };
    let shorter = |&tokens: &u32| Some(tokens / step_from(tokens));
    let chunk = |tokens| StepPlan { head: Head::None, ..step.for_chunk(tokens, None, device) };
    std::iter::successors(Some(longest), shorter)
        .take_while(|&tokens| tokens >= SHORTEST_CHUNK)
        .map(chunk)
        .collect()
}

fn step_plan(
    model: &Model,
    device: &DeviceProfile,
    options: &PlanOptions,
    context_tokens: u32,
) -> Result<StepPlan, LaneError> {
    let c = &model.config;
    let kv_type = options.kv_type.unwrap_or(match options.numerics {
        Numerics::Q8 => KvType::F16,
        Numerics::Exact => KvType::F32,
    });
    let kv = PagedKvConfig::new(c.n_layer, c.n_kv_head, c.head_dim, context_tokens)?
        .with_kv_type(kv_type)?;
    let dims = ModelDims {
        n_layer: c.n_layer,
        n_embd: c.n_embd,
        n_head: c.n_head,
        n_kv_head: c.n_kv_head,
        head_dim: c.head_dim,
        n_ff: c.n_ff,
        n_vocab: c.n_vocab,
    };
    let rope = RopePlan {
        pairing: c.rope.pairing,
        n_pairs: c.rope.dims / 2,
        magnitude: c.rope.attention_factor(),
    };
    let mut plan = StepPlan::new(dims, kv, options.numerics, rope, c.norm_eps, device);
    plan.embed_scale = c.embedding_scale;
    plan.fusion = options.fusion.decide(model, device, &plan);
    plan.exact_qkv = is_narrow(model) && plan.fusion == Fusion::Ops;
    plan.attention_scale = c.attention_scale;
    plan.activation = match c.activation {
        Activation::SwiGlu => decode_graph::Activation::SwiGlu,
        Activation::GeGlu => decode_graph::Activation::GeGlu,
    };
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_models_suit_exact_numerics() {
        let mut model = crate::ModelFile::open(None).unwrap().model;
        for (n_embd, expected) in
            [(576, Numerics::Exact), (1024, Numerics::Exact), (1056, Numerics::Q8)]
        {
            model.config.n_embd = n_embd;
            assert_eq!(suitable_numerics(&model, FusionChoice::Auto), expected);
            assert_eq!(suitable_numerics(&model, FusionChoice::Persistent), Numerics::Q8);
        }
    }

    #[test]
    fn narrow_models_have_exact_q_k_and_v_where_operations_are_kernels() {
        let mut model = crate::ModelFile::open(None).unwrap().model;
        let hopper = DeviceProfile { compute_capability: 90, ..DeviceProfile::A2000 };
        let mut exact_qkv = |n_embd, device| {
            model.config.n_embd = n_embd;
            step_plan(&model, device, &PlanOptions::default(), 64).unwrap().exact_qkv
        };
        assert!(exact_qkv(1024, &DeviceProfile::A2000));
        assert!(!exact_qkv(1056, &DeviceProfile::A2000));
        assert!(!exact_qkv(1024, &hopper));
    }

    #[test]
    fn long_chunks_give_way_to_the_context() {
        let mut file = crate::ModelFile::open(None).unwrap();
        file.model.config.context_length = 2048;
        let plan = |usable_bytes| {
            let options = PlanOptions { usable_bytes, ..Default::default() };
            MemoryPlan::new(&file.gguf, &file.model, &DeviceProfile::A2000, &options).unwrap()
        };
        let chunks = |plan: &MemoryPlan| -> Vec<u32> {
            plan.chunks.iter().map(|chunk| chunk.n_tokens).collect()
        };
        let spacious = plan(None);
        assert_eq!(chunks(&spacious), [1024, 512, 128, 32, 8]);
        let tight = plan(Some(spacious.bytes.total_bytes() - 1));
        assert_eq!(chunks(&tight), [512, 128, 32, 8]);
        assert_eq!(tight.step.kv.max_context_tokens(), 2048);
    }

    #[test]
    fn the_largest_fitting_context_is_found() {
        assert_eq!(largest_fitting(16, 8192, |tokens| tokens <= 2600), Some(2592));
        assert_eq!(largest_fitting(16, 8192, |_| false), None);
        assert_eq!(largest_fitting(16, 40, |tokens| tokens <= 32), Some(32));
    }

    #[test]
    fn s14_a_refusal_names_the_shortage_and_what_fits() {
        let refusal = DoesNotFit {
            needed_bytes: 2815 << 20,
            usable_bytes: 2204 << 20,
            option: "-c",
            fitting_context: Some(2592),
        };
        let text = refusal.to_string();
        assert_eq!(text, "needs 2815 MiB, usable 2204: 611 short; -c 2592 fits");
    }
}
