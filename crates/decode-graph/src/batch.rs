//! Steps of many rows: batches of sequences, chunks of prompts.
//!
//! A step computes `n_tokens` *rows*. Each row is a token of some sequence at some position, and
//! all rows are appended to the cache before any of them attends, so that tokens of one sequence
//! may follow each other inside of a step: each sees those before it. `n_outputs` of the rows have
//! an *output*: logits, a token chosen from them by parameters of its own, and the row's next
//! input. What is not known when a graph is captured lies in small buffers of the [`StepArena`]:
//!
//! | buffer | per | is |
//! |---|---|---|
//! | `sequences` | row | which block table: a row of the planner's, [`kv_paged::SequenceId::row`] |
//! | `tokens` | row | [`TokenParams`]: position, slot, token; the device advances those of outputs |
//! | `outputs` | output | its row, or [`NO_ROW`] |
//! | `sampling` | output | [`SamplingPack`], for [`Head::Sampled`] |
//! | `logits`, `token`, `step_count` | output | results |
//!
//! [`StepPlan::for_batch`] is a step in which every row may be of another sequence and has an
//! output; [`StepPlan::for_chunk`] one of a run of tokens of one sequence, with one output. A batch
//! may mix both: rows of a prompt beside rows of sequences that decode, outputs where they are
//! wanted. Only `run_tokens` promises something in exchange for a faster attention, see there.
//!
//! ```no_run
//! # fn f<M: gpu_slab::DeviceMemory>(slab: &mut gpu_slab::Slab<M>, one: decode_graph::StepPlan,
//! #     device: kernels_ptx::DeviceProfile, planner: &mut kv_paged::Planner, id: kv_paged::SequenceId,
//! #     delta: &mut kv_paged::Delta) -> Result<(), Box<dyn std::error::Error>> {
//! use decode_graph::batch::{NO_ROW, PADDING, Row};
//! use decode_graph::{KvArena, StepArena};
//! use kernels_ptx::TokenParams;
//!
//! // Once: plans for a batch of 8 and a chunk of 128, one cache and one set of buffers for both.
//! let plans = [
//!     one.for_batch(8, planner.config().clone(), &device),
//!     one.for_chunk(128, Some(planner.config().clone()), &device),
//! ];
//! let kv = KvArena::for_plan(slab, &plans[0])?;
//! let arena = StepArena::for_plans(slab, &plans)?;
//! arena.zero(slab)?;
//! // ... record and capture each plan ...
//!
//! // When the planner has changed something: its table is the device's, index for index. (Transfers
//! // of blocks come first; see its front page.)
//! planner.take_delta(delta);
//! for run in delta.runs() {
//!     slab.write_view(kv.table, u64::from(run.index) * 4, bytemuck::cast_slice(run.values))?;
//! }
//!
//! // When a sequence joins or leaves: its row, and the row's output. Others stay as they are.
//! let params = TokenParams { absolute_position: 17, ring_slot: 17, token_id: 42 };
//! arena.write_rows(slab, 3, &[Row { sequence: id.row(), params }])?;
//! arena.write_outputs(slab, 3, &[3])?;
//! arena.write_rows(slab, 4, &[PADDING; 4])?;
//! arena.write_outputs(slab, 4, &[NO_ROW; 4])?;
//!
//! // Each step: `graph.replay(.., Drive::SelfAdvance)`, nothing to upload; then the tokens.
//! let mut tokens = [0; 8];
//! arena.read_tokens(slab, &mut tokens)?;
//! # Ok(()) }
//! ```
//!
//! Rules:
//! - A row's result depends on the plan (its bucket) and on its own sequence, not on other rows.
//! - Rows that nobody needs are [`PADDING`]: they belong to the table's last row, which is all null
//!   block, at position 0. What they write nobody reads. They have no output.
//! - Positions stay below the context: where many sequences share a cache, no ring turns. A run of
//!   several tokens does not go around the ring either.
//! - Two rows of a step are never the same position of the same sequence.
//! - Where a group has a window, only layers of that window are in it; all other layers are in the
//!   group that sees everything. Sinks are not attended to: a group that has some is refused.

