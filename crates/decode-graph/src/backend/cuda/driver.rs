//! The driver's functions for modules, launches and graphs, with integer results: see
//! [`gpu_slab::cuda`] for why they are declared again.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cust::sys::{CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstream};

// Linked for the symbols below.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use cuda_load as _;

/// `CU_JIT_ERROR_LOG_BUFFER`, `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
pub(super) const JIT_ERROR_LOG: [c_uint; 2] = [5, 6];
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`.
pub(super) const FUNCTION_STATIC_SHARED_BYTES: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const FUNCTION_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_GRAPH_NODE_TYPE_KERNEL`.
pub(super) const NODE_KERNEL: c_int = 0;

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    /// A union of 64 bytes; the attributes used here are a number at its start.
    value: [c_int; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`: all blocks run at the same time, or the launch fails.
    pub(super) fn cooperative() -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 2, padding: 0, value }
    }

    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may begin when the one
    /// before it says so, and waits itself for what that one wrote.
    pub(super) fn programmatic_serialization() -> Self {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, padding: 0, value }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

const _: () = assert!(size_of::<LaunchAttribute>() == 72 && size_of::<LaunchConfig>() == 56);

unsafe extern "C" {
    pub(super) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        option_count: c_uint,
        options: *const c_uint,
        values: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn cuModuleUnload(module: CUmodule) -> c_int;
    pub(super) fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> c_int;
    pub(super) fn cuFuncGetAttribute(
        value: *mut c_int,
        attribute: c_int,
        function: CUfunction,
    ) -> c_int;
    pub(super) fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int)
    -> c_int;
    pub(super) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: CUfunction,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;

    pub(super) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) -> c_int;
    pub(super) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> c_int;
    pub(super) fn cuGraphDestroy(graph: CUgraph) -> c_int;
    pub(super) fn cuGraphGetNodes(
        graph: CUgraph,
        nodes: *mut CUgraphNode,
        count: *mut usize,
    ) -> c_int;
    pub(super) fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_int) -> c_int;
    pub(super) fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    ) -> c_int;
    pub(super) fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) -> c_int;
    pub(super) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> c_int;
    pub(super) fn cuGraphExecDestroy(executable: CUgraphExec) -> c_int;
}

/// Calls a function of the driver and checks its result, naming it in the error. To be used inside
/// `unsafe` with a reason.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {
        gpu_slab::cuda::DriverError::check(
            stringify!($name),
            $crate::backend::cuda::driver::$name($($arg),*),
        )
    };
}
pub(super) use call;
