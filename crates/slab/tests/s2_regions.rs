//! S2: a permanent region that only grows, a transient one that is rewound, all or nothing.
//! S13: every refusal is a value, and leaves everything as it was.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpu_slab::testing::FailingMemory;
use gpu_slab::{Arena, Counters, DeviceMemory, HostMemory, MemoryError, Slab, SlabError, View};

fn slab(len_bytes: u64) -> Slab<HostMemory> {
    Slab::new(HostMemory::new(len_bytes).unwrap())
}

fn names<M: DeviceMemory>(slab: &Slab<M>) -> Vec<String> {
    slab.report().allocations.into_iter().map(|allocation| allocation.name).collect()
}

/// Everything that can be seen of a slab except its high-water mark, which may stay.
fn state<M: DeviceMemory>(slab: &Slab<M>) -> (gpu_slab::Report, Option<View>) {
    let mut report = slab.report();
    report.high_water_bytes = 0;
    (report, slab.cover([]).ok())
}

#[test]
fn s2_steps_start_at_the_permanent_end_and_are_rewound() {
    let mut slab = slab(4096);
    let weights = slab.allocate("weights", 1000).unwrap();
    assert_eq!(slab.seal(), 1000);
    let step = slab.checkpoint();
    for _ in 0..100 {
        let scores = slab.allocate("scores", 300).unwrap();
        assert_eq!(scores.offset_bytes(), 1024);
        assert_eq!(names(&slab), ["weights", "scores"]);
        slab.rewind(step).unwrap();
    }
    assert_eq!(names(&slab), ["weights"]);
    assert_eq!((slab.used_bytes(), slab.permanent_end_bytes()), (1000, 1000));
    assert_eq!(slab.high_water_bytes(), 1324);
    assert!(slab.resolve(weights).is_ok());
}

#[test]
fn s2_the_permanent_end_only_grows() {
    let mut slab = slab(4096);
    let start = slab.checkpoint();
    slab.allocate("weights", 512).unwrap();
    slab.seal();
    assert_eq!(
        slab.rewind(start),
        Err(SlabError::BelowPermanentEnd { target_bytes: 0, permanent_end_bytes: 512 })
    );
    slab.allocate("temporary", 512).unwrap();
    slab.rewind_transient().unwrap();
    assert_eq!((slab.seal(), slab.used_bytes()), (512, 512));
    slab.allocate("kv", 256).unwrap();
    assert_eq!(slab.seal(), 768);
    slab.rewind_transient().unwrap();
    assert_eq!(names(&slab), ["weights", "kv"]);
}

#[test]
fn s2_a_failed_transaction_leaves_the_slab_as_it_was() {
    let mut slab = slab(4096);
    let kept = slab.allocate_and_write("kept", &[1; 100]).unwrap();
    let before = state(&slab);
    let mut lost = None;
    let result = slab.transaction(|slab| {
        lost = Some(slab.allocate("k", 2000)?);
        slab.seal();
        slab.transaction(|slab| slab.allocate("inner", 1))?;
        slab.allocate("v", 2000)
    });
    assert!(matches!(result, Err(SlabError::OutOfMemory { name, .. }) if name == "v"));
    let after = state(&slab);
    assert_eq!(before.0, after.0);
    assert!(slab.resolve(kept).is_ok());
    assert!(matches!(slab.resolve(lost.unwrap()), Err(SlabError::StaleView { .. })));
    assert_eq!(slab.high_water_bytes(), 2305, "one byte at the first 256 after 256 + 2000");
}

