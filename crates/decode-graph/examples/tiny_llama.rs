//! A tiny Llama with random weights: recorded, captured and replayed on the host.
//!
//! `cargo run -p decode-graph --example tiny_llama`

// The model of the tests: weights, cache and buffers on a slab.
#[allow(dead_code, reason = "an example needs less of it than the tests")]
#[path = "../tests/support/mod.rs"]
mod support;

use decode_graph::{Drive, Head, HostBackend, Numerics};
use kernels_ptx::TokenParams;
use kv_paged::KvType;
use support::Tiny;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let mut graph = tiny.capture(Head::Greedy);

    println!("one step is {} launches:", graph.launches().len());
    for launch in graph.launches() {
        let geometry = launch.geometry;
        println!(
            "  {:24} {:?} x {:?} threads",
            launch.kernel.name(),
            geometry.grid,
            geometry.block
        );
    }

    // The host says what the first token is; the device chooses all others and feeds itself.
    let first = TokenParams { absolute_position: 0, ring_slot: 0, token_id: 4 };
    let mut ids = vec![first.token_id];
    for step in 0..20 {
        let drive = if step == 0 { Drive::Host(&[first]) } else { Drive::SelfAdvance };
        graph.replay(&mut HostBackend, &mut tiny.slab, drive)?;
        ids.push(tiny.u32(tiny.arena.token));
    }
    println!("tokens: {ids:?}");
    println!("{:?}", graph.telemetry());

    // What the graph points at is gone: it refuses, whoever owns the bytes now.
    tiny.slab.rewind_transient()?;
    match graph.replay(&mut HostBackend, &mut tiny.slab, Drive::SelfAdvance) {
        Err(refusal) => println!("after a rewind: {refusal}"),
        Ok(()) => unreachable!("a graph over rewound memory ran"),
    }
    Ok(())
}
