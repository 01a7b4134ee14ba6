//! Reads that are queued and waited for later.

use gpu_slab::{HostMemory, QueuedRead, Slab};

#[test]
fn a_queued_read_has_what_was_there_when_it_was_queued() {
    let mut slab = Slab::new(HostMemory::new(4096).unwrap());
    let view = slab.allocate_and_write("token", &[1, 2, 3, 4]).unwrap();
    let before = slab.counters();
    let queued = slab.queue_read_view(view).unwrap();
    assert_eq!(queued.len_bytes(), 4);
    assert_eq!(slab.counters().since(before).d2h_bytes, 4);
    slab.write_view(view, 0, &[9; 4]).unwrap();
    let mut bytes = [0; 4];
    slab.finish_read(queued, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
}

#[test]
fn only_a_few_bytes_can_be_queued_and_all_are_taken() {
    let mut slab = Slab::new(HostMemory::new(4096).unwrap());
    let long = slab.allocate_zeroed("long", QueuedRead::MAX_BYTES as u64 + 1).unwrap();
    assert!(slab.queue_read_view(long).is_err());
    let view = slab.allocate_zeroed("token", 4).unwrap();
    let queued = slab.queue_read_view(view).unwrap();
    assert!(slab.finish_read(queued, &mut [0; 3]).is_err());
}
