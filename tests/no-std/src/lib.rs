//! Uses a little of each crate that promises to work without std.

#![no_std]

use core::alloc::{GlobalAlloc, Layout};

use gpu_slab::{Allocate, Arena};
use kv_paged::PagedKvConfig;
use q4k_soa::{PackedLayout, Shape, WeightType};

/// An allocator that never has anything: this library is linked, not run.
struct Nothing;

// SAFETY: returning null is always allowed, and nothing is ever handed out to be freed.
unsafe impl GlobalAlloc for Nothing {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: Nothing = Nothing;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Bytes that a small cache and a small matrix need together.
#[unsafe(no_mangle)]
pub extern "C" fn planned_bytes(context_tokens: u32, rows: u32) -> u64 {
    let mut arena = Arena::counting();
    let Ok(kv) = PagedKvConfig::new(2, 2, 64, context_tokens) else { return 0 };
    let shape = Shape { n_out: rows, n_in: 256 };
    let Ok(matrix) = PackedLayout::planes(WeightType::Q4K, shape) else { return 0 };
    let cache = arena.allocate("kv", kv.total_bytes());
    let weight = Allocate::allocate(&mut arena, "weight", matrix.len_bytes());
    if cache.is_err() || weight.is_err() { 0 } else { arena.used_bytes() }
}
