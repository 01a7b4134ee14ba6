//! Each crate as somebody gets it from a registry: packaged, unpacked outside this tree, built and
//! tested there.

use std::ffi::OsStr;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::layers;

/// What is run in the unpacked crates, one line each: the crate, and cargo's arguments.
const RUNS: &[(&str, &[&str])] = &[
    ("cuda-load", &["test"]),
    ("gpu-slab", &["test"]),
    ("gpu-slab", &["check", "--no-default-features"]),
    ("gpu-slab", &["test", "--features", "cuda"]),
    ("kv-paged", &["test"]),
    ("kv-paged", &["check", "--no-default-features"]),
    ("q4k-soa", &["test"]),
    ("q4k-soa", &["check", "--no-default-features"]),
    // The mutants run in the tree; compiling them once more proves nothing about the package.
    ("kernels-ptx", &["test", "--", "--skip", "mutants"]),
    ("decode-graph", &["test"]),
    ("decode-graph", &["test", "--features", "cuda"]),
    ("lane", &["test", "--no-default-features"]),
    ("lane", &["build"]),
];

/// What crates.io takes, packed.
const MAX_PACKAGE_BYTES: u64 = 10 << 20;

/// What docs.rs runs, which has no CUDA and says who it is.
const DOCS: &[&str] = &["doc", "--no-deps", "--all-features"];

/// Outside crates that use one of ours each.
const DOWNSTREAM: &str = "tests/downstream";
const DOWNSTREAM_PROGRAMS: &[(&str, &str)] =
    &[("frames", "gpu-slab"), ("scheduler", "kv-paged"), ("converter", "q4k-soa")];

/// Checks the crates named, or all.
pub(crate) fn run(root: &Path, only: &[&str]) -> Result<()> {
    let crates = layers::published();
    expect_known(only, &crates)?;
    let wanted = |name: &str| only.is_empty() || only.contains(&name);
    let target = crate::target(root).join("package-check");
    package(root, &crates, &target)?;
    let outside = Outside::new()?;
    for name in &crates {
        outside.unpack(&target.join("package"), name)?;
    }
    outside.configure(&crates)?;
    for &(name, arguments) in RUNS.iter().filter(|run| wanted(run.0)) {
        println!("{name}: cargo {}", arguments.join(" "));
        outside.cargo(name, &target, arguments)?;
    }
    for name in crates.iter().filter(|name| wanted(name)) {
        println!("{name}: cargo {}, as on docs.rs", DOCS.join(" "));
        // Links that lead nowhere are docs.rs's to show and ours to refuse.
        let docs_rs = [
            ("DOCS_RS", Some("1")),
            ("CUDA_LIBRARY_PATH", None),
            ("RUSTDOCFLAGS", Some("-D warnings")),
        ];
        outside.cargo_with(name, &target, DOCS, &docs_rs)?;
    }
    copy(&root.join(DOWNSTREAM), &outside.folder.join("downstream"))?;
    for (program, _) in DOWNSTREAM_PROGRAMS.iter().filter(|program| wanted(program.1)) {
        println!("downstream, from the packages: cargo run -p {program}");
        outside.cargo("downstream", &target, &["run", "-p", program])?;
    }
    println!("the packages build and pass outside {}", root.display());
    Ok(())
}

/// Refuses a name that is no crate's: nothing would be checked, and that would pass.
fn expect_known(only: &[&str], crates: &[&str]) -> Result<()> {
    if let Some(unknown) = only.iter().find(|name| !crates.contains(name)) {
        bail!("no published crate {unknown}; there are {}", crates.join(", "));
    }
    Ok(())
}

/// Refuses what crates.io would.
fn expect_small(name: &str, bytes: u64) -> Result<()> {
    ensure!(
        bytes <= MAX_PACKAGE_BYTES,
        "{name}: the package has {bytes} bytes, crates.io takes {MAX_PACKAGE_BYTES}"
    );
    Ok(())
}

/// Packages the crates.
fn package(root: &Path, crates: &[&str], target: &Path) -> Result<()> {
    let mut command = Command::new("cargo");
    // `cargo xtask` is allowed on a tree in progress, so this is, too.
    command
        .args(["package", "--no-verify", "--allow-dirty", "--quiet", "--target-dir"])
        .arg(target);
    crates.iter().for_each(|name| {
        command.args(["-p", name]);
    });
    ensure!(command.current_dir(root).status()?.success(), "cargo package failed");
    Ok(())
}

/// A folder outside the tree, removed at the end.
struct Outside {
    folder: PathBuf,
}

impl Outside {
    fn new() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("package-check-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        Ok(Self { folder })
    }

