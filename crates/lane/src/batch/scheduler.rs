//! Which tokens the next step computes, for many requests that share one cache.

use std::collections::{BTreeMap, BTreeSet};

use kv_paged::{
    AdmissionPolicy, Delta, PlanError, Planner, PlannerReport, Request, Reserve, SequenceId,
    Verdict,
};

use super::job::{Job, JobReport, Preempt, SchedulerCounts, SchedulerOptions, SubmitError, Ticket};
use super::step::{Bucket, Row, StepKind};

/// A step to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// What its rows have in common.
    pub kind: StepKind,
    /// Rows that it is padded to.
    pub bucket: Bucket,
    /// What it computes.
    pub rows: Vec<Row>,
    /// Rows whose next token is wanted, with whose it is, by ascending row.
    pub outputs: Vec<(u32, Ticket)>,
    /// Tokens of each sequence in it.
    parts: Vec<(Ticket, u32)>,
}

enum Place {
    Waiting,
    Running(SequenceId),
    Swapped(SequenceId),
}

struct Entry {
    /// The prompt, then what was generated.
    tokens: Vec<u32>,
    prompt_tokens: u32,
    max_tokens: u32,
    salt: u64,
    place: Place,
    cached_tokens: Option<u32>,
    preemptions: u32,
}

/// Says which tokens the next step computes, of many jobs that share one cache.
///
/// Bookkeeping alone: blocks are [`kv_paged`]'s, memory is the [`BatchStep`](super::BatchStep)'s.
/// The rules:
///
/// - A step is a *prompt chunk*, rows of one sequence, or a *decode batch*, one row of each running
///   sequence. Prompts go first, one after the other: a full batch is what makes a step worth its
///   weights. Because a sequence is created when its turn comes, it finds in the prefix cache what
///   those before it have computed.
/// - Chunks end at multiples of the chunk size, whatever was cached before them, and a token that
///   was generated is computed in a decode row, also when it has to be computed again. So what a
///   position is computed with depends on the request alone.
/// - The oldest goes first: at admission, and when blocks are short. The youngest running sequence
///   gives way; the oldest always gets on, so everything ends.
pub struct Scheduler {
    options: SchedulerOptions,
    planner: Planner,
    jobs: BTreeMap<Ticket, Entry>,
    waiting: BTreeSet<Ticket>,
    /// In the order of their age.
    running: BTreeMap<Ticket, SequenceId>,
    swapped: BTreeSet<Ticket>,
    /// There was no room for this one, and nothing has been freed since.
    refused: Option<Ticket>,
    next_ticket: u64,
    counts: SchedulerCounts,
}

impl Scheduler {
    /// A scheduler without jobs over an empty cache.
    pub fn new(options: SchedulerOptions) -> Result<Self, PlanError> {
        Ok(Self {
            planner: Planner::new(options.planner_config()?),
            options,
            jobs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeMap::new(),
            swapped: BTreeSet::new(),
            refused: None,
            next_ticket: 0,
            counts: SchedulerCounts::default(),
        })
    }

    /// What it decides by.
    pub fn options(&self) -> &SchedulerOptions {
        &self.options
    }

