//! Says in a sentence what `cust`'s build script would say with a panic: that there is no folder
//! to look for libcuda in.
//!
//! The search below is that of `find_cuda_helper`, which `cust` and `cust_raw` use. This script has
//! no dependencies to wait for, so it is normally the first of the three to run.

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_LIBRARY_PATH");
    let target = |key: &str, value: &str| env::var(key).is_ok_and(|found| found == value);
    let defined_here = target("CARGO_CFG_TARGET_ARCH", "x86_64")
        && target("CARGO_CFG_TARGET_POINTER_WIDTH", "64")
        && target("CARGO_CFG_TARGET_OS", "linux");
    if !defined_here || env::var_os("DOCS_RS").is_some() {
        return;
    }

    let named = env::var("CUDA_LIBRARY_PATH").ok();
    let named_folders = named.iter().flat_map(|paths| paths.split(':')).map(PathBuf::from);
    if named_folders.chain(installed()).any(|folder| has_libraries(&folder)) {
        return;
    }
    let ours = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!(
        "cargo::error={}",
        match named {
            Some(paths) =>
                format!("CUDA_LIBRARY_PATH is {paths:?}, and no folder of it has a lib64 inside"),
            None => "CUDA_LIBRARY_PATH is not set, and no CUDA toolkit is installed".to_owned(),
        }
    );
    println!("cargo::error=neither is needed to build: libcuda is loaded at run time; say");
    println!("cargo::error=    export CUDA_LIBRARY_PATH={ours}");
    println!("cargo::error=and build again (the README of cuda-load tells the other ways)");
}

fn installed() -> impl Iterator<Item = PathBuf> {
    let versioned = Path::new("/usr/local").read_dir().into_iter().flatten().flatten();
    let versioned = versioned
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("cuda-"))
        .map(|entry| entry.path());
    ["/opt/cuda", "/usr/local/cuda"].map(PathBuf::from).into_iter().chain(versioned)
}

fn has_libraries(folder: &Path) -> bool {
    folder.join("lib64").is_dir() || folder.join("targets/x86_64-linux/include/cuda.h").is_file()
}
