//! A decode step's temporaries, rewound after every step: the slab never holds more than one step.
//!
//! `cargo run -p gpu-slab --example step`

use std::error::Error;

use gpu_slab::{Allocate, HostMemory, Plan, Slab, SlabError, View};

const HIDDEN: u64 = 256;
const FFN: u64 = 768;
const LAYERS: usize = 6;

/// What lives as long as the model does.
struct Permanent {
    weights: Vec<View>,
    hidden: View,
}

/// What lives for one step.
struct Step {
    attention_out: View,
    ffn_mid: View,
}

fn permanent(slab: &mut impl Allocate) -> Result<Permanent, SlabError> {
    let weights = (0..LAYERS)
        .map(|layer| slab.allocate(&format!("layer {layer} weights"), HIDDEN * FFN))
        .collect::<Result<_, _>>()?;
    let hidden = slab.allocate("hidden", HIDDEN * 4)?;
    slab.seal();
    Ok(Permanent { weights, hidden })
}

fn step(slab: &mut impl Allocate) -> Result<Step, SlabError> {
    Ok(Step {
        attention_out: slab.allocate("attention out", HIDDEN * 4)?,
        ffn_mid: slab.allocate("ffn mid", FFN * 4)?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let plan = Plan::of(|arena| {
        permanent(arena)?;
        step(arena)
    })?;
    println!("planned: {} bytes, {} permanent", plan.total_bytes(), plan.permanent_bytes());

    let mut slab = Slab::for_plan(&plan, HostMemory::new)?;
    let Permanent { weights, hidden } = slab.transaction(permanent)?;
    for (layer, &weights) in weights.iter().enumerate() {
        slab.fill_view(weights, layer as u8)?;
    }
    slab.fill_view(hidden, 0)?;

    let mut last = None;
    for position in 0..1000_u32 {
        let before = slab.checkpoint();
        let Step { attention_out, ffn_mid } = step(&mut slab)?;
        // Kernels would run here. A copy stands in for them.
        slab.write_view(hidden, 0, &position.to_le_bytes())?;
        slab.copy(hidden, attention_out)?;
        if position == 0 {
            println!("\nin the first step:\n{}", slab.report());
        }
        slab.rewind(before)?;
        last = Some(ffn_mid);
    }

    println!("\nafter 1000 steps:\n{}", slab.report());
    let counters = slab.counters();
    println!("\n{} H2D bytes in {} copies", counters.h2d_bytes, counters.h2d_copies);
    if let Some(Err(error)) = last.map(|view| slab.device_ptr(view)) {
        println!("a temporary kept too long: {error}");
    }
    Ok(())
}
