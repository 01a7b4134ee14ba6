//! Each call of the driver fails once: what comes back is an error, and nothing stays behind.
//!
//! Over the fake driver only, in a process of its own: it fails on demand and counts what is alive.

use std::ffi::{CStr, CString, c_char};
use std::process::Command;

use decode_graph::{Backend, CudaBackend, Drive, Graph, Label, Launch, Recording};
use gpu_slab::Slab;
use kernels_ptx::ops::rms_norm;
use kernels_ptx::{Kernel, TokenParams};

use crate::fake::is_fake;

const ALONE: &str = "GPU_TESTS_FAILING";
const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

struct Fake {
    live: extern "C" fn() -> usize,
    fail: unsafe extern "C" fn(*const c_char, u32, i32) -> bool,
}

impl Fake {
    fn open() -> Self {
        let find = |name: &CStr| cuda_load::symbol(name).expect("the fake driver is loaded");
        // SAFETY: these symbols of the fake driver have these signatures.
        unsafe {
            Self {
                live: std::mem::transmute::<*mut _, extern "C" fn() -> usize>(
                    find(c"fakeDriverLive").as_ptr(),
                ),
                fail: std::mem::transmute::<
                    *mut _,
                    unsafe extern "C" fn(*const c_char, u32, i32) -> bool,
                >(find(c"fakeDriverFail").as_ptr()),
            }
        }
    }

    /// Makes a call fail, and says whether the call wished for before did.
    fn fail(&self, function: &str, number: u32, code: i32) -> bool {
        let function = CString::new(function).expect("no zero inside");
        // SAFETY: the name ends with a zero.
        unsafe { (self.fail)(function.as_ptr(), number, code) }
    }
}

/// Around the staging ring, which is 32 MiB.
const BALLAST_BYTES: usize = 40 << 20;
/// Calls that a ride around the ring makes more of; for the others a little will do.
const CALLS_OF_THE_RING: [&str; 5] = [
    "cuMemHostAlloc",
    "cuMemcpyHtoDAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
];

/// All that a lane does: memory of both kinds, uploads, capture, replay.
fn life(ballast_bytes: usize) -> Result<f32, Box<dyn std::error::Error>> {
    const N: u32 = 64;
    let mut backend = CudaBackend::new(0)?;
    backend.load_report()?;
    backend.warm_up(std::time::Duration::ZERO)?;
    backend.memory_bytes()?;
    let mut plain = Slab::new(backend.allocate(1 << 20)?);
    plain.allocate_zeroed("plain", 7)?;
    let mut slab = Slab::new(backend.allocate_growing(64 << 20)?);
    let floats = |value: f32| vec![value; N as usize];
    let x = slab.allocate_and_write("x", bytemuck::cast_slice(&floats(2.0)))?;
    let weight = slab.allocate_and_write("weight", bytemuck::cast_slice(&floats(3.0)))?;
    let y = slab.allocate("y", u64::from(N) * 4)?;
    let tokens = slab.allocate("tokens", 12)?;
    slab.allocate_and_write("ballast", &vec![1; ballast_bytes])?;
    slab.copy(x, y)?;
    let args = rms_norm::Args { x, weight, y, n_tokens: 1, n: N, eps: 0.0 };
    let kernel = Kernel::RmsNorm;
    let launch = Launch {
        kernel,
        geometry: args.geometry(&backend.profile()),
        args: args.list(kernel, |view| view.len_bytes())?,
        label: Label { layer: None, what: "norm" },
    };
    let recording = Recording { launches: vec![launch], tokens };
    let mut graph = Graph::capture(&mut backend, &mut slab, &recording)?;
    graph.replay(&mut backend, &mut slab, Drive::Host(&[TokenParams::default()]))?;
    backend.synchronize()?;
    let mut found = [0u8; 4];
    slab.read_view(y, 0, &mut found)?;
    Ok(f32::from_le_bytes(found))
}

/// What is called while a lane lives, and while it is taken down.
const CALLS: [&str; 35] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuLaunchKernelEx",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphInstantiateWithFlags",
    "cuGraphUpload",
    "cuGraphLaunch",
];

/// Also called where nobody can be told, or where nothing can be given back any more.
const CALLS_OF_BOTH: [&str; 3] = ["cuCtxSetCurrent", "cuStreamSynchronize", "cuMemRelease"];

/// Called there alone.
const LAST_CALLS: [&str; 11] = [
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuCtxSynchronize",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuModuleUnload",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuDevicePrimaryCtxRelease_v2",
];

#[test]
fn every_call_may_fail() {
    const TEST: &str = "failing::every_call_may_fail";
    if !is_fake() {
        return; // `fake.rs` runs it
    }
    if std::env::var_os(ALONE).is_none() {
        let mut run = Command::new(std::env::current_exe().unwrap());
        let output = run.args(["--exact", TEST, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    cuda_load::present().unwrap();
    let fake = Fake::open();
    assert_eq!(life(BALLAST_BYTES).unwrap(), 3.0);
    assert_eq!((fake.live)(), 0, "nothing stays behind");
    for function in CALLS.into_iter().chain(CALLS_OF_BOTH).chain(LAST_CALLS) {
        let in_ring = CALLS_OF_THE_RING.contains(&function);
        let ballast_bytes = if in_ring { BALLAST_BYTES } else { 3 << 20 };
        let mut failures = 0;
        // Each call, until there is none of that number.
        for number in 1..50 {
            let code = if number % 2 == 1 { OUT_OF_MEMORY } else { LAUNCH_FAILED };
            fake.fail(function, number, code);
            let lived = life(ballast_bytes);
            if !fake.fail("", 0, 0) {
                assert_eq!(lived.unwrap(), 3.0, "nothing failed");
                break;
            }
            failures += 1;
            if CALLS.contains(&function) {
                // An out-of-memory error is told with what is free, if that can be told.
                let error = lived.expect_err(function).to_string();
                assert!(!error.contains('\n'), "{function} {number}: {error}");
                assert!(error.contains(function), "{function} {number}: {error}");
                assert_eq!((fake.live)(), 0, "{function} {number}: something stays behind");
            }
        }
        assert!(failures > 0, "{function} is not called");
    }
}