    /// Tokens that a sequence can have at most, alone in the cache.
    pub fn max_tokens(&self) -> u32 {
        let (block_size, chunk) = (self.options.block_size_tokens, self.options.chunk_tokens);
        let fits = |tokens: u32| {
            let mut groups = self.options.groups.iter();
            groups.all(|group| group.peak_blocks(block_size, tokens, chunk) < group.blocks)
        };
        let context = self.options.max_context_tokens;
        if fits(context) {
            return context;
        }
        let (mut good, mut bad) = (0, context.div_ceil(block_size));
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle * block_size) { good = middle } else { bad = middle }
        }
        good * block_size
    }

    /// Takes a job; it runs when there is room.
    pub fn submit(&mut self, job: Job) -> Result<Ticket, SubmitError> {
        let max_tokens = self.max_tokens();
        if job.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        // The last token generated is never computed, so it needs no slot.
        if job.prompt.len() > max_tokens as usize {
            let prompt_tokens = job.prompt.len();
            return Err(SubmitError::PromptTooLong { prompt_tokens, max_tokens });
        }
        let prompt_tokens = job.prompt.len() as u32;
        let wanted = prompt_tokens.saturating_add(job.n_tokens.max(1));
        Ok(self.enter(Entry {
            tokens: job.prompt,
            prompt_tokens,
            max_tokens: wanted.min(max_tokens.saturating_add(1)),
            salt: job.salt,
            place: Place::Waiting,
            cached_tokens: None,
            preemptions: 0,
        }))
    }

    /// A second job that goes on from where one is, sharing all that is computed.
    /// `None` if it has ended, or has all its tokens.
    pub fn fork(&mut self, ticket: Ticket) -> Option<Ticket> {
        let entry = self.jobs.get(&ticket)?;
        if self.is_full(ticket) {
            return None;
        }
        let place = match entry.place {
            // With every row taken the new one waits; the prefix cache remembers the blocks.
            Place::Running(id) => self.planner.fork(id).map_or(Place::Waiting, Place::Running),
            Place::Waiting | Place::Swapped(_) => Place::Waiting,
        };
        let entry = Entry { tokens: entry.tokens.clone(), place, ..*entry };
        Some(self.enter(entry))
    }

    fn enter(&mut self, entry: Entry) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        match entry.place {
            Place::Running(id) => drop(self.running.insert(ticket, id)),
            _ => drop(self.waiting.insert(ticket)),
        }
        self.jobs.insert(ticket, entry);
        ticket
    }

    /// Ends a job, whatever it is doing. Its blocks stay cached until they are needed.
    pub fn finish(&mut self, ticket: Ticket) -> Option<JobReport> {
        let entry = self.jobs.remove(&ticket)?;
        match entry.place {
            Place::Waiting => drop(self.waiting.remove(&ticket)),
            Place::Running(id) => {
                self.running.remove(&ticket);
                self.free(id);
            }
            Place::Swapped(id) => {
                self.swapped.remove(&ticket);
                self.free(id);
            }
        }
        Some(JobReport {
            prompt_tokens: entry.prompt_tokens,
            cached_tokens: entry.cached_tokens.unwrap_or(0),
            preemptions: entry.preemptions,
            tokens: entry.tokens[entry.prompt_tokens as usize..].to_vec(),
        })
    }

    /// Whether a job has as many tokens as it may have.
    pub fn is_full(&self, ticket: Ticket) -> bool {
        self.jobs.get(&ticket).is_some_and(|e| e.tokens.len() as u64 >= u64::from(e.max_tokens))
    }

    /// Jobs that have not ended.
    pub fn live_jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Jobs that wait for their turn, those that gave way among them.
    pub fn waiting_jobs(&self) -> usize {
        self.waiting.len() + self.swapped.len()
    }

    /// Fills `batch` with what to compute next; false when there is nothing to do. Run
    /// [`take_delta`](Self::take_delta), then the step, then [`complete`](Self::complete).
    pub fn next_step(&mut self, batch: &mut Batch) -> bool {
        batch.clear();
        self.swap_in();
        let mut gave_way = false;
        while batch.rows.is_empty() {
            let prompting =
                self.next_prompt().or_else(|| if gave_way { None } else { self.admit() });
            let Some(ticket) = prompting else { break };
            self.plan_chunk(ticket, batch);
            gave_way = !self.running.contains_key(&ticket);
        }
        if batch.rows.is_empty() {
            self.plan_decode(batch);
        }
        batch.bucket = self.bucket(batch);
        self.counts.add(batch);
        !batch.rows.is_empty()
    }

    fn bucket(&self, batch: &Batch) -> Bucket {
        let rows = (batch.rows.len() as u32).max(self.options.min_bucket);
        Bucket::of(rows).min(match batch.kind {
            StepKind::Decode => Bucket::of(self.options.max_batch),
            StepKind::Chunk => Bucket::of(self.options.chunk_tokens),
        })
    }

    /// What the device has to do before the step.
    pub fn take_delta(&mut self, delta: &mut Delta) {
        self.planner.take_delta(delta);
    }

    /// The step was computed (or will be before anything that is planned from now on), and chose
    /// these tokens for `batch.outputs`.
    pub fn complete(&mut self, batch: &Batch, chosen: &[u32]) {
        debug_assert_eq!(batch.outputs.len(), chosen.len());
        if self.options.groups.iter().any(|group| group.window_tokens.is_some()) {
            // Blocks that slide out of a window come free.
            self.refused = None;
        }
        for &(ticket, n_tokens) in &batch.parts {
            if let Some(&id) = self.running.get(&ticket) {
                let done = self.planner.commit(id, n_tokens);
                debug_assert_eq!(done, Ok(()), "what the step appended is uncommitted");
            }
        }
        for (&(_, ticket), &token) in batch.outputs.iter().zip(chosen) {
            if let Some(entry) = self.jobs.get_mut(&ticket) {
                entry.tokens.push(token);
            }
        }
    }

    /// Nothing is known about the device's cache any more: every job is computed again, the tokens
    /// that it has being given.
    pub fn start_over(&mut self) {
        for (_, id) in std::mem::take(&mut self.running) {
            self.free(id);
        }
        for ticket in std::mem::take(&mut self.swapped) {
            if let Some(Entry { place: Place::Swapped(id), .. }) = self.jobs.get(&ticket) {
                self.free(*id);
            }
        }
        self.planner.drop_cached();
        self.planner.invalidate_table();
        for (&ticket, entry) in &mut self.jobs {
            entry.place = Place::Waiting;
            self.waiting.insert(ticket);
        }
    }

    /// The blocks.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    /// Counts of blocks and sequences.
    pub fn report(&self) -> PlannerReport {
        self.planner.report()
    }

    /// Counts of steps.
    pub fn counts(&self) -> SchedulerCounts {
        self.counts
    }

    fn free(&mut self, id: SequenceId) {
        self.refused = None;
        let freed = self.planner.free(id);
        debug_assert_eq!(freed, Ok(()), "a job's sequence lives");
    }

    fn committed(&self, id: SequenceId) -> u32 {
        self.planner.committed_tokens(id).unwrap_or(0)
    }

    /// The oldest running job whose prompt is not computed.
    fn next_prompt(&self) -> Option<Ticket> {
        let mut running = self.running.iter();
        let prompting =
            running.find(|(ticket, id)| self.committed(**id) < self.jobs[ticket].prompt_tokens);
        prompting.map(|(&ticket, _)| ticket)
    }

    /// Brings back those that wait in host memory, the oldest first, while there is room.
    fn swap_in(&mut self) {
        while let Some(&ticket) = self.swapped.first() {
            let Some(Entry { place: Place::Swapped(id), .. }) = self.jobs.get(&ticket) else {
                return;
            };
            let id = *id;
            let reserve = if self.running.is_empty() { 0 } else { self.options.watermark_blocks };
            let roomy = (0..self.options.groups.len() as u32).all(|group| {
                let group = kv_paged::GroupId(group);
                let needed = self.planner.sequence_report(id, group).map_or(0, |r| r.blocks);
                let pool = self.planner.pool(group);
                // One more, or it would have to go again for its next token.
                pool.is_ok_and(|pool| pool.available_blocks() > needed + reserve)
                    || self.running.is_empty()
            });
            if !roomy || self.planner.swap_in(id).is_err() {
                return;
            }
            self.swapped.pop_first();
            self.place(ticket, Place::Running(id));
        }
    }

    /// Starts the oldest waiting job, if there is room and none before it waits.
    fn admit(&mut self) -> Option<Ticket> {
        if !self.swapped.is_empty() || self.running.len() >= self.options.max_batch as usize {
            return None;
        }
        let &ticket = self.waiting.first()?;
        // Judging takes a look at the whole prompt: not with every step while nothing changes.
        if self.refused == Some(ticket) {
            return None;
        }
        let entry = &self.jobs[&ticket];
        let request = Request {
            prompt: &entry.tokens,
            max_tokens: entry.max_tokens.min(self.options.max_context_tokens),
            salt: entry.salt,
        };
        let policy = AdmissionPolicy {
            reserve: Reserve::Prompt,
            watermark_blocks: self.options.watermark_blocks,
            chunk_tokens: self.options.chunk_tokens,
            overtake: false,
        };
        let mut verdicts = Vec::with_capacity(1);
        self.planner.admit(&[request], &policy, &mut verdicts);
        let Some(Verdict::Admit { .. }) = verdicts.first() else {
            self.refused = Some(ticket);
            return None;
        };
        let created = self.planner.create(&request).ok()?;
        self.waiting.remove(&ticket);
        self.place(ticket, Place::Running(created.id));
        let entry = self.jobs.get_mut(&ticket)?;
        entry.cached_tokens.get_or_insert(created.cached_tokens.min(entry.prompt_tokens));
        Some(ticket)
    }

    fn place(&mut self, ticket: Ticket, place: Place) {
        match place {
            Place::Waiting => drop(self.waiting.insert(ticket)),
            Place::Running(id) => drop(self.running.insert(ticket, id)),
            Place::Swapped(_) => drop(self.swapped.insert(ticket)),
        }
        if let Some(entry) = self.jobs.get_mut(&ticket) {
            entry.place = place;
        }
    }

    /// The next chunk of a prompt, if any of it is left to compute.
    fn plan_chunk(&mut self, ticket: Ticket, batch: &mut Batch) {
        let Some(&id) = self.running.get(&ticket) else { return };
        let (start, chunk) = (self.committed(id), self.options.chunk_tokens);
        let end = (start / chunk + 1).saturating_mul(chunk).min(self.jobs[&ticket].prompt_tokens);
        if start < end && self.append(ticket, id, start, end) {
            batch.kind = StepKind::Chunk;
            self.push(batch, ticket, id, start, end);
        }
    }

    /// The next token of every running job.
    fn plan_decode(&mut self, batch: &mut Batch) {
        batch.kind = StepKind::Decode;
        let tickets: Vec<Ticket> = self.running.keys().copied().collect();
        for ticket in tickets {
            // It may have given way to one before it.
            let Some(&id) = self.running.get(&ticket) else { continue };
            let at = self.committed(id);
            if !self.is_full(ticket) && self.append(ticket, id, at, at + 1) {
                self.push(batch, ticket, id, at, at + 1);
            }
        }
    }

    fn push(&self, batch: &mut Batch, ticket: Ticket, id: SequenceId, start: u32, end: u32) {
        let tokens = &self.jobs[&ticket].tokens;
        for position in start..end {
            let token = tokens[position as usize];
            batch.rows.push(Row { sequence: id.row(), position, token });
        }
        batch.parts.push((ticket, end - start));
        if end as usize == tokens.len() {
            batch.outputs.push((batch.rows.len() as u32 - 1, ticket));
        }
    }

    /// Gets blocks for tokens of a job, from the youngest if need be; false if that was itself.
    fn append(&mut self, ticket: Ticket, id: SequenceId, start: u32, end: u32) -> bool {
        loop {
            let tokens = &self.jobs[&ticket].tokens[start as usize..end as usize];
            match self.planner.append(id, tokens) {
                Ok(()) => return true,
                Err(PlanError::OutOfBlocks { .. }) => {}
                Err(error) => unreachable!("a job's tokens fit its sequence: {error}"),
            }
            let Some((&youngest, _)) = self.running.last_key_value() else { return false };
            self.preempt(youngest);
            if youngest == ticket {
                return false;
            }
        }
    }

    fn preempt(&mut self, ticket: Ticket) {
        let Some(id) = self.running.remove(&ticket) else { return };
        self.refused = None;
        let swapped = self.options.preempt == Preempt::Swap
            // The only one there is would come back at once and find no more room than before.
            && !self.running.is_empty()
            && self.planner.swap_out(id).is_ok();
        if swapped {
            self.counts.swapped += 1;
            self.place(ticket, Place::Swapped(id));
        } else {
            self.counts.recomputed += 1;
            self.free(id);
            self.place(ticket, Place::Waiting);
        }
        if let Some(entry) = self.jobs.get_mut(&ticket) {
            entry.preemptions += 1;
        }
    }
}

impl Batch {
    fn clear(&mut self) {
        self.rows.clear();
        self.outputs.clear();
        self.parts.clear();
    }
}
