use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::SlabError;

/// Which slab or arena a view or checkpoint came from. No two of a process are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlabId(u64);

impl SlabId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Only distinctness matters, so no ordering with other memory is needed.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for SlabId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A range of bytes of one slab: an offset and a length, never an address or a borrow.
///
/// It is valid if and only if no rewind after its birth went below its end, however the space was
/// used since. The slab checks this at every use; a view that does not pass is an error, not a read
/// of somebody else's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    slab: SlabId,
    /// How many rewinds the slab had seen when the view was born.
    birth: u64,
    offset_bytes: u64,
    len_bytes: u64,
}

impl View {
    /// The caller guarantees that `offset_bytes + len_bytes` does not overflow.
    pub(crate) const fn new(slab: SlabId, birth: u64, offset_bytes: u64, len_bytes: u64) -> Self {
        Self { slab, birth, offset_bytes, len_bytes }
    }

    /// Distance from the slab's start.
    #[must_use]
    pub const fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Length.
    #[must_use]
    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// First byte after the view, from the slab's start.
    #[must_use]
    pub const fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.len_bytes
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The slab it belongs to.
    #[must_use]
    pub const fn slab_id(&self) -> SlabId {
        self.slab
    }

    pub(crate) const fn birth(&self) -> u64 {
        self.birth
    }

    /// A part of it, counted from its own start. The part is as old as the whole.
    ///
    /// ```
    /// # use gpu_slab::{Arena, SlabError};
    /// let view = Arena::counting().allocate("q, k, v", 3 * 1024)?;
    /// let k = view.slice(1024..2048)?;
    /// assert_eq!((k.offset_bytes(), k.len_bytes()), (1024, 1024));
    /// assert!(matches!(view.slice(3000..4000), Err(SlabError::OutOfView { .. })));
    /// # Ok::<(), SlabError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SlabError::OutOfView`] when the range is reversed or ends after the view.
    pub const fn slice(&self, range: Range<u64>) -> Result<View, SlabError> {
        if range.start > range.end || range.end > self.len_bytes {
            return Err(SlabError::OutOfView {
                start_bytes: range.start,
                end_bytes: range.end,
                view_len_bytes: self.len_bytes,
            });
        }
        Ok(Self {
            slab: self.slab,
            birth: self.birth,
            offset_bytes: self.offset_bytes + range.start,
            len_bytes: range.end - range.start,
        })
    }

    /// Whether the two share a byte of the same slab. An empty view shares none.
    #[must_use]
    pub fn overlaps(&self, other: &View) -> bool {
        self.slab == other.slab
            && self.offset_bytes.max(other.offset_bytes) < self.end_bytes().min(other.end_bytes())
    }
}

/// A place to rewind to. Opaque: it knows its slab and its age, and misuse is an error.
///
/// Rewinding to it gives back every later allocation and leaves the checkpoint itself valid; a
/// rewind *below* it makes it stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub(crate) slab: SlabId,
    pub(crate) birth: u64,
    pub(crate) offset_bytes: u64,
    /// How many allocations the report listed.
    pub(crate) allocations: usize,
}

impl Checkpoint {
    /// How many bytes of the slab were in use when it was taken.
    #[must_use]
    pub const fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }
}
