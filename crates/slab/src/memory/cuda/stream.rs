//! The stream that orders everything done to a slab, with its staging buffers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{self, STREAM_NON_BLOCKING, call};
use super::staging::Staging;
use super::{CudaContext, DriverError, RawStream};

/// A stream of a context: copies, fills, launches and graphs on it take effect in their order.
///
/// Clones are the same stream. Uploads of all memory on it go through one ring of pinned buffers,
/// 4 × 8 MiB, each allocated when it is first needed.
#[derive(Clone, Debug)]
pub struct CudaStream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    // Freed after `drop` below has waited for the copies out of them.
    staging: Mutex<Staging>,
    raw: RawStream,
    owned: bool,
    context: CudaContext,
}

// SAFETY: a stream handle may be used from any thread, and the driver locks what needs it.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaStream {
    /// A stream of its own, which does not wait for the legacy default stream.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(context: &CudaContext) -> Result<Self, DriverError> {
        context.make_current()?;
        let mut raw = core::ptr::null_mut();
        // SAFETY: a context is current, and the driver writes one handle.
        unsafe { call!(cuStreamCreate(&mut raw, STREAM_NON_BLOCKING)) }?;
        Ok(Self::over(context, raw, true))
    }

    /// A stream that somebody else made and will destroy.
    ///
    /// The legacy default stream (null) works for memory; the driver refuses to capture on it.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of `context` and outlives every clone of this value and everything made
    /// with it.
    #[must_use]
    pub unsafe fn from_raw(context: &CudaContext, raw: RawStream) -> Self {
        Self::over(context, raw, false)
    }

    fn over(context: &CudaContext, raw: RawStream, owned: bool) -> Self {
        let (context, staging) = (context.clone(), Mutex::default());
        Self(Arc::new(Inner { staging, raw, owned, context }))
    }

    /// The driver's handle.
    #[must_use]
    pub fn as_raw(&self) -> RawStream {
        self.0.raw
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.0.context
    }

    /// Waits until everything queued on it is done.
    ///
    /// # Errors
    ///
    /// What the device reports of it.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.0.context.make_current()?;
        self.0.context.count_synchronization();
        // SAFETY: the stream lives as long as `self`.
        unsafe { call!(cuStreamSynchronize(self.0.raw)) }
    }

    pub(super) fn staging(&self) -> MutexGuard<'_, Staging> {
        // Whoever panicked with the lock held left a buffer less used at worst.
        self.0.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same stream of the same context.
impl PartialEq for CudaStream {
    fn eq(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw && self.0.context.as_raw() == other.0.context.as_raw()
    }
}

impl Eq for CudaStream {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.make_current().is_err() {
            return;
        }
        // Errors are those of earlier work, or of a driver that is shutting down.
        // SAFETY: the stream is alive; copies out of the staging buffers end before they are freed.
        let _ = unsafe { driver::cuStreamSynchronize(self.raw) };
        if self.owned {
            // SAFETY: made by `new`, and nobody holds it any more.
            let _ = unsafe { driver::cuStreamDestroy_v2(self.raw) };
        }
    }
}
