//! What a model makes resident, in order: one walk for planning and for loading, so that the
//! plan of bytes is the bytes.

use decode_graph::{Fusion, KvArena, LayerWeights, ModelWeights, StepArena, StepPlan, WeightRef};
use gpu_slab::{Arena, Plan, SlabError, View};
use q4k_soa::{LayoutId, Shape};

use crate::gguf::Gguf;
use crate::model::{Model, TensorRef, VectorRef};
use crate::residency::{allocate_weight, packed_layout};

/// Takes what the walk comes past.
pub(crate) trait Visit {
    /// Why it cannot.
    type Error;
    /// A weight matrix.
    fn matrix(&mut self, name: &str, matrix: TensorRef) -> Result<WeightRef, Self::Error>;
    /// Vectors that become one f32 array.
    fn vectors(&mut self, name: &str, parts: &[VectorRef]) -> Result<View, Self::Error>;
    /// The rope frequencies, `n_pairs` of them.
    fn frequencies(&mut self, model: &Model) -> Result<View, Self::Error>;
}

/// How matrices are packed for a step.
pub(crate) fn layout_id(fusion: Fusion) -> LayoutId {
    match fusion {
        Fusion::Ops => LayoutId::PLANES,
        Fusion::Persistent => LayoutId::STREAM,
    }
}

/// Name of the array of rope frequencies.
pub(crate) const FREQUENCIES: &str = "rope.inverse_frequencies";

/// Walks all weights of a model.
pub(crate) fn walk<V: Visit>(
    gguf: &Gguf,
    model: &Model,
    visit: &mut V,
) -> Result<ModelWeights, V::Error> {
    let name = |index: usize| gguf.tensors()[index].name();
    let matrix = |visit: &mut V, m: TensorRef| visit.matrix(name(m.index), m);
    let vector = |visit: &mut V, v: VectorRef| visit.vectors(name(v.index), &[v]);

    let embed = matrix(visit, model.embed)?;
    let inverse_frequencies = visit.frequencies(model)?;
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
            window: 0,
        });
    }
    let output_norm = vector(visit, model.output_norm)?;
    let output = if model.tied_output() { embed } else { matrix(visit, model.output)? };
    Ok(ModelWeights { embed, inverse_frequencies, layers, output_norm, output })
}

/// Only takes the room.
struct Count<'a> {
    arena: &'a mut Arena,
    layout: LayoutId,
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
        self.arena.allocate(name, elems * 4)
    }

    fn frequencies(&mut self, model: &Model) -> Result<View, SlabError> {
        self.arena.allocate(FREQUENCIES, u64::from(model.config.rope.dims / 2) * 8)
    }
}

/// Counts, by name, the bytes that loading `model` for `steps` allocates: steps over one cache and
/// one set of buffers, at least one.
pub(crate) fn count(gguf: &Gguf, model: &Model, steps: &[StepPlan]) -> Result<Plan, SlabError> {
    let step = &steps[0];
    Plan::of(|arena| {
        walk(gguf, model, &mut Count { arena, layout: layout_id(step.fusion) })?;
        KvArena::for_plan(arena, step)?;
        StepArena::for_plans(arena, steps)
    })
}
