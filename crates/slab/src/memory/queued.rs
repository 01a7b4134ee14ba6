use crate::MemoryError;

/// A read of a few bytes under way: see [`DeviceMemory::queue_read`](crate::DeviceMemory::queue_read).
#[derive(Debug)]
#[must_use = "the bytes come with `finish_read`"]
pub struct QueuedRead {
    /// The bytes, where they were read at once.
    pub(super) bytes: [u8; Self::MAX_BYTES],
    len: usize,
    /// Number of the read, where it is under way.
    #[cfg(feature = "cuda")]
    pub(super) number: Option<u64>,
}

impl QueuedRead {
    /// Most bytes of one queued read: what a step tells the host, never its activations.
    pub const MAX_BYTES: usize = 64;

    pub(super) fn new(len: usize) -> Result<Self, MemoryError> {
        if len > Self::MAX_BYTES {
            let message = alloc::format!("at most {} bytes can be queued", Self::MAX_BYTES);
            return Err(MemoryError::new("read", len as u64, message));
        }
        Ok(Self {
            bytes: [0; Self::MAX_BYTES],
            len,
            #[cfg(feature = "cuda")]
            number: None,
        })
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    pub(super) fn check_len(&self, bytes: &[u8]) -> Result<(), MemoryError> {
        if bytes.len() == self.len {
            return Ok(());
        }
        let message = alloc::format!("{} bytes were queued, {} taken", self.len, bytes.len());
        Err(MemoryError::new("read", self.len as u64, message))
    }

    pub(super) fn copy_to(&self, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check_len(bytes)?;
        bytes.copy_from_slice(&self.bytes[..self.len]);
        Ok(())
    }
}
