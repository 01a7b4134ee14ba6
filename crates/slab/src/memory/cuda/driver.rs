//! The driver's functions that memory needs, with integer results.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cust::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationProp, CUstream,
};

pub(super) type AllocationHandle = c_ulonglong;

/// `CU_STREAM_NON_BLOCKING`: does not wait for the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const GRANULARITY_MINIMUM: c_int = 0;

unsafe extern "C" {
    pub(super) fn cuInit(flags: c_uint) -> c_int;
    pub(super) fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    pub(super) fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
    pub(super) fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;

    pub(super) fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    pub(super) fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> c_int;
    pub(super) fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) -> c_int;
    pub(super) fn cuDeviceGetAttribute(
        value: *mut c_int,
        attribute: c_int,
        device: CUdevice,
    ) -> c_int;

    pub(super) fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> c_int;
    pub(super) fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> c_int;
    pub(super) fn cuCtxSetCurrent(context: CUcontext) -> c_int;
    pub(super) fn cuCtxGetDevice(device: *mut CUdevice) -> c_int;
    pub(super) fn cuCtxSynchronize() -> c_int;

    pub(super) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    pub(super) fn cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize) -> c_int;
    pub(super) fn cuMemFree_v2(address: CUdeviceptr) -> c_int;
    pub(super) fn cuMemHostAlloc(pointer: *mut *mut c_void, len: usize, flags: c_uint) -> c_int;
    pub(super) fn cuMemFreeHost(pointer: *mut c_void) -> c_int;

    pub(super) fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        prop: *const CUmemAllocationProp,
        option: c_int,
    ) -> c_int;
    pub(super) fn cuMemAddressReserve(
        address: *mut CUdeviceptr,
        len: usize,
        alignment: usize,
        wanted: CUdeviceptr,
        flags: c_ulonglong,
    ) -> c_int;
    pub(super) fn cuMemAddressFree(address: CUdeviceptr, len: usize) -> c_int;
    pub(super) fn cuMemCreate(
        handle: *mut AllocationHandle,
        len: usize,
        prop: *const CUmemAllocationProp,
        flags: c_ulonglong,
    ) -> c_int;
    pub(super) fn cuMemRelease(handle: AllocationHandle) -> c_int;
    pub(super) fn cuMemMap(
        address: CUdeviceptr,
        len: usize,
        offset: usize,
        handle: AllocationHandle,
        flags: c_ulonglong,
    ) -> c_int;
    pub(super) fn cuMemUnmap(address: CUdeviceptr, len: usize) -> c_int;
    pub(super) fn cuMemSetAccess(
        address: CUdeviceptr,
        len: usize,
        access: *const CUmemAccessDesc,
        count: usize,
    ) -> c_int;

    pub(super) fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        len: usize,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        len: usize,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn cuMemcpyDtoDAsync_v2(
        to: CUdeviceptr,
        from: CUdeviceptr,
        len: usize,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn cuMemsetD8Async(
        to: CUdeviceptr,
        value: u8,
        count: usize,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn cuMemsetD32Async(
        to: CUdeviceptr,
        value: c_uint,
        count: usize,
        stream: CUstream,
    ) -> c_int;

    pub(super) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> c_int;
    pub(super) fn cuStreamDestroy_v2(stream: CUstream) -> c_int;
    pub(super) fn cuStreamSynchronize(stream: CUstream) -> c_int;
    pub(super) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> c_int;
    pub(super) fn cuEventDestroy_v2(event: CUevent) -> c_int;
    pub(super) fn cuEventRecord(event: CUevent, stream: CUstream) -> c_int;
    pub(super) fn cuEventSynchronize(event: CUevent) -> c_int;
}

/// Calls a function of the driver and checks its result, naming it in the error. To be used inside
/// `unsafe` with a reason.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {
        $crate::memory::cuda::DriverError::check(
            stringify!($name),
            $crate::memory::cuda::driver::$name($($arg),*),
        )
    };
}
pub(super) use call;
