//! What the benches share.
#![allow(dead_code)] // every bench uses a part

use q4k_soa::{PackedLayout, Shape, WeightType};

/// The common ones first.
pub(crate) const TYPES: [WeightType; 11] = [
    WeightType::Q4K,
    WeightType::Q6K,
    WeightType::Q8_0,
    WeightType::Q5K,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::F16,
    WeightType::Bf16,
    WeightType::F32,
];

/// About 40 MB of source, more than the caches near a core hold.
pub(crate) fn large(ty: WeightType) -> (PackedLayout, Vec<u8>) {
    let row_bytes = ty.row_bytes(4096).unwrap();
    let n_out = (40_000_000 / row_bytes) as u32;
    let layout = PackedLayout::planes(ty, Shape { n_out, n_in: 4096 }).unwrap();
    let mut state = 1u64;
    let mut bytes = vec![0; layout.source_bytes() as usize];
    for byte in &mut bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8 & 0x3f; // all floats and halves among them finite
    }
    (layout, bytes)
}

/// Runs on one thread, so that numbers are per core.
pub(crate) fn on_one_core(run: impl FnOnce() + Send) {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(run);
}
