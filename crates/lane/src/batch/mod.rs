//! Many sequences at once: continuous batching over one paged cache.
//!
//! [`Scheduler`] says what the next step computes, [`BatchStep`] computes it, [`Engine`] puts the two
//! together; [`RequestLine`] reads a request, [`Service`] answers many.

mod device;
mod engine;
mod job;
mod lines;
mod open;
mod plan;
mod request_line;
mod scheduler;
mod service;
mod step;

pub use device::BatchDevice;
pub(crate) use device::Many;
pub use engine::{Chosen, Engine, EngineError, EngineReport};
pub use job::{Job, JobReport, Preempt, SchedulerCounts, SchedulerOptions, SubmitError, Ticket};
pub use lines::{Line, MAX_LINE_BYTES, read_line};
pub use open::BatchLane;
pub(crate) use plan::most_tokens;
pub use plan::{BatchOptions, BatchPlan};
pub use request_line::{BadLine, DEFAULT_N_TOKENS, Prompt, RequestId, RequestLine};
pub use scheduler::{Batch, Scheduler};
pub use service::{Answer, AnswerTiming, Record, Refusal, Service};
pub use step::{BatchStep, Bucket, Row, StepKind, Wanted};
