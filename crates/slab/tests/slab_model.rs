//! Any sequence of operations, against a model of the slab (see `model`), and with memory that
//! refuses.

mod model;

use gpu_slab::testing::FailingMemory;
use gpu_slab::{HostMemory, Slab, SlabError, View};
use model::{CAPACITY_BYTES, Op};
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    let index = any::<u32>;
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_sequence_agrees_with_the_model(ops in prop::collection::vec(op(), 1..80)) {
        model::run(&ops);
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