use gpu_slab::{DeviceMemory, Slab, SlabError, View};
use kernels_ptx::{Kernel, SamplingPack, TokenParams};
use kv_paged::{KvType, PlannerConfig};

#[cfg(doc)]
use crate::plan::Head;
use crate::plan::{KvArena, StepArena, StepPlan};
use crate::step::{RecordError, expect};

/// The row of an output that is not wanted: no token is chosen, nothing advances.
pub const NO_ROW: u32 = u32::MAX;

/// What a row of a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its sequence's row in the block table; beyond the last counts as the last.
    pub sequence: u32,
    /// Its token and position.
    pub params: TokenParams,
}

/// A row that computes nothing that is needed.
pub const PADDING: Row = Row {
    sequence: u32::MAX,
    params: TokenParams { absolute_position: 0, ring_slot: 0, token_id: 0 },
};

impl StepArena {
    /// Writes rows, the first of them at `first`: 16 bytes each.
    pub fn write_rows<M: DeviceMemory>(
        &self,
        slab: &mut Slab<M>,
        first: u32,
        rows: &[Row],
    ) -> Result<(), SlabError> {
        let sequences: Vec<u32> = rows.iter().map(|row| row.sequence).collect();
        let params: Vec<TokenParams> = rows.iter().map(|row| row.params).collect();
        write(slab, self.sequences, first, &sequences)?;
        write(slab, self.tokens, first, &params)
    }

    /// Writes the rows of outputs, the first of them at `first`.
    pub fn write_outputs<M: DeviceMemory>(
        &self,
        slab: &mut Slab<M>,
        first: u32,
        rows: &[u32],
    ) -> Result<(), SlabError> {
        write(slab, self.outputs, first, rows)
    }

    /// Writes the sampling parameters of outputs, the first of them at `first`.
    pub fn write_sampling<M: DeviceMemory>(
        &self,
        slab: &mut Slab<M>,
        first: u32,
        packs: &[SamplingPack],
    ) -> Result<(), SlabError> {
        write(slab, self.sampling, first, packs)
    }

    /// Waits for the queued steps, and reads the tokens of the first outputs.
    pub fn read_tokens<M: DeviceMemory>(
        &self,
        slab: &mut Slab<M>,
        tokens: &mut [u32],
    ) -> Result<(), SlabError> {
        slab.read_view(self.token, 0, bytemuck::cast_slice_mut(tokens))
    }
}

fn write<M: DeviceMemory, T: bytemuck::Pod>(
    slab: &mut Slab<M>,
    view: View,
    first: u32,
    values: &[T],
) -> Result<(), SlabError> {
    slab.write_view(view, u64::from(first) * size_of::<T>() as u64, bytemuck::cast_slice(values))
}

/// Refuses a plan whose rows do not fit together.
pub(crate) fn check(plan: &StepPlan) -> Result<(), RecordError> {
    let (rows, outputs) = (u64::from(plan.n_tokens), u64::from(plan.n_outputs));
    expect("rows, at least 1", rows.max(1), rows)?;
    expect("outputs, at least 1 and at most as many as rows", outputs.clamp(1, rows), outputs)?;
    let rest = plan.n_tokens.checked_rem(plan.run_tokens).unwrap_or(plan.n_tokens);
    expect("rows beyond whole runs", 0, rest.into())?;
    let Some(planner) = &plan.sequences else { return Ok(()) };
    let (kv, of) = (&plan.kv, planner);
    expect("block size", kv.block_size_tokens().into(), of.block_size_tokens().into())?;
    expect("context", kv.max_context_tokens().into(), of.max_context_tokens().into())?;
    let sinks = planner.groups().iter().map(|group| u64::from(group.sink_tokens)).sum();
    expect("attention sinks", 0, sinks)
}

/// One layer's part of the KV cache.
#[derive(Clone, Copy)]
pub(crate) struct LayerCache {
    pub(crate) kv: View,
    /// The tables of all sequences.
    pub(crate) block_table: View,
    /// Physical blocks.
    pub(crate) n_blocks: u32,
    pub(crate) n_sequences: u32,
    /// Entries from a sequence's table to the next one's.
    pub(crate) table_stride: u32,
    /// Entries of a sequence's table.
    pub(crate) n_logical: u32,
    pub(crate) kernels: CacheKernels,
}

