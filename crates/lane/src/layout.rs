//! What a model makes resident, in order: one walk for planning and for loading, so that the
//! plan of bytes is the bytes.

use std::collections::HashMap;

use decode_graph::{Fusion, KvArena, LayerWeights, ModelWeights, StepArena, StepPlan, WeightRef};
use gpu_slab::{Arena, Plan, SlabError, View};
use q4k_soa::{LayoutId, Shape};

use crate::gguf::Gguf;
use crate::model::{Model, Rope, TensorRef, VectorRef};
use crate::residency::{allocate_weight, packed_layout};

/// Takes what the walk comes past.
pub(crate) trait Visit {
    /// Why it cannot.
    type Error;
    /// A weight matrix.
    fn matrix(&mut self, name: &str, matrix: TensorRef) -> Result<WeightRef, Self::Error>;
    /// Vectors that become one f32 array.
    fn vectors(&mut self, name: &str, parts: &[VectorRef]) -> Result<View, Self::Error>;
    /// The frequencies of a rope, `n_pairs` of them, divided by `factors`.
    fn frequencies(
        &mut self,
        name: &str,
        rope: &Rope,
        factors: Option<VectorRef>,
    ) -> Result<View, Self::Error>;
}

/// How matrices are packed for a step.
pub(crate) fn layout_id(fusion: Fusion) -> LayoutId {
    match fusion {
        Fusion::Ops => LayoutId::PLANES,
        Fusion::Persistent => LayoutId::STREAM,
    }
}

/// Walks all weights that a model needs for a context of `context_tokens`.
pub(crate) fn walk<V: Visit>(
    gguf: &Gguf,
    model: &Model,
    context_tokens: u32,
    visit: &mut V,
) -> Result<ModelWeights, V::Error> {
    let name = |index: usize| gguf.tensors()[index].name();
    let matrix = |visit: &mut V, m: TensorRef| visit.matrix(name(m.index), m);
    let vector = |visit: &mut V, v: VectorRef| visit.vectors(name(v.index), &[v]);

    let embed = matrix(visit, model.embed)?;
    let (rope, factors) = (&model.config.rope, model.rope_factors(context_tokens));
    let inverse_frequencies = visit.frequencies("rope.inverse_frequencies", rope, factors)?;
    let local_rope = model.config.local_rope.as_ref();
    let local_frequencies = local_rope
        .map(|rope| visit.frequencies("rope.local_inverse_frequencies", rope, None))
        .transpose()?;
    let mut layers = Vec::with_capacity(model.layers.len());
    for (index, layer) in model.layers.iter().enumerate() {
        let bias = |visit: &mut V, bias: crate::model::QkvBias| {
            visit.vectors(&format!("blk.{index}.attn_qkv.bias"), &[bias.q, bias.k, bias.v])
        };
        layers.push(LayerWeights {
            attn_norm: vector(visit, layer.attn_norm)?,
            q: matrix(visit, layer.q)?,
            k: matrix(visit, layer.k)?,
            v: matrix(visit, layer.v)?,
            qkv_bias: layer.qkv_bias.map(|b| bias(visit, b)).transpose()?,
            q_norm: layer.qk_norm.map(|norm| vector(visit, norm.q)).transpose()?,
            k_norm: layer.qk_norm.map(|norm| vector(visit, norm.k)).transpose()?,
            o: matrix(visit, layer.o)?,
            ffn_norm: vector(visit, layer.ffn_norm)?,
            gate: matrix(visit, layer.gate)?,
            up: matrix(visit, layer.up)?,
            down: matrix(visit, layer.down)?,
            post_attn_norm: layer.post_attn_norm.map(|norm| vector(visit, norm)).transpose()?,
            post_ffn_norm: layer.post_ffn_norm.map(|norm| vector(visit, norm)).transpose()?,
            inverse_frequencies: local_frequencies.filter(|_| layer.window_tokens > 0),
            window: layer.window_tokens,
        });
    }
    let output_norm = vector(visit, model.output_norm)?;
    let output = if model.tied_output() { embed } else { matrix(visit, model.output)? };
    Ok(ModelWeights { embed, inverse_frequencies, layers, output_norm, output })
}

