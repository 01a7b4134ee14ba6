//! Devices that are missing, too small, or lost.

use std::process::Command;

use decode_graph::{Backend, CudaBackend, Drive, Graph, Head, Label, Launch, Numerics};
use kernels_ptx::{Arg, DeviceProfile, Kernel, TokenParams};
use kv_paged::KvType;

use crate::device;
use crate::support::{MEMORY_BYTES, Tiny};

/// Set in the process that loses its device.
const LOSE: &str = "GPU_TESTS_LOSE_DEVICE";

#[test]
fn backend_graph_and_memory_may_go_to_another_thread() {
    fn may_go<T: Send>() {}
    may_go::<CudaBackend>();
    may_go::<Graph<CudaBackend>>();
    may_go::<gpu_slab::Slab<gpu_slab::cuda::CudaMemory>>();
}

#[test]
fn a_missing_device_is_one_sentence() {
    let error = CudaBackend::new(4096).err().expect("nobody has so many");
    let said = error.to_string();
    assert!(said.starts_with("cuda: opening device 4096: ") && !said.contains('\n'), "{said}");
    let code = error.code.unwrap();
    // Out of range where there are devices, none otherwise.
    assert!(code == 101 || code == 100, "{said}");
}

#[test]
fn more_memory_than_there_is_says_how_much_there_is() {
    let Some(gpu) = device::gpu("more memory than there is") else { return };
    let (free, total) = gpu.memory_bytes().unwrap();
    assert!(free > 0 && free <= total);
    let error = gpu.allocate(total + (1 << 30)).unwrap_err();
    assert_eq!(error.code, Some(2), "{error}");
    assert!(error.message.contains(&format!("of {total}")), "{error}");
}

#[test]
fn the_device_tells_what_geometry_needs() {
    let Some(gpu) = device::gpu("the device's profile") else { return };
    let DeviceProfile { sm_count, l2_bytes, compute_capability, .. } = gpu.profile();
    let (block, sm) = (gpu.profile().shared_per_block_bytes, gpu.profile().shared_per_sm_bytes);
    assert!((1..1000).contains(&sm_count), "{sm_count}");
    assert!(l2_bytes >= 1 << 20, "{l2_bytes}");
    assert!((80..200).contains(&compute_capability), "{compute_capability}");
    assert!(block >= 48 << 10 && sm >= block, "{block}, {sm}");
    let target = if compute_capability >= 90 { "compute_90" } else { "compute_80" };
    let report = gpu.load_report().unwrap();
    assert_eq!(report.target, target);
    assert!(report.milliseconds > 0.0);
}

/// Runs in a process of its own: the device is lost to all of it.
#[test]
fn a_lost_device_is_named_and_every_later_call_fails() {
    const TEST: &str = "faults::a_lost_device_is_named_and_every_later_call_fails";
    if std::env::var_os(LOSE).is_none() {
        let Some(_gpu) = device::gpu("a lost device") else { return };
        let program = std::env::current_exe().unwrap();
        let mut run = Command::new(program);
        let output = run.args(["--exact", TEST, "--nocapture"]).env(LOSE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    let mut backend = CudaBackend::new(0).unwrap();
    let memory = backend.allocate(MEMORY_BYTES).unwrap();
    let profile = backend.profile();
    let mut tiny = Tiny::in_memory(memory, profile, Numerics::Q8, KvType::F16, false, 1);
    let mut graph = tiny.capture_on(&mut backend, Head::Greedy);
    let first = [TokenParams { absolute_position: 0, ring_slot: 0, token_id: 4 }];
    graph.replay(&mut backend, &mut tiny.slab, Drive::Host(&first)).unwrap();
    backend.synchronize().unwrap();

    let nowhere = Arg::Buffer(4096u64);
    let args = vec![nowhere, nowhere, nowhere, Arg::U32(1), Arg::U32(256), Arg::F32(1e-5)];
    let launch = Launch {
        kernel: Kernel::RmsNorm,
        geometry: kernels_ptx::Geometry {
            grid: [1, 1, 1],
            block: [64, 1, 1],
            shared_bytes: 0,
            cooperative: false,
        },
        args,
        label: Label { layer: Some(7), what: "a norm of nowhere" },
    };
    // SAFETY: broken on purpose, in a process that exists for it.
    unsafe { backend.launch_addressed(&launch) }.unwrap();
    let error = backend.synchronize().unwrap_err();
    eprintln!("{error}");
    assert_eq!(error.code, Some(700), "{error}");
    assert!(error.to_string().contains("layer 7 a norm of nowhere, rms_norm"), "{error}");
    assert!(error.to_string().contains("the device is lost"), "{error}");

    let said = |error: &dyn std::fmt::Display| {
        eprintln!("{error}");
        assert!(error.to_string().contains("a norm of nowhere"), "{error}");
    };
    said(&backend.synchronize().unwrap_err());
    said(&graph.replay(&mut backend, &mut tiny.slab, Drive::SelfAdvance).unwrap_err());
    let recording = tiny.record();
    said(&Graph::capture(&mut backend, &mut tiny.slab, &recording).err().unwrap());
    let error = tiny.slab.read_view(tiny.arena.token, 0, &mut [0; 4]).unwrap_err();
    assert!(error.to_string().contains("700"), "{error}");
    // And all of it can be dropped.
    drop((graph, tiny, backend));
}
