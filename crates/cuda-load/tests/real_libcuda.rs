//! What happens when something else in the program brings a libcuda of its own. The programs are
//! built by rustc alone, so that the test decides what the linker meets, and in which order.
#![cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{everything, folder, needed, shared_library, succeed};

const LIBCUDA: &str = "
    int cuInit(unsigned flags) { return 7000 + flags; }
    int cuOfALaterDriver(void) { return 42; }
";
const MAIN: &str = r#"
    unsafe extern "C" { fn cuInit(flags: u32) -> i32; }
    fn main() {
        // SAFETY: the signature is the driver's.
        println!("{} {} {}", cuda_load::present().is_ok(), unsafe { cuInit(1) }, other::call());
    }
"#;

/// A folder with this crate as an rlib and, in `toolkit/`, a libcuda like the toolkit's or driver's.
struct Bench(PathBuf);

impl Bench {
    fn new(name: &str) -> Self {
        let bench = Self(folder(name));
        std::fs::create_dir(bench.toolkit()).expect("the folder is writable");
        let libcuda = bench.toolkit().join("libcuda.so.1");
        shared_library(LIBCUDA, &libcuda, &["-Wl,-soname,libcuda.so.1"]);
        std::fs::copy(&libcuda, bench.toolkit().join("libcuda.so"))
            .expect("the folder is writable");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs");
        succeed(bench.rustc("rlib", "cuda_load").arg(source));
        bench
    }

    fn toolkit(&self) -> PathBuf {
        self.0.join("toolkit")
    }

    fn rustc(&self, kind: &str, name: &str) -> Command {
        let mut rustc = Command::new(option_env!("RUSTC").unwrap_or("rustc"));
        rustc.args(["--edition=2024", "--cap-lints=allow", "--crate-type", kind, "--crate-name"]);
        rustc.arg(name).args(["-L", ".", "-L", "toolkit"]).current_dir(&self.0);
        rustc
    }

    /// Another crate, `other`, with a function `call() -> i32`.
    fn other(&self, source: &str) {
        std::fs::write(self.0.join("other.rs"), source).expect("the folder is writable");
        succeed(self.rustc("rlib", "other").arg("other.rs"));
    }

    /// The program that `main` is, with both crates in this order on the linker's command line.
    fn link(&self, order: [&str; 2], main: &str, arguments: &[&str]) -> Result<PathBuf, Output> {
        let crates = order.map(|name| format!("extern crate {name};\n")).concat();
        std::fs::write(self.0.join("main.rs"), crates + main).expect("the folder is writable");
        let output = self.rustc("bin", "main").arg("main.rs").args(arguments).output();
        let output = output.expect("rustc runs");
        if output.status.success() { Ok(self.0.join("main")) } else { Err(output) }
    }

    fn run(&self, program: &Path, with_driver: bool) -> Output {
        let mut program = Command::new(program);
        program.env_remove("LD_LIBRARY_PATH");
        if with_driver {
            program.env("LD_LIBRARY_PATH", self.toolkit());
        } else {
            program.env("CUDA_LOAD_LIBRARY", "");
        }
        program.output().expect("the program was just linked")
    }
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", everything(output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn our_definitions_win_over_a_linked_libcuda() {
    let bench = Bench::new("our_definitions_win_over_a_linked_libcuda");
    bench.other(
        r#"#[link(name = "cuda")] unsafe extern "C" { fn cuInit(flags: u32) -> i32; }
           pub fn call() -> i32 { unsafe { cuInit(2) } }"#,
    );
    for order in [["cuda_load", "other"], ["other", "cuda_load"]] {
        // The compiler's own linker, and the system's.
        for linker in [&[][..], &["-Clink-arg=-fuse-ld=bfd"]] {
            let program = match bench.link(order, MAIN, linker) {
                Ok(program) => program,
                Err(output) if !linker.is_empty() => {
                    eprintln!("{linker:?}: skipped, {}", everything(&output));
                    continue;
                }
                Err(output) => panic!("{}", everything(&output)),
            };
            let needed = needed(&program).unwrap_or_default();
            let libcuda = needed.iter().any(|name| name.starts_with("libcuda"));
            assert!(!libcuda, "{order:?}, {linker:?}: {needed:?}");
            assert_eq!(printed(&bench.run(&program, false)), "false 100 100");
            assert_eq!(printed(&bench.run(&program, true)), "true 7001 7002");
        }
    }
}

