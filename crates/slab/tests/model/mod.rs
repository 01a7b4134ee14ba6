//! A slab beside a model that keeps everything and searches it plainly; after every operation all
//! that can be seen from outside is compared.

use gpu_slab::{Checkpoint, HostMemory, Slab, SlabError, View};

pub(crate) const CAPACITY_BYTES: u64 = 8192;

/// One operation; what numbers choose is reduced to what exists.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Allocate { len_bytes: u64, align_log2: u32 },
    AllocateZeroed { len_bytes: u64 },
    AllocateAndWrite { len_bytes: u64, value: u8 },
    Write { view: u32, value: u8 },
    Fill { view: u32, value: u8 },
    Copy { from: u32, to: u32 },
    Slice { view: u32, start: u32, end: u32 },
    Cover { views: Vec<u32> },
    Checkpoint,
    Rewind { checkpoint: u32 },
    RewindTransient,
    Seal,
    Transaction { ops: Vec<Op>, fail: bool },
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

/// Applies an allocation to both sides and compares.
fn allocated(
    model: &mut Model,
    name: String,
    result: Result<View, SlabError>,
    len: u64,
    align: u64,
    value: Option<u8>,
) {
    match (model.place(len, align), result) {
        (Some((start, end)), Ok(view)) => {
            assert_eq!((view.offset_bytes(), view.end_bytes()), (start, end));
            model.used = end;
            model.high_water = model.high_water.max(end);
            model.live.push((name, start, end));
            model.set((start, end), value);
            model.keep(view);
        }
        (None, Err(SlabError::OutOfMemory { requested_bytes, free_bytes, shortage_bytes, .. })) => {
            assert_eq!((requested_bytes, free_bytes), (len, CAPACITY_BYTES - model.used));
            let end = model.used.div_ceil(align) * align + len;
            assert_eq!(shortage_bytes, end - CAPACITY_BYTES);
        }
        (place, result) => panic!("{place:?} but {result:?}"),
    }
}

fn apply(slab: &mut Slab<HostMemory>, model: &mut Model, op: &Op) {
    let name = format!("allocation {}", model.names);
    model.names += 1;
    match op {
        Op::Allocate { len_bytes, align_log2 } => {
            let align = 1 << align_log2;
            let result = slab.allocate_aligned(&name, *len_bytes, align);
            allocated(model, name, result, *len_bytes, align, None);
        }
        Op::AllocateZeroed { len_bytes } => {
            let result = slab.allocate_zeroed(&name, *len_bytes);
            allocated(model, name, result, *len_bytes, 256, Some(0));
        }
        Op::AllocateAndWrite { len_bytes, value } => {
            let result = slab.allocate_and_write(&name, &vec![*value; *len_bytes as usize]);
            model.h2d_bytes += result.as_ref().map_or(0, View::len_bytes);
            allocated(model, name, result, *len_bytes, 256, Some(*value));
        }
        Op::Write { view, value } => {
            let Some(&chosen) = pick(view, &model.views) else { return };
            let bytes = vec![*value; (chosen.end - chosen.start) as usize];
            let result = slab.write_view(chosen.view, 0, &bytes);
            assert_eq!(result.is_ok(), model.valid(&chosen));
            if result.is_ok() {
                model.h2d_bytes += bytes.len() as u64;
                model.set((chosen.start, chosen.end), Some(*value));
            }
        }
        Op::Fill { view, value } => {
            let Some(&chosen) = pick(view, &model.views) else { return };
            let result = slab.fill_view(chosen.view, *value);
            assert_eq!(result.is_ok(), model.valid(&chosen));
            if result.is_ok() {
                model.set((chosen.start, chosen.end), Some(*value));
            }
        }
        Op::Copy { from, to } => {
            let Some(&from) = pick(from, &model.views) else { return };
            let Some(&to) = pick(to, &model.views) else { return };
            let (from_len, to_len) = (from.end - from.start, to.end - to.start);
            // Copy as much as both have: random views seldom have the same length.
            let len = from_len.min(to_len);
            let (source, target) =
                (from.view.slice(0..len).unwrap(), to.view.slice(0..len).unwrap());
            let valid = model.survives(from.born, from.start + len)
                && model.survives(to.born, to.start + len);
            let apart = from.start + len <= to.start || to.start + len <= from.start || len == 0;
            let result = slab.copy(source, target);
            assert_eq!(result.is_ok(), valid && apart, "{:?}", result);
            if result.is_ok() {
                let source = from.start as usize..(from.start + len) as usize;
                model.bytes.copy_within(source, to.start as usize);
            }
        }
        Op::Slice { view, start, end } => {
            let Some(&whole) = pick(view, &model.views) else { return };
            let len = whole.end - whole.start;
            let mut bounds = [start, end].map(|bound| u64::from(*bound) % (len + 1));
            bounds.sort_unstable();
            let [start, end] = bounds;
            let view = whole.view.slice(start..end).unwrap();
            assert_eq!(view.offset_bytes(), whole.start + start);
            let part =
                ModelView { view, start: whole.start + start, end: whole.start + end, ..whole };
            model.views.push(part);
        }
        Op::Cover { views } => {
            let chosen: Vec<_> =
                views.iter().filter_map(|index| pick(index, &model.views)).copied().collect();
            let result = slab.cover(chosen.iter().map(|chosen| chosen.view));
            assert_eq!(result.is_ok(), chosen.iter().all(|chosen| model.valid(chosen)));
            if let Ok(cover) = result {
                let end = chosen.iter().map(|chosen| chosen.end).max().unwrap_or(0);
                assert_eq!((cover.offset_bytes(), cover.end_bytes()), (0, end));
                model.keep(cover);
            }
        }
        Op::Checkpoint => {
            let checkpoint = slab.checkpoint();
            assert_eq!(checkpoint.offset_bytes(), model.used);
            model.checkpoints.push(ModelCheckpoint {
                checkpoint,
                taken: model.rewinds.len(),
                offset: model.used,
                live: model.live.len(),
            });
        }
        Op::Rewind { checkpoint } => {
            let Some(&chosen) = pick(checkpoint, &model.checkpoints) else { return };
            let result = slab.rewind(chosen.checkpoint);
            let survives = model.survives(chosen.taken, chosen.offset);
            let expected = survives && chosen.offset >= model.floor();
            assert_eq!(result.is_ok(), expected, "{:?} {:?}", chosen, result);
            match result {
                Ok(()) => model.rewind(chosen.offset, chosen.live),
                Err(SlabError::StaleCheckpoint { .. }) => assert!(!survives),
                Err(SlabError::BelowPermanentEnd { .. } | SlabError::BelowTransaction { .. }) => {
                    assert!(survives);
                }
                Err(other) => panic!("{other}"),
            }
        }
        Op::RewindTransient => {
            let result = slab.rewind_transient();
            assert_eq!(result.is_ok(), model.permanent_end >= model.floor());
            if result.is_ok() {
                model.rewind(model.permanent_end, model.permanent_live);
            }
        }
        Op::Seal => {
            model.permanent_end = model.used;
            model.permanent_live = model.live.len();
            assert_eq!(slab.seal(), model.used);
        }
        Op::Transaction { ops, fail } => {
            let (used, live) = (model.used, model.live.clone());
            let permanent = (model.permanent_end, model.permanent_live);
            model.transaction_starts.push((used, live.len()));
            let result = slab.transaction(|slab| {
                ops.iter().for_each(|op| apply(slab, model, op));
                if *fail { Err(()) } else { Ok(()) }
            });
            model.transaction_starts.pop();
            if result.is_err() {
                (model.permanent_end, model.permanent_live) = permanent;
                model.rewind(used, usize::MAX);
                model.live = live;
            }
        }
    }
    compare(slab, model);
}

