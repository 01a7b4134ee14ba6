//! What somebody reads who builds without a folder to look for libcuda in.
#![cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]

mod common;

use std::path::Path;
use std::process::Command;

use common::{folder, succeed};

#[test]
fn the_build_script_says_what_to_set() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = folder("the_build_script_says_what_to_set").join("script");
    let mut rustc = Command::new(option_env!("RUSTC").unwrap_or("rustc"));
    succeed(rustc.args(["--edition=2024", "-o"]).arg(&script).arg(here.join("build.rs")));
    let run = |library_path: Option<&Path>, os: &str| {
        let mut script = Command::new(&script);
        script.env("CARGO_CFG_TARGET_ARCH", "x86_64").env("CARGO_CFG_TARGET_OS", os);
        script.env("CARGO_CFG_TARGET_POINTER_WIDTH", "64").env("CARGO_MANIFEST_DIR", here);
        script.env_remove("CUDA_LIBRARY_PATH").env_remove("DOCS_RS");
        if let Some(path) = library_path {
            script.env("CUDA_LIBRARY_PATH", path);
        }
        succeed(&mut script)
    };
    assert!(!run(Some(here), "linux").contains("error"), "this crate's folder is enough");
    assert!(!run(None, "macos").contains("error"), "nothing is defined there");

    let said = run(None, "linux");
    if !said.contains("error") {
        eprintln!("the_build_script_says_what_to_set: rest skipped, a toolkit is installed");
        return;
    }
    assert!(said.contains("CUDA_LIBRARY_PATH is not set"), "{said}");
    assert!(said.contains(&format!("export CUDA_LIBRARY_PATH={}", here.display())), "{said}");
    let said = run(Some(Path::new("/nowhere")), "linux");
    assert!(said.contains(r#"CUDA_LIBRARY_PATH is "/nowhere""#), "{said}");
}
