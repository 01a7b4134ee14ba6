//! What the backend asks a device about itself, once.

use gpu_slab::cuda::{CudaContext, DriverError, driver_version};
use kernels_ptx::DeviceProfile;

/// A GPU and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDevice {
    /// Name, as the driver gives it.
    pub name: String,
    /// Version of the driver's interface: 12040 is CUDA 12.4.
    pub driver_version: u32,
    /// What launch geometry depends on.
    pub profile: DeviceProfile,
}

impl CudaDevice {
    /// Asks the device of `context`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn of(context: &CudaContext) -> Result<Self, DriverError> {
        // `CUdevice_attribute`s.
        const MULTIPROCESSOR_COUNT: i32 = 16;
        const L2_CACHE_SIZE: i32 = 38;
        const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: i32 = 81;
        const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: i32 = 97;
        let number = |attribute| context.attribute(attribute).map(|value| value.max(0) as u32);
        Ok(Self {
            name: context.device_name()?,
            driver_version: driver_version()?,
            profile: DeviceProfile {
                sm_count: number(MULTIPROCESSOR_COUNT)?,
                l2_bytes: number(L2_CACHE_SIZE)?.into(),
                shared_per_block_bytes: number(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                shared_per_sm_bytes: number(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
                compute_capability: context.compute_capability()?,
            },
        })
    }
}

impl std::fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (capability, driver) = (self.profile.compute_capability, self.driver_version);
        let (major, minor) = (capability / 10, capability % 10);
        write!(f, "{}, compute capability {major}.{minor}, ", self.name)?;
        write!(f, "driver of CUDA {}.{}", driver / 1000, driver % 1000 / 10)
    }
}