#[test]
fn s2_a_panic_in_a_transaction_leaves_the_slab_as_it_was() {
    let mut slab = slab(4096);
    slab.allocate("kept", 100).unwrap();
    let before = state(&slab).0;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        slab.transaction(|slab| -> Result<(), SlabError> {
            slab.allocate("k", 100)?;
            slab.seal();
            panic!("on purpose")
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(before, state(&slab).0);
    // The transaction has ended: what lies before it can be rewound again.
    slab.rewind_transient().unwrap();
    assert_eq!(slab.used_bytes(), 0);
}

#[test]
fn s2_a_transaction_that_succeeds_keeps_everything() {
    let mut slab = slab(4096);
    let (k, v) = slab
        .transaction(|slab| Ok::<_, SlabError>((slab.allocate("k", 10)?, slab.allocate("v", 10)?)))
        .unwrap();
    assert!(slab.resolve(k).is_ok() && slab.resolve(v).is_ok());
    assert_eq!(names(&slab), ["k", "v"]);
}

#[test]
fn s2_inside_a_transaction_nothing_from_before_is_rewound() {
    let mut slab = slab(4096);
    let start = slab.checkpoint();
    slab.allocate("before", 300).unwrap();
    let below = SlabError::BelowTransaction { target_bytes: 0, transaction_start_bytes: 300 };
    slab.transaction(|slab| {
        assert_eq!(slab.rewind(start), Err(below.clone()));
        assert_eq!(slab.rewind_transient(), Err(below.clone()));
        let inside = slab.checkpoint();
        slab.allocate("temporary", 100)?;
        slab.transaction(|slab| {
            assert!(matches!(slab.rewind(inside), Err(SlabError::BelowTransaction { .. })));
            Ok::<_, SlabError>(())
        })?;
        slab.rewind(inside)
    })
    .unwrap();
    assert_eq!(names(&slab), ["before"]);
    slab.rewind(start).unwrap();
    assert_eq!(names(&slab), [""; 0]);
}

#[test]
fn s2_replacing_the_slab_inside_a_transaction_harms_neither() {
    let mut first = slab(1024);
    first.allocate("first", 100).unwrap();
    let mut other = slab(1024);
    other.allocate("other", 200).unwrap();
    let result = first.transaction(|slab| {
        std::mem::swap(slab, &mut other);
        Err::<(), _>(())
    });
    assert!(result.is_err());
    assert_eq!((first.used_bytes(), other.used_bytes()), (200, 100));
}

#[test]
fn s2_alignment_is_of_offset_and_address() {
    let mut slab = slab(1 << 16);
    for align_bytes in [1, 2, 16, 256, 4096] {
        slab.allocate_aligned("one byte", 1, 1).unwrap();
        let view = slab.allocate_aligned("aligned", 3, align_bytes).unwrap();
        assert_eq!(view.offset_bytes() % align_bytes, 0);
        assert_eq!(slab.device_ptr(view).unwrap() % align_bytes, 0);
    }
    slab.allocate_aligned("one byte", 1, 1).unwrap();
    assert_eq!(slab.allocate("default", 1).unwrap().offset_bytes() % 256, 0);
    for align_bytes in [0, 3, 255, u64::MAX] {
        let name = "crooked".to_string();
        assert_eq!(
            slab.allocate_aligned("crooked", 1, align_bytes),
            Err(SlabError::BadAlignment { name, align_bytes })
        );
    }
}

/// Memory that starts at an address of its own choosing.
struct At(u64, HostMemory);

impl DeviceMemory for At {
    fn len_bytes(&self) -> u64 {
        self.1.len_bytes()
    }
    fn base_address(&self) -> u64 {
        self.0
    }
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.1.write(offset_bytes, bytes)
    }
    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.1.read(offset_bytes, bytes)
    }
    fn fill(&mut self, offset_bytes: u64, len_bytes: u64, value: u8) -> Result<(), MemoryError> {
        self.1.fill(offset_bytes, len_bytes, value)
    }
    fn copy_within(&mut self, from: u64, to: u64, len_bytes: u64) -> Result<(), MemoryError> {
        self.1.copy_within(from, to, len_bytes)
    }
}

