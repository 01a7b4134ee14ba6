//! Loading onto an NVIDIA GPU.

use crate::decode::Decode;
use crate::decoder::Progress;
use crate::lane::LaneError;
use crate::open::{LaneOptions, ModelFile};

/// Where the CUDA backend is compiled in.
#[cfg(feature = "cuda")]
mod backend {
    use std::time::Duration;

    use decode_graph::{Backend, CudaBackend};
    use gpu_slab::Slab;

    use super::*;
    use crate::decoder::Decoder;
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
            let backend = open(options.device)?;
            let plan = self.plan_cuda(&backend, options)?;
            Ok(Box::new(self.load_cuda_as_planned(backend, &plan, progress)?))
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
            mut backend: CudaBackend,
            plan: &MemoryPlan,
            progress: Progress<'_>,
        ) -> Result<Decoder<CudaBackend>, LaneError> {
            backend.warm_up(WARM_UP).map_err(|error| LaneError::NoBackend(error.to_string()))?;
            let slab =
                Slab::with_sizes(&[plan.bytes.total_bytes()], |bytes| backend.allocate(bytes))
                    .map_err(ResidencyError::from)?;
            Decoder::load(backend, slab.into_memory(), &self.gguf, &self.model, plan, progress)
        }
    }

    /// Opens a device.
    pub fn open(device: u32) -> Result<CudaBackend, LaneError> {
        CudaBackend::new(device).map_err(|error| LaneError::NoBackend(error.to_string()))
    }
}

#[cfg(feature = "cuda")]
pub use backend::open;

#[cfg(not(feature = "cuda"))]
impl ModelFile {
    pub(crate) fn load_cuda(
        &self,
        _options: &LaneOptions,
        _progress: Progress<'_>,
    ) -> Result<Box<dyn Decode>, LaneError> {
        Err(LaneError::NoBackend("this build has no CUDA backend".into()))
    }
}
