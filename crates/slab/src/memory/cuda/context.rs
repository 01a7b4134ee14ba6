//! A device's primary context, shared by everybody in the process.

use core::sync::atomic::{AtomicU64, Ordering};
use std::ffi::{CStr, c_char, c_int};
use std::format;
use std::string::{String, ToString};
use std::sync::Arc;

use cust::sys::CUdevice;

use super::driver::{self, call};
use super::{DriverError, RawContext};
use crate::MemoryError;

/// The primary context of a device, held as long as any clone of this lives.
///
/// Libraries over the runtime API, and `cudarc`, use the same context, so memory and streams can be
/// shared with them. Every call of this module makes it current on the calling thread and leaves it
/// so.
#[derive(Clone, Debug)]
pub struct CudaContext(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    raw: RawContext,
    device: CUdevice,
    /// Whether the primary context was retained, and is to be released.
    retained: bool,
    allocations: AtomicU64,
    synchronizations: AtomicU64,
    launches: AtomicU64,
}

// SAFETY: a context handle may be used from any thread, and the driver locks what needs it.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What was asked of the driver through one context, so that it can be shown what a step does not
/// do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaCounters {
    /// Allocations and mappings of device memory and of pinned host memory.
    pub allocations: u64,
    /// Calls that wait for the device: reads, synchronisations, waits for a staging buffer.
    pub synchronizations: u64,
    /// Launches of kernels and graphs.
    pub launches: u64,
}

impl CudaCounters {
    /// What was added after an earlier reading.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            allocations: self.allocations.saturating_sub(earlier.allocations),
            synchronizations: self.synchronizations.saturating_sub(earlier.synchronizations),
            launches: self.launches.saturating_sub(earlier.launches),
        }
    }
}

/// Loads and initialises the driver.
fn init() -> Result<(), DriverError> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    cuda_load::present().map_err(|missing| {
        DriverError::other("load the driver", DriverError::NO_DEVICE, missing.to_string())
    })?;
    // SAFETY: takes a number that must be zero.
    unsafe { call!(cuInit(0)) }
}

/// How many devices the driver offers to this process.
///
/// # Errors
///
/// There is no driver, or it does not start.
pub fn device_count() -> Result<u32, DriverError> {
    init()?;
    let mut count = 0;
    // SAFETY: the driver writes one number.
    unsafe { call!(cuDeviceGetCount(&mut count)) }?;
    Ok(count.max(0) as u32)
}

/// The driver's version as it says it: 12040 is CUDA 12.4.
///
/// # Errors
///
/// There is no driver.
pub fn driver_version() -> Result<u32, DriverError> {
    init()?;
    let mut version = 0;
    // SAFETY: the driver writes one number.
    unsafe { call!(cuDriverGetVersion(&mut version)) }?;
    Ok(version.max(0) as u32)
}

impl CudaContext {
    /// The primary context of device number `index`, made current on this thread.
    ///
    /// # Errors
    ///
    /// No driver, no such device, or the device refuses: with the driver's code.
    pub fn new(index: u32) -> Result<Self, DriverError> {
        let count = device_count()?;
        if index >= count {
            let (code, message) = match count {
                0 => (DriverError::NO_DEVICE, "the driver offers no device".to_string()),
                _ => (DriverError::INVALID_DEVICE, format!("device {index} of {count}, from 0 on")),
            };
            return Err(DriverError::other("open the device", code, message));
        }
        let (mut device, mut raw) = (0, core::ptr::null_mut());
        // SAFETY: the driver writes one device number.
        unsafe { call!(cuDeviceGet(&mut device, index as c_int)) }?;
        // SAFETY: the device exists, and the driver writes one handle.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut raw, device)) }?;
        let context = Self::over(raw, device, true);
        context.make_current()?;
        Ok(context)
    }

    /// Somebody else's context, made current on this thread.
    ///
    /// # Safety
    ///
    /// `raw` is a live context and outlives every clone of this value and everything made with it.
    ///
    /// # Errors
    ///
    /// The driver refuses it.
    pub unsafe fn from_raw(raw: RawContext) -> Result<Self, DriverError> {
        init()?;
        let context = Self::over(raw, 0, false);
        context.make_current()?;
        let mut device = 0;
        // SAFETY: a context is current, and the driver writes one device number.
        unsafe { call!(cuCtxGetDevice(&mut device)) }?;
        Ok(Self::over(raw, device, false))
    }

    fn over(raw: RawContext, device: CUdevice, retained: bool) -> Self {
        let zero = AtomicU64::default;
        Self(Arc::new(Inner {
            raw,
            device,
            retained,
            allocations: zero(),
            synchronizations: zero(),
            launches: zero(),
        }))
    }

    /// Makes it current on this thread, for calls of one's own.
    ///
    /// # Errors
    ///
    /// The context is gone.
    pub fn make_current(&self) -> Result<(), DriverError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { call!(cuCtxSetCurrent(self.0.raw)) }
    }

    /// The driver's handle.
    #[must_use]
    pub fn as_raw(&self) -> RawContext {
        self.0.raw
    }

    /// The device's name.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn device_name(&self) -> Result<String, DriverError> {
        let mut name = [0u8; 256];
        let buffer = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the driver writes at most so many bytes, a zero at their end.
        unsafe { call!(cuDeviceGetName(buffer, name.len() as c_int, self.0.device)) }?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into())
    }

    /// A `CUdevice_attribute` of the device, by its number in `cuda.h`.
    ///
    /// # Errors
    ///
    /// The driver knows no such attribute.
    pub fn attribute(&self, number: i32) -> Result<i32, DriverError> {
        let mut value = 0;
        // SAFETY: the device exists, and the driver writes one number.
        unsafe { call!(cuDeviceGetAttribute(&mut value, number, self.0.device)) }?;
        Ok(value)
    }

    /// Compute capability, major × 10 + minor.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn compute_capability(&self) -> Result<u32, DriverError> {
        const MAJOR: i32 = 75;
        const MINOR: i32 = 76;
        Ok((self.attribute(MAJOR)? * 10 + self.attribute(MINOR)?) as u32)
    }

    /// Free and total bytes of the device, as the driver counts them now.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free as u64, total as u64))
    }

    /// What was asked of the driver so far.
    #[must_use]
    pub fn counters(&self) -> CudaCounters {
        CudaCounters {
            allocations: self.0.allocations.load(Ordering::Relaxed),
            synchronizations: self.0.synchronizations.load(Ordering::Relaxed),
            launches: self.0.launches.load(Ordering::Relaxed),
        }
    }

    /// Counts a launch that somebody makes in this context by calls of their own.
    pub fn count_launch(&self) {
        self.0.launches.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_allocation(&self) {
        self.0.allocations.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_synchronization(&self) {
        self.0.synchronizations.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn device(&self) -> CUdevice {
        self.0.device
    }

    /// A refused allocation, with what there is.
    pub(super) fn refused(
        &self,
        operation: &'static str,
        requested_bytes: u64,
        error: DriverError,
    ) -> MemoryError {
        let out_of_memory = error.code == DriverError::OUT_OF_MEMORY;
        let mut refusal = error.memory(operation, requested_bytes);
        if let (true, Ok((free, total))) = (out_of_memory, self.memory_bytes()) {
            refusal.message +=
                &format!(", asked for {requested_bytes} bytes, {free} free of {total}");
        }
        refusal
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.retained {
            // SAFETY: retained once by `new`; whatever was made in the context held an `Arc` of
            // this, so it is gone. A driver that is shutting down says so, which harms nobody.
            let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}
