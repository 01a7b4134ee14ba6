#![doc = include_str!("../README.md")]
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod allocate;
mod arena;
mod counters;
mod error;
mod ladder;
mod memory;
mod plan;
mod report;
mod slab;
mod transaction;
mod validity;
mod view;

pub use allocate::{Allocate, DEFAULT_ALIGN_BYTES};
pub use arena::Arena;
pub use counters::Counters;
pub use error::SlabError;
pub use ladder::{DEFAULT_LADDER, Refusal, ladder_from};
#[cfg(feature = "cuda")]
pub use memory::cuda;
pub use memory::{DeviceMemory, HostMemory, MemoryError, QueuedRead};
pub use plan::Plan;
pub use report::{Allocation, Report};
pub use slab::Slab;
pub use view::{Checkpoint, SlabId, View};

/// Memory that fails on purpose, for the tests of whoever builds on a slab.
///
/// Always compiled in: a downstream crate that must survive a refused allocation or a failed copy
/// tests it with these, without a device.
///
/// ```
/// use gpu_slab::{HostMemory, Slab, SlabError, testing::FailingMemory};
///
/// let memory = FailingMemory::new(HostMemory::new(4096)?).refuse_call(2);
/// let mut slab = Slab::new(memory);
/// slab.allocate_zeroed("first", 256)?;
/// let error = slab.allocate_zeroed("second", 256).unwrap_err();
/// assert!(matches!(error, SlabError::Memory { name, .. } if name == "second"));
/// assert_eq!(slab.used_bytes(), 256); // the refused allocation left nothing behind
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub mod testing {
    pub use crate::memory::failing::{FailingMemory, host_memory_up_to};
}
