//! The same graph replayed for a long time on the device.

use decode_graph::{Backend, CudaBackend, Numerics};
use kv_paged::KvType;

use crate::device::{self, say};
use crate::support::{MEMORY_BYTES, Tiny, soak};

/// `gpu soak --ignored --nocapture`, alone, so that what the process holds is this test's.
#[test]
#[ignore = "a million replays, or SOAK_REPLAYS"]
fn a_run_of_a_million_replays_leaves_everything_as_it_was() {
    let Some(mut gpu) = device::gpu("a run of a million replays") else { return };
    let memory = gpu.allocate(MEMORY_BYTES).unwrap();
    let mut tiny = Tiny::in_memory(memory, gpu.profile(), Numerics::Q8, KvType::F16, false, 1);
    let free = |gpu: &CudaBackend| gpu.memory_bytes().unwrap().0;
    say(&format!("{}\n", soak::run(&mut *gpu, &mut tiny, soak::replays(), free)));
}
