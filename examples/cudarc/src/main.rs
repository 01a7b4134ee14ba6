//! An engine built on cudarc gives a decode step its memory and its stream, and reads what the
//! step left there.
//!
//! The engine allocates one piece of device memory with its own library. `gpu-slab` lays out the
//! model inside it, `decode-graph` records the step onto the engine's stream, and both hand nothing
//! back but offsets: the logits are read by the engine, through cudarc. Without a GPU it says so
//! and ends.
//!
//! `cargo run --manifest-path examples/cudarc/Cargo.toml`

// The tiny Llama of decode-graph's tests: weights, cache and buffers on any slab.
#[allow(dead_code, unused_imports)]
#[path = "../../../crates/decode-graph/tests/support/mod.rs"]
mod support;

use std::error::Error;

use cuda_load as _;
use cudarc::driver::{CudaContext, DevicePtr};
use decode_graph::{Backend, CudaBackend, Drive, Head, HostBackend, Numerics};
use gpu_slab::cuda::{self, CudaMemory, RawContext, RawStream};
use kernels_ptx::TokenParams;
use kv_paged::KvType;
use support::{MEMORY_BYTES, Tiny};

/// Tokens that the device chooses by itself after the first.
const STEPS: u32 = 20;
const FIRST: TokenParams = TokenParams { absolute_position: 0, ring_slot: 0, token_id: 4 };

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: looks for the library and closes it again.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        println!("skipped: no CUDA driver");
        return Ok(());
    }
    let engine = match CudaContext::new(0) {
        Ok(engine) => engine,
        Err(error) => {
            println!("skipped: no CUDA device ({error})");
            return Ok(());
        }
    };

    // The engine's: a stream (not the default one, which cannot be captured) and memory.
    let stream = engine.new_stream()?;
    let mut pool = stream.alloc_zeros::<u8>(MEMORY_BYTES as usize)?;
    let base_address = pool.device_ptr(&stream).0;

    // Ours, over the engine's handles. Everything is dropped before the engine's own values.
    let ids = {
        // SAFETY: `engine`, `stream` and `pool` outlive this block; nobody else uses the pool
        // inside of it, or by work on the same stream.
        let memory = unsafe {
            let context = cuda::CudaContext::from_raw(engine.cu_ctx() as RawContext)?;
            let stream = cuda::CudaStream::from_raw(&context, stream.cu_stream() as RawStream);
            CudaMemory::from_raw(&stream, base_address, MEMORY_BYTES)
        };
        let mut backend = CudaBackend::on_stream(memory.stream().clone())?;
        println!("{}: {}", backend.device(), engine.name()?);
        let mut tiny =
            Tiny::in_memory(memory, backend.profile(), Numerics::Exact, KvType::F32, false, 1);
        let mut graph = tiny.capture_on(&mut backend, Head::Greedy);

        let mut ids = Vec::new();
        for step in 0..STEPS {
            let drive = if step == 0 { Drive::Host(&[FIRST]) } else { Drive::SelfAdvance };
            graph.replay(&mut backend, &mut tiny.slab, drive)?;
            // The engine reads through its own library, in the order of its own stream.
            let token = tiny.slab.resolve(tiny.arena.token)?;
            let bytes = stream.clone_dtoh(&pool.slice(token.start as usize..token.end as usize))?;
            ids.push(u32::from_le_bytes(bytes[..4].try_into()?));
        }
        backend.synchronize()?;
        println!("{}", tiny.slab.report());
        println!("{:?}", graph.telemetry());
        assert_eq!(graph.telemetry().h2d_bytes_per_token, Some(0));
        ids
    };

    // The engine goes on with its memory as before.
    stream.memset_zeros(&mut pool)?;
    assert_eq!(ids, on_the_host()?, "the device's tokens are the host's");
    println!("{STEPS} tokens on cudarc's memory and stream, the same as on the host: {ids:?}");
    Ok(())
}

/// The same model by the kernels' CPU twins.
fn on_the_host() -> Result<Vec<u32>, Box<dyn Error>> {
    let mut tiny = Tiny::new(Numerics::Exact, KvType::F32, false, 1);
    let mut graph = tiny.capture(Head::Greedy);
    let mut ids = Vec::new();
    for step in 0..STEPS {
        let drive = if step == 0 { Drive::Host(&[FIRST]) } else { Drive::SelfAdvance };
        graph.replay(&mut HostBackend, &mut tiny.slab, drive)?;
        ids.push(tiny.u32(tiny.arena.token));
    }
    Ok(ids)
}
