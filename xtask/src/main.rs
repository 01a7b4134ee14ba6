//! Chores of this workspace: `cargo xtask <chore>`.

mod build_ptx;
mod cuda_stubs;
mod features;
mod fuzz;
mod generated;
mod layers;
mod manifest;
mod nvrtc;
mod package_check;
mod parallel;
mod ptx;
mod ptx_report;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask <chore>

  layers                          fail when a crate depends on one that its layer may not
  features                        lint every crate without features, with each alone, and with all
  cuda-stubs [--check]            generate the symbols that cuda-load defines
  build-ptx [--check]             compile crates/kernels-ptx/cu to PTX with the pinned NVRTC
  build-ptx --verify              compare manifest, sources and PTX, without a compiler
  build-ptx --nvcc [PATH]         the same with another compiler ($CUDA_HOME/bin/nvcc where no
                                  PATH is given), to target/ptx-nvcc, for experiments
  ptx-report [--record]           registers, shared memory and spills of every shipped kernel,
                                  compared with (or written to) what is on record
  package-check [CRATE…]          build and test every crate from its package, outside this tree
  fuzz [--seconds N] [--seed N] [TARGET…]
                                  build and run the fuzz targets, 60 s each from seed 1 unless said
                                  otherwise

--check changes nothing and fails when the generated files are not up to date.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = root();
    let done = match arguments[..] {
        ["layers"] => layers::run(&root),
        ["features"] => features::run(&root),
        ["cuda-stubs"] => cuda_stubs::run(&root, false),
        ["cuda-stubs", "--check"] => cuda_stubs::run(&root, true),
        ["build-ptx"] => build_ptx::run(&root, false),
        ["build-ptx", "--check"] => build_ptx::run(&root, true),
        ["build-ptx", "--verify"] => build_ptx::verify(&root),
        ["build-ptx", "--nvcc"] => build_ptx::run_nvcc(&root, None),
        ["build-ptx", "--nvcc", path] => build_ptx::run_nvcc(&root, Some(path.as_ref())),
        ["ptx-report"] => ptx_report::run(&root, false),
        ["ptx-report", "--record"] => ptx_report::run(&root, true),
        ["package-check", ref crates @ ..] => package_check::run(&root, crates),
        ["fuzz", ref options @ ..] => {
            fuzz::Options::parse(options).and_then(|options| fuzz::run(&root, &options))
        }
        ["--help" | "-h" | "help"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace: the folder above this package.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Where builds go: nothing under it is ever committed.
fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |path| root.join(path))
}
