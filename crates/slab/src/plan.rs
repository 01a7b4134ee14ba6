use core::fmt;

use crate::report::{Allocation, Report};
use crate::{Arena, SlabError};

/// What a layout needs, to the byte and by name, learnt by running it on an arena that only counts.
///
/// The total is the highest use at any moment, so temporaries that the layout rewinds are in it.
/// Memory of that size, aligned as the layout asks, fits the layout exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// At the highest use.
    peak: Report,
    permanent_end_bytes: u64,
}

impl Plan {
    /// Runs `layout` in counting mode. What it returns is dropped: its views belong to no memory.
    ///
    /// # Errors
    ///
    /// What `layout` returned.
    pub fn of<T, E>(layout: impl FnOnce(&mut Arena) -> Result<T, E>) -> Result<Self, E> {
        let mut arena = Arena::counting();
        layout(&mut arena)?;
        Ok(arena.plan())
    }

    pub(crate) fn from_reports(peak: Report, now: &Report) -> Self {
        Self { peak, permanent_end_bytes: now.permanent_end_bytes }
    }

    /// What a slab needs for this layout.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.peak.used_bytes
    }

    /// The part of it that is permanent when the layout is through.
    #[must_use]
    pub fn permanent_bytes(&self) -> u64 {
        self.permanent_end_bytes
    }

    /// The part of the total that only aligns.
    #[must_use]
    pub fn alignment_bytes(&self) -> u64 {
        self.peak.alignment_bytes
    }

    /// What is allocated at the moment of highest use, by offset. Lengths and
    /// [`alignment_bytes`](Self::alignment_bytes) add up to the total.
    #[must_use]
    pub fn allocations(&self) -> &[Allocation] {
        &self.peak.allocations
    }

    /// Refuses a layout that cannot fit before anything is allocated.
    ///
    /// # Errors
    ///
    /// [`SlabError::DoesNotFit`] with the shortage.
    pub fn check_fits(&self, usable_bytes: u64) -> Result<(), SlabError> {
        let needed_bytes = self.total_bytes();
        match needed_bytes.checked_sub(usable_bytes) {
            None | Some(0) => Ok(()),
            Some(shortage_bytes) => {
                Err(SlabError::DoesNotFit { needed_bytes, usable_bytes, shortage_bytes })
            }
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peak.fmt(f)
    }
}
