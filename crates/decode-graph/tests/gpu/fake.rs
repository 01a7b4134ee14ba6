//! The same tests over the library that plays the driver, in a process of their own.

use std::path::PathBuf;
use std::process::Command;

use crate::device::say;

/// Set in the process that runs over the fake.
const INSIDE: &str = "GPU_TESTS_FAKE";

pub(crate) fn is_fake() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Where cargo puts it, if it was built.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let library = program.parent()?.parent()?.join("examples/libfake_driver.so");
    library.exists().then_some(library)
}

#[test]
fn s20_all_of_this_runs_without_a_gpu() {
    if is_fake() {
        return;
    }
    let Some(library) = library() else {
        say("skipped all of this without a GPU: the example `fake_driver` was not built\n");
        return;
    };
    let mut run = Command::new(std::env::current_exe().unwrap());
    run.env("CUDA_LOAD_LIBRARY", library).env(INSIDE, "1").env("GPU_TESTS_REQUIRED", "1");
    // The shapes of models add nothing where twins are compared with twins.
    let output = run.args(["--skip", "kernels::model"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    assert!(!text.contains("skipped") && text.contains("test result: ok"), "{text}");
}
