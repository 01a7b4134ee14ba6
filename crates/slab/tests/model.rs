//! Any sequence of operations, against a model that keeps everything and searches it plainly.

use gpu_slab::testing::FailingMemory;
use gpu_slab::{Checkpoint, HostMemory, Slab, SlabError, View};
use proptest::prelude::*;
use proptest::sample::Index;

const CAPACITY_BYTES: u64 = 8192;

#[derive(Clone, Debug)]
enum Op {
    Allocate { len_bytes: u64, align_log2: u32 },
    AllocateZeroed { len_bytes: u64 },
    AllocateAndWrite { len_bytes: u64, value: u8 },
    Write { view: Index, value: u8 },
    Fill { view: Index, value: u8 },
    Copy { from: Index, to: Index },
    Slice { view: Index, start: Index, end: Index },
    Cover { views: Vec<Index> },
    Checkpoint,
    Rewind { checkpoint: Index },
    RewindTransient,
    Seal,
    Transaction { ops: Vec<Op>, fail: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let leaf = prop_oneof![
        6 => (prop_oneof![Just(0u64), 1u64..1500], 0u32..10)
            .prop_map(|(len_bytes, align_log2)| Op::Allocate { len_bytes, align_log2 }),
        2 => (0u64..700).prop_map(|len_bytes| Op::AllocateZeroed { len_bytes }),
        3 => (0u64..700, any::<u8>())
            .prop_map(|(len_bytes, value)| Op::AllocateAndWrite { len_bytes, value }),
        3 => (index(), any::<u8>()).prop_map(|(view, value)| Op::Write { view, value }),
        2 => (index(), any::<u8>()).prop_map(|(view, value)| Op::Fill { view, value }),
        2 => (index(), index()).prop_map(|(from, to)| Op::Copy { from, to }),
        2 => (index(), index(), index())
            .prop_map(|(view, start, end)| Op::Slice { view, start, end }),
        1 => prop::collection::vec(index(), 0..4).prop_map(|views| Op::Cover { views }),
        4 => Just(Op::Checkpoint),
        4 => index().prop_map(|checkpoint| Op::Rewind { checkpoint }),
        1 => Just(Op::RewindTransient),
        1 => Just(Op::Seal),
    ];
    leaf.prop_recursive(3, 24, 8, |inner| {
        (prop::collection::vec(inner, 0..8), any::<bool>())
            .prop_map(|(ops, fail)| Op::Transaction { ops, fail })
    })
}

/// A view as the model sees it: plain numbers and when it was born.
#[derive(Clone, Copy, Debug)]
struct ModelView {
    view: View,
    born: usize,
    start: u64,
    end: u64,
}

#[derive(Clone, Copy, Debug)]
struct ModelCheckpoint {
    checkpoint: Checkpoint,
    taken: usize,
    offset: u64,
    live: usize,
}

/// What the slab must look like. Nothing is ever forgotten or summed up.
#[derive(Default)]
struct Model {
    /// Target of every rewind that ever happened; its length is the time.
    rewinds: Vec<u64>,
    used: u64,
    permanent_end: u64,
    /// How many of `live` are permanent.
    permanent_live: usize,
    /// Use and length of `live` at the start of each running transaction.
    transaction_starts: Vec<(u64, usize)>,
    high_water: u64,
    /// Name, start and end of what the report lists.
    live: Vec<(String, u64, u64)>,
    /// All views ever made, parts and covers too.
    views: Vec<ModelView>,
    checkpoints: Vec<ModelCheckpoint>,
    /// What the bytes must be; `None` where nobody has said so since they were allocated.
    bytes: Vec<Option<u8>>,
    h2d_bytes: u64,
    names: usize,
}

impl Model {
    fn new() -> Self {
        Self { bytes: vec![None; CAPACITY_BYTES as usize], ..Self::default() }
    }

    fn survives(&self, born: usize, end: u64) -> bool {
        self.rewinds[born..].iter().all(|&target| target >= end)
    }

    fn valid(&self, view: &ModelView) -> bool {
        self.survives(view.born, view.end)
    }

    fn floor(&self) -> u64 {
        self.transaction_starts.iter().map(|start| start.0).fold(self.permanent_end, u64::max)
    }

