use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use crate::report::{Allocation, Report};
use crate::transaction::{self, HasArena};
use crate::validity::RewindHistory;
use crate::{Allocate, Checkpoint, DEFAULT_ALIGN_BYTES, Plan, SlabError, SlabId, View};

/// The allocator under a slab: it knows offsets and names, and never sees memory.
///
/// Used alone it counts: the layout code that will run on a [`Slab`](crate::Slab) runs on
/// [`Arena::counting`] first and tells what it needs. Its views belong to it; a slab refuses them.
pub struct Arena {
    id: SlabId,
    capacity_bytes: u64,
    used_bytes: u64,
    permanent: Mark,
    /// Where the innermost running transaction began; nothing below it may be rewound.
    transaction: Mark,
    high_water_bytes: u64,
    rewinds: RewindHistory,
    entries: Vec<Entry>,
    /// All names of `entries`, one after the other: naming costs no allocation of its own, and
    /// rewinding them is one truncation.
    names: String,
    /// Counting only: the report at the highest use so far that was rewound.
    peak: Option<Box<Report>>,
}

/// A height of the arena. The count tells apart what the bytes do not: empty allocations.
#[derive(Clone, Copy, Default)]
struct Mark {
    bytes: u64,
    allocations: usize,
}

struct Entry {
    name_start: usize,
    offset_bytes: u64,
    len_bytes: u64,
}

impl Entry {
    fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.len_bytes
    }
}

/// Room that was found and not yet taken.
pub(crate) struct Placement {
    offset_bytes: u64,
    pub(crate) end_bytes: u64,
}

/// What a transaction needs to come back to.
pub(crate) struct Savepoint {
    slab: SlabId,
    start: Mark,
    permanent: Mark,
    outer: Mark,
}

