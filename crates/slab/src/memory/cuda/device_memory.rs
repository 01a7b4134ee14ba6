//! Device memory under a slab.

use super::driver::call;
use super::{CudaAllocation, CudaStream, DriverError};
use crate::{DeviceMemory, MemoryError, QueuedRead};

/// Memory of an NVIDIA GPU; copies and fills are ordered on a stream.
///
/// Writing returns when the bytes are in pinned staging memory, reading waits for the stream. While
/// the stream is being captured nothing may be written, read, filled or copied: the driver would
/// record it or end the capture.
#[derive(Debug)]
pub struct CudaMemory {
    allocation: CudaAllocation,
    stream: CudaStream,
    max_len_bytes: u64,
}

impl CudaMemory {
    /// Memory of a fixed length.
    ///
    /// # Errors
    ///
    /// The device has not that much: what was asked for, free and there in all.
    pub fn new(stream: &CudaStream, len_bytes: u64) -> Result<Self, MemoryError> {
        let allocation = CudaAllocation::plain(stream.context(), len_bytes)?;
        Ok(Self { allocation, stream: stream.clone(), max_len_bytes: len_bytes })
    }

    /// Memory of no bytes yet that grows in place up to `reserve_bytes`, by multiples of
    /// [`granularity_bytes`](Self::granularity_bytes). Only addresses are reserved at once.
    ///
    /// # Errors
    ///
    /// The driver has no such run of addresses.
    pub fn growing(stream: &CudaStream, reserve_bytes: u64) -> Result<Self, MemoryError> {
        let allocation = CudaAllocation::growing(stream.context(), reserve_bytes)?;
        Ok(Self { allocation, stream: stream.clone(), max_len_bytes: reserve_bytes })
    }

    /// Memory that another library owns and will free, so that its engine can use a slab.
    ///
    /// # Safety
    ///
    /// `base_address` and `len_bytes` behind it are device memory of the stream's context, used by
    /// nobody else while this value lives, or by work ordered on the same stream. It outlives this
    /// value, everything queued on the stream by then, and every graph captured over it.
    pub unsafe fn from_raw(stream: &CudaStream, base_address: u64, len_bytes: u64) -> Self {
        let allocation = CudaAllocation::borrowed(stream.context(), base_address, len_bytes);
        Self { allocation, stream: stream.clone(), max_len_bytes: len_bytes }
    }

    /// The stream that orders everything here.
    #[must_use]
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// The memory itself, to be kept alive by whoever keeps addresses.
    #[must_use]
    pub fn allocation(&self) -> &CudaAllocation {
        &self.allocation
    }

    /// What growth is rounded up to (2 MiB on the devices seen so far); `None` where it cannot grow.
    #[must_use]
    pub fn granularity_bytes(&self) -> Option<u64> {
        self.allocation.granularity_bytes()
    }

    /// Checks a range, makes the context current, and gives the address.
    fn enter(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<u64, MemoryError> {
        MemoryError::check_range(operation, offset_bytes, len_bytes, self.len_bytes())?;
        self.stream.context().make_current().map_err(|e| e.memory(operation, len_bytes))?;
        Ok(self.base_address() + offset_bytes)
    }
}

impl DeviceMemory for CudaMemory {
    fn len_bytes(&self) -> u64 {
        self.allocation.backed_bytes().min(self.max_len_bytes)
    }

    fn base_address(&self) -> u64 {
        self.allocation.base_address()
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let len_bytes = bytes.len() as u64;
        let to = self.enter("write", offset_bytes, len_bytes)?;
        let (context, raw) = (self.stream.context(), self.stream.as_raw());
        // SAFETY: the range was checked, the context is current and the stream's.
        let queued = unsafe { self.stream.staging().upload(context, raw, to, bytes) };
        queued.map_err(|error| error.memory("write", len_bytes))
    }

    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let len_bytes = bytes.len() as u64;
        let from = self.enter("read", offset_bytes, len_bytes)?;
        let (context, raw) = (self.stream.context(), self.stream.as_raw());
        // SAFETY: the range was checked, the context is current and the stream's.
        let done = unsafe { self.stream.staging().download(context, raw, from, bytes) };
        done.map_err(|error| error.memory("read", len_bytes))
    }

    fn queue_read(&mut self, offset_bytes: u64, len: usize) -> Result<QueuedRead, MemoryError> {
        let mut queued = QueuedRead::new(len)?;
        let from = self.enter("read", offset_bytes, len as u64)?;
        let (context, raw) = (self.stream.context(), self.stream.as_raw());
        // SAFETY: the range was checked, the context is current and the stream's.
        let number = unsafe { self.stream.staging().queue_download(context, raw, from, len) };
        queued.number = Some(number.map_err(|error| error.memory("read", len as u64))?);
        Ok(queued)
    }

    fn finish_read(&mut self, queued: QueuedRead, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let len_bytes = queued.len_bytes() as u64;
        queued.check_len(bytes)?;
        let Some(number) = queued.number else { return queued.copy_to(bytes) };
        let context = self.stream.context();
        let enter = context.make_current();
        let done =
            enter.and_then(|()| self.stream.staging().finish_download(context, number, bytes));
        match done.map_err(|error| error.memory("read", len_bytes))? {
            true => Ok(()),
            false => {
                Err(MemoryError::new("read", len_bytes, "too many reads were queued after it"))
            }
        }
    }

    fn fill(&mut self, offset_bytes: u64, len_bytes: u64, value: u8) -> Result<(), MemoryError> {
        let to = self.enter("fill", offset_bytes, len_bytes)?;
        let raw = self.stream.as_raw();
        let fill = || -> Result<(), DriverError> {
            // Whole words where the start allows it, and the rest by bytes.
            let words = if to % 4 == 0 { len_bytes / 4 } else { 0 };
            if words > 0 {
                let word = u32::from_ne_bytes([value; 4]);
                // SAFETY: inside of the range, which was checked; the start is a word's.
                unsafe { call!(cuMemsetD32Async(to, word, words as usize, raw)) }?;
            }
            let rest = len_bytes - words * 4;
            if rest > 0 {
                // SAFETY: inside of the range, which was checked.
                unsafe { call!(cuMemsetD8Async(to + words * 4, value, rest as usize, raw)) }?;
            }
            Ok(())
        };
        fill().map_err(|error| error.memory("fill", len_bytes))
    }

    fn copy_within(&mut self, from: u64, to: u64, len_bytes: u64) -> Result<(), MemoryError> {
        MemoryError::check_copy(from, to, len_bytes, self.len_bytes())?;
        let from = self.enter("copy", from, len_bytes)?;
        let to = self.enter("copy", to, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges were checked and share no byte.
        unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, len_bytes as usize, self.stream.as_raw())) }
            .map_err(|error| error.memory("copy", len_bytes))
    }

    fn grow(&mut self, len_bytes: u64) -> Result<(), MemoryError> {
        if len_bytes > self.max_len_bytes {
            let message = std::format!("only {} bytes are reserved", self.max_len_bytes);
            return Err(MemoryError::new("grow", len_bytes, message));
        }
        self.allocation.grow(len_bytes)
    }

    fn max_len_bytes(&self) -> u64 {
        self.max_len_bytes
    }

    fn synchronize(&self) -> Result<(), MemoryError> {
        self.stream.synchronize().map_err(|error| error.memory("synchronize", 0))
    }
}
