//! The GPU that the tests share.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use decode_graph::CudaBackend;

/// The backend of device 0, for one test at a time; `None` where there is no device, which is said.
pub(crate) fn gpu(test: &str) -> Option<MutexGuard<'static, CudaBackend>> {
    static GPU: OnceLock<Result<Mutex<CudaBackend>, String>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| match gpu_slab::cuda::device_count() {
        Ok(0) => Err("the driver offers none".into()),
        Err(error) => Err(error.message),
        Ok(_) => {
            let backend = CudaBackend::new(0).unwrap_or_else(|error| panic!("{error}"));
            let report = backend.load_report().unwrap_or_else(|error| panic!("{error}"));
            let mut said = format!("{}\n{report}\n", backend.cuda_device());
            for (module, target, milliseconds) in &report.modules {
                said += &format!("  {module}.{target}: {milliseconds:.1} ms\n");
            }
            say(&said);
            Ok(Mutex::new(backend))
        }
    });
    match gpu {
        // A test that failed with the lock held is no reason for the others to fail.
        Ok(backend) => Some(backend.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(reason) => {
            say(&format!("skipped {test}: no CUDA device ({reason})\n"));
            assert!(std::env::var_os("GPU_TESTS_REQUIRED").is_none(), "{test} was skipped");
            None
        }
    }
}

/// Prints even where the test's own output is kept back.
pub(crate) fn say(text: &str) {
    // Whoever closed the output does not want it.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Another seed every time, or `KERNELS_SEED`.
pub(crate) fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let given = std::env::var("KERNELS_SEED").ok().and_then(|seed| seed.parse().ok());
        given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64 % 1_000_000_007)
        })
    })
}
