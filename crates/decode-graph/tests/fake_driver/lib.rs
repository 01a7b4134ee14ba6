//! A library that plays the CUDA driver: memory is the host's, a kernel is its CPU twin.
//!
//! `CUDA_LOAD_LIBRARY=…/libfake_driver.so` makes the tests of `gpu` run on a machine without a GPU,
//! so everything but the kernels themselves is tested there: arguments and their order, capture and
//! what ends it, memory that grows, what is freed and when, what happens when a call fails.
//!
//! It is stricter than a driver: a buffer that does not lie in live memory with all the bytes of
//! its shape loses the device, as an illegal address does.
//!
//! `fakeDriverFail` makes the n-th call of a function fail, `fakeDriverLive` counts what was made and
//! not destroyed: see `gpu/failing.rs`.

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::missing_safety_doc, reason = "the driver's documentation says what to pass")]
#![allow(missing_docs, reason = "the driver's documentation says what they do")]

mod memory;
mod run;
mod state;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use kernels_ptx::{Geometry, Kernel};

use crate::run::{Launched, Node};
use crate::state::{Capture, Code, INVALID_VALUE, NOT_FOUND, State, call};

const CAPTURE_UNSUPPORTED: Code = 900;
const CAPTURE_INVALIDATED: Code = 901;

/// Writes a result to where the caller wants it.
fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the driver's contract: the caller's pointer is to a place for a value of this type.
    unsafe { to.write(value) };
    Ok(())
}

macro_rules! exports {
    ($( fn $name:ident($state:ident $(, $arg:ident: $ty:ty)*) $body:block )*) => {
        $(
            // SAFETY: no other library of the process defines a symbol of this name.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                call(stringify!($name), |$state: &mut State| -> Result<(), Code> { $body })
            }
        )*
    };
}

/// The driver's words for a code.
fn texts(code: Code) -> Option<(&'static CStr, &'static CStr)> {
    Some(match code {
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted while capturing")
        }
        CAPTURE_INVALIDATED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"failed due to a previous error")
        }
        _ => return None,
    })
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, to: *mut *const c_char) -> c_int {
    let name = texts(code).map_or(std::ptr::null(), |(name, _)| name.as_ptr());
    put(to, name).err().unwrap_or(c_int::from(name.is_null()))
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, to: *mut *const c_char) -> c_int {
    let text = texts(code).map_or(std::ptr::null(), |(_, text)| text.as_ptr());
    put(to, text).err().unwrap_or(c_int::from(text.is_null()))
}

/// `CUlaunchConfig`, as far as it is used.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: usize,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [u64; 8],
}

/// Reads as many arguments as the kernel has.
fn launched(
    kernel: Kernel,
    geometry: Geometry,
    arguments: *const *const c_void,
) -> Result<Launched, Code> {
    let words = kernel.params().iter().enumerate().map(|(index, param)| {
        // SAFETY: the driver's contract: a pointer to each argument, of the size in the signature.
        unsafe {
            let argument = *arguments.add(index);
            match param.kind {
                kernels_ptx::ParamKind::Buffer { .. } => argument.cast::<u64>().read_unaligned(),
                kernels_ptx::ParamKind::Scalar(_) => argument.cast::<u32>().read_unaligned().into(),
            }
        }
    });
    let [threads, blocks] = [geometry.block, geometry.grid].map(|d| d.iter().product::<u32>());
    if threads == 0 || threads > 1024 || blocks == 0 || geometry.shared_bytes > 227 << 10 {
        return Err(INVALID_VALUE);
    }
    Ok(Launched { kernel, words: words.collect() })
}

