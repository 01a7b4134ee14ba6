//! Device memory as the driver gives it: at once, growing, or lent by somebody.

use std::format;
use std::sync::{Arc, Mutex, PoisonError};
use std::vec::Vec;

use cust::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::driver::{self, AllocationHandle, GRANULARITY_MINIMUM, call};
use super::{CudaContext, DriverError};
use crate::MemoryError;

/// The device memory under a [`CudaMemory`](super::CudaMemory), alive as long as any clone of this:
/// for whoever keeps addresses, as a captured graph does.
#[derive(Clone, Debug)]
pub struct CudaAllocation(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    base_address: u64,
    kind: Kind,
    context: CudaContext,
}

#[derive(Debug)]
enum Kind {
    /// `cuMemAlloc`: freed at the end.
    Plain { len_bytes: u64 },
    /// Somebody else's: left alone.
    Borrowed { len_bytes: u64 },
    /// Reserved addresses, of which a growing part is mapped.
    Growing { reserved_bytes: u64, granularity_bytes: u64, mapped: Mutex<Vec<Piece>> },
}

/// A mapped run of addresses.
#[derive(Debug)]
struct Piece {
    end_bytes: u64,
    len_bytes: u64,
}

impl CudaAllocation {
    pub(super) fn plain(context: &CudaContext, len_bytes: u64) -> Result<Self, MemoryError> {
        let refused = |error| context.refused("allocate", len_bytes, error);
        context.make_current().map_err(refused)?;
        let mut base_address = 0;
        // The driver refuses a length of zero.
        // SAFETY: a context is current, and the driver writes one address.
        unsafe { call!(cuMemAlloc_v2(&mut base_address, len_bytes.max(1) as usize)) }
            .map_err(refused)?;
        context.count_allocation();
        Ok(Self::over(context, base_address, Kind::Plain { len_bytes }))
    }

    /// Nothing is freed at the end.
    pub(super) fn borrowed(context: &CudaContext, base_address: u64, len_bytes: u64) -> Self {
        Self::over(context, base_address, Kind::Borrowed { len_bytes })
    }

    /// Reserves addresses, maps nothing.
    pub(super) fn growing(context: &CudaContext, reserve_bytes: u64) -> Result<Self, MemoryError> {
        let refused = |error| context.refused("allocate", reserve_bytes, error);
        context.make_current().map_err(refused)?;
        let mut granularity = 0;
        let prop = properties(context);
        // SAFETY: `prop` is complete, and the driver writes one number.
        unsafe {
            call!(cuMemGetAllocationGranularity(&mut granularity, &prop, GRANULARITY_MINIMUM))
        }
        .map_err(refused)?;
        let granularity_bytes = (granularity as u64).max(1);
        let reserved_bytes =
            reserve_bytes.max(1).checked_next_multiple_of(granularity_bytes).ok_or_else(|| {
                MemoryError::new("allocate", reserve_bytes, "the size overflows 64 bits")
            })?;
        let mut base = 0;
        // SAFETY: the length is a multiple of the granularity; the driver chooses the address.
        unsafe { call!(cuMemAddressReserve(&mut base, reserved_bytes as usize, 0, 0, 0)) }
            .map_err(refused)?;
        let mapped = Mutex::default();
        let kind = Kind::Growing { reserved_bytes, granularity_bytes, mapped };
        Ok(Self::over(context, base, kind))
    }

