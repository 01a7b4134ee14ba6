//! Steps of many sequences on a backend: what the [`BatchStep`] of a loaded model does.

use decode_graph::batch::{NO_ROW, PADDING, Row as StepRow};
use decode_graph::{Backend, Drive, Head, KvArena};
use gpu_slab::{DeviceMemory, Slab, View};
use kernels_ptx::{SamplingPack, TokenParams};
use kv_paged::{GroupId, PlanError, PlannerConfig, Transfer};

use super::job::SchedulerOptions;
use super::plan::{BatchPlan, step_of};
use super::step::{BatchStep, Bucket, Row, StepKind, Wanted};
use crate::decoder::Decoder;
use crate::residency::{ResidencyError, StepName, Telemetry, last_candidate};

/// A loaded model that runs steps of many sequences.
pub trait BatchDevice: BatchStep {
    /// `host` or `cuda`.
    fn backend(&self) -> &'static str;

    /// What it runs on, for people.
    fn device(&self) -> String;

    /// A copy of everything that can be watched.
    fn telemetry(&self) -> Telemetry;

    /// Bytes that went to the device so far.
    fn h2d_bytes(&self) -> u64;
}

/// What a decoder of many sequences has besides.
pub(crate) struct Many {
    pub(crate) scheduler: SchedulerOptions,
    planner: PlannerConfig,
    places: Vec<GroupPlace>,
    /// Of each group, the blocks that wait in host memory, `[block][layer]`.
    host: Vec<Vec<u8>>,
    known: Known,
    next: Inputs,
}

/// Where a layer group's blocks lie in the cache.
struct GroupPlace {
    first_byte: u64,
    layers: u64,
    layer_bytes: u64,
    block_bytes: u64,
}

/// What the device's small buffers hold, so that a step uploads only what is new.
#[derive(Default)]
struct Known {
    is_certain: bool,
    inputs: Inputs,
}

/// What a step reads from the small buffers.
#[derive(Default)]
struct Inputs {
    rows: Vec<StepRow>,
    outputs: Vec<u32>,
    packs: Vec<SamplingPack>,
}

impl Many {
    pub(crate) fn new(one: &decode_graph::StepPlan, batch: &BatchPlan) -> Result<Self, PlanError> {
        let kv = &one.kv;
        let (mut places, mut host, mut first_byte) = (Vec::new(), Vec::new(), 0);
        for (index, group) in batch.planner.groups().iter().enumerate() {
            let id = GroupId(index as u32);
            let layout = batch.planner.layout(id, kv.n_kv_head(), kv.head_dim(), kv.kv_type())?;
            let place = GroupPlace {
                first_byte,
                layers: group.layers.into(),
                layer_bytes: layout.layer_stride() * kv.kv_type().elem_bytes(),
                block_bytes: layout.block_bytes(),
            };
            first_byte += layout.total_bytes();
            host.push(vec![0; (u64::from(group.host_blocks) * place.all_layers_bytes()) as usize]);
            places.push(place);
        }
        let (scheduler, planner) = (batch.scheduler.clone(), batch.planner.clone());
        let (known, next) = (Known::default(), Inputs::default());
        Ok(Self { scheduler, planner, places, host, known, next })
    }
}

impl GroupPlace {
    /// Bytes of a block in every layer.
    fn all_layers_bytes(&self) -> u64 {
        self.layers * self.block_bytes
    }

    /// A block, layer by layer.
    fn block<'a>(
        &'a self,
        kv: &'a KvArena,
        block: u32,
    ) -> impl Iterator<Item = Result<View, ResidencyError>> + 'a {
        (0..self.layers).map(move |layer| {
            let at =
                self.first_byte + layer * self.layer_bytes + u64::from(block) * self.block_bytes;
            Ok(kv.blocks.slice(at..at + self.block_bytes)?)
        })
    }

    /// Where each layer of a block waits in host memory.
    fn host_block(&self, block: u32) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        (0..self.layers).map(move |layer| {
            let at = u64::from(block) * self.all_layers_bytes() + layer * self.block_bytes;
            at as usize..(at + self.block_bytes) as usize
        })
    }
}

