//! What a decode step computes: dimensions, numerics, where its weights and buffers lie.

use gpu_slab::{Allocate, DeviceMemory, Slab, SlabError, View};
use kernels_ptx::ops::{HalfOrder, half_bytes};
use kernels_ptx::{DeviceProfile, RopePairing, schedule};
use kv_paged::{GroupId, PagedKvConfig, PlanError, PlannerConfig};
use q4k_soa::{LayoutId, Shape, WeightType};

/// How matrix products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// Activations quantised to i8 per group of 32, integer dot products.
    Q8,
    /// f32 activations on dequantised weights.
    Exact,
}

/// How a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Head {
    /// Logits of the last token, the likeliest token, step advance.
    Greedy,
    /// Logits of the last token, a draw by the sampling pack, step advance.
    Sampled,
    /// Nothing: the step only fills the KV cache (prompt processing).
    None,
}

/// How much of a step one kernel does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fusion {
    /// A kernel for each operation: [`record`](crate::record).
    #[default]
    Ops,
    /// One kernel for the whole step of one token, with weights in the stream layout:
    /// [`record_persistent`](crate::record_persistent).
    Persistent,
}

/// How gate and up are joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `silu(gate) · up`.
    #[default]
    SwiGlu,
    /// `gelu(gate) · up`, by the hyperbolic tangent.
    GeGlu,
}

/// Dimensions of a Llama-family model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelDims {
    /// Layers.
    pub n_layer: u32,
    /// Elements of the hidden state.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_kv_head: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Elements of the feed-forward middle.
    pub n_ff: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
}

impl ModelDims {
    /// Elements of all query heads.
    pub fn q_elems(&self) -> u32 {
        self.n_head * self.head_dim
    }

    /// Elements of all key heads (or value heads).
    pub fn kv_elems(&self) -> u32 {
        self.n_kv_head * self.head_dim
    }
}

/// Rotary embedding as kernels need it; the frequencies are a blob in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopePlan {
    /// Which elements turn together.
    pub pairing: RopePairing,
    /// Pairs turned per head.
    pub n_pairs: u32,
    /// Factor on cosine and sine.
    pub magnitude: f32,
}

/// Everything that decides the launches of a step, apart from addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// Model dimensions.
    pub dims: ModelDims,
    /// KV cache.
    pub kv: PagedKvConfig,
    /// Matrix products.
    pub numerics: Numerics,
    /// Takes f32 activations for q, k and v in q8 numerics too, in steps of operations: in narrow
    /// models most of what 8 bits move comes from there. Rows that are multiplied in f16 stay so.
    pub exact_qkv: bool,
    /// The end of the step.
    pub head: Head,
    /// Launches of the step.
    pub fusion: Fusion,
    /// Thread blocks of a persistent step: one for each multiprocessor.
    pub multiprocessors: u32,
    /// Tokens computed per step: its rows. See [`crate::batch`].
    pub n_tokens: u32,
    /// Rows that get logits and a token.
    pub n_outputs: u32,
    /// Rows come in runs of so many tokens that follow each other in one sequence: 1 for a batch
    /// of sequences, `n_tokens` for a chunk of a prompt.
    pub run_tokens: u32,
    /// The planner of the sequences that share the cache; `None`: one sequence owns it.
    pub sequences: Option<PlannerConfig>,
    /// Of every RMS norm.
    pub norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopePlan,
    /// Feed-forward part.
    pub activation: Activation,
    /// Factor on embedding rows.
    pub embed_scale: f32,
    /// Factor on attention scores.
    pub attention_scale: f32,
    /// Attention segments.
    pub n_segments: u32,
}

impl StepPlan {
    /// The plan of one token per step on `device`, without scalings.
    pub fn new(
        dims: ModelDims,
        kv: PagedKvConfig,
        numerics: Numerics,
        rope: RopePlan,
        norm_eps: f32,
        device: &DeviceProfile,
    ) -> Self {
        Self {
            dims,
            kv,
            numerics,
            exact_qkv: false,
            head: Head::Greedy,
            fusion: Fusion::Ops,
            multiprocessors: device.sm_count,
            n_tokens: 1,
            n_outputs: 1,
            run_tokens: 1,
            sequences: None,
            norm_eps,
            rope,
            activation: Activation::SwiGlu,
            embed_scale: 1.0,
            attention_scale: 1.0 / (dims.head_dim as f32).sqrt(),
            n_segments: device.attention_segments(dims.n_kv_head, kv.max_context_tokens()),
        }
    }

    /// The same model for a batch: each of `rows` rows is a token of any sequence of `sequences`
    /// and has an output.
    pub fn for_batch(&self, rows: u32, sequences: PlannerConfig, device: &DeviceProfile) -> Self {
        self.for_rows(rows, rows, 1, Some(sequences), device)
    }

