//! What a scheduler is asked for and what it answers.

use kv_paged::{LayerGroup, PlanError, PlannerConfig};

use super::scheduler::Batch;
use super::step::StepKind;

/// How a running sequence gives way to older ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preempt {
    /// It is computed again, as far as its blocks are not cached any more.
    #[default]
    Recompute,
    /// Its blocks wait in host memory, or it is computed again where there is no room.
    Swap,
}

/// What a scheduler decides by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Sequences that run at the same time, at most.
    pub max_batch: u32,
    /// Rows of a prompt chunk, at most.
    pub chunk_tokens: u32,
    /// Tokens of a sequence at most.
    pub max_context_tokens: u32,
    /// Token slots of a block.
    pub block_size_tokens: u32,
    /// The layers and their blocks, the null block included.
    pub groups: Vec<LayerGroup>,
    /// Whether blocks are kept for requests that begin alike.
    pub prefix_cache: bool,
    /// Blocks that no new sequence gets while others run.
    pub watermark_blocks: u32,
    /// How a sequence gives way.
    pub preempt: Preempt,
    /// Every step is padded to the bucket of at least so many rows; 1: to the smallest that fits.
    pub min_bucket: u32,
}

impl SchedulerOptions {
    /// The planner of the cache.
    pub fn planner_config(&self) -> Result<PlannerConfig, PlanError> {
        let (groups, sequences) = (self.groups.clone(), self.max_batch);
        let config = PlannerConfig::new(groups, sequences, self.max_context_tokens)?
            .with_block_size(self.block_size_tokens)?;
        Ok(if self.prefix_cache { config } else { config.with_prefix_nodes(0) })
    }
}

/// A request's name inside the engine. Tickets are handed out in order: the smaller is the older.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// What a request asks of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Token ids to go on from.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; at least one is.
    pub n_tokens: u32,
    /// Jobs of different salts share nothing.
    pub salt: u64,
}

/// Why a job was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Nothing to start from.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// A token of the prompt that the vocabulary does not have.
    #[error("token id {id} is out of range: the vocabulary has {n_vocab} tokens")]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Tokens of the vocabulary.
        n_vocab: u32,
    },
    /// The prompt, and a first token behind it, can never be in the cache.
    #[error(
        "the prompt has {prompt_tokens} tokens, a sequence can have {max_tokens}, its answer among \
         them"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens that a sequence can have: context and blocks allow no more.
        max_tokens: u32,
    },
}

/// What became of a job, as far as it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobReport {
    /// Tokens generated.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were cached when it was first admitted.
    pub cached_tokens: u32,
    /// Times it gave way.
    pub preemptions: u32,
}

/// Counts since a scheduler was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounts {
    /// Steps of prompt chunks.
    pub chunk_steps: u64,
    /// Rows in them, without padding.
    pub chunk_rows: u64,
    /// Steps of decode batches.
    pub decode_steps: u64,
    /// Rows in them, without padding.
    pub decode_rows: u64,
    /// Sequences that gave way to be computed again.
    pub recomputed: u64,
    /// Sequences that gave way to host memory.
    pub swapped: u64,
}

impl SchedulerCounts {
    pub(super) fn add(&mut self, batch: &Batch) {
        let (steps, rows) = match batch.kind {
            StepKind::Chunk => (&mut self.chunk_steps, &mut self.chunk_rows),
            StepKind::Decode => (&mut self.decode_steps, &mut self.decode_rows),
        };
        *steps += u64::from(!batch.rows.is_empty());
        *rows += batch.rows.len() as u64;
    }
}
