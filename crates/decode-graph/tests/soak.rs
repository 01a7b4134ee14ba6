//! The same graph replayed for a long time on the host. The GPU's turn is in `tests/gpu/soak.rs`.

#[allow(dead_code, reason = "it serves another test too")]
mod support;

use decode_graph::{HostBackend, Numerics};
use kv_paged::KvType;
use support::{Tiny, soak};

fn tiny() -> Tiny {
    Tiny::new(Numerics::Q8, KvType::F16, false, 1)
}

#[test]
fn a_run_of_some_thousand_replays_leaves_everything_as_it_was() {
    println!("{}", soak::run(&mut HostBackend, &mut tiny(), 8_000, |_| 0));
}

/// `cargo test --release -p decode-graph --test soak -- --ignored --nocapture`
#[test]
#[ignore = "the same run as above, a million replays or SOAK_REPLAYS"]
fn a_run_of_a_million_replays_leaves_everything_as_it_was() {
    println!("{}", soak::run(&mut HostBackend, &mut tiny(), soak::replays(), |_| 0));
}