impl Inputs {
    /// Becomes those of a step, padded to its bucket.
    fn set(&mut self, step: (StepKind, Bucket, Head), rows: &[Row], wanted: &[Wanted]) {
        let (kind, bucket, head) = step;
        let padded = bucket.rows() as usize;
        self.rows.clear();
        self.rows.extend(rows.iter().map(|row| StepRow {
            sequence: row.sequence,
            params: TokenParams {
                absolute_position: row.position,
                ring_slot: row.position,
                token_id: row.token,
            },
        }));
        self.rows.resize(padded, PADDING);
        self.outputs.clear();
        self.outputs.extend(wanted.iter().map(|want| want.row));
        self.outputs.resize(if kind == StepKind::Decode { padded } else { 1 }, NO_ROW);
        self.packs.clear();
        if head == Head::Sampled {
            self.packs.extend(wanted.iter().map(|want| want.sampling));
        }
    }
}

impl Known {
    /// Brings the device's buffers to hold these inputs.
    fn bring<M: DeviceMemory>(
        &mut self,
        slab: &mut Slab<M>,
        arena: &decode_graph::StepArena,
        next: &Inputs,
    ) -> Result<(), ResidencyError> {
        if !self.is_certain {
            // Counters of blocks that arrived begin at 0, whatever a failed step has left there.
            arena.zero(slab)?;
            *self = Self::default();
        }
        self.is_certain = false;
        let known = &mut self.inputs;
        if let Some((first, new)) = update(&mut known.rows, &next.rows) {
            arena.write_rows(slab, first, new)?;
        }
        if let Some((first, new)) = update(&mut known.outputs, &next.outputs) {
            arena.write_outputs(slab, first, new)?;
        }
        if let Some((first, new)) = update(&mut known.packs, &next.packs) {
            arena.write_sampling(slab, first, new)?;
        }
        Ok(())
    }

    /// The step is done: the device has advanced the rows of outputs.
    fn advance(&mut self, wanted: &[Wanted], chosen: &[u32], max_context_tokens: u32) {
        for (want, &token_id) in wanted.iter().zip(chosen) {
            let params = &mut self.inputs.rows[want.row as usize].params;
            let ring_slot = (params.ring_slot + 1) % max_context_tokens;
            let absolute_position = params.absolute_position + 1;
            *params = TokenParams { absolute_position, ring_slot, token_id };
        }
        self.is_certain = true;
    }
}

/// Makes `known` begin with `wanted`; what of it is new lies between the first and the last
/// difference.
fn update<'a, T: Clone + PartialEq>(known: &mut Vec<T>, wanted: &'a [T]) -> Option<(u32, &'a [T])> {
    let differs = |i: &usize| known.get(*i) != Some(&wanted[*i]);
    let first = (0..wanted.len()).find(differs)?;
    let last = (0..wanted.len()).rfind(differs)?;
    let new = &wanted[first..=last];
    let known_end = known.len().min(last + 1);
    known.splice(first..known_end, new.iter().cloned());
    Some((first as u32, new))
}

impl<B: Backend> Decoder<B> {
    /// Runs a step of padding, so that clocks, driver and modules are ready before the first token.
    pub(crate) fn warm_up_batch(&mut self) -> Result<(), ResidencyError> {
        self.run_rows(StepKind::Decode, Bucket::of(1), &[], &[], &mut Vec::new())
    }

    fn prepare_bucket(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        head: Head,
    ) -> Result<(), ResidencyError> {
        let n_tokens = bucket.rows();
        let run_tokens = if kind == StepKind::Chunk { n_tokens } else { 1 };
        if self.residency.use_graph(StepName { head, n_tokens, run_tokens }) {
            return Ok(());
        }
        let many = self.many.as_ref().ok_or(NOT_LOADED)?;
        let device = self.residency.backend().profile();
        let plan = step_of(&self.plan, &many.planner, kind, bucket, head, &device);
        self.residency.prepare_graph(&plan, &self.weights)
    }

