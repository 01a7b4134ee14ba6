//! Small C libraries that play the driver, and processes to load them into.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A new folder of this name under the build's folder for temporary files.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("the build's folder for temporary files is writable");
    folder
}

/// Compiles C to a shared library; the compiler is the one rustc links with.
pub(crate) fn shared_library(source: &str, library: &Path, arguments: &[&str]) {
    let code = library.with_extension("c");
    std::fs::write(&code, source).expect("the folder is writable");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(&code).args(arguments);
    succeed(&mut cc);
}

pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}\n{}", everything(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn everything(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Runs `body` in a process of its own in which what `library` returns plays the driver: a process
/// looks for one once. `test` is the name of the calling test, which is what that process runs.
pub(crate) fn with_driver<L: AsRef<OsStr>>(test: &str, library: fn(&str) -> L, body: fn()) {
    const INSIDE: &str = "CUDA_LOAD_TEST_INSIDE";
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let mut again = Command::new(env::current_exe().expect("a test knows its own path"));
    again.args(["--exact", test, "--test-threads=1"]);
    let printed = succeed(again.env(INSIDE, "1").env("CUDA_LOAD_LIBRARY", library(test)));
    assert!(printed.contains("1 passed"), "{test} is not the name of this test:\n{printed}");
}

/// For [`with_driver`]: no driver at all.
pub(crate) fn none(_: &str) -> &'static str {
    ""
}

/// The libraries that a program asks the dynamic loader for, or `None` without `readelf`.
pub(crate) fn needed(program: &Path) -> Option<Vec<String>> {
    let output = Command::new("readelf").arg("-d").arg(program).output().ok()?;
    assert!(output.status.success(), "{}", everything(&output));
    let text = everything(&output);
    let needed = text.lines().filter(|line| line.contains("(NEEDED)"));
    let names = needed.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.into()));
    let names: Vec<String> = names.collect();
    assert!(!names.is_empty(), "even libc is missing from\n{text}");
    Some(names)
}