    /// The same model for chunks of a prompt: `tokens` tokens that follow each other in one
    /// sequence, one of which has an output.
    pub fn for_chunk(
        &self,
        tokens: u32,
        sequences: Option<PlannerConfig>,
        device: &DeviceProfile,
    ) -> Self {
        self.for_rows(tokens, 1, tokens, sequences, device)
    }

    fn for_rows(
        &self,
        n_tokens: u32,
        n_outputs: u32,
        run_tokens: u32,
        sequences: Option<PlannerConfig>,
        device: &DeviceProfile,
    ) -> Self {
        let heads = self.dims.n_kv_head.saturating_mul(n_tokens);
        let n_segments = device.attention_segments(heads, self.kv.max_context_tokens());
        let fusion = Fusion::Ops;
        Self { fusion, n_tokens, n_outputs, run_tokens, sequences, n_segments, ..self.clone() }
    }

    /// How the product of q, k and v is computed.
    pub(crate) fn qkv_numerics(&self) -> Numerics {
        if self.exact_qkv { Numerics::Exact } else { self.numerics }
    }

    /// Whether matrix products are those of tensor cores, with f16 activations.
    pub(crate) fn uses_halves(&self) -> bool {
        let d = self.dims;
        let rows = [d.n_embd, d.q_elems(), d.n_ff];
        self.numerics == Numerics::Q8
            && self.n_tokens > 1
            && rows.iter().all(|n| n.is_multiple_of(8))
    }

    /// Bytes of the f16 activations of a step, rows of `n` elements.
    fn half_bytes(&self, n: u32) -> u64 {
        let order = half_order(self.n_tokens);
        if self.uses_halves() { half_bytes(order, self.n_tokens, n) } else { 0 }
    }

    /// Bytes of the cache and entries of its block tables.
    pub(crate) fn kv_sizes(&self) -> Result<(u64, u64), PlanError> {
        let Some(planner) = &self.sequences else {
            return Ok((self.kv.total_bytes(), self.kv.table_entries()));
        };
        let mut bytes = 0u64;
        for group in 0..planner.groups().len() {
            bytes = bytes.saturating_add(self.group_layout(planner, group)?.total_bytes());
        }
        let rows = u64::from(planner.max_sequences()) + 1;
        let row = planner.groups().len() as u64 * u64::from(planner.blocks_per_sequence());
        Ok((bytes, rows * row))
    }

    pub(crate) fn group_layout(
        &self,
        planner: &PlannerConfig,
        group: usize,
    ) -> Result<kv_paged::KvLayout, PlanError> {
        let kv = &self.kv;
        planner.layout(GroupId(group as u32), kv.n_kv_head(), kv.head_dim(), kv.kv_type())
    }
}

/// How the f16 activations of a product with so many vectors lie.
pub(crate) fn half_order(n_tokens: u32) -> HalfOrder {
    if n_tokens <= HalfOrder::MAX_FRAGMENT_ROWS { HalfOrder::Fragments } else { HalfOrder::Rows }
}

/// A packed matrix in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightRef {
    /// Where it lies.
    pub view: View,
    /// How it is quantised.
    pub weight_type: WeightType,
    /// Its rows and row length.
    pub shape: Shape,
    /// How it is packed: [`LayoutId::PLANES`] for a step of operations, [`LayoutId::STREAM`] for a
    /// persistent one.
    pub layout: LayoutId,
}

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights {
    /// f32 `[n_embd]`.
    pub attn_norm: View,
    /// `[q_elems, n_embd]`.
    pub q: WeightRef,
    /// `[kv_elems, n_embd]`.
    pub k: WeightRef,
    /// `[kv_elems, n_embd]`.
    pub v: WeightRef,
    /// f32 `[q_elems + 2 kv_elems]`, where the architecture has biases.
    pub qkv_bias: Option<View>,
    /// f32 `[head_dim]`, where queries are normed.
    pub q_norm: Option<View>,
    /// f32 `[head_dim]`, where keys are normed.
    pub k_norm: Option<View>,
    /// `[n_embd, q_elems]`.
    pub o: WeightRef,
    /// f32 `[n_embd]`.
    pub ffn_norm: View,
    /// `[n_ff, n_embd]`.
    pub gate: WeightRef,
    /// `[n_ff, n_embd]`.
    pub up: WeightRef,
    /// `[n_embd, n_ff]`.
    pub down: WeightRef,
    /// f32 `[n_embd]`, where what attention adds is normed.
    pub post_attn_norm: Option<View>,
    /// f32 `[n_embd]`, where what the feed-forward part adds is normed.
    pub post_ffn_norm: Option<View>,
    /// f64 `[n_pairs]`, where the layer turns by others than the model's.
    pub inverse_frequencies: Option<View>,
    /// Tokens back that attention sees; 0: all.
    pub window: u32,
}

