use core::sync::atomic::{AtomicU64, Ordering};

/// What has crossed between host and device through a slab since it was made.
///
/// Counted where it happens, at the slab's write and read path, and only when it succeeded. Fills
/// and copies within the device cross nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counters {
    /// Bytes written to the device.
    pub h2d_bytes: u64,
    /// Bytes read from the device.
    pub d2h_bytes: u64,
    /// Writes of at least one byte.
    pub h2d_copies: u64,
    /// Reads of at least one byte.
    pub d2h_copies: u64,
}

impl Counters {
    /// What was added after an earlier reading of the same slab.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            h2d_bytes: self.h2d_bytes.saturating_sub(earlier.h2d_bytes),
            d2h_bytes: self.d2h_bytes.saturating_sub(earlier.d2h_bytes),
            h2d_copies: self.h2d_copies.saturating_sub(earlier.h2d_copies),
            d2h_copies: self.d2h_copies.saturating_sub(earlier.d2h_copies),
        }
    }
}

/// One direction. Atomic because reading needs only a shared slab; a plain tally, so relaxed.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    bytes: AtomicU64,
    copies: AtomicU64,
}

impl Tally {
    pub(crate) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }
}
