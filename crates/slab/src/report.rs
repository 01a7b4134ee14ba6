use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// What a slab holds. Sizes are in bytes; offsets count from the slab's start.
///
/// Displayed it is a table, largest allocation first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The most the slab may hold; [`u64::MAX`] when counting without a limit.
    pub capacity_bytes: u64,
    /// Device memory behind it now: less than the capacity while growing memory has not yet grown.
    pub backed_bytes: u64,
    /// In use, alignment included.
    pub used_bytes: u64,
    /// Capacity not in use.
    pub free_bytes: u64,
    /// The most that ever was in use.
    pub high_water_bytes: u64,
    /// End of the permanent region.
    pub permanent_end_bytes: u64,
    /// Part of the use that aligns allocations and belongs to none.
    pub alignment_bytes: u64,
    /// Every live allocation, by offset.
    pub allocations: Vec<Allocation>,
}

/// One line of a [`Report`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The name it was allocated under.
    pub name: String,
    /// Where it starts.
    pub offset_bytes: u64,
    /// Its length, alignment not included.
    pub len_bytes: u64,
    /// Whether it lies in the permanent region.
    pub permanent: bool,
}

impl Report {
    /// The allocations, largest first, and by offset among equals.
    #[must_use]
    pub fn by_size(&self) -> Vec<&Allocation> {
        let mut sorted: Vec<_> = self.allocations.iter().collect();
        sorted.sort_by_key(|allocation| core::cmp::Reverse(allocation.len_bytes));
        sorted
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.capacity_bytes == u64::MAX {
            write!(f, "{} used", Size(self.used_bytes))?;
        } else {
            let (used, capacity) = (Size(self.used_bytes), Size(self.capacity_bytes));
            write!(f, "{used} of {capacity} used, {} free", Size(self.free_bytes))?;
        }
        write!(f, ", permanent end {}", Size(self.permanent_end_bytes))?;
        write!(f, ", high water {}", Size(self.high_water_bytes))?;
        if self.backed_bytes < self.capacity_bytes {
            write!(f, ", {} backed", Size(self.backed_bytes))?;
        }
        let header = format_args!("\n{:>14} {:>14}  {:9}  name", "bytes", "offset", "region");
        f.write_fmt(header)?;
        for Allocation { name, offset_bytes, len_bytes, permanent } in self.by_size() {
            let region = if *permanent { "permanent" } else { "transient" };
            write!(f, "\n{len_bytes:>14} {offset_bytes:>14}  {region:9}  {name}")?;
        }
        write!(f, "\n{:>14} {:>14}  {:9}  (alignment)", self.alignment_bytes, "", "")
    }
}

/// Bytes as a person reads them: MiB from one MiB on, the plain number below.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        match self.0 {
            bytes if bytes < MIB => write!(f, "{bytes} bytes"),
            bytes if bytes.is_multiple_of(MIB) => write!(f, "{} MiB", bytes / MIB),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / MIB as f64),
        }
    }
}
