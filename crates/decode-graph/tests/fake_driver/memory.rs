//! Device memory in the host's, with every mistake that can be seen seen.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use crate::state::{Code, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY};

/// What the device has.
pub(crate) const TOTAL_BYTES: usize = 3 << 30;
pub(crate) const GRANULARITY_BYTES: usize = 2 << 20;
const ALIGN_BYTES: usize = 512;
/// Fresh memory up to this length is filled with something that nobody should rely on.
const SPOILT_BYTES: usize = 32 << 20;
const SPOILT: u8 = 0xcd;

#[derive(Default)]
pub(crate) struct Memory {
    /// Start and length of what kernels may use.
    device: BTreeMap<u64, usize>,
    pinned: BTreeMap<u64, usize>,
    reserved: BTreeMap<u64, usize>,
    /// Of mapped pieces: whether access was given.
    mapped: BTreeMap<u64, (usize, bool)>,
    /// Length of memory that was created and not released yet.
    created: BTreeMap<u64, usize>,
    used_bytes: usize,
    handles: u64,
}

fn layout(len: usize) -> Result<Layout, Code> {
    Layout::from_size_align(len.max(1), ALIGN_BYTES).map_err(|_| OUT_OF_MEMORY)
}

fn take(len: usize) -> Result<u64, Code> {
    // SAFETY: the layout's size is not zero.
    let start = unsafe { alloc_zeroed(layout(len)?) };
    if start.is_null() { Err(OUT_OF_MEMORY) } else { Ok(start as u64) }
}

fn give(start: u64, len: usize) -> Result<(), Code> {
    // SAFETY: made by `take` with this length; the caller has forgotten it.
    unsafe { dealloc(start as *mut u8, layout(len)?) };
    Ok(())
}

fn spoil(start: u64, len: usize) {
    if len <= SPOILT_BYTES {
        // SAFETY: so many bytes at `start` were just allocated.
        unsafe { (start as *mut u8).write_bytes(SPOILT, len) };
    }
}

impl Memory {
    pub(crate) fn free_bytes(&self) -> usize {
        TOTAL_BYTES.saturating_sub(self.used_bytes)
    }

    fn grant(&mut self, len: usize) -> Result<(), Code> {
        if len > self.free_bytes() {
            return Err(OUT_OF_MEMORY);
        }
        self.used_bytes += len;
        Ok(())
    }

    pub(crate) fn allocate(&mut self, len: usize) -> Result<u64, Code> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        self.grant(len)?;
        let start = take(len)?;
        spoil(start, len);
        self.device.insert(start, len);
        Ok(start)
    }

    pub(crate) fn free(&mut self, start: u64) -> Result<(), Code> {
        let len = self.device.remove(&start).ok_or(INVALID_VALUE)?;
        self.used_bytes -= len;
        give(start, len)
    }

    pub(crate) fn pin(&mut self, len: usize) -> Result<u64, Code> {
        let start = take(len)?;
        self.pinned.insert(start, len);
        Ok(start)
    }

    pub(crate) fn unpin(&mut self, start: u64) -> Result<(), Code> {
        give(start, self.pinned.remove(&start).ok_or(INVALID_VALUE)?)
    }

    pub(crate) fn reserve(&mut self, len: usize) -> Result<u64, Code> {
        if len == 0 || !len.is_multiple_of(GRANULARITY_BYTES) {
            return Err(INVALID_VALUE);
        }
        let start = take(len)?;
        self.reserved.insert(start, len);
        Ok(start)
    }

    pub(crate) fn unreserve(&mut self, start: u64, len: usize) -> Result<(), Code> {
        let mapped = self.mapped.range(start..start + len as u64).next().is_some();
        if mapped || self.reserved.get(&start) != Some(&len) {
            return Err(INVALID_VALUE);
        }
        self.reserved.remove(&start);
        give(start, len)
    }

    pub(crate) fn create(&mut self, len: usize) -> Result<u64, Code> {
        if len == 0 || !len.is_multiple_of(GRANULARITY_BYTES) {
            return Err(INVALID_VALUE);
        }
        self.grant(len)?;
        self.handles += 1;
        self.created.insert(self.handles, len);
        Ok(self.handles)
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), Code> {
        let len = self.created.remove(&handle).ok_or(INVALID_VALUE)?;
        // What is mapped stays in use until it is unmapped, and was counted there.
        self.used_bytes -= len;
        Ok(())
    }

    pub(crate) fn map(&mut self, address: u64, len: usize, handle: u64) -> Result<(), Code> {
        let (start, reserved) = self.reserved.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let inside = address + len as u64 <= start + *reserved as u64;
        let taken = self.containing(&self.mapped, address, len, |(len, _)| *len).is_some();
        if !inside || taken || self.created.get(&handle) != Some(&len) {
            return Err(INVALID_VALUE);
        }
        self.used_bytes += len;
        spoil(address, len);
        self.mapped.insert(address, (len, false));
        Ok(())
    }

    pub(crate) fn unmap(&mut self, address: u64, len: usize) -> Result<(), Code> {
        if self.mapped.get(&address).map(|(len, _)| *len) != Some(len) {
            return Err(INVALID_VALUE);
        }
        self.mapped.remove(&address);
        self.used_bytes -= len;
        Ok(())
    }

    pub(crate) fn allow(&mut self, address: u64, len: usize) -> Result<(), Code> {
        match self.mapped.get_mut(&address) {
            Some((mapped, allowed)) if *mapped == len => {
                *allowed = true;
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }

    /// The piece of `map` that holds the first of `len` bytes at `address`.
    fn containing<'a, T>(
        &self,
        map: &'a BTreeMap<u64, T>,
        address: u64,
        len: usize,
        len_of: impl Fn(&T) -> usize,
    ) -> Option<(u64, &'a T)> {
        let (start, value) = map.range(..=address).next_back()?;
        let end = start + len_of(value) as u64;
        (address < end && len > 0).then_some((end, value))
    }

    pub(crate) fn check_pinned(&self, address: u64, len: usize) -> Result<(), Code> {
        match self.containing(&self.pinned, address, len, |len| *len) {
            Some((end, _)) if address + len as u64 <= end => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Refuses bytes that are not all live device memory.
    pub(crate) fn check_device(&self, address: u64, len: usize) -> Result<(), Code> {
        let (mut address, mut len) = (address, len);
        // A range may lie across several mapped pieces.
        while len > 0 {
            let plain = self.containing(&self.device, address, len, |len| *len).map(|(end, _)| end);
            let mapped = self.containing(&self.mapped, address, len, |(len, _)| *len);
            let mapped = mapped.filter(|(_, (_, allowed))| *allowed).map(|(end, _)| end);
            let end = plain.or(mapped).ok_or(ILLEGAL_ADDRESS)?;
            let here = ((end - address) as usize).min(len);
            address += here as u64;
            len -= here;
        }
        Ok(())
    }

    pub(crate) fn live(&self) -> usize {
        self.device.len()
            + self.pinned.len()
            + self.reserved.len()
            + self.mapped.len()
            + self.created.len()
    }
}
