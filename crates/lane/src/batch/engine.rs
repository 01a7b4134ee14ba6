//! Many sequences at once: a scheduler, and the device that it plans for.

use std::collections::HashMap;

use kv_paged::{Delta, PlannerReport};

use super::job::{Job, JobReport, SchedulerCounts, SubmitError, Ticket};
use super::scheduler::{Batch, Scheduler};
use super::step::{BatchStep, Wanted};
use crate::residency::ResidencyError;
use crate::sampling::Sampling;

/// Decodes many sequences with continuous batching: jobs join and leave between steps.
///
/// A result does not depend on what else runs, nor on when it gives way, but for the kernels of
/// another [bucket](super::Bucket): those may differ in the last bits.
pub struct Engine<S> {
    step: S,
    scheduler: Scheduler,
    sampling: HashMap<Ticket, Sampling>,
    delta: Delta,
    batch: Batch,
    wanted: Vec<Wanted>,
    chosen: Vec<u32>,
    table_bytes: u64,
    block_moves: u64,
}

/// A token that a step chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Whose it is.
    pub ticket: Ticket,
    /// The token.
    pub token: u32,
    /// It is the last that the job may have: finish it.
    pub is_last: bool,
}

/// What an engine has done, and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineReport {
    /// Steps and rows.
    pub counts: SchedulerCounts,
    /// Blocks and sequences.
    pub planner: PlannerReport,
    /// Bytes of block-table entries that were uploaded.
    pub table_bytes: u64,
    /// Blocks that were moved: copies on write, swaps.
    pub block_moves: u64,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device failed. The next step begins to compute again what the cache has lost.
    #[error(transparent)]
    Step(#[from] ResidencyError),
    /// Jobs wait, and none of them can run. It does not happen; if it does, it ends here.
    #[error("{waiting_jobs} jobs wait and none can run")]
    Stuck {
        /// How many.
        waiting_jobs: usize,
    },
}

impl<S: BatchStep> Engine<S> {
    /// An engine over an empty cache.
    pub fn new(step: S, scheduler: Scheduler) -> Self {
        Self {
            step,
            scheduler,
            sampling: HashMap::new(),
            delta: Delta::new(),
            batch: Batch::default(),
            wanted: Vec::new(),
            chosen: Vec::new(),
            table_bytes: 0,
            block_moves: 0,
        }
    }

    /// Takes a job; it runs when there is room.
    pub fn submit(&mut self, job: Job, sampling: Sampling) -> Result<Ticket, SubmitError> {
        let n_vocab = self.step.n_vocab();
        if let Some(&id) = job.prompt.iter().find(|&&id| id >= n_vocab) {
            return Err(SubmitError::IdOutOfRange { id, n_vocab });
        }
        let ticket = self.scheduler.submit(job)?;
        self.sampling.insert(ticket, sampling);
        Ok(ticket)
    }

    /// A second job that goes on from where one is, with a choice of its own; `None` if that one has
    /// ended.
    pub fn fork(&mut self, ticket: Ticket, sampling: Sampling) -> Option<Ticket> {
        let fork = self.scheduler.fork(ticket)?;
        self.sampling.insert(fork, sampling);
        Some(fork)
    }

    /// Ends a job, whatever it is doing: because it has all it wants, or to cancel it.
    pub fn finish(&mut self, ticket: Ticket) -> Option<JobReport> {
        self.sampling.remove(&ticket);
        self.scheduler.finish(ticket)
    }

    /// Runs one step, and appends the tokens that it chose to `chosen`. False when there is nothing
    /// to do.
    pub fn step(&mut self, chosen: &mut Vec<Chosen>) -> Result<bool, EngineError> {
        if !self.scheduler.next_step(&mut self.batch) {
            return match self.scheduler.waiting_jobs() {
                0 => Ok(false),
                waiting_jobs => Err(EngineError::Stuck { waiting_jobs }),
            };
        }
        if let Err(error) = self.run() {
            self.scheduler.start_over();
            return Err(error.into());
        }
        self.scheduler.complete(&self.batch, &self.chosen);
        for (&(_, ticket), &token) in self.batch.outputs.iter().zip(&self.chosen) {
            chosen.push(Chosen { ticket, token, is_last: self.scheduler.is_full(ticket) });
        }
        Ok(true)
    }

    fn run(&mut self) -> Result<(), ResidencyError> {
        self.scheduler.take_delta(&mut self.delta);
        for &transfer in self.delta.transfers() {
            self.step.transfer(transfer)?;
            self.block_moves += 1;
        }
        for run in self.delta.runs() {
            self.step.write_table(run.index, run.values)?;
        }
        self.table_bytes += self.delta.value_bytes();
        self.wanted.clear();
        self.wanted.extend(self.batch.outputs.iter().map(|(row, ticket)| {
            let sampling = self.sampling.get(ticket).copied().unwrap_or(Sampling::GREEDY);
            Wanted { row: *row, sampling: sampling.pack() }
        }));
        self.chosen.clear();
        let Batch { kind, bucket, rows, .. } = &self.batch;
        self.step.run(*kind, *bucket, rows, &self.wanted, &mut self.chosen)
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The device.
    pub fn device(&self) -> &S {
        &self.step
    }

    /// What it has done, and what it holds.
    pub fn report(&self) -> EngineReport {
        EngineReport {
            counts: self.scheduler.counts(),
            planner: self.scheduler.report(),
            table_bytes: self.table_bytes,
            block_moves: self.block_moves,
        }
    }
}
