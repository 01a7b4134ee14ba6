#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

pub mod backend;
mod graph;
mod key;
mod launch;
mod plan;
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
pub use plan::{
    Head, KvArena, LayerWeights, ModelDims, ModelWeights, Numerics, RopePlan, StepArena, StepPlan,
    WeightRef,
};
pub use step::{RecordError, Recording, record};
pub use telemetry::GraphTelemetry;
