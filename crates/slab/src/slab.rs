use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::counters::Tally;
use crate::transaction::{self, HasArena};
use crate::{
    Allocate, Arena, Checkpoint, Counters, DEFAULT_ALIGN_BYTES, DeviceMemory, MemoryError, Plan,
    QueuedRead, Refusal, Report, SlabError, SlabId, View, ladder_from,
};

/// The target of this crate's log records.
const LOG: &str = "gpu_slab";

/// A bump allocator over one device allocation.
///
/// Allocations go upwards. [`seal`](Self::seal) makes what is allocated permanent; what comes after
/// is transient and goes back by [`rewind`](Self::rewind). Views are checked at every use.
pub struct Slab<M> {
    arena: Arena,
    memory: M,
    h2d: Tally,
    d2h: Tally,
}

impl<M: DeviceMemory> Slab<M> {
    /// A slab in memory obtained for it; its size is logged in MiB.
    #[must_use]
    pub fn new(memory: M) -> Self {
        let slab = Self::over(memory);
        log::info!(target: LOG, "slab {} of {:.1} MiB", slab.id(), mib(slab.capacity_bytes()));
        slab
    }

    /// A slab laid over memory that somebody else owns: a `&mut` of it, or a value that does not free
    /// it. Nothing is written until somebody asks.
    ///
    /// ```
    /// use gpu_slab::{HostMemory, Slab};
    ///
    /// let mut memory = HostMemory::new(4096)?;
    /// let mut slab = Slab::over(&mut memory);
    /// slab.allocate_and_write("greeting", b"hello")?;
    /// assert_eq!(&memory.bytes()[..5], b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn over(memory: M) -> Self {
        Self {
            arena: Arena::new(memory.max_len_bytes()),
            memory,
            h2d: Tally::default(),
            d2h: Tally::default(),
        }
    }

    /// Asks for each size in order and takes the first that is granted.
    ///
    /// ```
    /// use gpu_slab::{DEFAULT_LADDER, HostMemory, Slab};
    ///
    /// let slab = Slab::with_sizes(&DEFAULT_LADDER, HostMemory::new)?;
    /// # Ok::<(), gpu_slab::SlabError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SlabError::AllSizesRefused`] with each size and its reason.
    pub fn with_sizes(
        sizes_bytes: &[u64],
        mut grant: impl FnMut(u64) -> Result<M, MemoryError>,
    ) -> Result<Self, SlabError> {
        let mut refusals = Vec::new();
        for &len_bytes in sizes_bytes {
            let granted = grant(len_bytes).and_then(|memory| {
                let granted_bytes = memory.max_len_bytes();
                MemoryError::check_range("allocate", 0, len_bytes, granted_bytes).map(|()| memory)
            });
            match granted {
                Ok(memory) => return Ok(Self::new(memory)),
                Err(error) => {
                    log::debug!(target: LOG, "{:.1} MiB refused: {error}", mib(len_bytes));
                    refusals.push(Refusal { len_bytes, error });
                }
            }
        }
        Err(SlabError::AllSizesRefused { refusals })
    }

    /// Asks for what the plan needs first, then for less: [`ladder_from`] its total.
    ///
    /// Whoever cannot work with less asks [`with_sizes`](Self::with_sizes) for the total alone.
    ///
    /// # Errors
    ///
    /// [`SlabError::AllSizesRefused`] with each size and its reason.
    pub fn for_plan(
        plan: &Plan,
        grant: impl FnMut(u64) -> Result<M, MemoryError>,
    ) -> Result<Self, SlabError> {
        Self::with_sizes(&ladder_from(plan.total_bytes()), grant)
    }

    /// See [`Allocate::allocate`]. The bytes are whatever was there before.
    ///
    /// # Errors
    ///
    /// As [`Allocate::allocate_aligned`].
    #[inline]
    pub fn allocate(&mut self, name: &str, len_bytes: u64) -> Result<View, SlabError> {
        self.allocate_aligned(name, len_bytes, DEFAULT_ALIGN_BYTES)
    }

    /// See [`Allocate::allocate_aligned`]. Offset and address are both aligned; growing memory grows.
    ///
    /// # Errors
    ///
    /// As [`Allocate::allocate_aligned`].
    #[inline]
    pub fn allocate_aligned(
        &mut self,
        name: &str,
        len_bytes: u64,
        align_bytes: u64,
    ) -> Result<View, SlabError> {
        let placement = self.arena.place(name, len_bytes, align_bytes)?;
        let base_address = self.memory.base_address();
        if base_address & (align_bytes - 1) != 0 {
            let name = name.to_owned();
            return Err(SlabError::MisalignedBase { name, align_bytes, base_address });
        }
        if placement.end_bytes > self.memory.len_bytes() {
            let grown = self.memory.grow(placement.end_bytes);
            grown.map_err(|source| SlabError::Memory { name: name.to_owned(), source })?;
        }
        Ok(self.arena.take(name, placement))
    }

    /// An allocation filled with zeros on the device: nothing is uploaded.
    ///
    /// # Errors
    ///
    /// As [`Allocate::allocate_aligned`], and [`SlabError::Memory`] when the fill failed; nothing is
    /// allocated then.
    pub fn allocate_zeroed(&mut self, name: &str, len_bytes: u64) -> Result<View, SlabError> {
        self.transaction(|slab| {
            let view = slab.allocate(name, len_bytes)?;
            slab.fill_view(view, 0)?;
            Ok(view)
        })
    }

    /// An allocation that holds `bytes`.
    ///
    /// # Errors
    ///
    /// As [`Allocate::allocate_aligned`], and [`SlabError::Memory`] when the write failed; nothing is
    /// allocated then.
    pub fn allocate_and_write(&mut self, name: &str, bytes: &[u8]) -> Result<View, SlabError> {
        self.transaction(|slab| {
            let view = slab.allocate(name, bytes.len() as u64)?;
            slab.write_view(view, 0, bytes)?;
            Ok(view)
        })
    }

    /// Writes `bytes` into a view, from `offset_bytes` of the view on.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale, the bytes do not fit it, the memory failed.
    pub fn write_view(
        &mut self,
        view: View,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), SlabError> {
        let range = self.resolve_part(view, offset_bytes, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let written = self.memory.write(range.start, bytes);
        written.map_err(|source| self.memory_failed(view, source))?;
        self.h2d.add(bytes.len());
        Ok(())
    }

    /// Reads from a view into `bytes`, from `offset_bytes` of the view on.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale, the bytes do not lie inside it, the memory failed.
    pub fn read_view(
        &self,
        view: View,
        offset_bytes: u64,
        bytes: &mut [u8],
    ) -> Result<(), SlabError> {
        let range = self.resolve_part(view, offset_bytes, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let read = self.memory.read(range.start, bytes);
        read.map_err(|source| self.memory_failed(view, source))?;
        self.d2h.add(bytes.len());
        Ok(())
    }

    /// Queues a read of a whole view of a few bytes: see [`DeviceMemory::queue_read`]. Counted here.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale, it is longer than [`QueuedRead::MAX_BYTES`], the memory failed.
    pub fn queue_read_view(&mut self, view: View) -> Result<QueuedRead, SlabError> {
        let range = self.resolve(view)?;
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let queued = self.memory.queue_read(range.start, len);
        let queued = queued.map_err(|source| self.memory_failed(view, source))?;
        self.d2h.add(len);
        Ok(queued)
    }

    /// Waits for a queued read: see [`DeviceMemory::finish_read`].
    ///
    /// # Errors
    ///
    /// `bytes` has another length, the read was overtaken, the memory failed.
    pub fn finish_read(&mut self, queued: QueuedRead, bytes: &mut [u8]) -> Result<(), SlabError> {
        let done = self.memory.finish_read(queued, bytes);
        done.map_err(|source| SlabError::Memory { name: String::new(), source })
    }

    /// Sets every byte of a view, on the device.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale, the memory failed.
    pub fn fill_view(&mut self, view: View, value: u8) -> Result<(), SlabError> {
        let range = self.resolve(view)?;
        if view.is_empty() {
            return Ok(());
        }
        let filled = self.memory.fill(range.start, view.len_bytes(), value);
        filled.map_err(|source| self.memory_failed(view, source))
    }

    /// Copies one view to another of the same length, on the device.
    ///
    /// # Errors
    ///
    /// A view is foreign or stale, the lengths differ, the views overlap, the memory failed.
    pub fn copy(&mut self, from: View, to: View) -> Result<(), SlabError> {
        let (source, target) = (self.resolve(from)?, self.resolve(to)?);
        let (from_bytes, to_bytes) = (from.len_bytes(), to.len_bytes());
        if from_bytes != to_bytes {
            return Err(SlabError::LengthMismatch { from_bytes, to_bytes });
        }
        if from.overlaps(&to) {
            return Err(SlabError::OverlappingCopy {
                from_offset_bytes: source.start,
                to_offset_bytes: target.start,
                len_bytes: from_bytes,
            });
        }
        if from.is_empty() {
            return Ok(());
        }
        let copied = self.memory.copy_within(source.start, target.start, from_bytes);
        copied.map_err(|source| self.memory_failed(to, source))
    }

    /// Where a view starts, as kernels see it.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale.
    #[inline]
    pub fn device_ptr(&self, view: View) -> Result<u64, SlabError> {
        // A memory that holds the view's bytes has addresses for them, so this cannot overflow.
        Ok(self.memory.base_address().wrapping_add(self.resolve(view)?.start))
    }

    /// The offsets of a valid view.
    ///
    /// # Errors
    ///
    /// The view is foreign or stale.
    #[inline]
    pub fn resolve(&self, view: View) -> Result<Range<u64>, SlabError> {
        self.arena.check(view)?;
        Ok(view.offset_bytes()..view.end_bytes())
    }

    fn resolve_part(
        &self,
        view: View,
        offset_bytes: u64,
        len: usize,
    ) -> Result<Range<u64>, SlabError> {
        // The whole view must be valid, not only the part: a cover speaks for more than its start.
        self.arena.check(view)?;
        let part = view.slice(offset_bytes..offset_bytes.saturating_add(len as u64))?;
        Ok(part.offset_bytes()..part.end_bytes())
    }

    #[cold]
    fn memory_failed(&self, view: View, source: MemoryError) -> SlabError {
        let name = self.arena.name_of(view).map_or_else(String::new, ToOwned::to_owned);
        SlabError::Memory { name, source }
    }

    /// See [`Arena::cover`].
    ///
    /// # Errors
    ///
    /// A view is foreign or stale.
    pub fn cover(&self, views: impl IntoIterator<Item = View>) -> Result<View, SlabError> {
        self.arena.cover(views)
    }

    /// See [`Allocate::checkpoint`].
    #[must_use]
    #[inline]
    pub fn checkpoint(&self) -> Checkpoint {
        self.arena.checkpoint()
    }

    /// See [`Allocate::rewind`].
    ///
    /// # Errors
    ///
    /// As [`Allocate::rewind`].
    #[inline]
    pub fn rewind(&mut self, checkpoint: Checkpoint) -> Result<(), SlabError> {
        self.arena.rewind(checkpoint)
    }

    /// See [`Arena::rewind_transient`].
    ///
    /// # Errors
    ///
    /// As [`Arena::rewind_transient`].
    pub fn rewind_transient(&mut self) -> Result<(), SlabError> {
        self.arena.rewind_transient()
    }

    /// See [`Allocate::seal`].
    pub fn seal(&mut self) -> u64 {
        self.arena.seal()
    }

    /// All or nothing: if `body` fails or panics, everything that it allocated or sealed is undone.
    ///
    /// Inside, nothing from before can be rewound. Transactions nest. Bytes written to views from
    /// before stay written, memory that grew stays grown, and counters and high water stay.
    ///
    /// ```
    /// use gpu_slab::{HostMemory, Slab, SlabError};
    ///
    /// let mut slab = Slab::new(HostMemory::new(1024)?);
    /// let pair = slab.transaction(|slab| {
    ///     Ok::<_, SlabError>((slab.allocate("k", 800)?, slab.allocate("v", 800)?))
    /// });
    /// assert!(matches!(pair, Err(SlabError::OutOfMemory { shortage_bytes: 800, .. })));
    /// assert_eq!(slab.used_bytes(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// What `body` returned.
    pub fn transaction<T, E>(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        transaction::run(self, body)
    }

    /// Waits until everything issued to the memory is done.
    ///
    /// # Errors
    ///
    /// [`SlabError::Memory`] with what the device reports of earlier calls.
    pub fn synchronize(&self) -> Result<(), SlabError> {
        let done = self.memory.synchronize();
        done.map_err(|source| SlabError::Memory { name: String::new(), source })
    }

    /// Its identity, carried by its views and checkpoints.
    #[must_use]
    pub fn id(&self) -> SlabId {
        self.arena.id()
    }

    /// The most it may hold, growth included.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.arena.capacity_bytes()
    }

    /// Bytes in use now, alignment included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.arena.used_bytes()
    }

    /// Bytes not in use.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.arena.free_bytes()
    }

    /// The most that ever was in use.
    #[must_use]
    pub fn high_water_bytes(&self) -> u64 {
        self.arena.high_water_bytes()
    }

    /// End of the permanent region, where the transient one starts.
    #[must_use]
    pub fn permanent_end_bytes(&self) -> u64 {
        self.arena.permanent_end_bytes()
    }

    /// See [`Arena::name_of`].
    #[must_use]
    pub fn name_of(&self, view: View) -> Option<&str> {
        self.arena.name_of(view)
    }

    /// What it holds.
    #[must_use]
    pub fn report(&self) -> Report {
        Report { backed_bytes: self.memory.len_bytes(), ..self.arena.report() }
    }

    /// What has crossed between host and device through it.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            h2d_bytes: self.h2d.bytes(),
            d2h_bytes: self.d2h.bytes(),
            h2d_copies: self.h2d.copies(),
            d2h_copies: self.d2h.copies(),
        }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The memory, for what a slab does not do. It sees offsets and no views: nothing is checked,
    /// and nothing is counted.
    #[must_use]
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// The memory, when the slab is done with. Its views are of no use any more.
    #[must_use]
    pub fn into_memory(self) -> M {
        self.memory
    }
}

impl<M: DeviceMemory> Allocate for Slab<M> {
    fn allocate_aligned(
        &mut self,
        name: &str,
        len_bytes: u64,
        align_bytes: u64,
    ) -> Result<View, SlabError> {
        Slab::allocate_aligned(self, name, len_bytes, align_bytes)
    }

    fn checkpoint(&self) -> Checkpoint {
        Slab::checkpoint(self)
    }

    fn rewind(&mut self, checkpoint: Checkpoint) -> Result<(), SlabError> {
        Slab::rewind(self, checkpoint)
    }

    fn seal(&mut self) -> u64 {
        Slab::seal(self)
    }
}

impl<M> HasArena for Slab<M> {
    fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }
}

impl<M> fmt::Debug for Slab<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("arena", &self.arena).finish_non_exhaustive()
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