/// The kernels of a cache's element type.
#[derive(Clone, Copy)]
pub(crate) struct CacheKernels {
    pub(crate) append: Kernel,
    pub(crate) attention: Kernel,
    /// Both and the joining of segments at once, for one token.
    pub(crate) step: Option<Kernel>,
    /// Those that write f16, for many rows and runs of tokens, read it.
    pub(crate) half: bool,
    pub(crate) elem_bytes: u32,
}

impl CacheKernels {
    fn of(kv_type: KvType) -> Result<Self, RecordError> {
        let (append, attention, step) = match kv_type {
            KvType::F32 => {
                (Kernel::RopeAppendF32, Kernel::AttentionF32, Some(Kernel::AttentionStepF32))
            }
            KvType::F16 => {
                (Kernel::RopeAppendF16, Kernel::AttentionF16, Some(Kernel::AttentionStepF16))
            }
            KvType::Q8 => (Kernel::RopeAppendQ8, Kernel::AttentionQ8, None),
            other => return Err(RecordError::Unsupported(format!("a {other:?} KV cache"))),
        };
        let (half, elem_bytes) = (kv_type == KvType::F16, kv_type.elem_bytes() as u32);
        Ok(Self { append, attention, step, half, elem_bytes })
    }
}

impl LayerCache {
    /// Of layers with these windows.
    pub(crate) fn of_layers(
        plan: &StepPlan,
        kv: &KvArena,
        windows: &[u32],
    ) -> Result<Vec<Self>, RecordError> {
        let kernels = CacheKernels::of(plan.kv.kv_type())?;
        let n_logical = plan.kv.blocks_per_layer();
        let part = |view: View, range| view.slice(range).map_err(RecordError::Slab);
        let Some(planner) = &plan.sequences else {
            let layer_bytes = plan.kv.total_bytes() / u64::from(plan.dims.n_layer);
            let table_bytes = u64::from(n_logical) * 4;
            let of_layer = |layer: u64| {
                let at = |bytes: u64| layer * bytes..(layer + 1) * bytes;
                Ok(Self {
                    kv: part(kv.blocks, at(layer_bytes))?,
                    block_table: part(kv.table, at(table_bytes))?,
                    n_blocks: n_logical,
                    n_sequences: 1,
                    table_stride: 0,
                    n_logical,
                    kernels,
                })
            };
            return (0..windows.len() as u64).map(of_layer).collect();
        };

        let unsupported = |error: kv_paged::PlanError| RecordError::Unsupported(error.to_string());
        let layouts = (0..planner.groups().len())
            .map(|group| plan.group_layout(planner, group))
            .collect::<Result<Vec<_>, _>>()
            .map_err(unsupported)?;
        let mut used = vec![0u32; layouts.len()];
        let mut caches = Vec::new();
        for &window in windows {
            let group = group_of(planner, window)?;
            let before: u64 = layouts[..group].iter().map(|layout| layout.total_bytes()).sum();
            let layer_bytes = layouts[group].layer_stride() * u64::from(kernels.elem_bytes);
            let first = before + u64::from(used[group]) * layer_bytes;
            used[group] += 1;
            let table = group as u64 * u64::from(n_logical) * 4;
            caches.push(Self {
                kv: part(kv.blocks, first..first + layer_bytes)?,
                block_table: part(kv.table, table..kv.table.len_bytes())?,
                n_blocks: layouts[group].blocks_per_layer(),
                n_sequences: planner.max_sequences() + 1,
                table_stride: layouts.len() as u32 * n_logical,
                n_logical,
                kernels,
            });
        }
        for (group, used) in planner.groups().iter().zip(used) {
            expect("layers of a group", group.layers.into(), used.into())?;
        }
        Ok(caches)
    }
}

/// The group of a planner that layers with a window are in.
fn group_of(planner: &PlannerConfig, window: u32) -> Result<usize, RecordError> {
    let find = |wanted| planner.groups().iter().position(|group| group.window_tokens == wanted);
    let own = (window > 0).then(|| find(Some(window))).flatten();
    own.or_else(|| find(None)).ok_or(RecordError::Plan {
        what: "window of a group for a layer",
        expected: window.into(),
        found: 0,
    })
}
