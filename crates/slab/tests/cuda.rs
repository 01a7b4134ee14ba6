//! Memory of an NVIDIA GPU. Without one every test but the first says that it was skipped.
//!
//! `GPU_TESTS_REQUIRED=1` makes a skipped test fail. Needs no files: the binary can be carried to
//! another machine.

use std::io::Write;
use std::sync::OnceLock;

use gpu_slab::cuda::{CudaContext, CudaMemory, CudaStream, device_count};
use gpu_slab::{DeviceMemory, HostMemory, MemoryError, Slab, SlabError};

const MIB: u64 = 1 << 20;

/// A new stream of device 0; `None` where there is no device, which is said.
fn stream(test: &str) -> Option<CudaStream> {
    static CONTEXT: OnceLock<Result<CudaContext, String>> = OnceLock::new();
    let context = CONTEXT.get_or_init(|| match device_count() {
        Ok(0) => Err("the driver offers none".into()),
        Err(error) => Err(error.message),
        Ok(_) => Ok(CudaContext::new(0).unwrap_or_else(|error| panic!("{error}"))),
    });
    match context {
        Ok(context) => Some(CudaStream::new(context).unwrap()),
        Err(reason) => {
            say(&format!("skipped {test}: no CUDA device ({reason})\n"));
            assert!(std::env::var_os("GPU_TESTS_REQUIRED").is_none(), "{test} was skipped");
            None
        }
    }
}

/// Prints even where the test's own output is kept back.
fn say(text: &str) {
    // Whoever closed the output does not want it.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn read(memory: &CudaMemory, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut found = vec![0; len];
    memory.read(offset_bytes, &mut found).unwrap();
    found
}

#[test]
fn without_a_device_the_reason_is_one_line() {
    let error = CudaContext::new(4096).expect_err("nobody has so many devices");
    let said = error.to_string();
    assert!(!said.contains('\n') && said.contains(&format!("code {}", error.code)), "{said}");
    assert!([100, 101].contains(&error.code), "{said}");
    if error.code == 101 {
        assert!(said.contains("device 4096 of "), "{said}");
    }
}

#[test]
fn what_is_read_is_what_was_written() {
    let Some(stream) = stream("what is read is what was written") else { return };
    let mut memory = CudaMemory::new(&stream, 96 * MIB).unwrap();
    // Around the alignment, the length and the number of the staging buffers.
    let lengths = [0, 1, 3, 63, 64, 65, 4096, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 41 << 20];
    for (round, len) in lengths.into_iter().enumerate() {
        let (offset_bytes, expected) = (round as u64 * 7 + 1, bytes(len, round as u64));
        memory.write(offset_bytes, &expected).unwrap();
        assert!(read(&memory, offset_bytes, len) == expected, "{len} bytes at {offset_bytes}");
    }
}

#[test]
fn small_writes_share_staging_buffers_and_none_is_overtaken() {
    let Some(stream) = stream("small writes") else { return };
    let mut memory = CudaMemory::new(&stream, MIB).unwrap();
    // More than the ring holds, all queued without a wait in between.
    let mut expected = vec![0u8; 4096];
    memory.fill(0, 4096, 0).unwrap();
    for round in 0..700_000u64 {
        let at = (round * 37 % 1021) as usize * 4;
        let value = (round as u32).to_le_bytes();
        memory.write(at as u64, &value).unwrap();
        expected[at..at + 4].copy_from_slice(&value);
    }
    assert_eq!(read(&memory, 0, 4096), expected);
}

#[test]
fn calls_take_effect_in_order() {
    let Some(stream) = stream("order") else { return };
    let mut memory = CudaMemory::new(&stream, 64 * MIB).unwrap();
    for round in 0..20u8 {
        memory.fill(0, 32 * MIB, round).unwrap();
        memory.write(5, &[round ^ 0xff; 3]).unwrap();
        memory.copy_within(0, 32 * MIB, 32 * MIB).unwrap();
        memory.fill(0, 64, 0).unwrap();
        let found = read(&memory, 32 * MIB, 10);
        let (old, new) = (round, round ^ 0xff);
        assert_eq!(found, [old, old, old, old, old, new, new, new, old, old]);
        assert_eq!(read(&memory, 64 * MIB - 1, 1), [old]);
        assert_eq!(read(&memory, 0, 64), [0; 64]);
    }
}

