//! What many sequences need: a cache that they share, buffers for the largest step, and what the
//! scheduler decides by, planned before anything is allocated.

use std::collections::BTreeMap;

use decode_graph::{Head, StepPlan};
use gpu_slab::Plan;
use kernels_ptx::DeviceProfile;
use kv_paged::{LayerGroup, PlannerConfig};

use super::scheduler::{Preempt, SchedulerOptions};
use super::step::{Bucket, StepKind};
use crate::lane::LaneError;

/// How many sequences run together, and what they may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Sequences that run at the same time at most.
    pub max_batch: u32,
    /// Tokens of all sequences that the cache holds. `None`: `max_batch` contexts, or as many as the
    /// memory allows.
    pub ctx_total_tokens: Option<u32>,
    /// How a sequence gives way.
    pub preempt: Preempt,
    /// Tokens that can wait in host memory. `None`: as many as the cache holds.
    pub swap_tokens: Option<u32>,
    /// Share of the cache, in percent, that no new sequence gets while others run.
    pub watermark_percent: u32,
    /// Whether sequences that begin alike share what is alike.
    pub prefix_cache: bool,
    /// Every step has the bucket of at least so many rows.
    pub min_bucket: u32,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self {
            max_batch: 32,
            ctx_total_tokens: None,
            preempt: Preempt::Recompute,
            swap_tokens: None,
            watermark_percent: 1,
            prefix_cache: true,
            min_bucket: 1,
        }
    }
}

/// The part of a memory plan that many sequences add.
#[derive(Clone, Debug)]
pub struct BatchPlan {
    /// What the scheduler decides by.
    pub scheduler: SchedulerOptions,
    /// The planner of the cache.
    pub planner: PlannerConfig,
    /// The steps of every bucket; the buffers are for any of them.
    pub steps: Vec<StepPlan>,
}

impl BatchOptions {
    /// The plan for a model whose layers see the last `windows` tokens (0: all), with a cache of
    /// `total_tokens`.
    pub(crate) fn plan(
        &self,
        one: &StepPlan,
        windows: &[u32],
        total_tokens: u32,
        chunk_tokens: u32,
        device: &DeviceProfile,
    ) -> Result<BatchPlan, LaneError> {
        let kv = &one.kv;
        let (block_size, context) = (kv.block_size_tokens(), kv.max_context_tokens());
        let chunk_tokens = chunk_tokens.clamp(1, context);
        let blocks = total_tokens.div_ceil(block_size);
        let host_blocks = match self.preempt {
            Preempt::Recompute => 0,
            Preempt::Swap => self.swap_tokens.unwrap_or(total_tokens).div_ceil(block_size),
        };
        let mut layers = BTreeMap::<u32, u32>::new();
        windows.iter().for_each(|&window| *layers.entry(window).or_default() += 1);
        let group = |(&window, &layers): (&u32, &u32)| {
            let group = match window {
                0 => LayerGroup::full(layers, 0),
                _ => LayerGroup::sliding(layers, 0, window, 0),
            };
            // Layers with a window keep no more than they can see, and one chunk.
            let most = group.peak_blocks(block_size, context, chunk_tokens);
            let blocks = blocks.min(most.saturating_mul(self.max_batch)).saturating_add(1);
            LayerGroup { blocks, host_blocks: host_blocks.min(blocks), ..group }
        };
        let groups: Vec<LayerGroup> = layers.iter().map(group).collect();
        let scheduler = SchedulerOptions {
            max_batch: self.max_batch,
            chunk_tokens,
            max_context_tokens: context,
            block_size_tokens: block_size,
            groups: groups.clone(),
            prefix_cache: self.prefix_cache,
            watermark_blocks: (u64::from(blocks) * u64::from(self.watermark_percent) / 100) as u32,
            preempt: self.preempt,
            min_bucket: self.min_bucket,
        };
        let planner = scheduler.planner_config()?;
        let buckets = |rows: u32| (0..=Bucket::of(rows).rows().ilog2()).map(|n| Bucket::of(1 << n));
        let step = |kind, bucket| step_of(one, &planner, kind, bucket, Head::Sampled, device);
        let decode = buckets(self.max_batch).map(|bucket| step(StepKind::Decode, bucket));
        let chunks = buckets(chunk_tokens).map(|bucket| step(StepKind::Chunk, bucket));
        let steps = decode.chain(chunks).collect();
        Ok(BatchPlan { scheduler, planner, steps })
    }
}

/// The step of a bucket.
pub(crate) fn step_of(
    one: &StepPlan,
    planner: &PlannerConfig,
    kind: StepKind,
    bucket: Bucket,
    head: Head,
    device: &DeviceProfile,
) -> StepPlan {
    let plan = match kind {
        StepKind::Decode => one.for_batch(bucket.rows(), planner.clone(), device),
        StepKind::Chunk => one.for_chunk(bucket.rows(), Some(planner.clone()), device),
    };
    StepPlan { head, ..plan }
}

/// The most tokens, in whole blocks, whose plan fits `usable_bytes`; at least one block.
pub(crate) fn most_tokens(
    wanted_tokens: u32,
    block_size: u32,
    usable_bytes: u64,
    bytes: impl Fn(u32) -> Result<Plan, LaneError>,
) -> Option<u32> {
    let fits = |blocks: u32| {
        bytes(blocks.saturating_mul(block_size))
            .is_ok_and(|plan| plan.total_bytes() <= usable_bytes)
    };
    let (mut good, mut bad) = (0, wanted_tokens.div_ceil(block_size) + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    (good > 0).then_some(good * block_size)
}
