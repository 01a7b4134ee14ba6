//! What loading holds beside the slab: less than the largest matrix, as an allocator counts it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use lane::{BackendChoice, LaneOptions, ModelFile};

mod draft;

use draft::{Draft, Q4_K, Val};

/// The system's allocator, with a count of what is in use and of the most that ever was.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn taken(bytes: usize) {
    let now = IN_USE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: everything is the system allocator's; only numbers are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller's word.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn loading_holds_less_than_the_largest_matrix_beside_the_slab() {
    const N_VOCAB: u32 = 100_000;
    const LARGEST_BYTES: usize = N_VOCAB as usize * 144;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wide.gguf");
    let mut draft = Draft::llama();
    let tokens = (0..N_VOCAB).map(|id| format!("t{id}")).collect();
    draft
        .key("llama.vocab_size", Val::U32(N_VOCAB))
        .key("tokenizer.ggml.tokens", Val::Strs(tokens))
        .key("tokenizer.ggml.token_type", Val::I32s(vec![1; N_VOCAB as usize]))
        .tensor("token_embd.weight", &[256, N_VOCAB.into()], Q4_K);
    std::fs::write(&path, draft.bytes()).unwrap();
    drop(draft);

    let file = ModelFile::open(Some(&path)).unwrap();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let options = LaneOptions { backend: BackendChoice::Host, ..Default::default() };
    let before = IN_USE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let decoder = threads.install(|| file.load_host(&options, &mut |_| {})).unwrap();
    let slab_bytes = decoder.residency().slab().capacity_bytes() as usize;
    let beside = MOST.load(Ordering::Relaxed) - before - slab_bytes;
    println!(
        "{beside} bytes beside a slab of {slab_bytes}, the largest matrix has {LARGEST_BYTES}"
    );
    assert!(beside < LARGEST_BYTES, "{beside}");
}