/// The layouts that steps read weights in, the first step's first.
pub(crate) fn layout_ids(steps: &[StepPlan]) -> Vec<LayoutId> {
    let mut ids = Vec::new();
    for id in steps.iter().map(|step| layout_id(step.fusion)) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// Only takes the room.
struct Count<'a> {
    arena: &'a mut Arena,
    layout: LayoutId,
    /// What is not packed is there once, whatever the layouts.
    small: &'a mut HashMap<String, View>,
}

impl Count<'_> {
    fn small(&mut self, name: &str, len_bytes: u64) -> Result<View, SlabError> {
        if let Some(view) = self.small.get(name) {
            return Ok(*view);
        }
        let view = self.arena.allocate(name, len_bytes)?;
        self.small.insert(name.to_owned(), view);
        Ok(view)
    }
}

impl Visit for Count<'_> {
    type Error = SlabError;

    fn matrix(&mut self, name: &str, matrix: TensorRef) -> Result<WeightRef, SlabError> {
        let shape = Shape { n_out: matrix.n_out, n_in: matrix.n_in };
        // The model's shapes were checked when it was described.
        let layout =
            packed_layout(self.layout, matrix.ty, shape).map_err(|_| SlabError::Overflow {
                name: name.to_owned(),
                offset_bytes: self.arena.used_bytes(),
                len_bytes: matrix.n_bytes(),
                align_bytes: gpu_slab::DEFAULT_ALIGN_BYTES,
            })?;
        let view = allocate_weight(self.arena, name, &layout)?;
        Ok(WeightRef { view, weight_type: matrix.ty, shape, layout: layout.layout_id() })
    }

    fn vectors(&mut self, name: &str, parts: &[VectorRef]) -> Result<View, SlabError> {
        let elems: u64 = parts.iter().map(|part| u64::from(part.n_elems)).sum();
        self.small(name, elems * 4)
    }

    fn frequencies(
        &mut self,
        name: &str,
        rope: &Rope,
        _factors: Option<VectorRef>,
    ) -> Result<View, SlabError> {
        self.small(name, u64::from(rope.dims / 2) * 8)
    }
}

/// The kernels that steps launch, in the order of their first use. Nothing needs to be resident for
/// that; what cannot be recorded will be said when it is.
#[cfg(cuda_backend)]
pub(crate) fn kernels(
    gguf: &Gguf,
    model: &Model,
    steps: &[StepPlan],
    device: &kernels_ptx::DeviceProfile,
) -> Vec<kernels_ptx::Kernel> {
    let mut kernels = Vec::new();
    let mut add = |kernel| {
        if !kernels.contains(&kernel) {
            kernels.push(kernel);
        }
    };
    let counted = Plan::of(|arena| {
        let (weights, kv, buffers) = take_room(arena, gguf, model, steps)?;
        for step in steps {
            if step.fusion == Fusion::Persistent {
                add(kernels_ptx::Kernel::Persistent);
                continue;
            }
            let weights = &weights[&layout_id(step.fusion)];
            let recording = decode_graph::record(step, weights, &kv, &buffers, device);
            let launches = recording.iter().flat_map(|recording| &recording.launches);
            launches.for_each(|launch| add(launch.kernel));
        }
        Ok::<_, SlabError>(())
    });
    if let Err(error) = counted {
        log::debug!(target: "lane", "no kernel can be loaded ahead: {error}");
    }
    kernels
}

/// Counts, by name, the bytes that loading `model` for `steps` allocates: steps over one cache and
/// one set of buffers, at least one.
pub(crate) fn count(gguf: &Gguf, model: &Model, steps: &[StepPlan]) -> Result<Plan, SlabError> {
    Plan::of(|arena| take_room(arena, gguf, model, steps))
}

/// Everything that is allocated for steps, in the order in which it is.
fn take_room(
    arena: &mut Arena,
    gguf: &Gguf,
    model: &Model,
    steps: &[StepPlan],
) -> Result<(HashMap<LayoutId, ModelWeights>, KvArena, StepArena), SlabError> {
    let (mut weights, mut small) = (HashMap::new(), HashMap::new());
    for layout in layout_ids(steps) {
        let mut count = Count { arena, layout, small: &mut small };
        let context_tokens = steps[0].kv.max_context_tokens();
        weights.insert(layout, walk(gguf, model, context_tokens, &mut count)?);
    }
    let kv = KvArena::for_plan(arena, &steps[0])?;
    Ok((weights, kv, StepArena::for_plans(arena, steps)?))
}