#[test]
fn fills_reach_exactly_their_range() {
    let Some(stream) = stream("fills") else { return };
    let mut memory = CudaMemory::new(&stream, 4096).unwrap();
    let mut expected = vec![9u8; 4096];
    memory.fill(0, 4096, 9).unwrap();
    for (round, (start, len)) in
        [(0, 1), (3, 5), (4, 4), (8, 7), (17, 1001), (4095, 1), (2048, 0)].into_iter().enumerate()
    {
        let value = round as u8 + 20;
        memory.fill(start as u64, len as u64, value).unwrap();
        expected[start..start + len].fill(value);
        assert_eq!(read(&memory, 0, 4096), expected, "{len} bytes at {start}");
    }
}

#[test]
fn no_call_reaches_outside() {
    let Some(stream) = stream("no call reaches outside") else { return };
    let mut memory = CudaMemory::new(&stream, 1000).unwrap();
    memory.fill(0, 1000, 1).unwrap();
    assert!(memory.write(999, &[1, 2]).is_err());
    assert!(memory.write(u64::MAX, &[1]).is_err());
    assert!(memory.read(1001, &mut []).is_err());
    assert!(memory.fill(0, 1001, 9).is_err());
    assert!(memory.copy_within(0, 501, 500).is_err());
    assert!(memory.copy_within(0, 499, 500).is_err(), "overlap");
    assert!(memory.grow(1001).is_err());
    memory.grow(1000).unwrap();
    memory.write(1000, &[]).unwrap();
    memory.copy_within(7, 7, 0).unwrap();
    assert_eq!(read(&memory, 0, 1000), [1; 1000]);
    assert_eq!((memory.len_bytes(), memory.max_len_bytes()), (1000, 1000));
    assert_eq!(memory.base_address() % 256, 0);
}

#[test]
fn s16_memory_grows_and_nothing_moves() {
    let Some(stream) = stream("growth") else { return };
    let mut memory = CudaMemory::growing(&stream, 1000 * MIB + 5).unwrap();
    let granularity_bytes = memory.granularity_bytes().unwrap();
    say(&format!("growth: by multiples of {granularity_bytes} bytes\n"));
    let base = memory.base_address();
    assert_eq!((memory.len_bytes(), memory.max_len_bytes()), (0, 1000 * MIB + 5));
    assert!(memory.write(0, &[1]).is_err(), "nothing is there yet");
    let allocations = stream.context().counters().allocations;
    memory.grow(1).unwrap();
    assert_eq!(memory.len_bytes(), granularity_bytes);
    let expected = bytes(granularity_bytes as usize, 1);
    memory.write(0, &expected).unwrap();
    memory.grow(granularity_bytes).unwrap();
    memory.grow(0).unwrap();
    assert_eq!(memory.len_bytes(), granularity_bytes, "that much was there");
    for mib in [3, 4, 100, 500] {
        memory.grow(mib * MIB).unwrap();
        assert!(memory.len_bytes() >= mib * MIB);
        assert_eq!(memory.base_address(), base);
        memory.write(memory.len_bytes() - 1, &[7]).unwrap();
        // Across a seam between two mappings.
        memory.write(granularity_bytes - 2, &expected[..4]).unwrap();
        assert_eq!(read(&memory, granularity_bytes - 2, 4), expected[..4]);
        memory.write(granularity_bytes - 2, &expected[granularity_bytes as usize - 2..]).unwrap();
    }
    assert!(stream.context().counters().allocations > allocations);
    assert!(read(&memory, 0, expected.len()) == expected);
    let error = memory.grow(1000 * MIB + 6).unwrap_err();
    assert_eq!(error.requested_bytes, 1000 * MIB + 6);
    memory.grow(1000 * MIB + 5).unwrap();
    assert_eq!(memory.len_bytes(), 1000 * MIB + 5, "no more than was reserved");
    assert!(memory.write(1000 * MIB + 5, &[1]).is_err());
}

#[test]
fn what_is_dropped_is_free_again() {
    let Some(stream) = stream("what is dropped is free again") else { return };
    // Other tests allocate meanwhile, so much is asked for.
    let (free_bytes, _) = stream.context().memory_bytes().unwrap();
    let len_bytes = free_bytes / 10 * 6;
    for _ in 0..4 {
        drop(CudaMemory::new(&stream, len_bytes).unwrap());
        let mut memory = CudaMemory::growing(&stream, len_bytes).unwrap();
        memory.grow(len_bytes / 2).unwrap();
        memory.grow(len_bytes).unwrap();
        memory.fill(len_bytes - 8, 8, 3).unwrap();
    }
}

