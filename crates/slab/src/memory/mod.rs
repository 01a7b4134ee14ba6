//! The seam under the allocator.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use core::fmt;

#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
pub(crate) mod failing;
mod host;
mod queued;

pub use host::HostMemory;
pub use queued::QueuedRead;

/// One device allocation, as a slab needs it: bytes that can be written, read, filled and copied.
///
/// # Contract
///
/// - **Order.** Calls take effect in the order in which they are made, on the device too: whatever
///   was issued later in the same order (a kernel on the same stream, a read) sees them. A call need
///   not wait for the device. `write` is done with the caller's bytes when it returns; `read` has all
///   of its bytes when it returns; [`synchronize`](Self::synchronize) waits for everything. A fault
///   of the device may therefore be reported by a later call.
/// - **Range.** A call outside of `0..len_bytes()` is refused before anything happens
///   ([`MemoryError::check_range`]); none is a silent no-op.
/// - **Address.** The base address does not change while the memory lives, growth included.
/// - **Contents** are undefined until written or filled.
pub trait DeviceMemory {
    /// Bytes usable now.
    fn len_bytes(&self) -> u64;

    /// Address of the first byte as kernels see it; on the host the value of the pointer.
    fn base_address(&self) -> u64;

    /// Copies `bytes` to the device.
    ///
    /// # Errors
    ///
    /// The range does not fit, or the device failed.
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError>;

    /// Copies from the device into `bytes`.
    ///
    /// # Errors
    ///
    /// The range does not fit, or the device failed.
    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError>;

    /// Queues a read of a few bytes (at most [`QueuedRead::MAX_BYTES`]) behind everything issued so
    /// far, so that more can be issued before [`finish_read`](Self::finish_read) waits for it. Memory
    /// that has nothing to wait for reads at once.
    ///
    /// # Errors
    ///
    /// The range does not fit, there are too many bytes, or the device failed.
    fn queue_read(&mut self, offset_bytes: u64, len: usize) -> Result<QueuedRead, MemoryError> {
        let mut queued = QueuedRead::new(len)?;
        self.read(offset_bytes, &mut queued.bytes[..len])?;
        Ok(queued)
    }

    /// Waits for a queued read, not for what was issued after it, and copies its bytes.
    ///
    /// # Errors
    ///
    /// The device failed, `bytes` has another length, or so many reads were queued after this one
    /// that its bytes are gone (there is room for four).
    fn finish_read(&mut self, queued: QueuedRead, bytes: &mut [u8]) -> Result<(), MemoryError> {
        queued.copy_to(bytes)
    }

    /// Sets every byte of a range on the device; nothing is uploaded.
    ///
    /// # Errors
    ///
    /// The range does not fit, or the device failed.
    fn fill(&mut self, offset_bytes: u64, len_bytes: u64, value: u8) -> Result<(), MemoryError>;

    /// Copies one range to another on the device. The two share no byte.
    ///
    /// # Errors
    ///
    /// A range does not fit, the ranges overlap, or the device failed.
    fn copy_within(&mut self, from: u64, to: u64, len_bytes: u64) -> Result<(), MemoryError>;

    /// Makes at least `len_bytes` usable, in place: addresses and contents stay. Less than there is
    /// already is no error and changes nothing.
    ///
    /// # Errors
    ///
    /// The memory cannot grow that far, or the device has no more; then nothing has changed.
    fn grow(&mut self, len_bytes: u64) -> Result<(), MemoryError> {
        if len_bytes <= self.len_bytes() {
            return Ok(());
        }
        let message = format!("the memory cannot grow beyond {} bytes", self.len_bytes());
        Err(MemoryError::new("grow", len_bytes, message))
    }

    /// How many bytes [`grow`](Self::grow) may reach. Constant while the memory lives.
    fn max_len_bytes(&self) -> u64 {
        self.len_bytes()
    }

    /// Waits until everything issued so far is done.
    ///
    /// # Errors
    ///
    /// What the device reports of the calls before.
    fn synchronize(&self) -> Result<(), MemoryError> {
        Ok(())
    }
}

