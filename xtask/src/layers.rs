//! The layers of the workspace: no crate depends on one that its layer may not.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// Each package and what it may depend on; `?` marks what only an optional feature may bring in.
const LAYERS: &[(&str, &[&str])] = &[
    ("cuda-load", &[]),
    ("gpu-slab", &["cuda-load?"]),
    ("kv-paged", &[]),
    ("q4k-soa", &[]),
    ("kernels-ptx", &["q4k-soa", "kv-paged"]),
    ("decode-graph", &["gpu-slab", "kernels-ptx", "q4k-soa", "kv-paged", "cuda-load?"]),
    ("lane", &["cuda-load", "gpu-slab", "kv-paged", "q4k-soa", "kernels-ptx", "decode-graph"]),
    ("xtask", &[]),
];

/// The packages for others; the chores are for this workspace alone.
pub(crate) fn published() -> Vec<&'static str> {
    LAYERS.iter().map(|layer| layer.0).filter(|name| *name != env!("CARGO_PKG_NAME")).collect()
}

#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for an ordinary one, else `dev` or `build`.
    kind: Option<String>,
    optional: bool,
}

/// What cargo says of the workspace's packages.
pub(crate) fn metadata(root: &Path) -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("running cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("reading cargo metadata")
}

pub(crate) fn run(root: &Path) -> Result<()> {
    let metadata = metadata(root)?;
    let faults = faults(&metadata);
    if faults.is_empty() {
        println!("layers: {} packages keep to theirs", metadata.packages.len());
        return Ok(());
    }
    bail!("the layers of xtask/src/layers.rs are broken:\n  {}", faults.join("\n  "))
}

fn faults(metadata: &Metadata) -> Vec<String> {
    let mut faults = Vec::new();
    let ours = |name: &str| metadata.packages.iter().any(|package| package.name == name);
    for package in &metadata.packages {
        let Some((name, allowed)) = LAYERS.iter().find(|layer| layer.0 == package.name) else {
            faults.push(format!("{} is in no layer", package.name));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|dependency| ours(&dependency.name)) {
            let on = &dependency.name;
            let kind = dependency.kind.as_deref().unwrap_or("normal");
            let optional = allowed.iter().any(|a| a.strip_suffix('?') == Some(on));
            if !optional && !allowed.contains(&on.as_str()) {
                faults.push(format!("{name} may not depend on {on} ({kind} dependency)"));
            } else if optional && !dependency.optional && kind != "dev" {
                faults.push(format!("{name} may depend on {on} only as an option ({kind})"));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_keeps_its_layers() {
        run(&crate::root()).unwrap();
    }

    fn said(package: &str, on: &str, kind: &str, optional: bool) -> Vec<String> {
        let known = LAYERS.iter().filter(|layer| layer.0 != package);
        let mut packages: Vec<_> =
            known.map(|layer| serde_json::json!({ "name": layer.0, "dependencies": [] })).collect();
        let kind = (kind != "normal").then_some(kind);
        let dependency = serde_json::json!({ "name": on, "kind": kind, "optional": optional });
        packages.push(serde_json::json!({ "name": package, "dependencies": [dependency] }));
        let metadata = serde_json::json!({ "packages": packages });
        faults(&serde_json::from_value(metadata).unwrap())
    }

    #[test]
    fn an_arrow_upwards_is_a_fault_whatever_its_kind() {
        for kind in ["normal", "dev", "build"] {
            for optional in [false, true] {
                let said = said("kv-paged", "gpu-slab", kind, optional);
                let expected = format!("kv-paged may not depend on gpu-slab ({kind} dependency)");
                assert_eq!(said, [expected]);
            }
        }
    }

    #[test]
    fn what_the_table_lists_is_no_fault() {
        assert!(said("decode-graph", "kernels-ptx", "normal", false).is_empty());
        assert!(said("kv-paged", "serde", "normal", false).is_empty());
        assert!(said("gpu-slab", "cuda-load", "normal", true).is_empty());
    }

    #[test]
    fn the_loader_is_an_option_below_the_command() {
        let said = said("gpu-slab", "cuda-load", "normal", false);
        assert_eq!(said, ["gpu-slab may depend on cuda-load only as an option (normal)"]);
    }

    #[test]
    fn a_new_package_needs_a_layer() {
        assert_eq!(said("newcomer", "gpu-slab", "normal", false), ["newcomer is in no layer"]);
    }
}