#[test]
fn s1_more_than_there_is_is_refused_with_numbers() {
    let Some(stream) = stream("more than there is") else { return };
    let (_, total_bytes) = stream.context().memory_bytes().unwrap();
    let too_much = total_bytes + MIB;
    let refused = |error: MemoryError| {
        assert_eq!(error.code, Some(2), "{error}");
        let said = error.to_string();
        assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{said}");
        assert!(said.contains(&format!("of {total_bytes}")), "{said}");
    };
    refused(CudaMemory::new(&stream, too_much).unwrap_err());
    let mut memory = CudaMemory::growing(&stream, too_much).unwrap();
    memory.grow(MIB).unwrap();
    memory.write(0, b"kept").unwrap();
    let len_bytes = memory.len_bytes();
    refused(memory.grow(too_much).unwrap_err());
    assert_eq!(memory.len_bytes(), len_bytes);
    assert_eq!(read(&memory, 0, 4), b"kept");

    let ladder = [too_much, 8 * MIB, MIB];
    let slab = Slab::with_sizes(&ladder, |len| CudaMemory::new(&stream, len)).unwrap();
    assert_eq!(slab.capacity_bytes(), 8 * MIB);
    let Err(SlabError::AllSizesRefused { refusals }) =
        Slab::with_sizes(&[too_much, too_much + 1], |len| CudaMemory::new(&stream, len))
    else {
        panic!("granted")
    };
    assert_eq!(refusals.len(), 2);
}

#[test]
fn a_slab_does_on_the_device_what_it_does_on_the_host() {
    let Some(stream) = stream("a slab on the device") else { return };
    fn run<M: DeviceMemory>(memory: M) -> (Vec<u8>, gpu_slab::Counters) {
        let mut slab = Slab::new(memory);
        let first = slab.allocate_and_write("first", &bytes(1000, 3)).unwrap();
        slab.seal();
        let checkpoint = slab.checkpoint();
        let second = slab.allocate_zeroed("second", 1000).unwrap();
        slab.write_view(second, 990, &[1, 2, 3]).unwrap();
        slab.rewind(checkpoint).unwrap();
        let third = slab.allocate("third", 1000).unwrap();
        assert!(slab.write_view(second, 0, &[9]).is_err());
        slab.copy(first, third).unwrap();
        slab.fill_view(first.slice(10..20).unwrap(), 0xee).unwrap();
        assert_eq!(slab.device_ptr(third).unwrap() % 256, 0);
        let mut found = vec![0; 2000];
        slab.read_view(first, 0, &mut found[..1000]).unwrap();
        slab.read_view(third, 0, &mut found[1000..]).unwrap();
        (found, slab.counters())
    }
    let expected = run(HostMemory::new(MIB).unwrap());
    assert_eq!(run(CudaMemory::new(&stream, MIB).unwrap()), expected);
    assert_eq!(run(CudaMemory::growing(&stream, MIB).unwrap()), expected);
}

#[test]
fn memory_that_another_owns_is_left_to_it() {
    let Some(stream) = stream("memory that another owns") else { return };
    let mut owner = CudaMemory::new(&stream, 2 * MIB).unwrap();
    owner.fill(0, 2 * MIB, 5).unwrap();
    {
        // SAFETY: a part of `owner`, which lives longer and is not used meanwhile.
        let lent = unsafe { CudaMemory::from_raw(&stream, owner.base_address() + MIB, MIB) };
        let mut slab = Slab::over(lent);
        slab.allocate_and_write("greeting", b"hello").unwrap();
        assert!(slab.memory_mut().grow(MIB + 1).is_err());
        assert!(slab.memory_mut().write(MIB, &[1]).is_err());
    }
    assert_eq!(read(&owner, MIB, 6), b"hello\x05");
    assert_eq!(read(&owner, MIB - 1, 1), [5]);
    owner.write(0, &[1]).unwrap();
}

#[test]
fn memory_goes_to_other_threads_and_streams_are_independent() {
    let Some(first) = stream("other threads") else { return };
    let threads: Vec<_> = (0..4u8)
        .map(|index| {
            let stream = CudaStream::new(first.context()).unwrap();
            assert_ne!(stream, first);
            let mut memory = CudaMemory::new(&stream, 16 * MIB).unwrap();
            std::thread::spawn(move || {
                let expected = bytes(10 << 20, u64::from(index));
                for _ in 0..5 {
                    memory.write(3, &expected).unwrap();
                    assert!(read(&memory, 3, expected.len()) == expected);
                }
                memory
            })
        })
        .collect();
    let memories: Vec<CudaMemory> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    // Dropped on this thread, in an order that is not that of their making.
    memories.into_iter().rev().for_each(drop);
}

