//! A renderer that lays out each frame's buffers in one block of memory.

use gpu_slab::{Allocate, HostMemory, Plan, Slab, SlabError, View};

/// A frame's buffers at a resolution.
fn frame(slab: &mut impl Allocate, width: u64, height: u64) -> Result<[View; 2], SlabError> {
    let color = slab.allocate("color", width * height * 4)?;
    let depth = slab.allocate("depth", width * height * 2)?;
    Ok([color, depth])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plan = Plan::of(|arena| {
        arena.allocate("textures", 1 << 20)?;
        frame(arena, 640, 480)
    })?;
    let mut slab = Slab::new(HostMemory::new(plan.total_bytes())?);
    let textures = slab.allocate_zeroed("textures", 1 << 20)?;
    slab.seal();

    let mut kept = None;
    for color in 0..100 {
        let before = slab.checkpoint();
        let [target, _depth] = frame(&mut slab, 640, 480)?;
        slab.fill_view(target, color)?;
        slab.rewind(before)?;
        kept = Some(target);
    }
    assert_eq!(slab.high_water_bytes(), plan.total_bytes(), "the plan was exact");
    assert!(slab.resolve(textures).is_ok());
    // A frame twice as large is refused, and changes nothing.
    let too_large = slab.transaction(|slab| frame(slab, 1280, 960));
    assert!(matches!(too_large, Err(SlabError::OutOfMemory { .. })));
    let stale = slab.resolve(kept.expect("100 frames"));
    assert!(matches!(stale, Err(SlabError::StaleView { .. })));
    println!("100 frames in {} bytes", plan.total_bytes());
    Ok(())
}
