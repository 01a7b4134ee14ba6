//! Any run of operations of the slab, beside the model of its tests.
#![no_main]

#[path = "../../crates/slab/tests/model/mod.rs"]
mod model;

use libfuzzer_sys::fuzz_target;
use model::Op;

/// Operations of one run; every one is followed by a comparison of everything.
const MAX_OPS: usize = 120;

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.chunks_exact(4).take(MAX_OPS);
    model::run(&ops(&mut bytes, 3));
});

/// Operations until the bytes, or those of a transaction, end.
fn ops<'d>(bytes: &mut dyn Iterator<Item = &'d [u8]>, depth: u32) -> Vec<Op> {
    let mut ops = Vec::new();
    while let Some(&[code, a, b, c]) = bytes.next() {
        let len_bytes = u64::from(u16::from_le_bytes([a, b]) % 1500);
        let (first, second, third) = (u32::from(a), u32::from(b), u32::from(c));
        ops.push(match code % 15 {
            0 | 1 => Op::Allocate { len_bytes, align_log2: third % 10 },
            2 => Op::AllocateZeroed { len_bytes },
            3 => Op::AllocateAndWrite { len_bytes, value: c },
            4 => Op::Write { view: first, value: c },
            5 => Op::Fill { view: first, value: c },
            6 => Op::Copy { from: first, to: second },
            7 => Op::Slice { view: first, start: second, end: third },
            8 => Op::Cover { views: vec![first, second, third] },
            9 => Op::Checkpoint,
            10 => Op::Rewind { checkpoint: first },
            11 => Op::RewindTransient,
            12 => Op::Seal,
            13 if depth > 0 => {
                let ops = self::ops(bytes, depth - 1);
                Op::Transaction { ops, fail: c % 2 == 0 }
            }
            _ => break,
        });
    }
    ops
}