/// The weights of a model.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    /// `[n_vocab, n_embd]`.
    pub embed: WeightRef,
    /// f64 `[n_pairs]`: radians per position.
    pub inverse_frequencies: View,
    /// Layers in order.
    pub layers: Vec<LayerWeights>,
    /// f32 `[n_embd]`.
    pub output_norm: View,
    /// `[n_vocab, n_embd]`, the embedding matrix where they are tied.
    pub output: WeightRef,
}

/// The KV cache in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvArena {
    /// Shape.
    pub config: PagedKvConfig,
    /// The blocks: of all layers, or of the layers of the first group, then those of the next.
    pub blocks: View,
    /// u32 `[layer][logical block]` where one sequence owns the cache, else the planner's
    /// `[sequence][group][logical block]`.
    pub table: View,
}

impl KvArena {
    /// Takes room for the blocks and the table of `config`.
    pub fn allocate(memory: &mut impl Allocate, config: PagedKvConfig) -> Result<Self, SlabError> {
        let table_bytes = u64::from(config.n_layer()) * u64::from(config.blocks_per_layer()) * 4;
        Ok(Self {
            config,
            blocks: memory.allocate("kv.blocks", config.total_bytes())?,
            table: memory.allocate("kv.table", table_bytes)?,
        })
    }

    /// Takes room for the cache of a plan, whoever owns it: for many sequences, the pools of their
    /// planner and its table.
    pub fn for_plan(memory: &mut impl Allocate, plan: &StepPlan) -> Result<Self, SlabError> {
        // A planner whose pools have no size fits nowhere.
        let (blocks, entries) = plan.kv_sizes().unwrap_or((u64::MAX, 0));
        Ok(Self {
            config: plan.kv,
            blocks: memory.allocate("kv.blocks", blocks)?,
            table: memory.allocate("kv.table", entries * 4)?,
        })
    }
}

/// The fixed activation buffers of a step (S7). Sizes are for `n_tokens` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepArena {
    /// f32 `[n_tokens][n_embd]`, the residual stream.
    pub hidden_a: View,
    /// f32 `[n_tokens][n_embd]`, the residual stream between attention and feed-forward.
    pub hidden_b: View,
    /// f32 `[n_tokens][widest input]`, a normed input of a product of f32 activations.
    pub normed: View,
    /// i8 `[n_tokens][widest input]`, a q8 input.
    pub quants: View,
    /// [`q4k_soa::Q8Group`] `[n_tokens][widest input / 32]`.
    pub groups: View,
    /// f32 `[n_tokens][q, k, v]`.
    pub qkv: View,
    /// f32 `[n_tokens][q_elems]`, turned.
    pub q: View,
    /// f32 `[n_tokens][n_head][n_segments][max, sum, head_dim]`.
    pub partials: View,
    /// f32 `[n_tokens][q_elems]`.
    pub attention: View,
    /// f32 `[n_tokens][n_ff]`.
    pub ffn_mid: View,
    /// f16 `[n_tokens][n_embd]`, a normed input; of steps that use f16, as are the next two.
    pub normed_half: View,
    /// f16 `[n_tokens][q_elems]`.
    pub attention_half: View,
    /// f16 `[n_tokens][n_ff]`, times [`kernels_ptx::ops::gemm::MIDDLE_SCALE`].
    pub ffn_mid_half: View,
    /// f32 `[n_outputs][n_vocab]`.
    pub logits: View,
    /// u32 `[n_kv_head + n_outputs]`: blocks of attention that are done, then those of the choice
    /// of each token; zero before the first step.
    pub arrivals: View,
    /// u32 `[n_tokens][n_kv_head]`: blocks of attention that are done with a row; zero before the
    /// first step.
    pub row_arrivals: View,
    /// u32 `[n_outputs][2]`: the best candidate among those of the blocks that are done; zero
    /// before the first step.
    pub best: View,
    /// u32 `[n_outputs]`: the tokens chosen.
    pub token: View,
    /// [`kernels_ptx::TokenParams`] `[n_tokens]`.
    pub tokens: View,
    /// u32 `[n_tokens]`: the sequence of each row, a row of the planner's table.
    pub sequences: View,
    /// u32 `[n_outputs]`: the row of each output, or [`crate::batch::NO_ROW`].
    pub outputs: View,
    /// u32 `[n_outputs]`: steps made.
    pub step_count: View,
    /// [`kernels_ptx::SamplingPack`] `[n_outputs]`.
    pub sampling: View,
    /// Of a persistent step.
    pub persistent: Option<PersistentArena>,
}

/// What a persistent step needs beside the buffers of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentArena {
    /// Where its thread blocks tell each other their results; zero before the first step.
    pub exchange: View,
    /// Its schedule.
    pub table: View,
}

