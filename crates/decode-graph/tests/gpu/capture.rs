//! Capture that goes wrong, and work of the caller's inside of it.

use std::ffi::{c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use decode_graph::backend::cuda::{CaptureMode, External};
use decode_graph::{Backend, CudaBackend, Drive, Graph, GraphError, Head, Numerics};
use gpu_slab::cuda::{CudaMemory, RawStream};
use kernels_ptx::TokenParams;
use kv_paged::KvType;

use crate::device;
use crate::support::{MEMORY_BYTES, Tiny};

unsafe extern "C" {
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: RawStream) -> c_int;
    fn cuStreamSynchronize(stream: RawStream) -> c_int;
}

const FIRST: TokenParams = TokenParams { absolute_position: 0, ring_slot: 0, token_id: 4 };

fn tiny(backend: &CudaBackend) -> Tiny<CudaMemory> {
    let memory = backend.allocate(MEMORY_BYTES).unwrap();
    Tiny::in_memory(memory, backend.profile(), Numerics::Q8, KvType::F16, false, 1)
}

/// Captures and runs a step, as if nothing had happened before.
fn still_works(backend: &mut CudaBackend, tiny: &mut Tiny<CudaMemory>) {
    let mut graph = tiny.capture_on(backend, Head::Greedy);
    graph.replay(backend, &mut tiny.slab, Drive::Host(&[FIRST])).unwrap();
    backend.synchronize().unwrap();
    assert!(tiny.logits().iter().all(|x| x.is_finite()));
}