#[test]
fn somebody_elses_context_and_stream_will_do() {
    let Some(theirs) = stream("somebody else's context") else { return };
    // SAFETY: the context is alive to the end of this test.
    let context = unsafe { CudaContext::from_raw(theirs.context().as_raw()) }.unwrap();
    // SAFETY: the stream too.
    let stream = unsafe { CudaStream::from_raw(&context, theirs.as_raw()) };
    assert_eq!(stream, theirs);
    assert_eq!(context.device_name().unwrap(), theirs.context().device_name().unwrap());
    let mut memory = CudaMemory::new(&stream, MIB).unwrap();
    memory.write(0, b"theirs").unwrap();
    assert_eq!(read(&memory, 0, 6), b"theirs");
    drop((memory, stream, context));
    theirs.synchronize().unwrap();
}

#[test]
fn waits_and_allocations_are_counted() {
    let Some(stream) = stream("waits and allocations") else { return };
    // SAFETY: the context is alive to the end of this test. Counters of its own: other tests count
    // in the shared one.
    let context = unsafe { CudaContext::from_raw(stream.context().as_raw()) }.unwrap();
    let stream = CudaStream::new(&context).unwrap();
    let mut memory = CudaMemory::new(&stream, MIB).unwrap();
    memory.write(0, &[1; 12]).unwrap();
    read(&memory, 0, 4);
    assert_eq!(context.counters().allocations, 3, "memory, and pinned for writing and reading");
    let before = context.counters();
    for _ in 0..100 {
        memory.write(0, &[1; 12]).unwrap();
        memory.fill(64, 64, 0).unwrap();
    }
    assert_eq!(context.counters(), before, "nothing of this waits or allocates");
    read(&memory, 0, 4);
    assert_eq!(context.counters().since(before).synchronizations, 1);
    assert_eq!(context.counters().since(before).allocations, 0);
}

#[test]
fn uploading_is_as_quick_as_the_bus() {
    let Some(stream) = stream("upload speed") else { return };
    let len_bytes = 512 * MIB;
    let mut memory = CudaMemory::new(&stream, len_bytes).unwrap();
    let chunk = bytes(4 << 20, 1);
    memory.write(0, &chunk).unwrap();
    for _ in 0..8 {
        memory.write(0, &chunk).unwrap(); // every staging buffer is there
    }
    memory.synchronize().unwrap();
    let start = std::time::Instant::now();
    for offset_bytes in (0..len_bytes).step_by(chunk.len()) {
        memory.write(offset_bytes, &chunk).unwrap();
    }
    memory.synchronize().unwrap();
    let gigabytes_per_second = len_bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    say(&format!("upload: {gigabytes_per_second:.1} GB/s through pinned staging\n"));
    assert!(gigabytes_per_second > 1.0, "{gigabytes_per_second} GB/s");
    assert!(read(&memory, len_bytes - chunk.len() as u64, chunk.len()) == chunk);
}

#[test]
fn a_queued_read_has_what_was_there_when_it_was_queued() {
    let Some(stream) = stream("queued reads") else { return };
    let mut memory = CudaMemory::new(&stream, MIB).unwrap();
    let mut queued = Vec::new();
    for value in 0..4u8 {
        memory.write(0, &[value; 4]).unwrap();
        queued.push(memory.queue_read(0, 4).unwrap());
    }
    memory.write(0, &[9; 4]).unwrap();
    for (value, queued) in queued.into_iter().enumerate() {
        let mut bytes = [0xff; 4];
        memory.finish_read(queued, &mut bytes).unwrap();
        assert_eq!(bytes, [value as u8; 4]);
    }
    let overtaken = memory.queue_read(0, 4).unwrap();
    let later: Vec<_> = (0..4).map(|_| memory.queue_read(0, 4).unwrap()).collect();
    let error = memory.finish_read(overtaken, &mut [0; 4]).unwrap_err();
    assert!(error.to_string().contains("too many reads"), "{error}");
    for queued in later {
        memory.finish_read(queued, &mut [0; 4]).unwrap();
    }
    assert!(memory.queue_read(0, 65).is_err());
    assert!(memory.queue_read(MIB - 3, 4).is_err());
}