impl PersistentArena {
    fn allocate(memory: &mut impl Allocate, plan: &StepPlan) -> Result<Self, SlabError> {
        let (d, n_ctas) = (plan.dims, plan.multiprocessors);
        let exchange = schedule::exchange_words(&crate::persistent::dims(plan), n_ctas);
        let table = schedule::table_words(d.n_layer, n_ctas);
        Ok(Self {
            exchange: memory.allocate("step.exchange", u64::from(exchange) * 4)?,
            table: memory.allocate("step.schedule", u64::from(table) * 4)?,
        })
    }
}

impl StepArena {
    /// Takes room for the buffers of `plan`.
    pub fn allocate(memory: &mut impl Allocate, plan: &StepPlan) -> Result<Self, SlabError> {
        Self::for_plans(memory, std::slice::from_ref(plan))
    }

    /// Takes room for buffers that each of `plans` can use, plans of one model.
    ///
    /// # Panics
    /// Without a plan.
    pub fn for_plans(memory: &mut impl Allocate, plans: &[StepPlan]) -> Result<Self, SlabError> {
        let d = plans[0].dims;
        let (q, kv) = (u64::from(d.q_elems()), u64::from(d.kv_elems()));
        let (n_embd, n_ff) = (u64::from(d.n_embd), u64::from(d.n_ff));
        let (n_head, n_kv_head) = (u64::from(d.n_head), u64::from(d.n_kv_head));
        let widest = n_embd.max(n_ff).max(q);
        let most = |f: fn(&StepPlan) -> u32| plans.iter().map(f).max().map_or(0, u64::from);
        let (tokens, outputs) = (most(|plan| plan.n_tokens), most(|plan| plan.n_outputs));
        let segments = most(|plan| plan.n_tokens * plan.n_segments);
        let halves = |n: u32| plans.iter().map(|plan| plan.half_bytes(n)).max().unwrap_or(0);
        let mut floats = |name: &'static str, elems: u64| memory.allocate(name, elems * 4);
        Ok(Self {
            hidden_a: floats("step.hidden_a", tokens * n_embd)?,
            hidden_b: floats("step.hidden_b", tokens * n_embd)?,
            normed: floats("step.normed", tokens * widest)?,
            qkv: floats("step.qkv", tokens * (q + 2 * kv))?,
            q: floats("step.q", tokens * q)?,
            partials: floats("step.partials", segments * n_head * u64::from(2 + d.head_dim))?,
            attention: floats("step.attention", tokens * q)?,
            ffn_mid: floats("step.ffn_mid", tokens * n_ff)?,
            logits: floats("step.logits", outputs * u64::from(d.n_vocab))?,
            token: floats("step.token", outputs)?,
            tokens: floats("step.tokens", tokens * 3)?,
            sequences: floats("step.sequences", tokens)?,
            outputs: floats("step.outputs", outputs)?,
            step_count: floats("step.step_count", outputs)?,
            sampling: floats("step.sampling", outputs * 6)?,
            arrivals: floats("step.arrivals", n_kv_head + outputs)?,
            row_arrivals: floats("step.row_arrivals", tokens * n_kv_head)?,
            best: floats("step.best", outputs * 2)?,
            groups: floats("step.groups", tokens * widest.div_ceil(32) * 2)?,
            quants: memory.allocate("step.quants", tokens * widest)?,
            normed_half: memory.allocate("step.normed_half", halves(d.n_embd))?,
            attention_half: memory.allocate("step.attention_half", halves(d.q_elems()))?,
            ffn_mid_half: memory.allocate("step.ffn_mid_half", halves(d.n_ff))?,
            persistent: match plans.iter().find(|plan| plan.fusion == Fusion::Persistent) {
                None => None,
                Some(plan) => Some(PersistentArena::allocate(memory, plan)?),
            },
        })
    }

    /// Zeroes every buffer on the device. The first step needs it: counters of blocks that arrived
    /// and the exchange of a persistent step begin at 0.
    pub fn zero<M: DeviceMemory>(&self, slab: &mut Slab<M>) -> Result<(), SlabError> {
        self.views().into_iter().try_for_each(|view| slab.fill_view(view, 0))
    }

    fn views(&self) -> Vec<View> {
        let persistent = self.persistent.map(|p| [p.exchange, p.table]);
        let views = [
            self.hidden_a,
            self.hidden_b,
            self.normed,
            self.quants,
            self.groups,
            self.qkv,
            self.q,
            self.partials,
            self.attention,
            self.ffn_mid,
            self.normed_half,
            self.attention_half,
            self.ffn_mid_half,
            self.logits,
            self.arrivals,
            self.row_arrivals,
            self.best,
            self.token,
            self.tokens,
            self.sequences,
            self.outputs,
            self.step_count,
            self.sampling,
        ];
        views.into_iter().chain(persistent.into_iter().flatten()).collect()
    }
}
