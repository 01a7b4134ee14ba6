//! From a model file into a residency: reading, fingerprinting, packing and uploading all at the
//! same time, a few MiB of weights at a time.

mod cache;
mod chunk;
mod fill;
mod pipeline;

use std::path::Path;

use decode_graph::{Backend, ModelWeights, StepPlan, WeightRef};
use gpu_slab::View;
use q4k_soa::{LayoutId, Shape};

use self::chunk::Matrix;
use crate::gguf::Gguf;
use crate::lane::LaneError;
use crate::layout::{self, Visit};
use crate::model::{Model, Rope, TensorRef, VectorRef};
use crate::residency::{Residency, packed_layout};

pub use cache::{CachePlace, read_cache};
pub use fill::read_matrix;

/// Told while weights are loaded.
pub type Progress<'a> = &'a mut dyn FnMut(LoadProgress<'_>);

/// How far loading is.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress<'a> {
    /// The matrix being loaded.
    pub name: &'a str,
    /// Bytes of the file done.
    pub done_bytes: u64,
    /// Bytes of the file to do.
    pub total_bytes: u64,
}

/// Makes all weights of a model resident, packed as `step` wants them. With the path of a `cache`
/// they come from there if it holds this very model packed so, and are kept there if not.
///
/// Holds a few MiB of weights outside of the slab, less than one matrix of any real model.
pub fn load_weights<B: Backend>(
    residency: &mut Residency<B>,
    gguf: &Gguf,
    model: &Model,
    step: &StepPlan,
    cache: Option<&Path>,
    progress: Progress<'_>,
) -> Result<ModelWeights, LaneError> {
    let layout = layout::layout_id(step.fusion);
    let mut reserve = Reserve { residency, gguf, layout, matrices: Vec::new() };
    let weights = layout::walk(gguf, model, step.kv.max_context_tokens(), &mut reserve)?;
    let matrices = reserve.matrices;
    pipeline::run(residency, gguf, &matrices, cache, progress)?;
    Ok(weights)
}

/// Takes the room of the matrices, and makes everything small resident at once.
struct Reserve<'a, B: Backend> {
    residency: &'a mut Residency<B>,
    gguf: &'a Gguf,
    layout: LayoutId,
    matrices: Vec<Matrix>,
}

impl<B: Backend> Visit for Reserve<'_, B> {
    type Error = LaneError;

    fn matrix(&mut self, name: &str, tensor: TensorRef) -> Result<WeightRef, LaneError> {
        let shape = Shape { n_out: tensor.n_out, n_in: tensor.n_in };
        let layout = packed_layout(self.layout, tensor.ty, shape)
            .map_err(|source| chunk::weight_error(name, source))?;
        let weight = self.residency.reserve_weight(name, &layout)?;
        self.matrices.push(Matrix { name: name.into(), tensor, layout, weight });
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