    /// Unpacks the newest package of the crate to a folder of its name.
    fn unpack(&self, packages: &Path, name: &str) -> Result<()> {
        let version = env!("CARGO_PKG_VERSION");
        let package = packages.join(format!("{name}-{version}.crate"));
        let bytes = fs::metadata(&package).with_context(|| package.display().to_string())?.len();
        println!("{name}: {} KiB", bytes.div_ceil(1024));
        expect_small(name, bytes)?;
        let mut tar = Command::new("tar");
        tar.arg("xzf").arg(&package).arg("-C").arg(&self.folder);
        ensure!(tar.status().context("starting tar")?.success(), "unpacking {}", package.display());
        fs::rename(self.folder.join(format!("{name}-{version}")), self.folder.join(name))?;
        Ok(())
    }

    /// What a registry would answer, and the folder that `cuda-load`'s page says to make.
    fn configure(&self, crates: &[&str]) -> Result<()> {
        // Tests decode whole models; the workspace's profiles are not seen here.
        let mut config = String::from("[profile.dev]\nopt-level = 1\n\n[profile.dev.package]\n");
        for name in crates {
            writeln!(config, "{name} = {{ opt-level = 2 }}")?;
        }
        config += "\n[patch.crates-io]\n";
        for name in crates {
            writeln!(config, "{name} = {{ path = {:?} }}", self.folder.join(name))?;
        }
        fs::create_dir(self.folder.join(".cargo"))?;
        fs::write(self.folder.join(".cargo/config.toml"), config)?;
        let library = self.cuda_library_path().join("lib64");
        fs::create_dir_all(&library)?;
        fs::write(library.join("libcuda.so"), "OUTPUT_FORMAT(elf64-x86-64)\n")?;
        Ok(())
    }

    fn cuda_library_path(&self) -> PathBuf {
        self.folder.join("cuda")
    }

    fn cargo(&self, name: &str, target: &Path, arguments: &[&str]) -> Result<()> {
        let library = self.cuda_library_path();
        self.cargo_with(name, target, arguments, &[("CUDA_LIBRARY_PATH", library.to_str())])
    }

    /// With variables set, or taken away.
    fn cargo_with(
        &self,
        name: &str,
        target: &Path,
        arguments: &[&str],
        variables: &[(&str, Option<&str>)],
    ) -> Result<()> {
        let mut command = Command::new("cargo");
        command.current_dir(self.folder.join(name)).args(arguments);
        command.env("CARGO_TARGET_DIR", target);
        // The packages are what is in question here.
        command.env("PROPTEST_CASES", "16");
        // This process was started by cargo and has its variables.
        let of_cargo = |name: &OsStr| name.to_string_lossy().starts_with("CARGO_PKG_");
        std::env::vars_os().filter(|(name, _)| of_cargo(name)).for_each(|(name, _)| {
            command.env_remove(name);
        });
        command.env_remove("CARGO_MANIFEST_DIR");
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        ensure!(command.status()?.success(), "{name}: cargo {} failed", arguments.join(" "));
        Ok(())
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // A folder left behind in the system's place for such things does no harm.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Copies a folder but for hidden files and builds.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with('.') || name == "target" || name == "Cargo.lock" {
            continue;
        }
        let (from, to) = (entry.path(), to.join(&name));
        if entry.file_type()?.is_dir() {
            copy(&from, &to)?;
        } else {
            fs::copy(&from, &to)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_crate_is_refused() {
        let crates = layers::published();
        expect_known(&[], &crates).unwrap();
        expect_known(&["lane", "kv-paged"], &crates).unwrap();
        let error = expect_known(&["lane", "kv_paged"], &crates).unwrap_err().to_string();
        assert!(error.starts_with("no published crate kv_paged; there are "), "{error}");
    }

    #[test]
    fn every_run_is_of_a_published_crate() {
        let published = layers::published();
        let runs = RUNS.iter().map(|run| run.0);
        for name in runs.chain(DOWNSTREAM_PROGRAMS.iter().map(|program| program.1)) {
            assert!(published.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_package_may_be_as_large_as_crates_io_takes() {
        expect_small("lane", 10 * 1024 * 1024).unwrap();
        let error = expect_small("lane", 10 * 1024 * 1024 + 1).unwrap_err().to_string();
        assert!(error.contains("10485761 bytes"), "{error}");
    }

    /// One text: the README is the crate's front page, so the two cannot disagree, and its examples
    /// are tests.
    #[test]
    fn every_crate_has_its_readme_as_front_page_and_says_how_docs_rs_builds_it() {
        let mut found = Vec::new();
        for entry in fs::read_dir(crate::root().join("crates")).unwrap() {
            let folder = entry.unwrap().path();
            let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
            let (manifest, library, readme) =
                (read("Cargo.toml"), read("src/lib.rs"), read("README.md"));
            let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")).unwrap();
            let name = name.trim_end_matches('"').to_owned();
            assert!(library.starts_with("#![doc = include_str!(\"../README.md\")]"), "{name}");
            assert!(readme.starts_with(&format!("# {name}\n")), "{name}");
            assert!(manifest.contains("[package.metadata.docs.rs]\nall-features = true"), "{name}");
            assert!(folder.join("examples").is_dir(), "{name} has no example");
            found.push(name);
        }
        found.sort();
        let mut published = layers::published();
        published.sort_unstable();
        assert_eq!(found, published);
    }
}
