//! Faults on purpose, for the tests of whoever builds on this crate. Always compiled in.

use std::cell::Cell;

use gpu_slab::MemoryError;
use gpu_slab::testing::FailingMemory;
use kernels_ptx::DeviceProfile;

use crate::backend::{Backend, BackendError};
use crate::launch::{ByteRange, Launch};

/// A backend that refuses one of its calls, over memory that can refuse as well.
///
/// Counted are capture, node count, replay, launch and synchronise, in the order in which they
/// come; the first has number 1. A refused call does not reach the backend below.
///
/// ```
/// use decode_graph::{Backend, HostBackend, testing::FaultyBackend};
///
/// let mut backend = FaultyBackend::new(HostBackend).refuse_call(2);
/// assert!(backend.synchronize().is_ok());
/// let error = backend.synchronize().unwrap_err();
/// assert_eq!(error.to_string(), "host: synchronize: call 2 was refused on purpose");
/// assert!(backend.synchronize().is_ok());
/// ```
pub struct FaultyBackend<B> {
    inner: B,
    refuse_call: Option<u64>,
    calls: Cell<u64>,
}

impl<B: Backend> FaultyBackend<B> {
    /// A backend that refuses nothing yet.
    pub fn new(inner: B) -> Self {
        Self { inner, refuse_call: None, calls: Cell::new(0) }
    }

    /// Refuses call number `number`.
    #[must_use]
    pub fn refuse_call(mut self, number: u64) -> Self {
        self.refuse_call = Some(number);
        self
    }

    /// Calls so far, the refused one included.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    fn call(&self, during: &str) -> Result<(), BackendError> {
        let number = self.calls.get() + 1;
        self.calls.set(number);
        if self.refuse_call != Some(number) {
            return Ok(());
        }
        Err(BackendError {
            backend: self.inner.name(),
            during: during.to_owned(),
            message: format!("call {number} was refused on purpose"),
            code: None,
        })
    }
}

impl<B: Backend> Backend for FaultyBackend<B> {
    type Memory = FailingMemory<B::Memory>;
    type Executable = B::Executable;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn device(&self) -> String {
        self.inner.device()
    }

    fn allocate(&self, len_bytes: u64) -> Result<Self::Memory, MemoryError> {
        self.inner.allocate(len_bytes).map(FailingMemory::new)
    }

    fn profile(&self) -> DeviceProfile {
        self.inner.profile()
    }

    fn code_hash(&self) -> u64 {
        self.inner.code_hash()
    }

    fn capture(
        &mut self,
        memory: &mut Self::Memory,
        launches: &[Launch<ByteRange>],
    ) -> Result<B::Executable, BackendError> {
        self.call("capture")?;
        self.inner.capture(memory.inner_mut(), launches)
    }

    fn node_count(&self, executable: &B::Executable) -> Result<usize, BackendError> {
        self.call("node count")?;
        self.inner.node_count(executable)
    }

    fn replay(
        &mut self,
        memory: &mut Self::Memory,
        executable: &mut B::Executable,
    ) -> Result<(), BackendError> {
        self.call("replay")?;
        self.inner.replay(memory.inner_mut(), executable)
    }

    fn is_asynchronous(&self) -> bool {
        self.inner.is_asynchronous()
    }

    fn launch(
        &mut self,
        memory: &mut Self::Memory,
        launch: &Launch<ByteRange>,
    ) -> Result<(), BackendError> {
        self.call("launch")?;
        self.inner.launch(memory.inner_mut(), launch)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.call("synchronize")?;
        self.inner.synchronize()
    }
}
