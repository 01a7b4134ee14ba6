//! S1: one slab per device; the first size that the device grants.

use std::sync::Mutex;

use gpu_slab::testing::host_memory_up_to;
use gpu_slab::{DEFAULT_LADDER, HostMemory, MemoryError, Plan, Slab, SlabError};

const GIB: u64 = 1 << 30;

/// Keeps what was logged at level info, for the test that wants to see it.
struct Kept(Mutex<Vec<String>>);

static KEPT: Kept = Kept(Mutex::new(Vec::new()));

impl log::Log for Kept {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target() == "gpu_slab" && metadata.level() <= log::Level::Info
    }
    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }
    fn flush(&self) {}
}

#[test]
fn s1_the_first_granted_size_is_used_and_logged_in_mib() {
    log::set_logger(&KEPT).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let mut asked = Vec::new();
    let mut device = host_memory_up_to(2 * GIB + 5);
    let slab = Slab::with_sizes(&DEFAULT_LADDER, |len_bytes| {
        asked.push(len_bytes);
        device(len_bytes)
    })
    .unwrap();
    assert_eq!(asked, [5 * GIB / 2, 2 * GIB], "in order, and none after the first granted");
    assert_eq!(slab.capacity_bytes(), 2 * GIB);
    let line = format!("slab {} of 2048.0 MiB", slab.id());
    assert!(KEPT.0.lock().unwrap().contains(&line), "{:?}", KEPT.0);
}

#[test]
fn s1_all_refused_lists_each_size_and_the_devices_reason() {
    let error = Slab::with_sizes(&DEFAULT_LADDER, host_memory_up_to(100)).unwrap_err();
    let SlabError::AllSizesRefused { refusals } = &error else { panic!("{error}") };
    let sizes: Vec<_> = refusals.iter().map(|refusal| refusal.len_bytes).collect();
    assert_eq!(sizes, DEFAULT_LADDER);
    for refusal in refusals {
        assert_eq!(refusal.error.code, Some(2));
        assert_eq!(refusal.error.requested_bytes, refusal.len_bytes);
    }
    let text = error.to_string();
    for part in ["2560 MiB: ", "2048 MiB: ", "1024 MiB: ", "100 bytes are free", "(code 2)"] {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
}

#[test]
fn s1_no_sizes_is_an_error_of_its_own_words() {
    let error = Slab::with_sizes(&[], HostMemory::new).unwrap_err();
    assert_eq!(error, SlabError::AllSizesRefused { refusals: vec![] });
    assert_eq!(error.to_string(), "no slab: no size was asked for");
}

#[test]
fn s1_a_plan_asks_for_its_total_first() {
    let plan = Plan::of(|arena| arena.allocate("weights", 3 * GIB)).unwrap();
    let mut asked = Vec::new();
    let refused = Slab::<HostMemory>::for_plan(&plan, |len_bytes| {
        asked.push(len_bytes);
        Err(MemoryError::new("allocate", len_bytes, "no"))
    });
    assert!(refused.is_err());
    assert_eq!(asked, [3 * GIB, DEFAULT_LADDER[0], DEFAULT_LADDER[1], DEFAULT_LADDER[2]]);
}

#[test]
fn s1_a_grant_of_less_than_asked_is_a_refusal() {
    let slab = Slab::with_sizes(&[5000, 3000], |_| HostMemory::new(4000)).unwrap();
    assert_eq!(slab.capacity_bytes(), 4000);
    let error = Slab::with_sizes(&[5000], |_| HostMemory::new(4000)).unwrap_err();
    assert!(error.to_string().contains("4000 bytes"), "{error}");
}

#[test]
fn s1_a_slab_is_laid_over_memory_of_somebody_else() {
    let mut memory = HostMemory::new(1024).unwrap();
    memory.bytes_mut().fill(9);
    let mut slab = Slab::over(&mut memory);
    let first = slab.allocate("first", 10).unwrap();
    let mut bytes = [0; 10];
    slab.read_view(first, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 10], "nothing is written before somebody asks");
    slab.allocate_and_write("second", &[1, 2, 3]).unwrap();
    drop(slab);
    assert_eq!(memory.bytes()[256..260], [1, 2, 3, 9], "the owner has it back, written to");
}