#[test]
fn naming_the_crate_is_enough_to_have_its_definitions() {
    let bench = Bench::new("naming_the_crate_is_enough_to_have_its_definitions");
    bench.other(
        r#"unsafe extern "C" { fn cuInit(flags: u32) -> i32; }
           pub fn call() -> i32 { unsafe { cuInit(2) } }"#,
    );
    for order in [["cuda_load as _", "other"], ["other", "cuda_load as _"]] {
        let main = r#"fn main() { println!("{}", other::call()); }"#;
        let program = bench.link(order, main, &[]).unwrap_or_else(|o| panic!("{}", everything(&o)));
        assert_eq!(printed(&bench.run(&program, false)), "100");
        assert_eq!(printed(&bench.run(&program, true)), "7002");
    }
}

#[test]
fn every_linker_takes_the_script_in_lib64() {
    let bench = Bench::new("every_linker_takes_the_script_in_lib64");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("lib64/libcuda.so");
    std::fs::copy(script, bench.toolkit().join("libcuda.so")).expect("the folder is writable");
    bench.other(
        r#"#[link(name = "cuda")] unsafe extern "C" { fn cuInit(flags: u32) -> i32; }
           pub fn call() -> i32 { unsafe { cuInit(2) } }"#,
    );
    for linker in ["lld", "bfd", "gold", "mold"] {
        let here = Command::new(format!("ld.{linker}")).arg("--version").output().is_ok();
        if !here && linker != "lld" {
            eprintln!("every_linker_takes_the_script_in_lib64: {linker} skipped, not installed");
            continue;
        }
        // lld comes with the compiler and is its default.
        let argument = format!("-Clink-arg=-fuse-ld={linker}");
        let program = bench.link(["cuda_load", "other"], MAIN, &[&argument]);
        let program = program.unwrap_or_else(|said| panic!("{linker}: {}", everything(&said)));
        assert_eq!(printed(&bench.run(&program, false)), "false 100 100", "{linker}");
        std::fs::remove_file(program).expect("it was just run");
    }
}

#[test]
fn a_symbol_that_we_do_not_define_brings_the_linked_libcuda_back() {
    let bench = Bench::new("a_symbol_that_we_do_not_define_brings_the_linked_libcuda_back");
    bench.other(
        r#"#[link(name = "cuda")] unsafe extern "C" { fn cuOfALaterDriver() -> i32; }
           pub fn call() -> i32 { unsafe { cuOfALaterDriver() } }"#,
    );
    let program = bench.link(["other", "cuda_load"], MAIN, &[]).expect("links");
    assert!(needed(&program).is_none_or(|names| names.iter().any(|name| name == "libcuda.so.1")));
    // Both are then one library in one process, and without it the program does not start.
    assert_eq!(printed(&bench.run(&program, true)), "true 7001 42");
    assert!(!bench.run(&program, false).status.success());
}

#[test]
fn a_shared_library_that_needs_libcuda_shares_it_with_us() {
    let bench = Bench::new("a_shared_library_that_needs_libcuda_shares_it_with_us");
    let code = "int cuInit(unsigned); int vendor(void) { return cuInit(2); }";
    let libcuda = bench.toolkit().join("libcuda.so.1");
    let libcuda = libcuda.to_str().expect("the build's folder has a UTF-8 name");
    shared_library(code, &bench.toolkit().join("libvendor.so"), &[libcuda]);
    bench.other(
        r#"#[link(name = "vendor")] unsafe extern "C" { fn vendor() -> i32; }
           pub fn call() -> i32 { unsafe { vendor() } }"#,
    );
    let program = bench.link(["other", "cuda_load"], MAIN, &[]).expect("links");
    assert_eq!(printed(&bench.run(&program, true)), "true 7001 7002");
}

#[test]
fn two_static_definitions_do_not_link() {
    let bench = Bench::new("two_static_definitions_do_not_link");
    bench.other(
        r#"#[unsafe(no_mangle)] extern "C" fn cuInit(_: u32) -> i32 { 1 }
           pub fn call() -> i32 { 0 }"#,
    );
    let output =
        bench.link(["other", "cuda_load"], MAIN, &[]).expect_err("cuInit has two definitions");
    let said = everything(&output);
    assert!(said.contains("cuInit"), "{said}");
    assert!(said.contains("duplicate symbol") || said.contains("multiple definition"), "{said}");
}
