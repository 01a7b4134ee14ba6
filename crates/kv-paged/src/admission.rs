//! Which waiting requests may start, and which running sequences make room.

use crate::{GroupId, LayerGroup, MAX_GROUPS, PlanError, Planner, Request, SequenceId};
use alloc::vec::Vec;

/// How much of a sequence's future an admission counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reserve {
    /// The prompt: more sequences run, and some may have to be preempted.
    #[default]
    Prompt,
    /// The maximum length, of running sequences too: nothing ever has to be preempted, unless
    /// sequences are forked or swapped in besides.
    Maximum,
}

/// How to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdmissionPolicy {
    /// What is counted.
    pub reserve: Reserve,
    /// Blocks of each group that are kept for running sequences; not asked for while nothing
    /// runs.
    pub watermark_blocks: u32,
    /// Tokens that are appended to one sequence before they are committed, at most.
    pub chunk_tokens: u32,
    /// Whether a request may pass one that has to wait.
    pub overtake: bool,
}

impl Default for AdmissionPolicy {
    fn default() -> Self {
        Self { reserve: Reserve::Prompt, watermark_blocks: 0, chunk_tokens: 512, overtake: false }
    }
}

/// What becomes of a request now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits, together with the admitted ones before it.
    Admit {
        /// Tokens of its prompt that are cached.
        cached_tokens: u32,
    },
    /// It fits once blocks come free.
    WaitForBlocks {
        /// The group that is short.
        group: GroupId,
        /// Blocks that it needs there.
        needed_blocks: u32,
        /// Blocks that it could have there.
        available_blocks: u32,
    },
    /// It fits once a sequence ends.
    WaitForSequence,
    /// One before it waits, and it may not overtake.
    WaitForTurn,
    /// It never fits.
    Never(PlanError),
}

/// Sequences to preempt, and what that gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preemption {
    /// The youngest first. Free each, to compute it again later, or swap it out.
    pub victims: Vec<SequenceId>,
    /// Blocks of the group that become available; fewer than asked for if there are not more.
    pub freed_blocks: u32,
}

/// A live sequence that begins like a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivePrefix {
    /// The sequence.
    pub id: SequenceId,
    /// Tokens of full blocks that both have.
    pub common_tokens: u32,
    /// Of these, tokens that are committed: what a request created now could share.
    pub committed_tokens: u32,
}

