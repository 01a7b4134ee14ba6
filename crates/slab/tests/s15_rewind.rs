//! S15: a view is valid if and only if no later rewind went below its end.

use gpu_slab::{HostMemory, Slab, SlabError};

fn slab() -> Slab<HostMemory> {
    Slab::new(HostMemory::new(1 << 16).unwrap())
}

#[test]
fn s15_stale_view_is_an_error() {
    let mut slab = slab();
    let start = slab.checkpoint();
    let old = slab.allocate_and_write("old", &[1; 100]).unwrap();
    slab.rewind(start).unwrap();
    let stale = SlabError::StaleView { offset_bytes: 0, len_bytes: 100, rewound_to_bytes: 0 };
    assert_eq!(slab.resolve(old), Err(stale.clone()), "at once");
    let new = slab.allocate_and_write("new", &[2; 100]).unwrap();
    assert_eq!(new.offset_bytes(), old.offset_bytes());
    let counters = slab.counters();
    assert_eq!(slab.device_ptr(old), Err(stale.clone()), "and when the space is used again");
    assert_eq!(slab.write_view(old, 0, &[9]), Err(stale.clone()));
    assert_eq!(slab.read_view(old, 0, &mut [0]), Err(stale.clone()));
    assert_eq!(slab.fill_view(old, 9), Err(stale.clone()));
    assert_eq!(slab.copy(old, new), Err(stale.clone()));
    assert_eq!(slab.copy(new, old), Err(stale.clone()));
    assert_eq!(slab.view_bytes(old), Err(stale.clone()));
    assert_eq!(slab.view_bytes_mut(old), Err(stale.clone()));
    assert_eq!(slab.cover([new, old]), Err(stale));
    assert_eq!(slab.view_bytes(new).unwrap(), [2; 100], "nobody wrote through it");
    assert_eq!(slab.counters(), counters);
}

#[test]
fn s15_a_rewind_to_a_views_end_leaves_it_valid() {
    let mut slab = slab();
    let kept = slab.allocate("kept", 256).unwrap();
    let after = slab.checkpoint();
    slab.allocate("temporary", 1).unwrap();
    slab.rewind(after).unwrap();
    assert_eq!(slab.resolve(kept), Ok(0..256));
}

#[test]
fn s15_a_low_rewind_is_not_forgotten_after_a_higher_one() {
    let mut slab = slab();
    let low = slab.checkpoint();
    let old = slab.allocate("old", 256).unwrap();
    slab.rewind(low).unwrap();
    slab.allocate("new", 512).unwrap();
    let high = slab.checkpoint();
    slab.allocate("temporary", 256).unwrap();
    slab.rewind(high).unwrap();
    assert!(matches!(slab.resolve(old), Err(SlabError::StaleView { rewound_to_bytes: 0, .. })));
}

#[test]
fn s15_part_of_a_stale_view_is_stale() {
    let mut slab = slab();
    let start = slab.checkpoint();
    let view = slab.allocate("view", 256).unwrap();
    let part = view.slice(10..20).unwrap();
    assert_eq!(slab.resolve(part), Ok(10..20));
    slab.rewind(start).unwrap();
    slab.allocate("other", 256).unwrap();
    assert!(matches!(slab.resolve(part), Err(SlabError::StaleView { .. })));
    let late = view.slice(10..20).unwrap();
    assert!(matches!(slab.resolve(late), Err(SlabError::StaleView { .. })), "as old as the whole");
}

#[test]
fn s15_views_and_checkpoints_of_another_slab_are_foreign() {
    let (mut one, mut two) = (slab(), slab());
    let view = one.allocate("view", 16).unwrap();
    two.allocate("view", 16).unwrap();
    let (view_slab, slab) = (one.id(), two.id());
    assert_ne!(view_slab, slab);
    let foreign = SlabError::ForeignView { view_slab, slab };
    assert_eq!(two.resolve(view), Err(foreign.clone()));
    assert_eq!(two.write_view(view, 0, &[1]), Err(foreign.clone()));
    assert_eq!(two.cover([view]), Err(foreign));
    let checkpoint = one.checkpoint();
    assert_eq!(
        two.rewind(checkpoint),
        Err(SlabError::ForeignCheckpoint { checkpoint_slab: view_slab, slab })
    );
    assert_eq!(two.used_bytes(), 16);
}

#[test]
fn s15_a_checkpoint_below_which_was_rewound_is_stale() {
    let mut slab = slab();
    let low = slab.checkpoint();
    slab.allocate("first", 256).unwrap();
    let high = slab.checkpoint();
    slab.allocate("second", 256).unwrap();
    slab.rewind(high).unwrap();
    slab.rewind(high).unwrap(); // again is fine
    slab.rewind(low).unwrap();
    let stale = SlabError::StaleCheckpoint { offset_bytes: 256, rewound_to_bytes: 0 };
    assert_eq!(slab.rewind(high), Err(stale.clone()));
    slab.allocate("third", 1024).unwrap();
    assert_eq!(slab.rewind(high), Err(stale), "also when the slab is higher again");
    assert_eq!(slab.used_bytes(), 1024);
    slab.rewind(low).unwrap();
}

#[test]
fn s15_a_cover_is_valid_as_long_as_all_it_covers() {
    let mut slab = slab();
    let weights = slab.allocate("weights", 1000).unwrap();
    let after_weights = slab.checkpoint();
    let arena = slab.allocate("step arena", 500).unwrap();
    let after_arena = slab.checkpoint();
    let graph = slab.cover([arena, weights]).unwrap();
    assert_eq!((graph.offset_bytes(), graph.end_bytes()), (0, arena.end_bytes()));
    for _ in 0..3 {
        slab.allocate("temporary", 100).unwrap();
        slab.rewind(after_arena).unwrap();
        assert!(slab.resolve(graph).is_ok());
    }
    slab.rewind(after_weights).unwrap();
    slab.allocate("step arena", 500).unwrap();
    assert!(matches!(slab.resolve(graph), Err(SlabError::StaleView { .. })));
    assert!(slab.resolve(weights).is_ok());
    assert!(slab.cover([]).is_ok_and(|empty| empty.is_empty()));
}

#[test]
fn s15_what_a_failed_transaction_handed_out_is_stale() {
    let mut slab = slab();
    let mut leaked = None;
    let _ = slab.transaction(|slab| {
        leaked = Some((slab.allocate("leaked", 10).unwrap(), slab.checkpoint()));
        Err::<(), _>(())
    });
    slab.allocate("other", 10).unwrap();
    let (view, checkpoint) = leaked.unwrap();
    assert!(matches!(slab.resolve(view), Err(SlabError::StaleView { .. })));
    assert!(matches!(slab.rewind(checkpoint), Err(SlabError::StaleCheckpoint { .. })));
}

#[test]
fn s15_a_stale_cover_is_stale_at_its_start_too() {
    let mut slab = slab();
    let low = slab.allocate_zeroed("low", 256).unwrap();
    let middle = slab.checkpoint();
    let high = slab.allocate("high", 256).unwrap();
    let cover = slab.cover([low, high]).unwrap();
    slab.rewind(middle).unwrap();
    assert!(matches!(slab.write_view(cover, 0, &[1]), Err(SlabError::StaleView { .. })));
    assert!(matches!(slab.read_view(cover, 0, &mut [0]), Err(SlabError::StaleView { .. })));
    assert_eq!(slab.view_bytes(low).unwrap(), [0; 256]);
}
