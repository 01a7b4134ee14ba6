//! What many sequences need: a cache that they share, buffers for the largest step, and what the
//! scheduler decides by, planned before anything is allocated.

use std::collections::BTreeMap;

use decode_graph::{Head, StepPlan};
use gpu_slab::Plan;
use kernels_ptx::DeviceProfile;
use kv_paged::{LayerGroup, PlannerConfig};

use super::job::{Preempt, SchedulerOptions};
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

#[cfg(test)]
mod tests {
    use super::*;
    use decode_graph::{ModelDims, Numerics, RopePlan};
    use kernels_ptx::RopePairing;
    use kv_paged::PagedKvConfig;

    const DEVICE: DeviceProfile = DeviceProfile::A2000;

    fn one(context_tokens: u32) -> StepPlan {
        let dims = ModelDims {
            n_layer: 6,
            n_embd: 64,
            n_head: 2,
            n_kv_head: 1,
            head_dim: 32,
            n_ff: 64,
            n_vocab: 100,
        };
        let kv = PagedKvConfig::new(6, 1, 32, context_tokens).unwrap();
        let rope = RopePlan { pairing: RopePairing::Halves, n_pairs: 16, magnitude: 1.0 };
        StepPlan::new(dims, kv, Numerics::Q8, rope, 1e-6, &DEVICE)
    }

    #[test]
    fn layers_with_a_window_have_a_smaller_pool() {
        let options = BatchOptions { max_batch: 4, preempt: Preempt::Swap, ..Default::default() };
        let windows = [128, 128, 0, 128, 128, 128];
        let plan = options.plan(&one(4096), &windows, 8192, 64, &DEVICE).unwrap();
        let [full, sliding] = plan.scheduler.groups[..] else { panic!("{plan:?}") };
        assert_eq!((full.layers, full.window_tokens, full.blocks), (1, None, 512 + 1));
        assert_eq!((sliding.layers, sliding.window_tokens), (5, Some(128)));
        // The window of 128, a chunk of 64, and the block where the window begins: for each of four.
        assert_eq!((sliding.blocks, sliding.host_blocks), (4 * 13 + 1, 4 * 13 + 1));
        assert_eq!((full.host_blocks, plan.scheduler.watermark_blocks), (512, 5));
    }

    #[test]
    fn there_is_a_step_for_every_bucket() {
        let options = BatchOptions { max_batch: 6, ..Default::default() };
        let plan = options.plan(&one(32), &[0; 6], 100, 512, &DEVICE).unwrap();
        let rows: Vec<(u32, u32)> =
            plan.steps.iter().map(|step| (step.n_tokens, step.n_outputs)).collect();
        let decode = [1, 2, 4, 8].map(|rows| (rows, rows));
        let chunks = [1, 2, 4, 8, 16, 32].map(|rows| (rows, 1));
        assert_eq!(rows, [&decode[..], &chunks].concat());
        assert_eq!(plan.scheduler.chunk_tokens, 32, "no longer than the context");
    }

    #[test]
    fn the_most_tokens_that_fit_are_whole_blocks() {
        let bytes = |tokens: u32| -> Result<Plan, LaneError> {
            let plan = Plan::of(|arena| arena.allocate("kv", u64::from(tokens) * 10));
            Ok(plan.map_err(crate::residency::ResidencyError::from)?)
        };
        assert_eq!(most_tokens(1000, 16, 5120, bytes), Some(512));
        assert_eq!(most_tokens(1000, 16, 100, bytes), None);
        assert_eq!(most_tokens(40, 16, 1 << 20, bytes), Some(48));
    }
}