impl Planner {
    /// Says for each request, in order, whether it may start now. Counts nothing twice that the
    /// requests could share among themselves only later (see
    /// [`longest_live_prefix`](Self::longest_live_prefix)), so what is admitted does fit. Changes
    /// nothing; `create` those that are admitted. Returns how many are.
    pub fn admit(
        &self,
        requests: &[Request<'_>],
        policy: &AdmissionPolicy,
        verdicts: &mut Vec<Verdict>,
    ) -> u32 {
        verdicts.clear();
        let mut room = self.room(policy);
        let mut rows = self.sequences.max() - self.sequences.live();
        let mut waiting = false;
        let mut admitted = 0;
        for request in requests {
            let verdict = if waiting && !policy.overtake {
                Verdict::WaitForTurn
            } else {
                self.judge(request, policy, &mut room, &mut rows)
            };
            match verdict {
                Verdict::Admit { .. } => admitted += 1,
                Verdict::Never(_) => {}
                _ => waiting = true,
            }
            verdicts.push(verdict);
        }
        admitted
    }

    /// Sequences that would have to go for `blocks` of a group to become available, the youngest
    /// first, `keep` excepted. A block counts where only the victim refers to it.
    pub fn preemption(
        &self,
        group: GroupId,
        blocks: u32,
        keep: Option<SequenceId>,
    ) -> Result<Preemption, PlanError> {
        let index = self.check_group(group)?;
        let mut candidates: Vec<_> = self
            .sequences
            .iter()
            .filter(|&(id, sequence)| !sequence.swapped && Some(id) != keep)
            .map(|(id, sequence)| (sequence.age, id))
            .collect();
        candidates.sort_unstable();
        let mut preemption = Preemption::default();
        while preemption.freed_blocks < blocks {
            let Some((_, id)) = candidates.pop() else { break };
            let row = id.row as usize;
            let own = self
                .kept(row, index)
                .filter(|&logical| self.pools[index].refs(self.table.get(row, index, logical)) == 1)
                .count() as u32;
            if own > 0 {
                preemption.freed_blocks += own;
                preemption.victims.push(id);
            }
        }
        Ok(preemption)
    }

    /// The live sequence of the same salt that has most of a prompt's full blocks, committed or
    /// not. A request may be worth holding back while its prefix is being computed.
    pub fn longest_live_prefix(&self, prompt: &[u32], salt: u64) -> Option<LivePrefix> {
        let block_size = self.config.block_size_tokens();
        let usable = &prompt[..prompt.len().saturating_sub(1)];
        let full = |tokens: u32| tokens / block_size * block_size;
        self.sequences
            .iter()
            .filter(|(_, sequence)| sequence.salt == salt)
            .map(|(id, sequence)| {
                let common = sequence.tokens.iter().zip(usable).take_while(|(a, b)| a == b).count();
                let common_tokens = full(common as u32);
                let committed_tokens = common_tokens.min(full(sequence.committed));
                LivePrefix { id, common_tokens, committed_tokens }
            })
            .filter(|found| found.common_tokens > 0)
            .max_by_key(|found| (found.common_tokens, found.committed_tokens))
    }

    /// Blocks of each group that requests may have.
    fn room(&self, policy: &AdmissionPolicy) -> [u32; MAX_GROUPS] {
        let mut room = [0; MAX_GROUPS];
        for (group, room) in room.iter_mut().enumerate().take(self.pools.len()) {
            let pool = &self.pools[group];
            let (mut peaks, mut held, mut running) = (0, 0, 0);
            for (id, sequence) in self.sequences.iter().filter(|(_, s)| !s.swapped) {
                let target = match policy.reserve {
                    Reserve::Prompt => sequence.prompt_tokens.max(sequence.len()),
                    Reserve::Maximum => sequence.max_tokens,
                };
                let peak = self.peak_blocks(group, target, policy);
                peaks += u64::from(peak);
                held += u64::from(self.lasting_blocks(id.row as usize, group).min(peak));
                running += 1;
            }
            // What slides out of one window may stay in another, so there only the blocks count,
            // not who holds them.
            let held = if self.spans[group].is_full() { held } else { pool.used_blocks().into() };
            let mut taken = peaks.saturating_sub(held);
            if running > 0 {
                taken += u64::from(policy.watermark_blocks);
            }
            let taken = u32::try_from(taken).unwrap_or(u32::MAX);
            *room = pool.available_blocks().saturating_sub(taken);
        }
        room
    }

    /// Blocks that the sequence has and need not copy before it appends.
    fn lasting_blocks(&self, row: usize, group: usize) -> u32 {
        let len = self.sequences[row].len();
        let block_size = self.config.block_size_tokens();
        let copied = !len.is_multiple_of(block_size)
            && self.pools[group].refs(self.table.get(row, group, len / block_size)) > 1;
        self.kept(row, group).count() as u32 - u32::from(copied)
    }

    fn judge(
        &self,
        request: &Request<'_>,
        policy: &AdmissionPolicy,
        room: &mut [u32; MAX_GROUPS],
        rows: &mut u32,
    ) -> Verdict {
        if let Err(error) = self.check_request(request) {
            return Verdict::Never(error);
        }
        let target = match policy.reserve {
            Reserve::Prompt => request.prompt.len() as u32,
            Reserve::Maximum => request.max_tokens,
        };
        for (group, pool) in self.pools.iter().enumerate() {
            let peak = self.peak_blocks(group, target, policy);
            if peak > pool.usable_blocks() {
                return Verdict::Never(self.out_of_blocks(group, peak));
            }
        }
        if *rows == 0 {
            return Verdict::WaitForSequence;
        }
        let found = self.longest_match(request.prompt, request.salt);
        let mut needed = [0; MAX_GROUPS];
        for (group, pool) in self.pools.iter().enumerate() {
            // Only a cached block that somebody uses is had without one less for others, and only
            // where it does not slide away from one of the two.
            let mut in_use = 0;
            if self.spans[group].is_full() {
                let path = core::iter::successors(found.tip, |&node| self.prefix.parent(node));
                in_use = path.filter(|&node| pool.refs(self.prefix.block(node, group)) > 0).count();
            }
            needed[group] = self.peak_blocks(group, target, policy).saturating_sub(in_use as u32);
            if needed[group] > room[group] {
                return Verdict::WaitForBlocks {
                    group: GroupId(group as u32),
                    needed_blocks: needed[group],
                    available_blocks: room[group],
                };
            }
        }
        for (room, needed) in room.iter_mut().zip(needed) {
            *room -= needed;
        }
        *rows -= 1;
        Verdict::Admit { cached_tokens: found.blocks * self.config.block_size_tokens() }
    }

    fn peak_blocks(&self, group: usize, len_tokens: u32, policy: &AdmissionPolicy) -> u32 {
        let group: &LayerGroup = &self.config.groups()[group];
        group.peak_blocks(self.config.block_size_tokens(), len_tokens, policy.chunk_tokens)
    }
}
