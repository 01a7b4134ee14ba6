#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

pub mod backend;
pub mod batch;
mod graph;
mod key;
mod launch;
mod persistent;
mod plan;
mod profile;
pub mod ptx;
mod step;
mod telemetry;
pub mod testing;

#[cfg(feature = "cuda")]
pub use backend::cuda::CudaBackend;
pub use backend::{Backend, BackendError, HostBackend};
pub use graph::{Drive, Graph, GraphError};
pub use key::GraphKey;
pub use launch::{BindError, ByteRange, Label, Launch};
pub use persistent::{
    PersistentFailure, PersistentOptions, clear_persistent_failure, persistent_failure,
    record_persistent,
};
pub use plan::{
    Activation, Fusion, Head, KvArena, LayerWeights, ModelDims, ModelWeights, Numerics,
    PersistentArena, RopePlan, StepArena, StepPlan, WeightRef,
};
pub use profile::{OpTime, Probe, read_bandwidth};
pub use step::{RecordError, Recording, record};
pub use telemetry::GraphTelemetry;