fn refused(backend: &mut CudaBackend, tiny: &mut Tiny<CudaMemory>) -> decode_graph::BackendError {
    let recording = tiny.record();
    match Graph::capture(backend, &mut tiny.slab, &recording) {
        Err(GraphError::Backend(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("captured"),
    }
}

#[test]
fn an_error_while_recording_leaves_the_stream_usable() {
    let Some(mut gpu) = device::gpu("an error while recording") else { return };
    let gpu = &mut *gpu;
    let mut tiny = tiny(gpu);
    gpu.set_externals(vec![External::new("fails", 1, 3, |_| Err(1))]);
    let error = refused(gpu, &mut tiny);
    gpu.set_externals(Vec::new());
    assert_eq!(error.code, Some(1));
    let said = error.to_string();
    assert!(said.contains("fails v1") && said.contains("CUDA_ERROR_INVALID_VALUE"), "{said}");
    still_works(gpu, &mut tiny);
}

#[test]
fn what_a_capture_forbids_is_named_and_ends_it() {
    let Some(mut gpu) = device::gpu("what a capture forbids") else { return };
    let gpu = &mut *gpu;
    let mut tiny = tiny(gpu);
    for mode in [CaptureMode::ThreadLocal, CaptureMode::Global, CaptureMode::Relaxed] {
        gpu.set_capture_mode(mode);
        // The error is swallowed; the driver has spoilt the capture all the same.
        let forbidden = |swallow: bool| {
            External::new("waits", 1, 2, move |stream| {
                // SAFETY: a live stream. Waiting for one that is captured is refused.
                let code = unsafe { cuStreamSynchronize(stream) };
                if swallow || code == 0 { Ok(()) } else { Err(code) }
            })
        };
        for swallow in [false, true] {
            gpu.set_externals(vec![forbidden(swallow)]);
            let error = refused(gpu, &mut tiny);
            gpu.set_externals(Vec::new());
            let code = error.code.unwrap();
            assert!((900..=908).contains(&code), "{error}");
            assert!(error.to_string().contains("CUDA_ERROR_STREAM_CAPTURE"), "{error}");
            still_works(gpu, &mut tiny);
        }
    }
    gpu.set_capture_mode(CaptureMode::default());
}

#[test]
fn a_panic_while_recording_leaves_the_stream_usable() {
    let Some(mut gpu) = device::gpu("a panic while recording") else { return };
    let gpu = &mut *gpu;
    let mut tiny = tiny(gpu);
    gpu.set_externals(vec![External::new("panics", 1, 5, |_| panic!("on purpose"))]);
    let recording = tiny.record();
    let caught = catch_unwind(AssertUnwindSafe(|| {
        Graph::capture(&mut *gpu, &mut tiny.slab, &recording).map(|_| ())
    }));
    gpu.set_externals(Vec::new());
    assert!(caught.is_err());
    still_works(gpu, &mut tiny);
}

#[test]
fn an_opaque_node_runs_among_ours_and_enters_the_key() {
    let Some(mut gpu) = device::gpu("an opaque node") else { return };
    let gpu = &mut *gpu;
    let mut tiny = tiny(gpu);
    let plain = tiny.capture_on(gpu, Head::Greedy).key();
    let spare = tiny.slab.allocate_zeroed("spare", 256).unwrap();
    let address = tiny.slab.device_ptr(spare).unwrap();
    let recorded = Arc::new(AtomicU64::new(0));
    let external = |version| {
        let recorded = recorded.clone();
        External::new("memset", version, 1, move |stream| {
            recorded.fetch_add(1, Ordering::Relaxed);
            // SAFETY: 64 words of the slab, which lives longer than the graph.
            match unsafe { cuMemsetD32Async(address, 0x0bad_cafe, 64, stream) } {
                0 => Ok(()),
                code => Err(code),
            }
        })
    };
    gpu.set_externals(vec![external(1)]);
    let mut graph = tiny.capture_on(gpu, Head::Greedy);
    assert_eq!(recorded.load(Ordering::Relaxed), 1);
    assert_eq!(graph.telemetry().nodes, graph.launches().len(), "a memset is no kernel");
    assert_ne!(graph.key(), plain);
    let recording = tiny.record();
    let key = |gpu: &mut CudaBackend, tiny: &Tiny<CudaMemory>| {
        Graph::bind(gpu, &tiny.slab, &recording).unwrap().1
    };
    assert_eq!(key(gpu, &tiny), graph.key());
    gpu.set_externals(vec![external(2)]);
    assert_ne!(key(gpu, &tiny), graph.key());
    gpu.set_externals(Vec::new());
    assert_eq!(key(gpu, &tiny), plain);

    graph.replay(gpu, &mut tiny.slab, Drive::Host(&[FIRST])).unwrap();
    let mut words = [0u32; 64];
    tiny.slab.read_view(spare, 0, bytemuck::cast_slice_mut(&mut words)).unwrap();
    assert_eq!(words, [0x0bad_cafe; 64]);

    let launches = graph.launches().len();
    gpu.set_externals(vec![External::new("beyond", 1, launches + 1, |_| Ok(()))]);
    let error = refused(gpu, &mut tiny);
    gpu.set_externals(Vec::new());
    assert!(error.to_string().contains("beyond v1"), "{error}");
}

#[test]
fn a_graph_outlives_its_slab_and_backend() {
    let Some(mut gpu) = device::gpu("a graph outlives its slab") else { return };
    let gpu = &mut *gpu;
    let mut other = CudaBackend::new(0).unwrap();
    let mut tiny = {
        let memory = other.allocate(MEMORY_BYTES).unwrap();
        Tiny::in_memory(memory, other.profile(), Numerics::Q8, KvType::F16, false, 1)
    };
    let mut graph = tiny.capture_on(&mut other, Head::Greedy);
    graph.replay(&mut other, &mut tiny.slab, Drive::Host(&[FIRST])).unwrap();
    // The run may not be over: memory and kernels have to wait for it.
    drop(tiny);
    drop(other);
    drop(graph);
    let mut tiny = self::tiny(gpu);
    still_works(gpu, &mut tiny);
}

#[test]
fn a_graph_is_run_over_its_own_memory_only() {
    let Some(mut gpu) = device::gpu("a graph and other memory") else { return };
    let gpu = &mut *gpu;
    let mut one = tiny(gpu);
    let two = tiny(gpu);
    let launches = one.capture_on(gpu, Head::Greedy).launches().to_vec();
    let mut executable = gpu.capture(one.slab.memory_mut(), &launches).unwrap();
    let mut other = two.slab.into_memory();
    let error = gpu.replay(&mut other, &mut executable).unwrap_err();
    assert!(error.to_string().contains("other memory"), "{error}");

    // Nor is anything launched beyond the memory's end.
    let mut small = gpu.allocate(4096).unwrap();
    let error = gpu.launch(&mut small, &launches[0]).unwrap_err();
    assert!(error.to_string().contains("outside of 4096 bytes"), "{error}");
    assert!(gpu.capture(&mut small, &launches).is_err());
}
