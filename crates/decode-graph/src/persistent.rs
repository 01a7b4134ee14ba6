//! Recording of the persistent step: the whole step of one token as one launch, and the upload of
//! its schedule. What the kernel does, `kernels_ptx::ops::persistent_sm90` says.

use gpu_slab::{DeviceMemory, Slab, SlabError, View};
use kernels_ptx::schedule::{self, ExchangeDims, LayerSpec, MatrixSpec, ModelSpec, Schedule};
use kernels_ptx::{DeviceProfile, Kernel, ops};
use kv_paged::KvType;
use q4k_soa::{LayoutId, PackedLayout, Shape};

use crate::launch::{Label, Launch};
use crate::plan::{
    Activation, Fusion, Head, KvArena, LayerWeights, ModelWeights, Numerics, PersistentArena,
    StepArena, StepPlan, WeightRef,
};
use crate::step::{RecordError, Recording, choose_and_advance, expect};

const LABEL: Label = Label { layer: None, what: "step" };

/// How the blocks of a persistent step wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentOptions {
    /// A block that waits longer than this for another gives the step up: no token is chosen and
    /// [`persistent_failure`] says where. 0: it waits for ever.
    pub watchdog_us: u32,
    /// Waits are delayed at random by up to so many nanoseconds; for tests.
    pub jitter_ns: u32,
}

impl Default for PersistentOptions {
    /// One second is a thousand times any step, and short enough for a caller.
    fn default() -> Self {
        Self { watchdog_us: 1_000_000, jitter_ns: 0 }
    }
}

/// The dimensions that buffers of a persistent step depend on.
pub(crate) fn dims(plan: &StepPlan) -> ExchangeDims {
    let d = plan.dims;
    ExchangeDims {
        n_layer: d.n_layer,
        n_embd: d.n_embd,
        n_head: d.n_head,
        n_kv_head: d.n_kv_head,
        head_dim: d.head_dim,
        n_ff: d.n_ff,
        max_context_tokens: plan.kv.max_context_tokens(),
    }
}

/// Records the step of `plan`, whose fusion is [`Fusion::Persistent`], as one launch (and one more
/// where the token is sampled), and uploads its schedule.
///
/// Matrices are in the stream layout. Weights, norms and frequencies lie in front of the cache and
/// the step's buffers, because the kernel takes them as one buffer.
///
/// # Errors
///
/// What the kernel is not made for; then record the step as operations.
pub fn record_persistent<M: DeviceMemory>(
    slab: &mut Slab<M>,
    plan: &StepPlan,
    weights: &ModelWeights,
    kv: &KvArena,
    arena: &StepArena,
    device: &DeviceProfile,
    options: PersistentOptions,
) -> Result<Recording, RecordError> {
    let buffers = check(plan, weights, kv, arena)?;
    let all = slab.cover(weight_views(weights)).map_err(RecordError::Slab)?;
    let model = spec(slab, plan, weights, all)?;
    let schedule = Schedule::new(&model, plan.multiprocessors, device.shared_per_block_bytes)?;
    let words = schedule.words();
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    slab.write_view(buffers.table, 0, bytes).map_err(RecordError::Slab)?;

    let sixteens = |what, len_bytes: u64| {
        let found = u32::try_from(len_bytes / 16).ok();
        found.ok_or(RecordError::Plan {
            what,
            expected: u64::from(u32::MAX) * 16,
            found: len_bytes,
        })
    };
    let args = ops::persistent_sm90::Args {
        weights: all,
        table: buffers.table,
        block_table: kv.table,
        kv: kv.blocks,
        exchange: buffers.exchange,
        tokens: arena.tokens,
        logits: arena.logits,
        token: arena.token,
        step_count: arena.step_count,
        weights_16: sixteens("bytes of the weights", all.len_bytes())?,
        kv_16: sixteens("bytes of the KV cache", plan.kv.total_bytes())?,
        table_words: words.len() as u32,
        block_table_entries: plan.dims.n_layer * plan.kv.blocks_per_layer(),
        exchange_words: schedule.exchange_words(),
        n_vocab: plan.dims.n_vocab,
        watchdog_us: options.watchdog_us,
        jitter: options.jitter_ns,
        table_hash: xxhash_rust::xxh3::xxh3_64(bytes) as u32,
    };
    let kernel = Kernel::Persistent;
    let args = args.list(kernel, |view: View| view.len_bytes());
    let args = args.map_err(|source| RecordError::Param { label: LABEL, source })?;
    let mut launches = vec![Launch { kernel, geometry: schedule.geometry(), args, label: LABEL }];
    if plan.head == Head::Sampled {
        launches.extend(choose_and_advance(plan, arena, device)?);
    }
    Ok(Recording { launches, tokens: arena.tokens })
}

