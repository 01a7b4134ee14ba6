use alloc::boxed::Box;
use alloc::format;
use core::fmt;
use core::ops::Range;

use crate::{DeviceMemory, MemoryError, Slab, SlabError, View};

/// Memory of the host that stores real bytes: what is read is what was written.
///
/// It starts at a page boundary, so any alignment up to a page holds for addresses as it does on a
/// device, and typed slices can be taken of aligned views. The operating system backs pages only
/// once they are touched, so a large slab costs what is used of it. It happens to start zeroed; code
/// that relies on it will fail on a device.
pub struct HostMemory {
    /// One page longer than asked for: the allocator aligns less than a device does, and asking it
    /// for more alignment would make it clear the bytes itself, touching every page.
    storage: Box<[u8]>,
    start: usize,
    len: usize,
    reserved: usize,
}

impl HostMemory {
    /// What its base address is a multiple of.
    pub const BASE_ALIGN_BYTES: u64 = 4096;

    /// Memory of a fixed length.
    ///
    /// # Errors
    ///
    /// The host has not that much.
    pub fn new(len_bytes: u64) -> Result<Self, MemoryError> {
        let mut memory = Self::growable(len_bytes)?;
        memory.len = memory.reserved;
        Ok(memory)
    }

    /// Memory of no bytes yet that grows in place up to `reserve_bytes`.
    ///
    /// ```
    /// use gpu_slab::{DeviceMemory, HostMemory, Slab};
    ///
    /// let mut slab = Slab::new(HostMemory::growable(1 << 30)?);
    /// let base = slab.memory().base_address();
    /// slab.allocate_zeroed("kv", 1000)?;
    /// assert_eq!(slab.memory().len_bytes(), 1000); // as far as was needed
    /// assert_eq!(slab.memory().base_address(), base);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The host has not that much address space.
    pub fn growable(reserve_bytes: u64) -> Result<Self, MemoryError> {
        let refused = || MemoryError::new("allocate", reserve_bytes, "the host refused it");
        let align = Self::BASE_ALIGN_BYTES as usize;
        let reserved = usize::try_from(reserve_bytes).map_err(|_| refused())?;
        let padded = reserved.checked_add(align).ok_or_else(refused)?;
        let storage =
            bytemuck::allocation::try_zeroed_slice_box::<u8>(padded).map_err(|()| refused())?;
        let start = storage.as_ptr().addr().next_multiple_of(align) - storage.as_ptr().addr();
        Ok(Self { storage, start, len: 0, reserved })
    }

    /// All of its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.len]
    }

    /// All of its bytes, to be changed in place, as a kernel does.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.len]
    }

    fn range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Range<usize>, MemoryError> {
        MemoryError::check_range(operation, offset_bytes, len_bytes, self.len_bytes())?;
        // Both are at most the length, which is a `usize`.
        Ok(offset_bytes as usize..(offset_bytes + len_bytes) as usize)
    }
}

impl DeviceMemory for HostMemory {
    fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    fn base_address(&self) -> u64 {
        self.storage.as_ptr().addr() as u64 + self.start as u64
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let range = self.range("write", offset_bytes, bytes.len() as u64)?;
        self.bytes_mut()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let range = self.range("read", offset_bytes, bytes.len() as u64)?;
        bytes.copy_from_slice(&self.bytes()[range]);
        Ok(())
    }

    fn fill(&mut self, offset_bytes: u64, len_bytes: u64, value: u8) -> Result<(), MemoryError> {
        let range = self.range("fill", offset_bytes, len_bytes)?;
        self.bytes_mut()[range].fill(value);
        Ok(())
    }

    fn copy_within(&mut self, from: u64, to: u64, len_bytes: u64) -> Result<(), MemoryError> {
        MemoryError::check_copy(from, to, len_bytes, self.len_bytes())?;
        let from = self.range("copy", from, len_bytes)?;
        self.bytes_mut().copy_within(from, to as usize);
        Ok(())
    }

    fn grow(&mut self, len_bytes: u64) -> Result<(), MemoryError> {
        if len_bytes > self.max_len_bytes() {
            let message = format!("only {} bytes are reserved", self.reserved);
            return Err(MemoryError::new("grow", len_bytes, message));
        }
        self.len = self.len.max(len_bytes as usize);
        Ok(())
    }

    fn max_len_bytes(&self) -> u64 {
        self.reserved as u64
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("len_bytes", &self.len)
            .field("max_len_bytes", &self.reserved)
            .finish_non_exhaustive()
    }
}

/// On the host a view's bytes can be looked at in place. Nothing crosses to a device here, so
/// nothing is counted.
impl Slab<HostMemory> {
    /// The bytes of a view.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale.
    pub fn view_bytes(&self, view: View) -> Result<&[u8], SlabError> {
        let range = self.resolve(view)?;
        Ok(&self.memory().bytes()[range.start as usize..range.end as usize])
    }

    /// The bytes of a view, to be changed in place.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale.
    pub fn view_bytes_mut(&mut self, view: View) -> Result<&mut [u8], SlabError> {
        let range = self.resolve(view)?;
        Ok(&mut self.memory_mut().bytes_mut()[range.start as usize..range.end as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_a_page_and_stays_there_when_moved() {
        let memory = HostMemory::new(1000).unwrap();
        let base = memory.base_address();
        assert_eq!(base % HostMemory::BASE_ALIGN_BYTES, 0);
        assert_eq!(memory.bytes().as_ptr() as u64, base);
        assert_eq!(memory.bytes().len(), 1000);
        let moved = Box::new(memory);
        assert_eq!(moved.base_address(), base);
    }

    #[test]
    fn more_than_the_host_has_is_an_error() {
        for len_bytes in [u64::MAX, u64::MAX - 4096, 1 << 62] {
            let error = HostMemory::new(len_bytes).unwrap_err();
            assert_eq!(error.requested_bytes, len_bytes);
        }
    }

    #[test]
    fn no_call_reaches_outside() {
        let mut memory = HostMemory::new(16).unwrap();
        assert!(memory.write(15, &[1, 2]).is_err());
        assert!(memory.write(u64::MAX, &[1]).is_err());
        assert!(memory.read(17, &mut []).is_err());
        assert!(memory.fill(0, 17, 9).is_err());
        assert!(memory.copy_within(0, 9, 8).is_err());
        assert!(memory.copy_within(9, 0, 8).is_err());
        assert!(memory.copy_within(0, 7, 8).is_err(), "overlap");
        assert_eq!(memory.bytes(), [0; 16]);
        memory.write(14, &[1, 2]).unwrap();
        memory.copy_within(8, 0, 8).unwrap();
        memory.read(16, &mut []).unwrap();
        assert_eq!(memory.bytes()[..8], [0, 0, 0, 0, 0, 0, 1, 2]);
    }

    #[test]
    fn grows_in_place_up_to_its_reserve() {
        let mut memory = HostMemory::growable(100).unwrap();
        let base = memory.base_address();
        assert_eq!((memory.len_bytes(), memory.max_len_bytes()), (0, 100));
        assert!(memory.write(0, &[1]).is_err());
        memory.grow(10).unwrap();
        memory.write(9, &[7]).unwrap();
        memory.grow(5).unwrap();
        assert_eq!(memory.len_bytes(), 10);
        let error = memory.grow(101).unwrap_err();
        assert_eq!(error.requested_bytes, 101);
        memory.grow(100).unwrap();
        assert_eq!((memory.base_address(), memory.bytes()[9]), (base, 7));
    }
}
