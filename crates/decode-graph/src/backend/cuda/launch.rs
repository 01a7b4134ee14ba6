//! One launch of a kernel on a stream.

use std::ffi::c_void;

use gpu_slab::cuda::{CudaStream, DriverError};
use gpu_slab::{DeviceMemory, cuda::CudaMemory};
use kernels_ptx::{Arg, MAX_PARAMS};

use super::driver::{LaunchAttribute, LaunchConfig, call};
use super::modules::Function;
use crate::launch::{ByteRange, Launch};

/// The launch with addresses in `memory`; `None` if a range does not lie inside of it.
pub(super) fn addressed(launch: &Launch<ByteRange>, memory: &CudaMemory) -> Option<Launch<u64>> {
    let (base, len_bytes) = (memory.base_address(), memory.len_bytes());
    let address = |range: ByteRange| {
        let end = range.offset_bytes.checked_add(range.len_bytes)?;
        (end <= len_bytes).then(|| base + range.offset_bytes)
    };
    let args = launch.args.iter().map(|arg| (*arg).try_map(|range| address(range).ok_or(())));
    let (kernel, geometry, label) = (launch.kernel, launch.geometry, launch.label);
    Some(Launch { kernel, geometry, label, args: args.collect::<Result<_, _>>().ok()? })
}

/// Queues a launch.
///
/// # Safety
///
/// `function` is the launch's kernel. Every address is that of device memory of the stream's
/// context with the bytes of its parameter's shape, aligned to its element, and stays so until the
/// kernel is done; what is written overlaps nothing else that is used. The context is current.
pub(super) unsafe fn launch(
    stream: &CudaStream,
    function: &Function,
    launch: &Launch<u64>,
) -> Result<(), DriverError> {
    let mut words = [0u64; MAX_PARAMS];
    let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMS];
    for ((arg, word), pointer) in launch.args.iter().zip(&mut words).zip(&mut pointers) {
        // The driver reads as many bytes as the parameter has: four of a little-endian word.
        *word = match *arg {
            Arg::Buffer(address) => address,
            Arg::Null => 0,
            Arg::U32(value) => u64::from(value.to_le()),
            Arg::F32(value) => u64::from(value.to_bits().to_le()),
        };
        *pointer = std::ptr::from_mut(word).cast();
    }
    let (arguments, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
    let (grid, block, shared_bytes) =
        (launch.geometry.grid, launch.geometry.block, launch.geometry.shared_bytes);
    stream.context().count_launch();
    let attribute = if launch.geometry.cooperative {
        Some(LaunchAttribute::cooperative())
    } else {
        function.programmatic.then(LaunchAttribute::programmatic_serialization)
    };
    if let Some(attribute) = attribute {
        let mut attributes = [attribute];
        let config = LaunchConfig {
            grid,
            block,
            shared_bytes,
            stream: stream.as_raw(),
            attributes: attributes.as_mut_ptr(),
            attribute_count: attributes.len() as u32,
        };
        // SAFETY: the caller's word for function and addresses; the arguments are one pointer for
        // each parameter of the kernel's signature, which a test compares with the PTX.
        return unsafe { call!(cuLaunchKernelEx(&config, function.raw(), arguments, none)) };
    }
    let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
    let (kernel, raw) = (function.raw(), stream.as_raw());
    // SAFETY: as above.
    unsafe {
        call!(cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared_bytes, raw, arguments, none))
    }
}
