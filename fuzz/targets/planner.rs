//! Any run of operations of the planner, beside the naive engine of its tests.
#![no_main]

#[path = "../../crates/kv-paged/tests/model/mod.rs"]
mod model;

use kv_paged::LayerGroup;
use libfuzzer_sys::fuzz_target;
use model::{Engine, Op};

/// Operations of one run.
const MAX_OPS: usize = 200;

fuzz_target!(|data: &[u8]| {
    let Some((&[kind, window, sinks, nodes], rest)) = data.split_first_chunk() else { return };
    let (window, sinks) = (u32::from(window) % 13 + 1, u32::from(sinks) % 9);
    let groups = match kind % 4 {
        0 => model::groups(),
        1 => vec![LayerGroup::full(1, 20).with_host_blocks(12)],
        2 => vec![LayerGroup::sliding(1, 18, window, sinks).with_host_blocks(12)],
        _ => vec![
            LayerGroup::sliding(1, 20, window, 0).with_host_blocks(12),
            LayerGroup::sliding(1, 20, sinks + 1, 4).with_host_blocks(12),
        ],
    };
    let nodes = (nodes < 128).then_some(u32::from(nodes) % 12);
    let mut engine = Engine::new(groups, nodes);
    for bytes in rest.chunks_exact(4).take(MAX_OPS) {
        engine.run(op(bytes[0], bytes[1].into(), bytes[2].into(), bytes[3].into()), true);
    }
    engine.finish();
});

fn op(code: u8, a: u32, b: u32, c: u32) -> Op {
    let pick = a % 6;
    match code % 13 {
        0 => Op::Create { prompt: a % 4, len: b % 50, salt: u64::from(c % 2) },
        1 => Op::Append { pick, text: b % 4, n: c % 14 },
        2 => Op::Commit { pick, n: b % 16 },
        3 => Op::OverCommit { pick },
        4 => Op::Truncate { pick, back: b % 12 },
        5 => Op::Fork { pick },
        6 => Op::Free { pick },
        7 => Op::SwapOut { pick },
        8 => Op::SwapIn { pick },
        9 => Op::Step,
        10 => Op::Invalidate,
        11 => Op::DropCached,
        _ => Op::Grow { group: a % 3 },
    }
}