fn check(
    plan: &StepPlan,
    weights: &ModelWeights,
    kv: &KvArena,
    arena: &StepArena,
) -> Result<PersistentArena, RecordError> {
    let unsupported = |what: &str| Err(RecordError::Unsupported(what.to_owned()));
    let any_layer = |lacks: fn(&LayerWeights) -> bool| weights.layers.iter().any(lacks);
    let post_norms =
        |layer: &LayerWeights| layer.post_attn_norm.is_some() || layer.post_ffn_norm.is_some();
    let own_frequencies = |layer: &LayerWeights| layer.inverse_frequencies.is_some();
    let refusals = [
        (plan.fusion != Fusion::Persistent, "a step of operations: record does"),
        (plan.numerics != Numerics::Q8, "a persistent step in exact numerics"),
        (plan.exact_qkv, "a persistent step with exact q, k and v"),
        (plan.head == Head::None, "a persistent step without logits"),
        (plan.activation != Activation::SwiGlu, "a persistent step with GeGLU"),
        (any_layer(post_norms), "a persistent step with norms of what is added"),
        (any_layer(own_frequencies), "a persistent step with rope frequencies of single layers"),
    ];
    if let Some((_, what)) = refusals.iter().find(|(refused, _)| *refused) {
        return unsupported(what);
    }
    expect("tokens of a persistent step", 1, plan.n_tokens.into())?;
    expect("sequences of a persistent step", 1, plan.sequences.as_ref().map_or(1, |_| 2))?;
    expect("layers", plan.dims.n_layer.into(), weights.layers.len() as u64)?;
    if plan.kv != kv.config {
        let (expected, found) = (plan.kv.total_bytes(), kv.config.total_bytes());
        return Err(RecordError::Plan { what: "KV bytes (and shape)", expected, found });
    }
    let none = "a persistent step without buffers: the arena was made for another plan";
    let Some(buffers) = arena.persistent else { return unsupported(none) };
    let words = schedule::exchange_words(&dims(plan), plan.multiprocessors);
    expect("bytes of the exchange buffer", u64::from(words) * 4, buffers.exchange.len_bytes())?;
    Ok(buffers)
}

fn weight_views(weights: &ModelWeights) -> Vec<View> {
    let mut views = vec![
        weights.embed.view,
        weights.inverse_frequencies,
        weights.output_norm,
        weights.output.view,
    ];
    for layer in &weights.layers {
        views.extend([layer.attn_norm, layer.ffn_norm]);
        let matrices = [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down];
        views.extend(matrices.map(|matrix| matrix.view));
        views.extend([layer.qkv_bias, layer.q_norm, layer.k_norm].into_iter().flatten());
    }
    views
}