#[test]
fn s2_memory_less_aligned_than_asked_is_refused() {
    let mut slab = Slab::over(At(0x7000_0080, HostMemory::new(4096).unwrap()));
    let error = slab.allocate("wide", 16).unwrap_err();
    let (name, base_address) = ("wide".to_string(), 0x7000_0080);
    assert_eq!(error, SlabError::MisalignedBase { name, align_bytes: 256, base_address });
    let narrow = slab.allocate_aligned("narrow", 16, 128).unwrap();
    assert_eq!(slab.device_ptr(narrow), Ok(0x7000_0080));
    assert_eq!(names(&slab), ["narrow"]);
}

#[test]
fn s2_memory_that_cannot_grow_says_so() {
    let mut memory = At(0, HostMemory::new(64).unwrap());
    assert_eq!(memory.max_len_bytes(), 64);
    memory.grow(64).unwrap();
    let error = memory.grow(65).unwrap_err();
    assert_eq!((error.operation, error.requested_bytes), ("grow", 65));
}

#[test]
fn s13_out_of_memory_says_how_much_is_short() {
    let mut slab = slab(1000);
    slab.allocate("first", 100).unwrap();
    assert_eq!(
        slab.allocate("second", 900),
        Err(SlabError::OutOfMemory {
            name: "second".into(),
            requested_bytes: 900,
            free_bytes: 900,
            shortage_bytes: 156, // what aligning to 256 takes
        })
    );
    assert_eq!(names(&slab), ["first"]);
    slab.allocate("second", 744).unwrap();
    assert_eq!(slab.free_bytes(), 0);
    slab.allocate_aligned("nothing", 0, 1).unwrap();
}

#[test]
fn s13_sizes_that_overflow_are_refused_with_their_numbers() {
    let mut arena = Arena::counting();
    arena.allocate_aligned("one", 1, 1).unwrap();
    for (len_bytes, align_bytes) in [(u64::MAX, 1), (u64::MAX, 256), (u64::MAX - 255, 256)] {
        assert_eq!(
            arena.allocate_aligned("huge", len_bytes, align_bytes),
            Err(SlabError::Overflow {
                name: "huge".into(),
                offset_bytes: 1,
                len_bytes,
                align_bytes
            })
        );
    }
    arena.allocate_aligned("nearly all", u64::MAX - 2, 1).unwrap();
    assert!(matches!(
        arena.allocate_aligned("aligned past the end", 0, 1 << 63),
        Err(SlabError::Overflow { .. })
    ));
    assert_eq!((arena.used_bytes(), arena.free_bytes()), (u64::MAX - 1, 1));
}

#[test]
fn s13_ranges_outside_of_a_view_are_refused() {
    let mut slab = slab(4096);
    let view = slab.allocate("view", 10).unwrap();
    slab.allocate("neighbour", 10).unwrap();
    let outside = |start_bytes, end_bytes| SlabError::OutOfView {
        start_bytes,
        end_bytes,
        view_len_bytes: 10,
    };
    assert_eq!(slab.write_view(view, 9, &[1, 2]), Err(outside(9, 11)));
    assert_eq!(slab.write_view(view, u64::MAX, &[1]), Err(outside(u64::MAX, u64::MAX)));
    assert_eq!(slab.read_view(view, 11, &mut []), Err(outside(11, 11)));
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = view.slice(5..4);
    assert_eq!(reversed, Err(outside(5, 4)));
    let tail = view.slice(8..10).unwrap();
    slab.write_view(tail, 0, &[1, 2]).unwrap();
    assert!(slab.write_view(tail, 1, &[1, 2]).is_err(), "a part is no way out of the part");
    assert_eq!(slab.counters().h2d_bytes, 2);
}

