//! What generation asks of a decoder, whatever backend it runs on.

use decode_graph::{Drive, Head, OpTime};
use gpu_slab::QueuedRead;
use kernels_ptx::SamplingPack;

use crate::batch::{BatchDevice, SchedulerOptions};
use crate::residency::{ResidencyError, Telemetry};

/// A loaded model with its KV cache: runs steps of one sequence.
pub trait Decode: Send {
    /// `host` or `cuda`.
    fn backend(&self) -> &'static str;

    /// What it runs on, for people.
    fn device(&self) -> String;

    /// Whether a step is only queued when [`step`](Self::step) returns.
    fn is_asynchronous(&self) -> bool;

    /// Tokens of the vocabulary.
    fn n_vocab(&self) -> u32;

    /// Token slots of the KV cache.
    fn max_context_tokens(&self) -> u32;

    /// Shape of the KV cache.
    fn kv(&self) -> kv_paged::PagedKvConfig;

    /// Chooses how steps end from here on; captures a graph the first time.
    fn prepare(&mut self, head: Head) -> Result<(), ResidencyError>;

    /// Parameters of [`Head::Sampled`]; uploaded only when they changed.
    fn set_sampling(&mut self, pack: &SamplingPack) -> Result<(), ResidencyError>;

    /// Queues the computation of the first of `ids`, the first of them at `position`, with nothing
    /// chosen behind them, and says how many; 0 where one by one is as well.
    fn prefill(&mut self, position: u32, ids: &[u32]) -> Result<usize, ResidencyError> {
        let _ = (position, ids);
        Ok(0)
    }

    /// Queues one step.
    fn step(&mut self, drive: Drive<'_>) -> Result<(), ResidencyError>;

    /// The token that the last step chose, once it is done.
    fn token(&mut self) -> Result<u32, ResidencyError>;

    /// Queues the reading of the token that the step queued last will choose, so that another step
    /// can be queued before it is waited for.
    fn queue_token(&mut self) -> Result<QueuedRead, ResidencyError>;

    /// Waits for a queued token.
    fn finish_token(&mut self, queued: QueuedRead) -> Result<u32, ResidencyError>;

    /// The logits of the last step, `[n_vocab]`, once it is done.
    fn logits(&mut self, logits: &mut [f32]) -> Result<(), ResidencyError>;

    /// Identity of what keys and values depend on besides the tokens.
    fn fingerprint(&self) -> u64;

    /// What the cache holds of the first `n_tokens` tokens, in whole blocks, `[layer][block]`.
    fn read_cache(&mut self, n_tokens: u32) -> Result<Vec<u8>, ResidencyError>;

    /// Writes what [`read_cache`](Self::read_cache) read.
    fn write_cache(&mut self, n_tokens: u32, blocks: &[u8]) -> Result<(), ResidencyError>;

    /// The same decoder for many sequences, and what their scheduler decides by, if it was loaded
    /// for them.
    fn into_batch(self: Box<Self>) -> Option<(SchedulerOptions, Box<dyn BatchDevice>)> {
        None
    }

    /// Times the operations of the step at a depth of so many tokens, and the whole step, seconds:
    /// medians of `repetitions`. The cache may not be relied on afterwards.
    fn time_ops(
        &mut self,
        depth: u32,
        repetitions: u32,
    ) -> Result<(Vec<OpTime>, f64), ResidencyError>;

    /// Bytes per second at which the backend reads memory that no cache holds.
    fn read_bandwidth(&mut self) -> Result<f64, ResidencyError>;

    /// A copy of everything that can be watched.
    fn telemetry(&self) -> Telemetry;

    /// The slab's allocations, for people.
    fn report(&self) -> gpu_slab::Report;
}
