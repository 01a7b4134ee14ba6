//! Pinned host memory that copies go through.
//!
//! A copy out of pageable memory makes the driver wait; out of pinned memory it is queued. Bytes to
//! be uploaded are copied into the current buffer of a ring and leave from there, so whoever packs
//! weights goes on packing while the previous ones travel. Small writes follow each other within
//! one buffer: an event is recorded and waited for only where the ring moves on.

use std::ffi::c_void;

use cust::sys::CUevent;

use super::driver::{self, EVENT_DISABLE_TIMING, call};
use super::{CudaContext, DriverError, RawStream};
use crate::QueuedRead;

const BUFFERS: usize = 4;
const BUFFER_BYTES: usize = 8 << 20;
/// Small writes start at multiples of this, as DMA likes them.
const ALIGN_BYTES: usize = 64;
/// Reads up to this go through pinned memory at once.
const READ_BYTES: usize = 1 << 20;
/// Small reads that can be under way at a time.
const QUEUED_READS: u64 = 4;

/// The ring, and a buffer for reads.
#[derive(Debug, Default)]
pub(super) struct Staging {
    ring: [Option<Slot>; BUFFERS],
    current: usize,
    used: usize,
    read: Option<Pinned>,
    queued: [Option<Slot>; QUEUED_READS as usize],
    reads_queued: u64,
}

#[derive(Debug)]
struct Slot {
    buffer: Pinned,
    /// Recorded behind the last copy out of the buffer (into it, for reads).
    left: Event,
}

impl Staging {
    /// Queues the copy of `bytes` to `to`; they have been read when this returns.
    ///
    /// # Safety
    ///
    /// `to` and so many bytes behind it are device memory, `stream` is a stream of `context`, which
    /// is current.
    pub(super) unsafe fn upload(
        &mut self,
        context: &CudaContext,
        stream: RawStream,
        to: u64,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        let mut to = to;
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.used >= BUFFER_BYTES {
                self.turn(context, stream)?;
            }
            let slot = match &mut self.ring[self.current] {
                Some(slot) => slot,
                none => {
                    let buffer = Pinned::new(context, BUFFER_BYTES)?;
                    none.insert(Slot { buffer, left: Event::new(context)? })
                }
            };
            let (now, later) = rest.split_at(rest.len().min(BUFFER_BYTES - self.used));
            let from = slot.buffer.put(self.used, now);
            // SAFETY: the caller's word for `to`; `from` holds so many bytes, which stay as they
            // are until the event behind this copy was waited for.
            unsafe { call!(cuMemcpyHtoDAsync_v2(to, from, now.len(), stream)) }?;
            self.used = (self.used + now.len()).next_multiple_of(ALIGN_BYTES);
            to += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Moves on to the next buffer, once the copies out of it are done.
    fn turn(&mut self, context: &CudaContext, stream: RawStream) -> Result<(), DriverError> {
        if let Some(slot) = &self.ring[self.current] {
            // SAFETY: event and stream are alive and of the current context.
            unsafe { call!(cuEventRecord(slot.left.raw, stream)) }?;
        }
        let next = (self.current + 1) % BUFFERS;
        if let Some(slot) = &self.ring[next] {
            context.count_synchronization();
            // SAFETY: the event is alive.
            unsafe { call!(cuEventSynchronize(slot.left.raw)) }?;
        }
        self.current = next;
        self.used = 0;
        Ok(())
    }

    /// Copies from the device, waiting for the stream.
    ///
    /// # Safety
    ///
    /// As [`upload`](Self::upload), of `from`.
    pub(super) unsafe fn download(
        &mut self,
        context: &CudaContext,
        stream: RawStream,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), DriverError> {
        let buffer = match &mut self.read {
            Some(buffer) => buffer,
            none => none.insert(Pinned::new(context, READ_BYTES)?),
        };
        for (index, piece) in bytes.chunks_mut(READ_BYTES).enumerate() {
            let from = from + (index * READ_BYTES) as u64;
            // SAFETY: the caller's word for `from`; the buffer has room for the piece.
            unsafe { call!(cuMemcpyDtoHAsync_v2(buffer.start(), from, piece.len(), stream)) }?;
            context.count_synchronization();
            // SAFETY: the stream is alive.
            unsafe { call!(cuStreamSynchronize(stream)) }?;
            buffer.get(piece);
        }
        Ok(())
    }
}

impl Staging {
    /// Queues a small copy from the device and returns its number.
    ///
    /// # Safety
    ///
    /// As [`upload`](Self::upload), of `from`; `len` is at most [`QueuedRead::MAX_BYTES`].
    pub(super) unsafe fn queue_download(
        &mut self,
        context: &CudaContext,
        stream: RawStream,
        from: u64,
        len: usize,
    ) -> Result<u64, DriverError> {
        let number = self.reads_queued;
        let slot = match &mut self.queued[(number % QUEUED_READS) as usize] {
            Some(slot) => slot,
            none => {
                let buffer = Pinned::new(context, QueuedRead::MAX_BYTES)?;
                none.insert(Slot { buffer, left: Event::new(context)? })
            }
        };
        // An older read into the same buffer comes before this one on the stream.
        // SAFETY: the caller's word for `from`; the buffer has room.
        unsafe { call!(cuMemcpyDtoHAsync_v2(slot.buffer.start(), from, len, stream)) }?;
        // SAFETY: event and stream are alive and of the current context.
        unsafe { call!(cuEventRecord(slot.left.raw, stream)) }?;
        self.reads_queued += 1;
        Ok(number)
    }

