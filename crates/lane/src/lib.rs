#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod batch;
pub mod chat;
pub mod decode;
pub mod decoder;
pub mod diff;
pub mod generate;
pub mod gguf;
pub mod lane;
mod layout;
pub mod loading;
pub mod memory_plan;
pub mod model;
pub mod open;
pub mod open_cuda;
pub mod perplexity;
pub mod residency;
pub mod sampling;
pub mod saved_state;
pub mod session;
mod shared;
pub mod stop_text;
pub mod synth;
pub mod tokenizer;

pub use generate::{DriveMode, GenerateOptions, Generation, StopReason, Timing, Token};
pub use lane::{Evaluator, Lane, LaneError};
pub use loading::CachePlace;
pub use memory_plan::{ContextSize, FusionChoice, MemoryPlan, PlanOptions};
pub use open::{BackendChoice, LaneOptions, ModelFile};
pub use sampling::{Logprob, Logprobs, Penalties, Sampling};
pub use session::{Answer, Session, SessionEvent};
pub use shared::Cancel;