/// Runs the operations on a new slab of [`CAPACITY_BYTES`].
pub(crate) fn run(ops: &[Op]) {
    let mut slab = Slab::new(HostMemory::new(CAPACITY_BYTES).unwrap());
    let mut model = Model::new();
    ops.iter().for_each(|op| apply(&mut slab, &mut model, op));
    assert_eq!(slab.counters().h2d_bytes, model.h2d_bytes);
}

fn pick<'a, T>(number: &u32, items: &'a [T]) -> Option<&'a T> {
    items.get(*number as usize % items.len().max(1))
}

/// Everything that can be seen from outside, after every operation.
fn compare(slab: &Slab<HostMemory>, model: &Model) {
    let report = slab.report();
    assert_eq!(report.used_bytes, model.used);
    assert_eq!(report.free_bytes, CAPACITY_BYTES - model.used);
    assert_eq!(report.permanent_end_bytes, model.permanent_end);
    assert_eq!(report.high_water_bytes, model.high_water);
    let listed = report.allocations.iter().map(|allocation| {
        let end = allocation.offset_bytes + allocation.len_bytes;
        (allocation.name.clone(), allocation.offset_bytes, end)
    });
    assert_eq!(listed.collect::<Vec<_>>(), model.live.clone());
    let permanent = report.allocations.iter().filter(|allocation| allocation.permanent).count();
    assert_eq!(permanent, model.permanent_live);

    for (index, chosen) in model.views.iter().enumerate() {
        let resolved = slab.resolve(chosen.view);
        if !model.valid(chosen) {
            let stale = matches!(resolved, Err(SlabError::StaleView { .. }));
            assert!(stale, "view {} {:?}: {:?}", index, chosen, resolved);
            continue;
        }
        assert_eq!(resolved, Ok(chosen.start..chosen.end), "view {}", index);
        assert!(chosen.end <= model.used, "a valid view lies in what is used");
        let range = chosen.start as usize..chosen.end as usize;
        let actual = &slab.memory().bytes()[range.clone()];
        for (offset, (&is, &must)) in actual.iter().zip(&model.bytes[range]).enumerate() {
            assert!(must.is_none_or(|must| must == is), "view {} byte {}", index, offset);
        }
    }
}
