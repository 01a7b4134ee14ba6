use crate::{Checkpoint, SlabError, View};

/// Alignment of an allocation for which none is asked: 256 bytes, what `cuMemAlloc` promises and
/// what the widest vector loads and bulk copies need.
pub const DEFAULT_ALIGN_BYTES: u64 = 256;

/// Whatever hands out named views: a [`Slab`](crate::Slab), or an [`Arena`](crate::Arena) that only
/// counts.
///
/// Layout code is written once against this trait. Run on [`Arena::counting`](crate::Arena::counting)
/// it tells how many bytes it needs ([`Plan::of`](crate::Plan::of)); run on a slab it allocates
/// exactly those.
///
/// ```
/// use gpu_slab::{Allocate, HostMemory, Plan, Slab, SlabError, View};
///
/// struct Buffers { hidden: View, logits: View }
///
/// fn layout(slab: &mut impl Allocate) -> Result<Buffers, SlabError> {
///     Ok(Buffers {
///         hidden: slab.allocate("hidden", 256 * 4)?,
///         logits: slab.allocate("logits", 4096 * 4)?,
///     })
/// }
///
/// let plan = Plan::of(layout)?;
/// let mut slab = Slab::new(HostMemory::new(plan.total_bytes())?);
/// let buffers = layout(&mut slab)?;
/// assert_eq!(buffers.hidden.len_bytes(), 1024);
/// assert_eq!(buffers.logits.end_bytes(), plan.total_bytes());
/// assert_eq!(slab.free_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Allocate {
    /// Takes `len_bytes` at the next multiple of `align_bytes`, under a name for reports and errors.
    ///
    /// Zero bytes are a legal length: the view is aligned like any other, is listed in the report,
    /// and takes nothing but the padding in front of it.
    ///
    /// # Errors
    ///
    /// [`SlabError::BadAlignment`] unless the alignment is a power of two,
    /// [`SlabError::MisalignedBase`] where the memory itself is aligned to less,
    /// [`SlabError::Overflow`] when the end does not fit 64 bits, [`SlabError::OutOfMemory`] with the
    /// shortage when it does not fit the memory, [`SlabError::Memory`] when growing memory was
    /// refused more. Nothing has changed after an error.
    fn allocate_aligned(
        &mut self,
        name: &str,
        len_bytes: u64,
        align_bytes: u64,
    ) -> Result<View, SlabError>;

    /// [`allocate_aligned`](Self::allocate_aligned) at [`DEFAULT_ALIGN_BYTES`].
    ///
    /// # Errors
    ///
    /// As [`allocate_aligned`](Self::allocate_aligned).
    fn allocate(&mut self, name: &str, len_bytes: u64) -> Result<View, SlabError> {
        self.allocate_aligned(name, len_bytes, DEFAULT_ALIGN_BYTES)
    }

    /// Where the next allocation starts searching: what [`rewind`](Self::rewind) can come back to.
    fn checkpoint(&self) -> Checkpoint;

    /// Gives back everything allocated since the checkpoint. A checkpoint may be used again.
    ///
    /// # Errors
    ///
    /// [`SlabError::ForeignCheckpoint`], [`SlabError::StaleCheckpoint`] when a rewind went below it
    /// in the meantime, [`SlabError::BelowPermanentEnd`], [`SlabError::BelowTransaction`]. Nothing
    /// has changed after an error.
    fn rewind(&mut self, checkpoint: Checkpoint) -> Result<(), SlabError>;

    /// Makes everything allocated so far permanent and returns the new permanent end in bytes.
    fn seal(&mut self) -> u64;
}
