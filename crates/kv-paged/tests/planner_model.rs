//! The planner against a naive engine that has real (small) memory: see `model`.

mod model;

use kv_paged::LayerGroup;
use model::{Engine, Op};
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    let pick = 0..6_u32;
    prop_oneof![
        3 => (0..4_u32, 0..50_u32, 0..2_u64)
            .prop_map(|(prompt, len, salt)| Op::Create { prompt, len, salt }),
        8 => (pick.clone(), 0..4_u32, 0..14_u32)
            .prop_map(|(pick, text, n)| Op::Append { pick, text, n }),
        8 => (pick.clone(), 0..16_u32).prop_map(|(pick, n)| Op::Commit { pick, n }),
        1 => pick.clone().prop_map(|pick| Op::OverCommit { pick }),
        2 => (pick.clone(), 0..12_u32).prop_map(|(pick, back)| Op::Truncate { pick, back }),
        2 => pick.clone().prop_map(|pick| Op::Fork { pick }),
        2 => pick.clone().prop_map(|pick| Op::Free { pick }),
        1 => pick.clone().prop_map(|pick| Op::SwapOut { pick }),
        2 => pick.prop_map(|pick| Op::SwapIn { pick }),
        1 => Just(Op::Step),
        1 => Just(Op::DropCached),
    ]
}

fn group_sets() -> impl Strategy<Value = Vec<LayerGroup>> {
    prop_oneof![
        Just(model::groups()),
        Just(vec![LayerGroup::full(1, 20).with_host_blocks(12)]),
        (1..14_u32, 0..9_u32).prop_map(|(window, sinks)| vec![
            LayerGroup::sliding(1, 18, window, sinks).with_host_blocks(12)
        ]),
        (1..14_u32, 1..14_u32).prop_map(|(a, b)| vec![
            LayerGroup::sliding(1, 20, a, 0).with_host_blocks(12),
            LayerGroup::sliding(1, 20, b, 4).with_host_blocks(12),
        ]),
    ]
}

proptest! {
    #[test]
    fn any_run_of_operations_agrees_with_the_naive_engine(
        groups in group_sets(),
        prefix_nodes in prop_oneof![6 => Just(None), 1 => Just(Some(0)), 3 => (1..9_u32).prop_map(Some)],
        ops in prop::collection::vec(op(), 1..160),
    ) {
        let mut engine = Engine::new(groups, prefix_nodes);
        for op in ops {
            engine.run(op, true);
        }
        engine.finish();
    }
}

/// A small generator, so that a long run needs no list of operations.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(n)) >> 32) as u32
    }

    fn op(&mut self) -> Op {
        let pick = self.below(6);
        match self.below(64) {
            0..6 => Op::Create {
                prompt: self.below(4),
                len: self.below(50),
                salt: u64::from(self.below(2)),
            },
            6..24 => Op::Append { pick, text: self.below(4), n: self.below(14) },
            24..43 => Op::Commit { pick, n: self.below(16) },
            43 => Op::OverCommit { pick },
            44..49 => Op::Truncate { pick, back: self.below(12) },
            49..52 => Op::Fork { pick },
            52..56 => Op::Free { pick },
            56..58 => Op::SwapOut { pick },
            58..61 => Op::SwapIn { pick },
            61 => Op::Step,
            62 => match self.below(16) {
                0 => Op::Invalidate,
                1 => Op::DropCached,
                2 => Op::Grow { group: self.below(3) },
                _ => Op::Step,
            },
            _ => Op::Append { pick, text: 0, n: 1 },
        }
    }
}

fn long_run(groups: Vec<LayerGroup>, operations: u32, seed: u64) {
    let mut random = Random(seed);
    let mut engine = Engine::new(groups, Some(40));
    for i in 0..operations {
        engine.run(random.op(), i % 16 == 0);
    }
    // The run has met every refusal and every part of the cache; otherwise it proved little.
    for name in ["blocks", "sequences", "context", "commit", "window", "swapped", "not swapped"] {
        assert!(
            engine.refused.contains_key(name),
            "never refused for {name}: {:?}",
            engine.refused
        );
    }
    let stats = engine.planner.prefix_stats();
    assert!(stats.hit_tokens > 0 && stats.evicted_blocks > 0);
    assert!(stats.deduplicated_blocks > 0 && stats.uncached_blocks > 0);
    assert!(engine.uploaded_bytes > 0);
    println!("{operations} operations: {:?}, {stats:?}", engine.refused);
    engine.finish();
}

#[test]
fn a_long_run_leaks_nothing() {
    long_run(model::groups(), 250_000, 0x5eed_0000_0000_0001);
}

#[test]
fn a_long_run_of_windows_only_leaks_nothing() {
    let mut groups = model::groups();
    groups.remove(0);
    long_run(groups, 100_000, 0x5eed_0000_0000_0003);
}

/// `cargo test --release -p kv-paged --test planner_model -- --ignored --nocapture`
#[test]
#[ignore = "the same run as above, longer"]
fn a_run_of_a_million_operations_leaks_nothing() {
    long_run(model::groups(), 1_000_000, 0x5eed_0000_0000_0002);
}