/// The model as the schedule sees it: places relative to the start of `all`.
fn spec<M: DeviceMemory>(
    slab: &Slab<M>,
    plan: &StepPlan,
    weights: &ModelWeights,
    all: View,
) -> Result<ModelSpec, RecordError> {
    let d = plan.dims;
    let place = |view: View| -> Result<u64, RecordError> {
        slab.resolve(view).map_err(RecordError::Slab)?;
        Ok(view.offset_bytes() - all.offset_bytes())
    };
    let optional = |view: Option<View>| view.map(place).transpose();
    let vector = |what, view: View, elems: u32| {
        expect(what, u64::from(elems) * 4, view.len_bytes())?;
        place(view)
    };
    let matrix = |what: &'static str, weight: &WeightRef, n_out: u32, n_in: u32| {
        if weight.layout != LayoutId::STREAM {
            let label = Label { layer: None, what };
            let (expected, found) = (LayoutId::STREAM, weight.layout);
            return Err(RecordError::Layout { label, expected, found });
        }
        expect(what, n_out.into(), weight.shape.n_out.into())?;
        expect(what, n_in.into(), weight.shape.n_in.into())?;
        let shape = Shape { n_out, n_in };
        let layout = PackedLayout::stream(weight.weight_type, shape)
            .map_err(|source| schedule::ScheduleError::Matrix { what, source })?;
        if weight.view.len_bytes() < layout.len_bytes() {
            let (expected, found) = (layout.len_bytes(), weight.view.len_bytes());
            return Err(RecordError::Plan { what, expected, found });
        }
        let offset_bytes = place(weight.view)?;
        Ok(MatrixSpec { weight_type: weight.weight_type, shape, offset_bytes })
    };
    let (q, kv) = (d.q_elems(), d.kv_elems());
    let layers = weights.layers.iter().map(|layer| {
        if let Some(bias) = layer.qkv_bias {
            vector("q, k and v bias", bias, q + 2 * kv)?;
        }
        for norm in [layer.q_norm, layer.k_norm].into_iter().flatten() {
            vector("norm of heads", norm, d.head_dim)?;
        }
        Ok(LayerSpec {
            attn_norm: vector("attention norm", layer.attn_norm, d.n_embd)?,
            qkv: [
                matrix("q", &layer.q, q, d.n_embd)?,
                matrix("k", &layer.k, kv, d.n_embd)?,
                matrix("v", &layer.v, kv, d.n_embd)?,
            ],
            qkv_bias: optional(layer.qkv_bias)?,
            q_norm: optional(layer.q_norm)?,
            k_norm: optional(layer.k_norm)?,
            o: matrix("output projection", &layer.o, d.n_embd, q)?,
            ffn_norm: vector("feed-forward norm", layer.ffn_norm, d.n_embd)?,
            gate_up: [
                matrix("gate", &layer.gate, d.n_ff, d.n_embd)?,
                matrix("up", &layer.up, d.n_ff, d.n_embd)?,
            ],
            down: matrix("down projection", &layer.down, d.n_embd, d.n_ff)?,
            window: layer.window,
        })
    });
    let layers = layers.collect::<Result<Vec<_>, RecordError>>()?;
    let n_pairs = plan.rope.n_pairs;
    let frequencies = weights.inverse_frequencies;
    expect("bytes of the frequencies", u64::from(n_pairs) * 8, frequencies.len_bytes())?;
    Ok(ModelSpec {
        n_embd: d.n_embd,
        n_head: d.n_head,
        n_kv_head: d.n_kv_head,
        head_dim: d.head_dim,
        n_ff: d.n_ff,
        n_vocab: d.n_vocab,
        n_pairs,
        pairing: plan.rope.pairing as u32,
        magnitude: plan.rope.magnitude,
        norm_eps: plan.norm_eps,
        embed_scale: plan.embed_scale,
        attention_scale: plan.attention_scale,
        block_size: plan.kv.block_size_tokens(),
        n_blocks: plan.kv.blocks_per_layer(),
        max_context_tokens: plan.kv.max_context_tokens(),
        kv_elem_bytes: match plan.kv.kv_type() {
            KvType::F16 => 2,
            other => {
                return Err(RecordError::Unsupported(format!(
                    "a persistent step with a {other:?} KV cache"
                )));
            }
        },
        embed: matrix("embedding", &weights.embed, d.n_vocab, d.n_embd)?,
        inverse_frequencies: place(frequencies)?,
        layers,
        output_norm: vector("output norm", weights.output_norm, d.n_embd)?,
        output: matrix("output", &weights.output, d.n_vocab, d.n_embd)?,
        greedy: plan.head == Head::Greedy,
    })
}

/// A block that waited in vain for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block {block} of the persistent step waited in vain in operation {operation} for {wait}")]
pub struct PersistentFailure {
    /// Thread block.
    pub block: u32,
    /// Operation, as the schedule counts them: four a layer.
    pub operation: u32,
    /// What for.
    pub wait: &'static str,
}

/// Whether the watchdog ended a step of this arena. After one, no step chooses a token until
/// [`clear_persistent_failure`]; then the step that failed can be run again.
///
/// # Errors
///
/// The slab's.
pub fn persistent_failure<M: DeviceMemory>(
    slab: &mut Slab<M>,
    arena: &StepArena,
) -> Result<Option<PersistentFailure>, SlabError> {
    let Some(buffers) = arena.persistent else { return Ok(None) };
    let mut words = [0u32; 4];
    let at = u64::from(schedule::FAILURE) * 4;
    slab.read_view(buffers.exchange, at, bytemuck::cast_slice_mut(&mut words))?;
    let [failed, block, operation, wait] = words;
    let waits = ["its input's counter", "its input", "queries and keys", "other segments"];
    let wait = waits.get(wait as usize).copied().unwrap_or("something");
    Ok((failed != 0).then_some(PersistentFailure { block, operation, wait }))
}

/// Forgets a failure.
///
/// # Errors
///
/// The slab's.
pub fn clear_persistent_failure<M: DeviceMemory>(
    slab: &mut Slab<M>,
    arena: &StepArena,
) -> Result<(), SlabError> {
    let Some(buffers) = arena.persistent else { return Ok(()) };
    slab.write_view(buffers.exchange, u64::from(schedule::FAILURE) * 4, &[0; 16])
}