impl Arena {
    /// An empty arena over `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            id: SlabId::fresh(),
            capacity_bytes,
            used_bytes: 0,
            permanent: Mark::default(),
            transaction: Mark::default(),
            high_water_bytes: 0,
            rewinds: RewindHistory::default(),
            entries: Vec::new(),
            names: String::new(),
            peak: None,
        }
    }

    /// An arena without an upper limit, which remembers what was allocated at its peak.
    #[must_use]
    pub fn counting() -> Self {
        let mut arena = Self::new(u64::MAX);
        arena.peak = Some(Box::new(arena.report()));
        arena
    }

    /// Its identity, carried by its views and checkpoints.
    #[must_use]
    pub fn id(&self) -> SlabId {
        self.id
    }

    /// Upper limit; [`u64::MAX`] when counting.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes in use now, alignment included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes not in use.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.used_bytes
    }

    /// The most that ever was in use.
    #[must_use]
    pub fn high_water_bytes(&self) -> u64 {
        self.high_water_bytes
    }

    /// End of the permanent region, where the transient one starts. It only grows.
    #[must_use]
    pub fn permanent_end_bytes(&self) -> u64 {
        self.permanent.bytes
    }

    /// See [`Allocate::allocate`].
    ///
    /// # Errors
    ///
    /// As [`Allocate::allocate_aligned`].
    #[inline]
    pub fn allocate(&mut self, name: &str, len_bytes: u64) -> Result<View, SlabError> {
        self.allocate_aligned(name, len_bytes, DEFAULT_ALIGN_BYTES)
    }

    /// See [`Allocate::allocate_aligned`].
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
        let placement = self.place(name, len_bytes, align_bytes)?;
        Ok(self.take(name, placement))
    }

    /// Finds room and changes nothing, so that memory can grow in between and may refuse to.
    #[inline]
    pub(crate) fn place(
        &self,
        name: &str,
        len_bytes: u64,
        align_bytes: u64,
    ) -> Result<Placement, SlabError> {
        if !align_bytes.is_power_of_two() {
            return Err(SlabError::BadAlignment { name: name.to_string(), align_bytes });
        }
        let mask = align_bytes - 1; // cheaper than the division of a general multiple
        let offset_bytes = self.used_bytes.checked_add(mask).map(|padded| padded & !mask);
        let end_bytes = offset_bytes.and_then(|offset_bytes| offset_bytes.checked_add(len_bytes));
        let (Some(offset_bytes), Some(end_bytes)) = (offset_bytes, end_bytes) else {
            return Err(SlabError::Overflow {
                name: name.to_string(),
                offset_bytes: self.used_bytes,
                len_bytes,
                align_bytes,
            });
        };
        if end_bytes > self.capacity_bytes {
            return Err(SlabError::OutOfMemory {
                name: name.to_string(),
                requested_bytes: len_bytes,
                free_bytes: self.free_bytes(),
                shortage_bytes: end_bytes - self.capacity_bytes,
            });
        }
        Ok(Placement { offset_bytes, end_bytes })
    }

    #[inline]
    pub(crate) fn take(&mut self, name: &str, placement: Placement) -> View {
        let Placement { offset_bytes, end_bytes } = placement;
        let len_bytes = end_bytes - offset_bytes;
        self.entries.push(Entry { name_start: self.names.len(), offset_bytes, len_bytes });
        self.names.push_str(name);
        self.used_bytes = end_bytes;
        self.high_water_bytes = self.high_water_bytes.max(end_bytes);
        View::new(self.id, self.rewinds.count(), offset_bytes, len_bytes)
    }

    /// See [`Allocate::checkpoint`].
    #[must_use]
    #[inline]
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            slab: self.id,
            birth: self.rewinds.count(),
            offset_bytes: self.used_bytes,
            allocations: self.entries.len(),
        }
    }

    /// See [`Allocate::rewind`].
    ///
    /// # Errors
    ///
    /// As [`Allocate::rewind`].
    #[inline]
    pub fn rewind(&mut self, checkpoint: Checkpoint) -> Result<(), SlabError> {
        let Checkpoint { slab, birth, offset_bytes, allocations } = checkpoint;
        if slab != self.id {
            return Err(SlabError::ForeignCheckpoint { checkpoint_slab: slab, slab: self.id });
        }
        if let Some(rewound_to_bytes) = self.rewinds.taken_by(birth, offset_bytes) {
            return Err(SlabError::StaleCheckpoint { offset_bytes, rewound_to_bytes });
        }
        self.check_floor(offset_bytes)?;
        self.lower_to(Mark { bytes: offset_bytes, allocations });
        Ok(())
    }

    /// Gives back everything above the permanent end.
    ///
    /// # Errors
    ///
    /// [`SlabError::BelowTransaction`] inside a transaction that began above it.
    pub fn rewind_transient(&mut self) -> Result<(), SlabError> {
        self.check_floor(self.permanent.bytes)?;
        self.lower_to(self.permanent);
        Ok(())
    }

    #[inline]
    fn check_floor(&self, target_bytes: u64) -> Result<(), SlabError> {
        if target_bytes < self.permanent.bytes {
            return Err(SlabError::BelowPermanentEnd {
                target_bytes,
                permanent_end_bytes: self.permanent.bytes,
            });
        }
        if target_bytes < self.transaction.bytes {
            return Err(SlabError::BelowTransaction {
                target_bytes,
                transaction_start_bytes: self.transaction.bytes,
            });
        }
        Ok(())
    }

    /// Lowers the arena to a target at or above the floor.
    #[inline]
    fn lower_to(&mut self, target: Mark) {
        if self.peak.is_some() {
            self.remember_peak();
        }
        // Empty allocations share their offset with their neighbours, so a target at the height of
        // the floor may be older than an empty one below the floor, and one may count empty ones that
        // have since been rewound and replaced.
        let floor = self.permanent.allocations.max(self.transaction.allocations);
        let mut kept = target.allocations.max(floor).min(self.entries.len());
        while kept > 0 && self.entries[kept - 1].end_bytes() > target.bytes {
            kept -= 1;
        }
        if let Some(first_gone) = self.entries.get(kept) {
            self.names.truncate(first_gone.name_start);
            self.entries.truncate(kept);
        }
        // Every valid view ends at or below the use, so a rewind to it takes nothing from anybody.
        if target.bytes < self.used_bytes {
            self.rewinds.record(target.bytes);
            self.used_bytes = target.bytes;
        }
    }

    /// See [`Allocate::seal`].
    pub fn seal(&mut self) -> u64 {
        self.permanent = self.mark();
        self.permanent.bytes
    }

    /// Checks that a view belongs to this arena and that no rewind went below its end since.
    ///
    /// # Errors
    ///
    /// [`SlabError::ForeignView`], [`SlabError::StaleView`].
    #[inline]
    pub fn check(&self, view: View) -> Result<(), SlabError> {
        if view.slab_id() != self.id {
            return Err(SlabError::ForeignView { view_slab: view.slab_id(), slab: self.id });
        }
        match self.rewinds.taken_by(view.birth(), view.end_bytes()) {
            None => Ok(()),
            Some(rewound_to_bytes) => Err(SlabError::StaleView {
                offset_bytes: view.offset_bytes(),
                len_bytes: view.len_bytes(),
                rewound_to_bytes,
            }),
        }
    }

    /// One view from the arena's start to the largest end of the given ones, born now: it is valid
    /// exactly as long as all of them are.
    ///
    /// Whoever keeps addresses, as a captured graph does, keeps this view with them and checks it
    /// before it uses them.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check), for the first view that is not valid now.
    pub fn cover(&self, views: impl IntoIterator<Item = View>) -> Result<View, SlabError> {
        let mut end_bytes = 0;
        for view in views {
            self.check(view)?;
            end_bytes = view.end_bytes().max(end_bytes);
        }
        Ok(View::new(self.id, self.rewinds.count(), 0, end_bytes))
    }

    /// The name under which the bytes of a valid view were allocated; `None` for a view that is not
    /// valid or that spans several allocations.
    #[must_use]
    pub fn name_of(&self, view: View) -> Option<&str> {
        self.check(view).ok()?;
        let after = self.entries.partition_point(|entry| entry.offset_bytes <= view.offset_bytes());
        // Of several that start here all but the last are empty; an empty view may also lie at the
        // end of the one before.
        let index = after.checked_sub(1)?;
        (view.end_bytes() <= self.entries[index].end_bytes()).then(|| self.name(index))
    }

    fn name(&self, index: usize) -> &str {
        let end = self.entries.get(index + 1).map_or(self.names.len(), |next| next.name_start);
        &self.names[self.entries[index].name_start..end]
    }

    /// Runs `body`; if it fails or panics, everything that it allocated or sealed is undone.
    ///
    /// Inside, nothing from before can be rewound, so that there is always something to come back
    /// to. Transactions nest. The high-water mark stays.
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

    fn mark(&self) -> Mark {
        Mark { bytes: self.used_bytes, allocations: self.entries.len() }
    }

    pub(crate) fn begin(&mut self) -> Savepoint {
        let start = self.mark();
        let outer = core::mem::replace(&mut self.transaction, start);
        Savepoint { slab: self.id, start, permanent: self.permanent, outer }
    }

    pub(crate) fn commit(&mut self, savepoint: &Savepoint) {
        // Another arena may have been put in this one's place; then there is nothing to end here.
        if savepoint.slab == self.id {
            self.transaction = savepoint.outer;
        }
    }

    pub(crate) fn roll_back(&mut self, savepoint: &Savepoint) {
        if savepoint.slab == self.id {
            self.permanent = savepoint.permanent;
            self.lower_to(savepoint.start);
            self.transaction = savepoint.outer;
        }
    }

    /// What is allocated now.
    #[must_use]
    pub fn report(&self) -> Report {
        let allocations = self.entries.iter().enumerate().map(|(index, entry)| Allocation {
            name: self.name(index).to_string(),
            offset_bytes: entry.offset_bytes,
            len_bytes: entry.len_bytes,
            permanent: index < self.permanent.allocations,
        });
        Report {
            capacity_bytes: self.capacity_bytes,
            backed_bytes: self.capacity_bytes,
            used_bytes: self.used_bytes,
            free_bytes: self.free_bytes(),
            high_water_bytes: self.high_water_bytes,
            permanent_end_bytes: self.permanent.bytes,
            alignment_bytes: self.used_bytes
                - self.entries.iter().map(|entry| entry.len_bytes).sum::<u64>(),
            allocations: allocations.collect(),
        }
    }

    fn remember_peak(&mut self) {
        if self.peak.as_ref().is_some_and(|peak| self.used_bytes > peak.used_bytes) {
            self.peak = Some(Box::new(self.report()));
        }
    }

    /// What this arena needed at its highest, by name.
    ///
    /// Only a [counting](Self::counting) arena knows the names of what it has already rewound; on
    /// another the plan is of what is allocated now.
    #[must_use]
    pub fn plan(&self) -> Plan {
        let now = self.report();
        match &self.peak {
            Some(peak) if peak.used_bytes > now.used_bytes => {
                Plan::from_reports(Report::clone(peak), &now)
            }
            _ => Plan::from_reports(now.clone(), &now),
        }
    }
}

impl Allocate for Arena {
    fn allocate_aligned(
        &mut self,
        name: &str,
        len_bytes: u64,
        align_bytes: u64,
    ) -> Result<View, SlabError> {
        Arena::allocate_aligned(self, name, len_bytes, align_bytes)
    }

    fn checkpoint(&self) -> Checkpoint {
        Arena::checkpoint(self)
    }

    fn rewind(&mut self, checkpoint: Checkpoint) -> Result<(), SlabError> {
        Arena::rewind(self, checkpoint)
    }

    fn seal(&mut self) -> u64 {
        Arena::seal(self)
    }
}

impl HasArena for Arena {
    fn arena_mut(&mut self) -> &mut Arena {
        self
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("id", &self.id)
            .field("capacity_bytes", &self.capacity_bytes)
            .field("used_bytes", &self.used_bytes)
            .field("permanent_end_bytes", &self.permanent.bytes)
            .field("high_water_bytes", &self.high_water_bytes)
            .field("allocations", &self.entries.len())
            .finish_non_exhaustive()
    }
}
