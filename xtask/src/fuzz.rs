//! Builds the fuzz targets and runs each for a while, several at a time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::parallel;

/// What cargo-fuzz passes: coverage for libFuzzer, and AddressSanitizer.
const RUSTFLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// One input may take this long, with the sanitizer, on a busy machine.
const TIMEOUT_SECONDS: u32 = 25;
/// One input may allocate this much at once, and all together.
const LIMITS_MB: (u32, u32) = (512, 2048);
/// Targets run at a time.
const JOBS: usize = 2;

/// How long, from which random numbers, and which; all where none is named.
pub(crate) struct Options<'a> {
    pub(crate) seconds: u32,
    /// Always the same unless another is asked for: a check of a change should fail for what the
    /// change did. 0 is another one each time.
    pub(crate) seed: u32,
    pub(crate) targets: Vec<&'a str>,
}

impl<'a> Options<'a> {
    pub(crate) fn parse(arguments: &[&'a str]) -> Result<Self> {
        let mut options = Self { seconds: 60, seed: 1, targets: Vec::new() };
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            match argument {
                "--seconds" => {
                    let value = arguments.next().context("--seconds needs a number")?;
                    options.seconds = value.parse().context("--seconds needs a number")?;
                    // libFuzzer takes 0 for no limit.
                    ensure!(options.seconds > 0, "--seconds must be at least 1");
                }
                "--seed" => {
                    let value = arguments.next().context("--seed needs a number")?;
                    options.seed = value.parse().context("--seed needs a number")?;
                }
                option if option.starts_with('-') => bail!("fuzz knows no option {option}"),
                target => options.targets.push(target),
            }
        }
        Ok(options)
    }
}

pub(crate) fn run(root: &Path, options: &Options<'_>) -> Result<()> {
    let fuzz = root.join("fuzz");
    let all = targets(&fuzz)?;
    let unknown = options.targets.iter().find(|name| !all.iter().any(|known| known == *name));
    if let Some(unknown) = unknown {
        bail!("no fuzz target {unknown}; there are {}", all.join(", "));
    }
    let chosen =
        |name: &&String| options.targets.is_empty() || options.targets.contains(&name.as_str());
    let chosen: Vec<&String> = all.iter().filter(chosen).collect();
    let Some(triple) = nightly_host() else {
        println!("fuzz: skipped, no nightly toolchain");
        return Ok(());
    };

    let target_dir = crate::target(root).join("fuzz");
    let mut build = Command::new("cargo");
    build.args(["+nightly", "build", "--release", "--bins", "--target", &triple]);
    build.arg("--manifest-path").arg(fuzz.join("Cargo.toml")).arg("--target-dir").arg(&target_dir);
    // This process was started by cargo: its toolchain is not the one to build with.
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "CARGO_TARGET_DIR"] {
        build.env_remove(name);
    }
    build.env("RUSTFLAGS", RUSTFLAGS);
    ensure!(build.status().context("starting cargo")?.success(), "the fuzz targets do not build");

    let binaries = target_dir.join(triple).join("release");
    println!("{:14}  {:>10}  {:>8}  {:>7}  {:>9}", "target", "inputs", "per s", "edges", "peak MB");
    let failed = parallel::map(&chosen, JOBS, |name| {
        let done = fuzz_one(&fuzz, &binaries, name, options);
        match &done {
            Ok(line) => println!("{line}"),
            Err(error) => eprintln!("{name}: {error:#}"),
        }
        done.is_err().then_some(name.as_str())
    });
    let failed: Vec<&str> = failed.into_iter().flatten().collect();
    ensure!(failed.is_empty(), "fuzzing found something in {}", failed.join(", "));
    Ok(())
}

