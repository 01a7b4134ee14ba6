//! S16: memory that grows does so in place, so addresses and whoever keeps them stay valid.

use gpu_slab::testing::FailingMemory;
use gpu_slab::{DeviceMemory, HostMemory, Slab, SlabError};

#[test]
fn s16_memory_grows_on_demand_and_addresses_stay() {
    let mut slab = Slab::new(HostMemory::growable(1 << 20).unwrap());
    assert_eq!((slab.capacity_bytes(), slab.report().backed_bytes), (1 << 20, 0));
    let weights = slab.allocate_and_write("weights", &[7; 1000]).unwrap();
    slab.seal();
    let address = slab.device_ptr(weights).unwrap();
    let graph = slab.cover([weights]).unwrap();
    let kv = slab.allocate_zeroed("kv", 500_000).unwrap();
    assert_eq!(slab.device_ptr(weights), Ok(address));
    assert_eq!(slab.device_ptr(kv), Ok(address + 1024));
    assert!(slab.resolve(graph).is_ok(), "growing rewinds nothing");
    assert_eq!(slab.view_bytes(weights).unwrap(), [7; 1000]);
    let report = slab.report();
    assert_eq!((report.backed_bytes, report.used_bytes), (501_024, 501_024));
    assert!(report.to_string().contains("0.5 MiB backed") || report.to_string().contains("501024"));
}

#[test]
fn s16_rewinding_keeps_what_was_grown() {
    let mut slab = Slab::new(FailingMemory::new(HostMemory::growable(1 << 20).unwrap()));
    let start = slab.checkpoint();
    for _ in 0..10 {
        slab.allocate("step", 4096).unwrap();
        slab.rewind(start).unwrap();
    }
    assert_eq!(slab.memory().calls(), 1, "grown once, for the first step");
    assert_eq!(slab.memory().len_bytes(), 4096);
}

#[test]
fn s16_a_device_that_refuses_more_leaves_the_slab_as_it_was() {
    let memory = FailingMemory::new(HostMemory::growable(1 << 20).unwrap()).refuse_above(8192);
    let mut slab = Slab::new(memory);
    slab.allocate_zeroed("kept", 8000).unwrap();
    let before = slab.report();
    let error = slab.allocate("more", 8000).unwrap_err();
    let SlabError::Memory { name, source } = &error else { panic!("{error}") };
    assert_eq!((name.as_str(), source.operation), ("more", "grow"));
    assert_eq!((source.code, source.requested_bytes), (Some(2), 8192 + 8000));
    assert_eq!(slab.report(), before);
}

#[test]
fn s16_beyond_the_reserve_is_out_of_memory_before_the_device_is_asked() {
    let mut slab = Slab::new(FailingMemory::new(HostMemory::growable(4096).unwrap()));
    let error = slab.allocate("too much", 5000).unwrap_err();
    assert!(matches!(error, SlabError::OutOfMemory { shortage_bytes: 904, .. }), "{error}");
    assert_eq!(slab.memory().calls(), 0);
}
