//! The CUDA backend on a GPU: every kernel against its CPU twin, the step against the host's, and
//! what happens when things go wrong. Without a GPU every test says that it was skipped.
//!
//! Where there is a fake driver beside the binary, all of it runs over that too.
//!
//! `KERNELS_SEED` repeats a run, `GPU_TESTS_REQUIRED=1` makes a skipped test fail,
//! `GPU_TESTS_REPLAYS` is how often the graph of the drift test is replayed (10 000). Needs no files:
//! the binary can be carried to another machine.

/// The cases that the kernels are also run on as host code.
#[path = "../../../kernels-ptx/tests/cu"]
mod cu {
    #[allow(dead_code, reason = "it serves another test too")]
    pub(crate) mod cases;
}
#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "it serves another test too")]
mod support;

mod appended;
mod batch;
mod capture;
mod device;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod failing;
mod fake;
mod faults;
mod kernels;
mod model_shapes;
mod soak;
mod step;