/// The names of the files in `targets/`.
fn targets(fuzz: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(fuzz.join("targets")).context("fuzz/targets")? {
        let path = entry?.path();
        names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

/// The triple that the nightly compiler runs on, where it is installed.
fn nightly_host() -> Option<String> {
    let mut rustc = Command::new("rustc");
    rustc.args(["+nightly", "-vV"]).env_remove("RUSTUP_TOOLCHAIN");
    let output = rustc.output().ok().filter(|output| output.status.success())?;
    let said = String::from_utf8(output.stdout).ok()?;
    said.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned)
}

/// Runs one target and returns its line of the table.
fn fuzz_one(fuzz: &Path, binaries: &Path, name: &str, options: &Options<'_>) -> Result<String> {
    let folder = |kind: &str| -> Result<PathBuf> {
        let path = fuzz.join(kind).join(name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    let mut command = Command::new(binaries.join(name));
    // What is found goes to the first folder; the second is only read.
    command.arg(folder("corpus")?).arg(folder("seeds")?);
    command.arg(format!("-artifact_prefix={}/", folder("artifacts")?.display()));
    command.arg(format!("-max_total_time={}", options.seconds));
    command.arg(format!("-seed={}", options.seed));
    command.arg(format!("-timeout={TIMEOUT_SECONDS}"));
    command.arg(format!("-malloc_limit_mb={}", LIMITS_MB.0));
    command.arg(format!("-rss_limit_mb={}", LIMITS_MB.1));
    command.arg("-print_final_stats=1");
    let words = fuzz.join("dictionaries").join(name);
    if words.exists() {
        command.arg(format!("-dict={}", words.display()));
    }
    let output = command.output().with_context(|| format!("starting {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<&str> = said.lines().collect();
        bail!("{}\n{}", output.status, lines[lines.len().saturating_sub(60)..].join("\n"));
    }
    Ok(line(name, &said))
}

/// The numbers in what libFuzzer says at its end.
fn line(name: &str, said: &str) -> String {
    let after = |mark: &str| {
        let found = said.rmatch_indices(mark).next();
        let rest = found.map_or("", |(at, _)| &said[at + mark.len()..]);
        rest.split_whitespace().next().unwrap_or("?").to_owned()
    };
    format!(
        "{name:14}  {:>10}  {:>8}  {:>7}  {:>9}",
        after("stat::number_of_executed_units:"),
        after("stat::average_exec_per_sec:"),
        after(" cov: "),
        after("stat::peak_rss_mb:")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_seconds_a_seed_and_targets() {
        let options = Options::parse(&["gguf", "--seconds", "7", "slab", "--seed", "3"]).unwrap();
        assert_eq!((options.seconds, options.seed), (7, 3));
        assert_eq!(options.targets, ["gguf", "slab"]);
        assert_eq!(Options::parse(&[]).unwrap().seed, 1);
        assert!(Options::parse(&["--seconds", "long"]).is_err());
        assert!(Options::parse(&["--seconds", "0"]).is_err());
        assert!(Options::parse(&["--seed"]).is_err());
        assert!(Options::parse(&["--fast"]).is_err());
    }

    #[test]
    fn every_target_has_seeds_and_is_declared() {
        let fuzz = crate::root().join("fuzz");
        let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
        let targets = targets(&fuzz).unwrap();
        assert_eq!(manifest.matches("[[bin]]").count(), targets.len());
        for name in targets {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not declared");
            let seeds = fs::read_dir(fuzz.join("seeds").join(&name)).unwrap().count();
            assert!(seeds > 0, "{name} has no seeds");
        }
    }

    #[test]
    fn the_numbers_of_libfuzzer_become_a_line() {
        let said = "#2\tINITED cov: 5 ft: 6\n#90\tDONE   cov: 41 ft: 87 corp: 3/9b\n\
            stat::number_of_executed_units: 90\nstat::average_exec_per_sec:     45\n\
            stat::peak_rss_mb:              31\n";
        let expected = format!("{:14}  {:>10}  {:>8}  {:>7}  {:>9}", "slab", 90, 45, 41, 31);
        assert_eq!(line("slab", said), expected);
    }
}
