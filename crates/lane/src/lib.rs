#![doc = include_str!("../README.md")]

pub mod chat;
pub mod decode;
pub mod decoder;
pub mod diff;
pub mod generate;
pub mod gguf;
pub mod lane;
mod layout;
pub mod memory_plan;
pub mod model;
pub mod open;
pub mod open_cuda;
pub mod residency;
pub mod synth;
pub mod tokenizer;

pub use generate::{DriveMode, GenerateOptions, Generation, Sampling, StopReason, Timing, Token};
pub use lane::{Lane, LaneError};
pub use memory_plan::{ContextSize, MemoryPlan, PlanOptions};
pub use open::{BackendChoice, LaneOptions, ModelFile};
