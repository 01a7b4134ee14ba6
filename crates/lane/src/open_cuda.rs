//! Loading onto an NVIDIA GPU.

use crate::decode::Decode;
use crate::lane::LaneError;
use crate::loading::Progress;
use crate::open::{LaneOptions, ModelFile};

/// Where the CUDA backend is compiled in.
#[cfg(cuda_backend)]
mod backend {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use decode_graph::{Backend, CudaBackend};
    use gpu_slab::Slab;

    use super::*;
    use crate::decoder::Decoder;
    use crate::layout;
    use crate::memory_plan::MemoryPlan;
    use crate::open::DEFAULT_VRAM_RESERVE_BYTES;
    use crate::residency::ResidencyError;

    /// The driver maps memory in pieces of this size.
    const GRANULARITY_BYTES: u64 = 2 << 20;

    /// Time for clocks to rise before the first token.
    const WARM_UP: Duration = Duration::from_millis(20);

    impl ModelFile {
        pub(crate) fn load_cuda(
            &self,
            options: &LaneOptions,
            progress: Progress<'_>,
        ) -> Result<Box<dyn Decode>, LaneError> {
            let started = Instant::now();
            let backend = open(options.device)?;
            log::info!(target: "lane", "device opened in {} ms", started.elapsed().as_millis());
            let plan = self.plan_cuda(&backend, options)?;
            let cache = self.cache_path(options, &plan);
            Ok(Box::new(self.load_cuda_with(backend, &plan, cache.as_deref(), progress)?))
        }

        /// Plans the model for the backend's device, within what is free on it.
        pub fn plan_cuda(
            &self,
            backend: &CudaBackend,
            options: &LaneOptions,
        ) -> Result<MemoryPlan, LaneError> {
            let (free_bytes, _) =
                backend.memory_bytes().map_err(|error| LaneError::NoBackend(error.to_string()))?;
            let reserve = options.vram_reserve_bytes.unwrap_or(DEFAULT_VRAM_RESERVE_BYTES);
            let free_bytes = free_bytes.saturating_sub(reserve) / GRANULARITY_BYTES;
            let free_bytes = free_bytes * GRANULARITY_BYTES;
            let usable_bytes =
                options.plan.usable_bytes.map_or(free_bytes, |budget| budget.min(free_bytes));
            self.plan(&backend.profile(), Some(usable_bytes), options)
        }

        /// Loads the model onto the backend's device.
        pub fn load_cuda_as_planned(
            &self,
            backend: CudaBackend,
            plan: &MemoryPlan,
            progress: Progress<'_>,
        ) -> Result<Decoder<CudaBackend>, LaneError> {
            self.load_cuda_with(backend, plan, None, progress)
        }

        fn load_cuda_with(
            &self,
            mut backend: CudaBackend,
            plan: &MemoryPlan,
            cache: Option<&Path>,
            progress: Progress<'_>,
        ) -> Result<Decoder<CudaBackend>, LaneError> {
            let profile = backend.profile();
            let steps = match &plan.batch {
                Some(batch) => batch.steps.clone(),
                None => plan.steps(),
            };
            backend.prefetch(&layout::kernels(&self.gguf, &self.model, &steps, &profile));
            backend.warm_up(WARM_UP).map_err(|error| LaneError::NoBackend(error.to_string()))?;
            let slab =
                Slab::with_sizes(&[plan.bytes.total_bytes()], |bytes| backend.allocate(bytes))
                    .map_err(ResidencyError::from)?;
            let (memory, gguf, model) = (slab.into_memory(), &self.gguf, &self.model);
            Decoder::load(backend, memory, gguf, model, plan, cache, progress)
        }
    }

    /// Opens a device.
    pub fn open(device: u32) -> Result<CudaBackend, LaneError> {
        CudaBackend::new(device).map_err(|error| LaneError::NoBackend(error.to_string()))
    }
}

#[cfg(cuda_backend)]
pub use backend::open;

#[cfg(not(cuda_backend))]
impl ModelFile {
    pub(crate) fn load_cuda(
        &self,
        _options: &LaneOptions,
        _progress: Progress<'_>,
    ) -> Result<Box<dyn Decode>, LaneError> {
        Err(LaneError::NoBackend("this build has no CUDA backend".into()))
    }
}
