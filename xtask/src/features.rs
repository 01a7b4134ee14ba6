//! Each crate with its features one by one: in the workspace's builds, which have them all together,
//! what one of them lacks another brings along.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::layers::{self, Package};

pub(crate) fn run(root: &Path) -> Result<()> {
    let metadata = layers::metadata(root)?;
    let published = layers::published();
    for package in metadata.packages.iter().filter(|it| published.contains(&it.name.as_str())) {
        for features in choices(package) {
            let arguments = [&["-p", &package.name, "--no-default-features"], &features[..]];
            let arguments = arguments.concat();
            println!("cargo clippy {}", arguments.join(" "));
            let mut clippy = Command::new("cargo");
            clippy.args(["clippy", "--quiet"]).args(&arguments).args(["--", "-D", "warnings"]);
            let status = clippy.current_dir(root).status()?;
            ensure!(status.success(), "cargo clippy {} failed", arguments.join(" "));
        }
    }
    Ok(())
}

/// Arguments for none, each alone, and all together. `default` is a list of others.
fn choices(package: &Package) -> Vec<Vec<&str>> {
    let names = package.features.keys().map(String::as_str).filter(|name| *name != "default");
    let names: Vec<_> = names.collect();
    let mut choices = vec![vec![]];
    choices.extend(names.iter().map(|name| vec!["--features", name]));
    if names.len() > 1 {
        choices.push(vec!["--all-features"]);
    }
    choices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(features: &[&str]) -> Vec<String> {
        let features: serde_json::Map<_, _> =
            features.iter().map(|name| ((*name).to_owned(), serde_json::json!([]))).collect();
        let package = serde_json::json!({ "name": "x", "features": features, "dependencies": [] });
        let package: Package = serde_json::from_value(package).unwrap();
        choices(&package).iter().map(|choice| choice.join(" ")).collect()
    }

    #[test]
    fn none_each_and_all() {
        assert_eq!(of(&[]), [""]);
        assert_eq!(of(&["default", "std"]), ["", "--features std"]);
        let two = ["", "--features cuda", "--features std", "--all-features"];
        assert_eq!(of(&["cuda", "default", "std"]), two);
    }
}