exports! {
    fn cuInit(_state, _flags: c_uint) { Ok(()) }
    fn cuDriverGetVersion(_state, version: *mut c_int) { put(version, 13_000) }
    fn cuDeviceGetCount(_state, count: *mut c_int) { put(count, 1) }
    fn cuDeviceGet(_state, device: *mut c_int, ordinal: c_int) {
        if ordinal == 0 { put(device, 0) } else { Err(101) }
    }
    fn cuDeviceGetName(_state, to: *mut c_char, len: c_int, _device: c_int) {
        let name = c"a CPU that plays a GPU".to_bytes_with_nul();
        if (len as usize) < name.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the driver's contract: there is room for `len` bytes.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), name.len()) };
        Ok(())
    }
    fn cuDeviceGetAttribute(_state, value: *mut c_int, attribute: c_int, _device: c_int) {
        put(value, match attribute {
            16 => 7, // multiprocessors
            38 => 40 << 20, // L2
            75 => 9, // compute capability 9.0
            76 => 0,
            81 => 228 << 10, // shared memory of a multiprocessor
            97 => 227 << 10, // and of a block
            _ => return Err(INVALID_VALUE),
        })
    }
    fn cuDevicePrimaryCtxRetain(state, context: *mut usize, _device: c_int) {
        state.retained += 1;
        put(context, 0xC0)
    }
    fn cuDevicePrimaryCtxRelease_v2(state, _device: c_int) {
        state.retained = state.retained.checked_sub(1).ok_or(INVALID_VALUE)?;
        Ok(())
    }
    fn cuCtxSetCurrent(_state, context: usize) {
        if context == 0xC0 { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuCtxGetDevice(_state, device: *mut c_int) { put(device, 0) }
    fn cuCtxSynchronize(_state) { Ok(()) }

    fn cuMemGetInfo_v2(state, free: *mut usize, total: *mut usize) {
        put(free, state.memory.free_bytes())?;
        put(total, memory::TOTAL_BYTES)
    }
    fn cuMemAlloc_v2(state, address: *mut u64, len: usize) {
        put(address, state.memory.allocate(len)?)
    }
    fn cuMemFree_v2(state, address: u64) { state.memory.free(address) }
    fn cuMemHostAlloc(state, pointer: *mut u64, len: usize, _flags: c_uint) {
        put(pointer, state.memory.pin(len)?)
    }
    fn cuMemFreeHost(state, pointer: u64) { state.memory.unpin(pointer) }
    fn cuMemGetAllocationGranularity(
        _state, granularity: *mut usize, _prop: *const c_void, _option: c_int
    ) {
        put(granularity, memory::GRANULARITY_BYTES)
    }
    fn cuMemAddressReserve(
        state, address: *mut u64, len: usize, _align: usize, _wanted: u64, _flags: c_ulonglong
    ) {
        put(address, state.memory.reserve(len)?)
    }
    fn cuMemAddressFree(state, address: u64, len: usize) { state.memory.unreserve(address, len) }
    fn cuMemCreate(
        state, handle: *mut u64, len: usize, _prop: *const c_void, _flags: c_ulonglong
    ) {
        put(handle, state.memory.create(len)?)
    }
    fn cuMemRelease(state, handle: u64) { state.memory.release(handle) }
    fn cuMemMap(
        state, address: u64, len: usize, _offset: usize, handle: u64, _flags: c_ulonglong
    ) {
        state.memory.map(address, len, handle)
    }
    fn cuMemUnmap(state, address: u64, len: usize) { state.memory.unmap(address, len) }
    fn cuMemSetAccess(
        state, address: u64, len: usize, _access: *const c_void, _count: usize
    ) {
        state.memory.allow(address, len)
    }

    fn cuMemcpyHtoDAsync_v2(state, to: u64, from: u64, len: usize, stream: usize) {
        state.memory.check_pinned(from, len)?;
        state.queue(stream, Node::Copy { to, from, len, host: true })
    }
    fn cuMemcpyDtoHAsync_v2(state, to: u64, from: u64, len: usize, stream: usize) {
        state.memory.check_pinned(to, len)?;
        state.queue(stream, Node::Copy { to, from, len, host: true })
    }
    fn cuMemcpyDtoDAsync_v2(state, to: u64, from: u64, len: usize, stream: usize) {
        state.queue(stream, Node::Copy { to, from, len, host: false })
    }
    fn cuMemsetD8Async(state, to: u64, value: u8, count: usize, stream: usize) {
        state.queue(stream, Node::Fill { to, pattern: [value; 4], len: count })
    }
    fn cuMemsetD32Async(state, to: u64, value: c_uint, count: usize, stream: usize) {
        if !to.is_multiple_of(4) {
            return Err(INVALID_VALUE);
        }
        state.queue(stream, Node::Fill { to, pattern: value.to_ne_bytes(), len: count * 4 })
    }

    fn cuStreamCreate(state, stream: *mut usize, _flags: c_uint) {
        let handle = state.handle();
        state.streams.insert(handle, Capture::default());
        put(stream, handle)
    }
    fn cuStreamDestroy_v2(state, stream: usize) {
        state.streams.remove(&stream).map(|_| ()).ok_or(INVALID_VALUE)
    }
    fn cuStreamSynchronize(state, stream: usize) {
        let capture = state.stream(stream)?;
        if capture.running {
            capture.invalid = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }
    fn cuEventCreate(state, event: *mut usize, _flags: c_uint) {
        let handle = state.handle();
        state.events.insert(handle);
        put(event, handle)
    }
    fn cuEventDestroy_v2(state, event: usize) {
        if state.events.remove(&event) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuEventRecord(state, event: usize, stream: usize) {
        state.stream(stream)?;
        if state.events.contains(&event) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuEventSynchronize(state, event: usize) {
        if state.events.contains(&event) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuModuleLoadDataEx(
        state, module: *mut usize, image: *const c_char, _count: c_uint, _options: *const c_uint,
        _values: *const c_void
    ) {
        // SAFETY: the driver's contract: PTX ends with a zero.
        let text = unsafe { CStr::from_ptr(image) }.to_str().map_err(|_| INVALID_VALUE)?;
        let entries = text.split(".entry").skip(1).filter_map(|rest| {
            let name = rest.split(['(', ' ', '\n']).find(|word| !word.is_empty())?;
            Kernel::by_name(name)
        });
        let handle = state.handle();
        state.modules.insert(handle, entries.collect());
        put(module, handle)
    }
    fn cuModuleUnload(state, module: usize) {
        state.functions.retain(|_, (of, _)| *of != module);
        state.modules.remove(&module).map(|_| ()).ok_or(INVALID_VALUE)
    }
    fn cuModuleGetFunction(
        state, function: *mut usize, module: usize, name: *const c_char
    ) {
        // SAFETY: the driver's contract: the name ends with a zero.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
        let kernels = state.modules.get(&module).ok_or(INVALID_VALUE)?;
        let kernel = kernels.iter().copied().find(|k| k.name() == name).ok_or(NOT_FOUND)?;
        let handle = state.handle();
        state.functions.insert(handle, (module, kernel));
        put(function, handle)
    }
    fn cuFuncGetAttribute(state, value: *mut c_int, _attribute: c_int, function: usize) {
        state.functions.get(&function).ok_or(INVALID_VALUE)?;
        put(value, 0)
    }
    fn cuFuncSetAttribute(state, function: usize, _attribute: c_int, _value: c_int) {
        state.functions.get(&function).map(|_| ()).ok_or(INVALID_VALUE)
    }
    fn cuLaunchKernelEx(
        state, config: *const LaunchConfig, function: usize, arguments: *const *const c_void,
        _extra: *const c_void
    ) {
        // SAFETY: the driver's contract: one complete configuration.
        let config = unsafe { &*config };
        // SAFETY: the driver's contract: so many attributes.
        let attribute = unsafe { &*config.attributes };
        let programmatic = (attribute.id, attribute.padding, attribute.value[0]) == (6, 0, 1);
        if config.attribute_count != 1 || !programmatic {
            return Err(INVALID_VALUE);
        }
        let (_, kernel) = *state.functions.get(&function).ok_or(INVALID_VALUE)?;
        let LaunchConfig { grid, block, shared_bytes, .. } = *config;
        let launch = launched(kernel, Geometry { grid, block, shared_bytes, cooperative: false }, arguments)?;
        state.queue(config.stream, Node::Kernel(launch))
    }
    fn cuLaunchKernel(
        state, function: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared_bytes: c_uint, stream: usize, arguments: *const *const c_void,
        _extra: *const c_void
    ) {
        let (_, kernel) = *state.functions.get(&function).ok_or(INVALID_VALUE)?;
        let geometry = Geometry { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes, cooperative: false };
        let launch = launched(kernel, geometry, arguments)?;
        state.queue(stream, Node::Kernel(launch))
    }

    fn cuStreamBeginCapture_v2(state, stream: usize, _mode: c_int) {
        let capture = state.stream(stream)?;
        if capture.running {
            return Err(INVALID_VALUE);
        }
        *capture = Capture { running: true, ..Capture::default() };
        Ok(())
    }
    fn cuStreamEndCapture(state, stream: usize, graph: *mut usize) {
        let capture = std::mem::take(state.stream(stream)?);
        put(graph, 0)?;
        if !capture.running {
            return Err(INVALID_VALUE);
        }
        if capture.invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        let handle = state.handle();
        state.graphs.insert(handle, capture.nodes.into());
        put(graph, handle)
    }
    fn cuGraphDestroy(state, graph: usize) {
        state.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_VALUE)
    }
    fn cuGraphGetNodes(state, graph: usize, nodes: *mut usize, count: *mut usize) {
        let len = state.graphs.get(&graph).ok_or(INVALID_VALUE)?.len();
        if !nodes.is_null() {
            for index in 0..len {
                // SAFETY: the driver's contract: there is room for as many nodes as there are.
                put(unsafe { nodes.add(index) }, graph << 20 | index)?;
            }
        }
        put(count, len)
    }
    fn cuGraphNodeGetType(state, node: usize, kind: *mut c_int) {
        let nodes = state.graphs.get(&(node >> 20)).ok_or(INVALID_VALUE)?;
        put(kind, match nodes.get(node & 0xf_ffff).ok_or(INVALID_VALUE)? {
            Node::Kernel(_) => 0,
            Node::Copy { .. } => 1,
            Node::Fill { .. } => 2,
        })
    }
    fn cuGraphInstantiateWithFlags(
        state, executable: *mut usize, graph: usize, _flags: c_ulonglong
    ) {
        let nodes = state.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
        let handle = state.handle();
        state.executables.insert(handle, nodes);
        put(executable, handle)
    }
    fn cuGraphUpload(state, executable: usize, stream: usize) {
        state.stream(stream)?;
        state.executables.get(&executable).map(|_| ()).ok_or(INVALID_VALUE)
    }
    fn cuGraphLaunch(state, executable: usize, stream: usize) {
        let nodes = state.executables.get(&executable).ok_or(INVALID_VALUE)?.clone();
        nodes.iter().try_for_each(|node| state.queue(stream, node.clone()))
    }
    fn cuGraphExecDestroy(state, executable: usize) {
        state.executables.remove(&executable).map(|_| ()).ok_or(INVALID_VALUE)
    }
}

/// No function of a driver: how many things are alive, of every kind.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn fakeDriverLive() -> usize {
    state::lock().live()
}

/// No function of a driver: makes call number `number` of `function` fail with `code`, and forgets
/// an earlier wish; says whether that one was fulfilled.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakeDriverFail(
    function: *const c_char,
    number: c_uint,
    code: c_int,
) -> bool {
    // SAFETY: the caller's name ends with a zero.
    let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
    state::lock().fail_call(function, number, code)
}