#[test]
fn s13_copies_that_a_device_leaves_undefined_are_refused() {
    let mut slab = slab(4096);
    let view = slab.allocate_and_write("view", &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let part = |range| view.slice(range).unwrap();
    assert_eq!(
        slab.copy(part(0..4), part(4..7)),
        Err(SlabError::LengthMismatch { from_bytes: 4, to_bytes: 3 })
    );
    assert_eq!(
        slab.copy(part(0..4), part(3..7)),
        Err(SlabError::OverlappingCopy { from_offset_bytes: 0, to_offset_bytes: 3, len_bytes: 4 })
    );
    slab.copy(part(0..4), part(4..8)).unwrap();
    slab.copy(part(2..2), part(2..2)).unwrap();
    assert_eq!(slab.view_bytes(view).unwrap(), [1, 2, 3, 4, 1, 2, 3, 4]);
    slab.view_bytes_mut(part(1..3)).unwrap().fill(0);
    assert_eq!(slab.view_bytes(view).unwrap(), [1, 0, 0, 4, 1, 2, 3, 4]);
}

#[test]
fn s13_each_failing_call_is_a_named_error_and_changes_nothing() {
    fn run(slab: &mut Slab<FailingMemory<HostMemory>>) -> Result<(), SlabError> {
        let kept = slab.allocate("kept", 8)?;
        slab.write_view(kept, 0, &[3; 8])?; // call 1
        let zeroed = slab.allocate_zeroed("zeroed", 8)?; // call 2
        slab.allocate_and_write("written", &[5; 8])?; // call 3
        slab.copy(kept, zeroed)?; // call 4
        slab.read_view(zeroed, 0, &mut [0; 8])?; // call 5
        slab.synchronize() // call 6
    }
    // What failed, and what was in use and had crossed by then.
    let expected = [
        ("kept", "write", 8, 0, 0),
        ("zeroed", "fill", 8, 8, 0),
        ("written", "write", 264, 8, 0),
        ("zeroed", "copy", 520, 16, 0),
        ("zeroed", "read", 520, 16, 0),
        ("", "synchronize", 520, 16, 8),
    ];
    for (call, (name, operation, used_bytes, h2d_bytes, d2h_bytes)) in (1..).zip(expected) {
        let memory = FailingMemory::new(HostMemory::new(4096).unwrap()).refuse_call(call);
        let mut slab = Slab::new(memory);
        let error = run(&mut slab).unwrap_err();
        let SlabError::Memory { name: failed, source } = &error else { panic!("{error}") };
        assert_eq!((failed.as_str(), source.operation, source.code), (name, operation, Some(2)));
        assert_eq!(slab.used_bytes(), used_bytes, "call {call}");
        let counters = slab.counters();
        assert_eq!((counters.h2d_bytes, counters.d2h_bytes), (h2d_bytes, d2h_bytes));
        assert!(error.to_string().contains("(code 2)"), "{error}");
    }
    let mut slab = Slab::new(FailingMemory::new(HostMemory::new(4096).unwrap()));
    run(&mut slab).unwrap();
    assert_eq!(slab.memory().calls(), 6, "every call of the table was tried");
}

#[test]
fn s13_every_refusal_of_the_memory_above_a_limit_can_be_survived() {
    let memory = FailingMemory::new(HostMemory::new(4096).unwrap()).refuse_above(1024);
    let mut slab = Slab::new(memory);
    let loaded = (0..8).map(|_| slab.allocate_zeroed("weight", 256)).filter(Result::is_ok).count();
    assert_eq!((loaded, slab.used_bytes()), (4, 1024));
    assert_eq!(slab.memory().refused(), 4);
}

#[test]
fn bytes_that_cross_are_counted_and_no_others() {
    let mut slab = slab(4096);
    let zeroed = slab.allocate_zeroed("zeroed", 100).unwrap();
    let other = slab.allocate("other", 100).unwrap();
    slab.fill_view(other, 7).unwrap();
    slab.copy(other, zeroed).unwrap();
    slab.write_view(zeroed, 5, &[]).unwrap();
    slab.read_view(zeroed, 5, &mut []).unwrap();
    assert_eq!(slab.counters(), Counters::default());
    slab.write_view(zeroed, 5, &[1; 12]).unwrap();
    slab.allocate_and_write("written", &[2; 30]).unwrap();
    let before = slab.counters();
    slab.read_view(zeroed, 4, &mut [0; 3]).unwrap();
    assert_eq!(before, Counters { h2d_bytes: 42, h2d_copies: 2, ..Counters::default() });
    let since = slab.counters().since(before);
    assert_eq!(since, Counters { d2h_bytes: 3, d2h_copies: 1, ..Counters::default() });
}

#[test]
fn empty_allocations_are_aligned_listed_and_free() {
    let mut slab = slab(1024);
    slab.allocate("before", 1).unwrap();
    let empty = slab.allocate_zeroed("empty", 0).unwrap();
    let after = slab.allocate("after", 1).unwrap();
    assert_eq!((empty.offset_bytes(), after.offset_bytes()), (256, 256));
    assert!(empty.is_empty() && !empty.overlaps(&after));
    assert_eq!(names(&slab), ["before", "empty", "after"]);
    assert_eq!(slab.resolve(empty), Ok(256..256));
    assert_eq!(slab.name_of(after), Some("after"));
}

#[test]
fn empty_allocations_are_permanent_and_transactional_like_others() {
    let mut slab = slab(1024);
    let start = slab.checkpoint();
    slab.allocate("sealed", 0).unwrap();
    slab.seal();
    slab.allocate("before", 0).unwrap();
    let failed = slab.transaction(|slab| {
        slab.allocate("inside", 0).unwrap();
        slab.rewind(start).unwrap(); // the same height, but older than the transaction
        assert_eq!(names(slab), ["sealed", "before"]);
        Err::<(), _>(())
    });
    assert!(failed.is_err());
    assert_eq!(names(&slab), ["sealed", "before"]);
    slab.rewind(start).unwrap();
    assert_eq!(names(&slab), ["sealed"]);
}

#[test]
fn a_view_knows_the_name_it_was_allocated_under() {
    let mut slab = slab(4096);
    let first = slab.allocate("first", 100).unwrap();
    let second = slab.allocate("second", 100).unwrap();
    assert_eq!(slab.name_of(first), Some("first"));
    assert_eq!(slab.name_of(second.slice(99..100).unwrap()), Some("second"));
    assert_eq!(slab.name_of(slab.cover([first, second]).unwrap()), None);
    slab.rewind_transient().unwrap();
    slab.allocate("third", 100).unwrap();
    assert_eq!(slab.name_of(first), None, "stale");
    assert_eq!(slab.name_of(slab.cover([]).unwrap()), Some("third"), "an empty view at 0");
}

#[test]
fn the_report_adds_up_and_prints_largest_first() {
    let mut slab = slab(8 << 20);
    slab.allocate("norm", 1000).unwrap();
    slab.allocate("weights", 3 << 20).unwrap();
    slab.seal();
    let temporary = slab.allocate("scores", 2000).unwrap();
    let report = slab.report();
    let lengths: u64 = report.allocations.iter().map(|allocation| allocation.len_bytes).sum();
    assert_eq!(lengths + report.alignment_bytes, report.used_bytes);
    assert_eq!(report.used_bytes + report.free_bytes, report.capacity_bytes);
    assert_eq!(report.backed_bytes, 8 << 20);
    assert_eq!(report.used_bytes, temporary.end_bytes());
    let text = report.to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "3.0 MiB of 8 MiB used, 5.0 MiB free, permanent end 3.0 MiB, high water 3.0 MiB",
            "         bytes         offset  region     name",
            "       3145728           1024  permanent  weights",
            "          2000        3146752  transient  scores",
            "          1000              0  permanent  norm",
            "            24                            (alignment)",
        ]
    );
}

#[test]
fn slabs_go_between_threads() {
    fn sendable<T: Send + Sync>() {}
    sendable::<Slab<HostMemory>>();
    sendable::<Slab<FailingMemory<HostMemory>>>();
    sendable::<SlabError>();
}