    fn rewind(&mut self, target: u64, live: usize) {
        self.rewinds.push(target);
        self.used = target;
        let kept = self.transaction_starts.iter().map(|start| start.1);
        self.live.truncate(kept.fold(live.max(self.permanent_live), usize::max));
        self.live.retain(|&(_, _, end)| end <= target);
    }

    fn keep(&mut self, view: View) -> ModelView {
        let model = ModelView {
            view,
            born: self.rewinds.len(),
            start: view.offset_bytes(),
            end: view.end_bytes(),
        };
        self.views.push(model);
        model
    }

    /// The place of an allocation that fits.
    fn place(&self, len: u64, align: u64) -> Option<(u64, u64)> {
        let start = self.used.div_ceil(align) * align;
        (start + len <= CAPACITY_BYTES).then_some((start, start + len))
    }

    fn set(&mut self, range: (u64, u64), value: Option<u8>) {
        self.bytes[range.0 as usize..range.1 as usize].fill(value);
    }
}

type Memory = FailingMemory<HostMemory>;

/// Applies an allocation to both sides and compares.
fn allocated(
    model: &mut Model,
    name: String,
    result: Result<View, SlabError>,
    len: u64,
    align: u64,
    value: Option<u8>,
) -> Result<(), TestCaseError> {
    match (model.place(len, align), result) {
        (Some((start, end)), Ok(view)) => {
            prop_assert_eq!((view.offset_bytes(), view.end_bytes()), (start, end));
            model.used = end;
            model.high_water = model.high_water.max(end);
            model.live.push((name, start, end));
            model.set((start, end), value);
            model.keep(view);
        }
        (None, Err(SlabError::OutOfMemory { requested_bytes, free_bytes, shortage_bytes, .. })) => {
            prop_assert_eq!((requested_bytes, free_bytes), (len, CAPACITY_BYTES - model.used));
            let end = model.used.div_ceil(align) * align + len;
            prop_assert_eq!(shortage_bytes, end - CAPACITY_BYTES);
        }
        (place, result) => prop_assert!(false, "{place:?} but {result:?}"),
    }
    Ok(())
}

fn apply(slab: &mut Slab<Memory>, model: &mut Model, op: &Op) -> Result<(), TestCaseError> {
    let name = format!("allocation {}", model.names);
    model.names += 1;
    match op {
        Op::Allocate { len_bytes, align_log2 } => {
            let align = 1 << align_log2;
            let result = slab.allocate_aligned(&name, *len_bytes, align);
            allocated(model, name, result, *len_bytes, align, None)?;
        }
        Op::AllocateZeroed { len_bytes } => {
            let result = slab.allocate_zeroed(&name, *len_bytes);
            allocated(model, name, result, *len_bytes, 256, Some(0))?;
        }
        Op::AllocateAndWrite { len_bytes, value } => {
            let result = slab.allocate_and_write(&name, &vec![*value; *len_bytes as usize]);
            model.h2d_bytes += result.as_ref().map_or(0, View::len_bytes);
            allocated(model, name, result, *len_bytes, 256, Some(*value))?;
        }
        Op::Write { view, value } => {
            let Some(&chosen) = pick(view, &model.views) else { return Ok(()) };
            let bytes = vec![*value; (chosen.end - chosen.start) as usize];
            let result = slab.write_view(chosen.view, 0, &bytes);
            prop_assert_eq!(result.is_ok(), model.valid(&chosen));
            if result.is_ok() {
                model.h2d_bytes += bytes.len() as u64;
                model.set((chosen.start, chosen.end), Some(*value));
            }
        }
        Op::Fill { view, value } => {
            let Some(&chosen) = pick(view, &model.views) else { return Ok(()) };
            let result = slab.fill_view(chosen.view, *value);
            prop_assert_eq!(result.is_ok(), model.valid(&chosen));
            if result.is_ok() {
                model.set((chosen.start, chosen.end), Some(*value));
            }
        }
        Op::Copy { from, to } => {
            let Some(&from) = pick(from, &model.views) else { return Ok(()) };
            let Some(&to) = pick(to, &model.views) else { return Ok(()) };
            let (from_len, to_len) = (from.end - from.start, to.end - to.start);
            // Copy as much as both have: random views seldom have the same length.
            let len = from_len.min(to_len);
            let (source, target) =
                (from.view.slice(0..len).unwrap(), to.view.slice(0..len).unwrap());
            let valid = model.survives(from.born, from.start + len)
                && model.survives(to.born, to.start + len);
            let apart = from.start + len <= to.start || to.start + len <= from.start || len == 0;
            let result = slab.copy(source, target);
            prop_assert_eq!(result.is_ok(), valid && apart, "{:?}", result);
            if result.is_ok() {
                let source = from.start as usize..(from.start + len) as usize;
                model.bytes.copy_within(source, to.start as usize);
            }
        }
        Op::Slice { view, start, end } => {
            let Some(&whole) = pick(view, &model.views) else { return Ok(()) };
            let len = whole.end - whole.start;
            let mut bounds = [start.index(len as usize + 1), end.index(len as usize + 1)];
            bounds.sort_unstable();
            let [start, end] = bounds.map(|bound| bound as u64);
            let view = whole.view.slice(start..end).unwrap();
            prop_assert_eq!(view.offset_bytes(), whole.start + start);
            let part =
                ModelView { view, start: whole.start + start, end: whole.start + end, ..whole };
            model.views.push(part);
        }
        Op::Cover { views } => {
            let chosen: Vec<_> =
                views.iter().filter_map(|index| pick(index, &model.views)).copied().collect();
            let result = slab.cover(chosen.iter().map(|chosen| chosen.view));
            prop_assert_eq!(result.is_ok(), chosen.iter().all(|chosen| model.valid(chosen)));
            if let Ok(cover) = result {
                let end = chosen.iter().map(|chosen| chosen.end).max().unwrap_or(0);
                prop_assert_eq!((cover.offset_bytes(), cover.end_bytes()), (0, end));
                model.keep(cover);
            }
        }
        Op::Checkpoint => {
            let checkpoint = slab.checkpoint();
            prop_assert_eq!(checkpoint.offset_bytes(), model.used);
            model.checkpoints.push(ModelCheckpoint {
                checkpoint,
                taken: model.rewinds.len(),
                offset: model.used,
                live: model.live.len(),
            });
        }
        Op::Rewind { checkpoint } => {
            let Some(&chosen) = pick(checkpoint, &model.checkpoints) else { return Ok(()) };
            let result = slab.rewind(chosen.checkpoint);
            let survives = model.survives(chosen.taken, chosen.offset);
            let expected = survives && chosen.offset >= model.floor();
            prop_assert_eq!(result.is_ok(), expected, "{:?} {:?}", chosen, result);
            match result {
                Ok(()) => model.rewind(chosen.offset, chosen.live),
                Err(SlabError::StaleCheckpoint { .. }) => prop_assert!(!survives),
                Err(SlabError::BelowPermanentEnd { .. } | SlabError::BelowTransaction { .. }) => {
                    prop_assert!(survives);
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
        Op::RewindTransient => {
            let result = slab.rewind_transient();
            prop_assert_eq!(result.is_ok(), model.permanent_end >= model.floor());
            if result.is_ok() {
                model.rewind(model.permanent_end, model.permanent_live);
            }
        }
        Op::Seal => {
            model.permanent_end = model.used;
            model.permanent_live = model.live.len();
            prop_assert_eq!(slab.seal(), model.used);
        }
        Op::Transaction { ops, fail } => {
            let (used, live) = (model.used, model.live.clone());
            let permanent = (model.permanent_end, model.permanent_live);
            model.transaction_starts.push((used, live.len()));
            // `Ok` and `Err(None)` are the two intended ends, `Err(Some)` a failed comparison.
            let result = slab.transaction(|slab| {
                run(slab, model, ops).map_err(Some)?;
                if *fail { Err(None) } else { Ok(()) }
            });
            model.transaction_starts.pop();
            match result {
                Ok(()) => {}
                Err(None) => {
                    (model.permanent_end, model.permanent_live) = permanent;
                    model.rewind(used, usize::MAX);
                    model.live = live;
                }
                Err(Some(failed)) => return Err(failed),
            }
        }
    }
    compare(slab, model)
}

fn run(slab: &mut Slab<Memory>, model: &mut Model, ops: &[Op]) -> Result<(), TestCaseError> {
    ops.iter().try_for_each(|op| apply(slab, model, op))
}

fn pick<'a, T>(index: &Index, items: &'a [T]) -> Option<&'a T> {
    (!items.is_empty()).then(|| index.get(items))
}

/// Everything that can be seen from outside, after every operation.
fn compare(slab: &Slab<Memory>, model: &Model) -> Result<(), TestCaseError> {
    let report = slab.report();
    prop_assert_eq!(report.used_bytes, model.used);
    prop_assert_eq!(report.free_bytes, CAPACITY_BYTES - model.used);
    prop_assert_eq!(report.permanent_end_bytes, model.permanent_end);
    prop_assert_eq!(report.high_water_bytes, model.high_water);
    let listed = report.allocations.iter().map(|allocation| {
        let end = allocation.offset_bytes + allocation.len_bytes;
        (allocation.name.clone(), allocation.offset_bytes, end)
    });
    prop_assert_eq!(listed.collect::<Vec<_>>(), model.live.clone());
    let permanent = report.allocations.iter().filter(|allocation| allocation.permanent).count();
    prop_assert_eq!(permanent, model.permanent_live);

    for (index, chosen) in model.views.iter().enumerate() {
        let resolved = slab.resolve(chosen.view);
        if !model.valid(chosen) {
            let stale = matches!(resolved, Err(SlabError::StaleView { .. }));
            prop_assert!(stale, "view {} {:?}: {:?}", index, chosen, resolved);
            continue;
        }
        prop_assert_eq!(resolved, Ok(chosen.start..chosen.end), "view {}", index);
        prop_assert!(chosen.end <= model.used, "a valid view lies in what is used");
        let range = chosen.start as usize..chosen.end as usize;
        let actual = &slab.memory().inner().bytes()[range.clone()];
        for (offset, (&is, &must)) in actual.iter().zip(&model.bytes[range]).enumerate() {
            prop_assert!(must.is_none_or(|must| must == is), "view {} byte {}", index, offset);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_sequence_agrees_with_the_model(ops in prop::collection::vec(op(), 1..80)) {
        let memory = FailingMemory::new(HostMemory::new(CAPACITY_BYTES).unwrap());
        let mut slab = Slab::new(memory);
        let mut model = Model::new();
        run(&mut slab, &mut model, &ops)?;
        prop_assert_eq!(slab.counters().h2d_bytes, model.h2d_bytes);
    }

    /// Whatever call of the memory fails, what is visible is as it was before the operation.
    #[test]
    fn s2_a_refused_call_leaves_the_slab_as_it_was(
        lens in prop::collection::vec((0u64..600, any::<bool>()), 1..20),
        refused in 1u64..40,
    ) {
        let memory = HostMemory::growable(CAPACITY_BYTES).unwrap();
        let mut slab = Slab::new(FailingMemory::new(memory).refuse_call(refused));
        let mut kept: Vec<(View, u8)> = vec![];
        for (index, &(len_bytes, zeroed)) in lens.iter().enumerate() {
            let before = (slab.report().allocations, slab.used_bytes(), slab.counters());
            let value = if zeroed { 0 } else { index as u8 };
            let result = if zeroed {
                slab.allocate_zeroed("zeroed", len_bytes)
            } else {
                slab.allocate_and_write("written", &vec![value; len_bytes as usize])
            };
            match result {
                Ok(view) => kept.push((view, value)),
                Err(SlabError::Memory { .. } | SlabError::OutOfMemory { .. }) => prop_assert_eq!(
                    before, (slab.report().allocations, slab.used_bytes(), slab.counters())
                ),
                Err(other) => prop_assert!(false, "{other}"),
            }
            for &(view, value) in &kept {
                let range = slab.resolve(view).unwrap();
                let bytes = &slab.memory().inner().bytes()[range.start as usize..range.end as usize];
                prop_assert!(bytes.iter().all(|&byte| byte == value));
            }
        }
    }
}