    fn over(context: &CudaContext, base_address: u64, kind: Kind) -> Self {
        Self(Arc::new(Inner { base_address, kind, context: context.clone() }))
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base_address(&self) -> u64 {
        self.0.base_address
    }

    /// Whether both are the same memory.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Bytes that can be used now.
    pub(super) fn backed_bytes(&self) -> u64 {
        match &self.0.kind {
            Kind::Plain { len_bytes } | Kind::Borrowed { len_bytes } => *len_bytes,
            Kind::Growing { mapped, .. } => end_of(&lock(mapped)),
        }
    }

    /// What growth is rounded up to, where there is growth.
    pub(super) fn granularity_bytes(&self) -> Option<u64> {
        match self.0.kind {
            Kind::Growing { granularity_bytes, .. } => Some(granularity_bytes),
            _ => None,
        }
    }

    /// Maps memory until `len_bytes` are backed.
    pub(super) fn grow(&self, len_bytes: u64) -> Result<(), MemoryError> {
        let Inner { base_address, kind, context } = &*self.0;
        let Kind::Growing { reserved_bytes, granularity_bytes, mapped } = kind else {
            if len_bytes <= self.backed_bytes() {
                return Ok(());
            }
            let message = format!("the memory has {} bytes for good", self.backed_bytes());
            return Err(MemoryError::new("grow", len_bytes, message));
        };
        let mut mapped = lock(mapped);
        let start_bytes = end_of(&mapped);
        if len_bytes <= start_bytes {
            return Ok(());
        }
        if len_bytes > *reserved_bytes {
            let message = format!("addresses are reserved for {reserved_bytes} bytes");
            return Err(MemoryError::new("grow", len_bytes, message));
        }
        // At most the reserve, which is a multiple itself.
        let end_bytes = len_bytes.next_multiple_of(*granularity_bytes);
        let more_bytes = end_bytes - start_bytes;
        let refused = |error| context.refused("grow", more_bytes, error);
        context.make_current().map_err(refused)?;
        map(context, base_address + start_bytes, more_bytes).map_err(refused)?;
        context.count_allocation();
        mapped.push(Piece { end_bytes, len_bytes: more_bytes });
        Ok(())
    }
}

fn lock(mapped: &Mutex<Vec<Piece>>) -> std::sync::MutexGuard<'_, Vec<Piece>> {
    mapped.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end_of(mapped: &[Piece]) -> u64 {
    mapped.last().map_or(0, |piece| piece.end_bytes)
}

/// Backs reserved addresses with new device memory, or leaves everything as it was.
fn map(context: &CudaContext, address: u64, len_bytes: u64) -> Result<(), DriverError> {
    let (prop, len) = (properties(context), len_bytes as usize);
    let mut handle: AllocationHandle = 0;
    // SAFETY: `prop` is complete, the length a multiple of the granularity; one handle is written.
    unsafe { call!(cuMemCreate(&mut handle, len, &prop, 0)) }?;
    // SAFETY: the addresses are reserved and not mapped yet; the handle has that length.
    let mapped = unsafe { call!(cuMemMap(address, len, 0, handle, 0)) };
    // SAFETY: a mapping keeps its memory by itself, and without one it is to be given back.
    let released = unsafe { call!(cuMemRelease(handle)) };
    mapped?;
    let access = CUmemAccessDesc {
        location: prop.location,
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the addresses are mapped, `access` is one complete description.
    let accessible = unsafe { call!(cuMemSetAccess(address, len, &access, 1)) };
    if let Err(error) = released.and(accessible) {
        // SAFETY: mapped above, and used by nobody yet.
        let _ = unsafe { driver::cuMemUnmap(address, len) };
        return Err(error);
    }
    Ok(())
}

/// Ordinary memory of the context's device.
fn properties(context: &CudaContext) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.device(),
        },
        win32HandleMetaData: core::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1::default(),
    }
}

impl Drop for Inner {
    /// Errors are those of earlier work, or of a driver that is shutting down: there is nobody to
    /// tell, and the memory is gone with the context.
    fn drop(&mut self) {
        if self.context.make_current().is_err() {
            return;
        }
        match &self.kind {
            Kind::Borrowed { .. } => {}
            Kind::Plain { .. } => {
                // SAFETY: made by `plain`; nobody holds its address any more. Waits for the device.
                let _ = unsafe { driver::cuMemFree_v2(self.base_address) };
            }
            Kind::Growing { reserved_bytes, mapped, .. } => {
                // Unlike freeing, unmapping does not wait.
                // SAFETY: takes nothing.
                let _ = unsafe { driver::cuCtxSynchronize() };
                for piece in lock(mapped).iter() {
                    let start = self.base_address + (piece.end_bytes - piece.len_bytes);
                    // SAFETY: mapped by `grow` as one piece; nobody uses the addresses any more.
                    let _ = unsafe { driver::cuMemUnmap(start, piece.len_bytes as usize) };
                }
                // SAFETY: reserved by `growing`; nothing is mapped any more.
                let _ = unsafe {
                    driver::cuMemAddressFree(self.base_address, *reserved_bytes as usize)
                };
            }
        }
    }
}
