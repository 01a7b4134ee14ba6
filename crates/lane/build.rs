//! Where the CUDA backend is compiled in: `cfg(cuda_backend)`.

use std::env::{var, var_os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(cuda_backend)");
    let target = |key| var(format!("CARGO_CFG_TARGET_{key}")).unwrap_or_default();
    // As the target's dependencies in the manifest have it.
    let loadable = target("ARCH") == "x86_64" && target("OS") == "linux";
    let feature = |name| var_os(format!("CARGO_FEATURE_{name}")).is_some();
    if feature("CUDA") || feature("AUTO_CUDA") && loadable {
        println!("cargo::rustc-cfg=cuda_backend");
    }
}
