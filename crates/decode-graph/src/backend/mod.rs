//! The seam under the graph: who runs the launches.

use gpu_slab::{DeviceMemory, MemoryError};
use kernels_ptx::DeviceProfile;

use crate::launch::{ByteRange, Launch};

#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
mod host;

pub use host::HostBackend;

/// Why a backend could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[error("{backend}: {during}: {message}")]
pub struct BackendError {
    /// Which backend.
    pub backend: &'static str,
    /// What it was doing.
    pub during: String,
    /// What went wrong.
    pub message: String,
    /// The driver's own number, where there is a driver.
    pub code: Option<i64>,
}

/// Runs launches over one kind of memory: one by one, or captured as a graph.
pub trait Backend {
    /// The memory it can work on.
    type Memory: DeviceMemory;
    /// A captured graph.
    type Executable;

    /// Short name, `host` or `cuda`.
    fn name(&self) -> &'static str;

    /// What it runs on, for people.
    fn device(&self) -> String;

    /// Memory of a fixed length that it can work on.
    fn allocate(&self, len_bytes: u64) -> Result<Self::Memory, MemoryError>;

    /// What geometry depends on.
    fn profile(&self) -> DeviceProfile;

    /// Hash of the code that it runs; part of the graph key.
    fn code_hash(&self) -> u64;

    /// Freezes launches and their arguments into something that runs them all at once.
    fn capture(
        &mut self,
        memory: &mut Self::Memory,
        launches: &[Launch<ByteRange>],
    ) -> Result<Self::Executable, BackendError>;

    /// Kernel nodes of a captured graph, as the driver counts them.
    fn node_count(&self, executable: &Self::Executable) -> Result<usize, BackendError>;

    /// Runs a captured graph. Never waits for the device.
    fn replay(
        &mut self,
        memory: &mut Self::Memory,
        executable: &mut Self::Executable,
    ) -> Result<(), BackendError>;

    /// Whether [`replay`](Self::replay) returns before the work is done, so that queueing the next
    /// one early hides the way to the device.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Runs one launch by itself.
    fn launch(
        &mut self,
        memory: &mut Self::Memory,
        launch: &Launch<ByteRange>,
    ) -> Result<(), BackendError>;

    /// Waits until everything queued is done.
    fn synchronize(&mut self) -> Result<(), BackendError>;
}