macro_rules! forward_device_memory {
    ($pointer:ty) => {
        /// Memory that somebody else keeps is memory too.
        impl<M: DeviceMemory + ?Sized> DeviceMemory for $pointer {
            fn len_bytes(&self) -> u64 {
                (**self).len_bytes()
            }
            fn base_address(&self) -> u64 {
                (**self).base_address()
            }
            fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError> {
                (**self).write(offset_bytes, bytes)
            }
            fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
                (**self).read(offset_bytes, bytes)
            }
            fn queue_read(&mut self, offset: u64, len: usize) -> Result<QueuedRead, MemoryError> {
                (**self).queue_read(offset, len)
            }
            fn finish_read(
                &mut self,
                queued: QueuedRead,
                bytes: &mut [u8],
            ) -> Result<(), MemoryError> {
                (**self).finish_read(queued, bytes)
            }
            fn fill(&mut self, offset: u64, len: u64, value: u8) -> Result<(), MemoryError> {
                (**self).fill(offset, len, value)
            }
            fn copy_within(&mut self, from: u64, to: u64, len: u64) -> Result<(), MemoryError> {
                (**self).copy_within(from, to, len)
            }
            fn grow(&mut self, len_bytes: u64) -> Result<(), MemoryError> {
                (**self).grow(len_bytes)
            }
            fn max_len_bytes(&self) -> u64 {
                (**self).max_len_bytes()
            }
            fn synchronize(&self) -> Result<(), MemoryError> {
                (**self).synchronize()
            }
        }
    };
}

forward_device_memory!(&mut M);
forward_device_memory!(Box<M>);

/// What the memory said when it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryError {
    /// What was being done: `allocate`, `write`, `read`, `fill`, `copy`, `grow`, `synchronize`.
    pub operation: &'static str,
    /// How many bytes it was asked for.
    pub requested_bytes: u64,
    /// The device's own number for the failure, as it came from the driver; `None` where the failure
    /// was found on the host.
    pub code: Option<i64>,
    /// The reason in words.
    pub message: String,
}

impl MemoryError {
    /// A failure without a device code.
    pub fn new(operation: &'static str, requested_bytes: u64, message: impl Into<String>) -> Self {
        Self { operation, requested_bytes, code: None, message: message.into() }
    }

    /// The same failure with the device's number for it.
    #[must_use]
    pub fn with_code(mut self, code: i64) -> Self {
        self.code = Some(code);
        self
    }

    /// Refuses a range that does not lie inside of `0..memory_bytes`: for whoever implements
    /// [`DeviceMemory`].
    ///
    /// # Errors
    ///
    /// The range, in words.
    pub fn check_range(
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
        memory_bytes: u64,
    ) -> Result<(), MemoryError> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end_bytes) if end_bytes <= memory_bytes => Ok(()),
            _ => {
                let message =
                    format!("offset {offset_bytes} is outside of a memory of {memory_bytes} bytes");
                Err(Self::new(operation, len_bytes, message))
            }
        }
    }

    /// Refuses a copy whose ranges do not both lie inside of `0..memory_bytes`, or overlap.
    ///
    /// # Errors
    ///
    /// The ranges, in words.
    pub fn check_copy(
        from: u64,
        to: u64,
        len_bytes: u64,
        memory_bytes: u64,
    ) -> Result<(), MemoryError> {
        Self::check_range("copy", from, len_bytes, memory_bytes)?;
        Self::check_range("copy", to, len_bytes, memory_bytes)?;
        if from.abs_diff(to) < len_bytes {
            let message = format!("the ranges at {from} and {to} overlap");
            return Err(Self::new("copy", len_bytes, message));
        }
        Ok(())
    }
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, requested_bytes, code, message } = self;
        write!(f, "{operation} of {requested_bytes} bytes failed: {message}")?;
        match code {
            Some(code) => write!(f, " (code {code})"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for MemoryError {}