    /// Waits for the read with this number; false if a later one has taken its place. The context
    /// is current.
    pub(super) fn finish_download(
        &mut self,
        context: &CudaContext,
        number: u64,
        bytes: &mut [u8],
    ) -> Result<bool, DriverError> {
        if self.reads_queued - number > QUEUED_READS {
            return Ok(false);
        }
        let Some(slot) = &self.queued[(number % QUEUED_READS) as usize] else { return Ok(false) };
        context.count_synchronization();
        // SAFETY: the event is alive.
        unsafe { call!(cuEventSynchronize(slot.left.raw)) }?;
        slot.buffer.get(bytes);
        Ok(true)
    }
}

#[derive(Debug)]
struct Event {
    raw: CUevent,
    context: CudaContext,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    fn new(context: &CudaContext) -> Result<Self, DriverError> {
        let mut raw = core::ptr::null_mut();
        // SAFETY: the context is current, and the driver writes one handle.
        unsafe { call!(cuEventCreate(&mut raw, EVENT_DISABLE_TIMING)) }?;
        Ok(Self { raw, context: context.clone() })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: made by `new`, used by nobody else.
            let _ = unsafe { driver::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// Page-locked host memory.
#[derive(Debug)]
struct Pinned {
    start: *mut u8,
    len: usize,
    context: CudaContext,
}

// SAFETY: plain memory that this value alone owns.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(context: &CudaContext, len: usize) -> Result<Self, DriverError> {
        let mut start: *mut c_void = core::ptr::null_mut();
        // SAFETY: the context is current, and the driver writes one pointer.
        unsafe { call!(cuMemHostAlloc(&mut start, len, 0)) }?;
        context.count_allocation();
        Ok(Self { start: start.cast(), len, context: context.clone() })
    }

    fn start(&mut self) -> *mut c_void {
        self.start.cast()
    }

    /// Copies `bytes` to `at` and returns where they are.
    fn put(&mut self, at: usize, bytes: &[u8]) -> *const c_void {
        assert!(at <= self.len && bytes.len() <= self.len - at, "staging buffer overrun");
        // SAFETY: in range, and a caller's slice is no part of this memory.
        unsafe {
            let to = self.start.add(at);
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            to.cast_const().cast()
        }
    }

    /// Copies from the start to `bytes`.
    fn get(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.len, "staging buffer overrun");
        // SAFETY: in range, written by the device before, and not part of the caller's slice.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.start, bytes.len()) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: made by `new`. The ring is dropped after its stream was synchronised.
            let _ = unsafe { driver::cuMemFreeHost(self.start.cast()) };
        }
    }
}
