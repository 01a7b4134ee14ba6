//! Memory of an NVIDIA GPU, over the driver's own interface.
//!
//! ```no_run
//! use gpu_slab::Slab;
//! use gpu_slab::cuda::{CudaContext, CudaMemory, CudaStream};
//!
//! let context = CudaContext::new(0)?;
//! let stream = CudaStream::new(&context)?;
//! let mut slab = Slab::new(CudaMemory::growing(&stream, 8 << 30)?);
//! let view = slab.allocate_and_write("weights", &[1, 2, 3, 4])?; // maps 2 MiB
//! let address = slab.device_ptr(view)?; // stays, however the slab grows
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All calls are ordered on one stream: what is written is seen by every kernel that is launched on
//! it later. [`CudaStream::new`] makes one that no other stream waits for; with
//! [`CudaStream::from_raw`] an engine's own is used, whatever library it came from (`cust`, `cudarc`).
//!
//! The functions of the driver are declared here with integer results: `cust` declares them with a
//! Rust enum that ends at CUDA 11.4, and a newer code in it would be undefined behaviour. Its types
//! are used as they are.

mod allocation;
mod context;
mod device_memory;
mod driver;
mod error;
mod staging;
mod stream;

pub use allocation::CudaAllocation;
pub use context::{CudaContext, CudaCounters, device_count, driver_version};
pub use device_memory::CudaMemory;
pub use error::DriverError;
pub use stream::CudaStream;

/// The driver's own handle of a context, as `cust` and `cudarc` have it too.
pub type RawContext = cust::sys::CUcontext;
/// The driver's own handle of a stream.
pub type RawStream = cust::sys::CUstream;
