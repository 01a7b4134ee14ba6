//! S14: the same layout code runs in counting mode first and gives a byte-exact plan by name.

use gpu_slab::testing::FailingMemory;
use gpu_slab::{Allocate, Arena, HostMemory, Plan, Slab, SlabError, View};
use proptest::prelude::*;

/// Permanent matrices, then a step with temporaries of which some are rewound in its middle.
fn layout(slab: &mut impl Allocate) -> Result<Vec<View>, SlabError> {
    let mut views = vec![];
    for layer in 0..3 {
        views.push(slab.allocate(&format!("layer {layer}"), 1000 + layer)?);
    }
    slab.seal();
    let step = slab.checkpoint();
    slab.allocate("scores", 10_000)?;
    slab.rewind(step)?;
    views.push(slab.allocate_aligned("logits", 100, 16)?);
    Ok(views)
}

#[test]
fn s14_the_plan_is_exact_to_the_byte_and_by_name() {
    let plan = Plan::of(layout).unwrap();
    let names: Vec<_> = plan.allocations().iter().map(|a| (a.name.as_str(), a.len_bytes)).collect();
    assert_eq!(
        names,
        [("layer 0", 1000), ("layer 1", 1001), ("layer 2", 1002), ("scores", 10_000)],
        "at the moment of highest use"
    );
    assert_eq!(plan.permanent_bytes(), 2048 + 1002);
    assert_eq!(plan.total_bytes(), 3072 + 10_000);
    let lengths: u64 = plan.allocations().iter().map(|a| a.len_bytes).sum();
    assert_eq!(lengths + plan.alignment_bytes(), plan.total_bytes());

    let mut slab = Slab::new(HostMemory::new(plan.total_bytes()).unwrap());
    let views = layout(&mut slab).unwrap();
    assert_eq!(slab.high_water_bytes(), plan.total_bytes());
    assert_eq!(slab.permanent_end_bytes(), plan.permanent_bytes());
    assert_eq!(slab.report().allocations[..3], plan.allocations()[..3]);
    assert!(views.iter().all(|&view| slab.resolve(view).is_ok()));

    let mut short = Slab::new(HostMemory::new(plan.total_bytes() - 1).unwrap());
    let error = short.transaction(layout).unwrap_err();
    assert!(matches!(error, SlabError::OutOfMemory { shortage_bytes: 1, .. }), "{error}");
}

#[test]
fn s14_what_cannot_fit_is_refused_before_the_first_allocation() {
    let plan = Plan::of(layout).unwrap();
    let needed_bytes = plan.total_bytes();
    plan.check_fits(needed_bytes).unwrap();
    plan.check_fits(u64::MAX).unwrap();
    let usable_bytes = needed_bytes - 611;
    assert_eq!(
        plan.check_fits(usable_bytes),
        Err(SlabError::DoesNotFit { needed_bytes, usable_bytes, shortage_bytes: 611 })
    );
}

#[test]
fn s14_counting_has_no_upper_limit_and_touches_no_memory() {
    let plan = Plan::of(|arena| arena.allocate("more than there is", 1 << 60)).unwrap();
    assert_eq!(plan.total_bytes(), 1 << 60);
    let limited = Arena::new(100).allocate("too much", 101);
    assert!(matches!(limited, Err(SlabError::OutOfMemory { shortage_bytes: 1, .. })));
}

#[test]
fn s14_a_layout_that_fails_gives_no_plan() {
    assert_eq!(Plan::of(|_| Err::<(), _>("shape")), Err("shape"));
}

#[test]
fn s14_views_of_a_plan_are_foreign_to_the_slab() {
    let mut planned = vec![];
    Plan::of(|arena| layout(arena).map(|views| planned = views)).unwrap();
    let slab = Slab::new(FailingMemory::new(HostMemory::new(1 << 16).unwrap()));
    assert!(matches!(slab.resolve(planned[0]), Err(SlabError::ForeignView { .. })));
    assert_eq!(slab.memory().calls(), 0);
}

#[test]
fn s14_a_plan_can_be_taken_at_any_time() {
    let mut arena = Arena::counting();
    assert_eq!(arena.plan().total_bytes(), 0);
    let start = arena.checkpoint();
    arena.allocate("first", 100).unwrap();
    arena.rewind(start).unwrap();
    arena.allocate("smaller", 50).unwrap();
    assert_eq!((arena.plan().total_bytes(), &*arena.plan().allocations()[0].name), (100, "first"));
    arena.allocate("second", 100).unwrap();
    let plan = arena.plan();
    assert_eq!(plan.total_bytes(), 356);
    assert!(plan.to_string().contains("second"), "{plan}");
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { len_bytes: u64, align_log2: u32 },
    Checkpoint,
    Rewind(prop::sample::Index),
    Seal,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u64..2000, 0u32..12)
            .prop_map(|(len_bytes, align_log2)| Op::Allocate { len_bytes, align_log2 }),
        1 => Just(Op::Checkpoint),
        1 => any::<prop::sample::Index>().prop_map(Op::Rewind),
        1 => Just(Op::Seal),
    ]
}

/// Any layout at all, refusals of rewinds included.
fn random_layout(slab: &mut impl Allocate, ops: &[Op]) -> Result<(), SlabError> {
    let mut checkpoints = vec![slab.checkpoint()];
    for (index, op) in ops.iter().enumerate() {
        match op {
            Op::Allocate { len_bytes, align_log2 } => {
                slab.allocate_aligned(&format!("{index}"), *len_bytes, 1 << align_log2)?;
            }
            Op::Checkpoint => checkpoints.push(slab.checkpoint()),
            Op::Rewind(which) => {
                let _ = slab.rewind(*which.get(&checkpoints));
            }
            Op::Seal => {
                slab.seal();
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn s14_plan_and_slab_agree_on_any_layout(ops in prop::collection::vec(op(), 0..60)) {
        let plan = Plan::of(|arena| random_layout(arena, &ops)).unwrap();
        let mut slab = Slab::new(HostMemory::new(plan.total_bytes()).unwrap());
        random_layout(&mut slab, &ops).unwrap();
        prop_assert_eq!(slab.high_water_bytes(), plan.total_bytes());
        prop_assert_eq!(slab.permanent_end_bytes(), plan.permanent_bytes());
        let lengths: u64 = plan.allocations().iter().map(|a| a.len_bytes).sum();
        prop_assert_eq!(lengths + plan.alignment_bytes(), plan.total_bytes());
        if plan.total_bytes() > 0 {
            let mut short = Slab::new(HostMemory::new(plan.total_bytes() - 1).unwrap());
            prop_assert!(random_layout(&mut short, &ops).is_err());
        }
    }
}
