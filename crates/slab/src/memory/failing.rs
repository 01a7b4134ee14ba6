use alloc::format;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::{DeviceMemory, HostMemory, MemoryError, QueuedRead};

/// The code that the helpers of this module give: `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i64 = 2;

/// Memory that refuses the n-th call, every call from the n-th on, or every access above an offset,
/// and otherwise passes on to `M`.
///
/// Counted as calls are those that can fail: write, read, fill, copy, grow, synchronize. The first
/// has number 1. A refused call does not reach `M`.
#[derive(Debug)]
pub struct FailingMemory<M> {
    inner: M,
    refuse_call: Option<u64>,
    refuse_from_call: Option<u64>,
    refuse_above_bytes: u64,
    calls: AtomicU64,
    refused: AtomicU64,
}

impl<M: DeviceMemory> FailingMemory<M> {
    /// Memory that refuses nothing yet.
    pub fn new(inner: M) -> Self {
        Self {
            inner,
            refuse_call: None,
            refuse_from_call: None,
            refuse_above_bytes: u64::MAX,
            calls: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Refuses call number `number` alone, as a passing fault does.
    #[must_use]
    pub fn refuse_call(mut self, number: u64) -> Self {
        self.refuse_call = Some(number);
        self
    }

    /// Refuses call number `number` and every later one, as a lost device does.
    #[must_use]
    pub fn refuse_from_call(mut self, number: u64) -> Self {
        self.refuse_from_call = Some(number);
        self
    }

    /// Refuses every access or growth that ends above `bytes`.
    #[must_use]
    pub fn refuse_above(mut self, bytes: u64) -> Self {
        self.refuse_above_bytes = bytes;
        self
    }

    /// Calls so far, the refused ones included.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Calls refused by this wrapper.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// The memory below.
    pub fn inner(&self) -> &M {
        &self.inner
    }

    /// The memory below, for access that is neither counted nor refused.
    pub fn inner_mut(&mut self) -> &mut M {
        &mut self.inner
    }

    /// The memory below, for good.
    pub fn into_inner(self) -> M {
        self.inner
    }

    fn call(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), MemoryError> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let refuse = self.refuse_call == Some(number)
            || self.refuse_from_call.is_some_and(|first| number >= first)
            || offset_bytes.saturating_add(len_bytes) > self.refuse_above_bytes;
        if !refuse {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        let message = format!("call {number} was refused on purpose");
        Err(MemoryError::new(operation, len_bytes, message).with_code(OUT_OF_MEMORY))
    }
}

impl<M: DeviceMemory> DeviceMemory for FailingMemory<M> {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn base_address(&self) -> u64 {
        self.inner.base_address()
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.call("write", offset_bytes, bytes.len() as u64)?;
        self.inner.write(offset_bytes, bytes)
    }

    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.call("read", offset_bytes, bytes.len() as u64)?;
        self.inner.read(offset_bytes, bytes)
    }

    fn queue_read(&mut self, offset_bytes: u64, len: usize) -> Result<QueuedRead, MemoryError> {
        self.call("read", offset_bytes, len as u64)?;
        self.inner.queue_read(offset_bytes, len)
    }

    fn finish_read(&mut self, queued: QueuedRead, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.inner.finish_read(queued, bytes)
    }

    fn fill(&mut self, offset_bytes: u64, len_bytes: u64, value: u8) -> Result<(), MemoryError> {
        self.call("fill", offset_bytes, len_bytes)?;
        self.inner.fill(offset_bytes, len_bytes, value)
    }

    fn copy_within(&mut self, from: u64, to: u64, len_bytes: u64) -> Result<(), MemoryError> {
        self.call("copy", from.max(to), len_bytes)?;
        self.inner.copy_within(from, to, len_bytes)
    }

    fn grow(&mut self, len_bytes: u64) -> Result<(), MemoryError> {
        self.call("grow", 0, len_bytes)?;
        self.inner.grow(len_bytes)
    }

    fn max_len_bytes(&self) -> u64 {
        self.inner.max_len_bytes()
    }

    fn synchronize(&self) -> Result<(), MemoryError> {
        self.call("synchronize", 0, 0)?;
        self.inner.synchronize()
    }
}

/// Stands in for a device with `free_bytes` left: grants host memory up to that size and refuses
/// more, with the code that CUDA gives.
///
/// ```
/// use gpu_slab::{Slab, testing::host_memory_up_to};
///
/// let slab = Slab::with_sizes(&[4096, 2048, 1024], host_memory_up_to(3000))?;
/// assert_eq!(slab.capacity_bytes(), 2048);
/// # Ok::<(), gpu_slab::SlabError>(())
/// ```
pub fn host_memory_up_to(free_bytes: u64) -> impl FnMut(u64) -> Result<HostMemory, MemoryError> {
    move |len_bytes| {
        if len_bytes <= free_bytes {
            return HostMemory::new(len_bytes);
        }
        let message = format!("out of memory, {free_bytes} bytes are free");
        Err(MemoryError::new("allocate", len_bytes, message).with_code(OUT_OF_MEMORY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing() -> FailingMemory<HostMemory> {
        FailingMemory::new(HostMemory::new(64).unwrap())
    }

    #[test]
    fn one_call_is_refused_and_counted() {
        let mut memory = failing().refuse_call(2);
        memory.write(0, &[1]).unwrap();
        let error = memory.write(0, &[2, 2]).unwrap_err();
        assert_eq!((error.code, error.requested_bytes), (Some(2), 2));
        let mut bytes = [0; 2];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 0], "the refused write did not arrive");
        assert_eq!((memory.calls(), memory.refused()), (3, 1));
    }

    #[test]
    fn a_lost_device_stays_lost() {
        let mut memory = failing().refuse_from_call(1);
        assert!(memory.fill(0, 1, 0).is_err());
        assert!(memory.copy_within(0, 8, 8).is_err());
        assert!(memory.grow(64).is_err());
        assert!(memory.synchronize().is_err());
        assert_eq!((memory.calls(), memory.refused()), (4, 4));
    }

    #[test]
    fn above_a_limit_everything_is_refused() {
        let mut memory = failing().refuse_above(32);
        memory.write(31, &[1]).unwrap();
        assert!(memory.write(31, &[1, 2]).is_err());
        assert!(memory.copy_within(0, 24, 16).is_err());
        assert!(memory.grow(33).is_err());
        memory.grow(32).unwrap();
    }
}