    fn run_rows(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        rows: &[Row],
        wanted: &[Wanted],
        chosen: &mut Vec<u32>,
    ) -> Result<(), ResidencyError> {
        let samples = wanted.iter().any(|want| want.sampling.temperature > 0.0);
        let head = match kind {
            StepKind::Chunk if wanted.is_empty() => Head::None,
            _ if samples => Head::Sampled,
            _ => Head::Greedy,
        };
        self.prepare_bucket(kind, bucket, head)?;

        let (_, arena) = self.arenas()?;
        let max_context_tokens = self.plan.kv.max_context_tokens();
        let Many { known, next, .. } = self.many.as_mut().ok_or(NOT_LOADED)?;
        next.set((kind, bucket, head), rows, wanted);
        known.bring(self.residency.slab_mut(), &arena, next)?;
        self.residency.replay(Drive::SelfAdvance)?;
        let first = chosen.len();
        chosen.resize(first + wanted.len(), 0);
        if !wanted.is_empty() {
            arena.read_tokens(self.residency.slab_mut(), &mut chosen[first..])?;
        }
        let n_vocab = self.plan.dims.n_vocab;
        for ((output, want), &token) in (0..).zip(wanted).zip(&chosen[first..]) {
            let last = last_candidate(&want.sampling, n_vocab);
            self.residency.check_number(output * u64::from(n_vocab), token, last)?;
        }
        let known = &mut self.many.as_mut().ok_or(NOT_LOADED)?.known;
        known.advance(wanted, &chosen[first..], max_context_tokens);
        Ok(())
    }

    fn arenas(&self) -> Result<(KvArena, decode_graph::StepArena), ResidencyError> {
        self.residency.arenas().map(|(kv, arena)| (*kv, *arena)).ok_or(NOT_LOADED)
    }
}

const NOT_LOADED: ResidencyError = ResidencyError::Missing("cache of many sequences");

impl<B> BatchStep for Decoder<B>
where
    B: Backend + Send,
    B::Memory: Send,
    B::Executable: Send,
{
    fn n_vocab(&self) -> u32 {
        self.plan.dims.n_vocab
    }

    fn transfer(&mut self, transfer: Transfer) -> Result<(), ResidencyError> {
        let (kv, _) = self.arenas()?;
        let Many { places, host, .. } = self.many.as_mut().ok_or(NOT_LOADED)?;
        let slab = self.residency.slab_mut();
        match transfer {
            Transfer::Copy { group: GroupId(group), from, to } => {
                let place = &places[group as usize];
                for (from, to) in place.block(&kv, from.0).zip(place.block(&kv, to.0)) {
                    slab.copy(from?, to?)?;
                }
            }
            Transfer::Out { group: GroupId(group), from, to } => {
                let (place, host) = (&places[group as usize], &mut host[group as usize]);
                for (from, to) in place.block(&kv, from.0).zip(place.host_block(to.0)) {
                    slab.read_view(from?, 0, &mut host[to])?;
                }
            }
            Transfer::In { group: GroupId(group), from, to } => {
                let (place, host) = (&places[group as usize], &host[group as usize]);
                for (from, to) in place.host_block(from.0).zip(place.block(&kv, to.0)) {
                    slab.write_view(to?, 0, &host[from])?;
                }
            }
        }
        Ok(())
    }

    fn write_table(&mut self, index: u32, values: &[u32]) -> Result<(), ResidencyError> {
        let (kv, _) = self.arenas()?;
        let at = u64::from(index) * 4;
        Ok(self.residency.slab_mut().write_view(kv.table, at, bytemuck::cast_slice(values))?)
    }

    fn run(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        rows: &[Row],
        wanted: &[Wanted],
        chosen: &mut Vec<u32>,
    ) -> Result<(), ResidencyError> {
        self.run_rows(kind, bucket, rows, wanted, chosen)
    }
}

impl<B> BatchDevice for Decoder<B>
where
    B: Backend + Send,
    B::Memory: Send,
    B::Executable: Send,
{
    fn backend(&self) -> &'static str {
        self.residency.backend().name()
    }

    fn device(&self) -> String {
        self.residency.backend().device()
    }

    fn telemetry(&self) -> Telemetry {
        self.residency.telemetry()
    }

    fn h2d_bytes(&self) -> u64 {
        self.residency.slab().counters().h2d_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::update;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_update_is_what_is_new_and_makes_it_known(
            known in proptest::collection::vec(0..3_u8, 0..8),
            wanted in proptest::collection::vec(0..3_u8, 0..8),
        ) {
            let mut device = known.clone();
            device.resize(16, 9);
            let mut updated = known.clone();
            match update(&mut updated, &wanted) {
                None => prop_assert!(known.starts_with(&wanted)),
                Some((first, new)) => {
                    device[first as usize..][..new.len()].copy_from_slice(new);
                    prop_assert_ne!(known.get(first as usize), Some(&new[0]));
                }
            }
            prop_assert!(device.starts_with(&wanted));
            prop_assert!(updated.starts_with(&wanted));
            // What is believed of the device is so.
            prop_assert_eq!(&device[..updated.len()], &updated[..]);
        }
    }
}
