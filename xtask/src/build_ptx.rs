//! PTX from the kernels' sources: shipped files from the pinned compiler, or experiments with
//! another.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::generated::{Files, settle};
use crate::manifest::{FILE, Manifest, Module, Source, hash, source_files};
use crate::nvrtc::Nvrtc;
use crate::parallel;
use crate::ptx::{Ptx, normalised};
use crate::toolchain::{self, Toolchain};

const COMMAND: &str = "cargo xtask build-ptx";
/// What [`rust`] writes: a line per module for `include!` in Rust.
const RUST_FILE: &str = "modules.rs";
/// On the first line of a source: flags for this file alone.
const FLAGS_MARK: &str = "// build-ptx:";
/// The sources' folder as the compiler sees it, in messages and `__FILE__`.
const SOURCES: &str = "kernels-ptx/cu";

pub(crate) fn sources(root: &Path) -> PathBuf {
    root.join("crates/kernels-ptx/cu")
}

pub(crate) fn shipped(root: &Path) -> PathBuf {
    root.join("crates/decode-graph/ptx")
}

pub(crate) fn run(root: &Path, check: bool) -> Result<()> {
    let (sources, shipped) = (sources(root), shipped(root));
    if source_files(&sources)?.is_empty() && !shipped.join(FILE).exists() {
        println!("no .cu files in {}: nothing to compile", sources.display());
        return Ok(());
    }
    // A check trusts nothing that is shipped.
    let known = if check { Vec::new() } else { known(&sources, &shipped) };
    let files = build(&sources, &Toolchain::unpacked(&crate::target(root))?, known)?;
    let ours = |name: &str| name.ends_with(".ptx") || [FILE, RUST_FILE].contains(&name);
    settle(&shipped, &files, ours, check, COMMAND)
}

/// What a compiler is not needed for: the PTX and the manifest belong to the sources as they are.
pub(crate) fn verify(root: &Path) -> Result<()> {
    let (sources, shipped) = (sources(root), shipped(root));
    if source_files(&sources)?.is_empty() && !shipped.join(FILE).exists() {
        println!("no .cu files in {}: nothing to verify", sources.display());
        return Ok(());
    }
    let verified = Manifest::read(&shipped).and_then(|manifest| {
        manifest.verify(&sources, &shipped)?;
        if fs::read_to_string(shipped.join(RUST_FILE)).ok() != Some(rust(&manifest)) {
            bail!("{RUST_FILE} does not list what {FILE} describes");
        }
        Ok(manifest)
    });
    let manifest = verified.map_err(|error| anyhow!("{error:#}\nrun: {COMMAND}"))?;
    println!("{}: {} modules as described", shipped.display(), manifest.modules.len());
    Ok(())
}

/// The shipped modules that are what would be made: of the same sources, flags and compiler.
fn known(sources: &Path, shipped: &Path) -> Vec<(Module, String)> {
    let Ok(manifest) = Manifest::read(shipped) else { return Vec::new() };
    if !manifest.packages.iter().map(String::as_str).eq(toolchain::pinned()) {
        return Vec::new();
    }
    let text_of = |module: &Module| {
        let source = Source::read(sources, &module.source).ok()?;
        let text = fs::read_to_string(shipped.join(&module.file)).ok()?;
        let same = source.hash() == module.source_xxh3
            && source.headers() == module.headers
            && flags(&source, &module.target) == module.flags
            && hash(text.as_bytes()) == module.ptx_xxh3;
        same.then_some(text)
    };
    let modules = manifest.modules.into_iter();
    modules.filter_map(|module| text_of(&module).map(|text| (module, text))).collect()
}

/// Every shipped file, from the sources and what is known of them.
fn build(sources: &Path, toolchain: &Toolchain, mut known: Vec<(Module, String)>) -> Result<Files> {
    let nvrtc = Nvrtc::open(&toolchain.nvrtc())?;
    let include = toolchain.include();
    let include = include.to_str().context("the build's folder has a name that is not UTF-8")?;
    let mut files = Files::new();
    let mut modules = Vec::new();
    // All are compiled, so that one mistake does not hide the next.
    let mut faults = Vec::new();
    let mut unknown = Vec::new();
    for name in source_files(sources)? {
        for target in targets(&name) {
            let same =
                |(module, _): &(Module, String)| module.source == name && module.target == *target;
            if let Some(index) = known.iter().position(same) {
                let (module, ptx) = known.swap_remove(index);
                files.insert(module.file.clone(), ptx.into_bytes());
                modules.push(module);
            } else {
                unknown.push((Source::read(sources, &name)?, *target));
            }
        }
    }
    let made = parallel::map(&unknown, parallel::jobs(), |(source, target)| {
        module(source, target, |flags| {
            let mut options = flags.to_vec();
            options.push(format!("--include-path={include}"));
            let name = format!("{SOURCES}/{}", source.name());
            nvrtc.compile(&name, source.text(), source.header_files(), &options)
        })
    });
    for ((source, target), module) in unknown.iter().zip(made) {
        match module {
            Ok((_, ptx)) if ptx.contains(include) => {
                faults.push(format!("{} for {target}: its PTX names {include}", source.name()));
            }
            Ok((module, ptx)) => {
                files.insert(module.file.clone(), ptx.into_bytes());
                modules.push(module);
            }
            Err(error) => faults.push(format!("{} for {target}: {error:#}", source.name())),
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n\n"));
    }
    modules.sort_by(|a, b| a.file.cmp(&b.file));
    let manifest = Manifest {
        generated_by: COMMAND.to_owned(),
        compiler: format!("NVRTC {}", nvrtc.version()?),
        packages: toolchain::pinned().map(str::to_owned).collect(),
        modules,
    };
    files.insert(RUST_FILE.to_owned(), rust(&manifest).into_bytes());
    files.insert(FILE.to_owned(), manifest.to_json()?);
    Ok(files)
}

/// The architectures that a source is compiled for. One with `wgmma` or another feature of a single
/// architecture says so in its name, because its PTX runs nowhere else.
fn targets(source: &str) -> &'static [&'static str] {
    match source.strip_suffix(".cu") {
        Some(name) if name.ends_with("_sm90a") => &["compute_90a"],
        Some(name) if name.ends_with("_sm90") => &["compute_90"],
        _ => &["compute_80", "compute_90"],
    }
}

fn flags(source: &Source, target: &str) -> Vec<String> {
    let common = ["--std=c++17".to_owned(), "-default-device".to_owned()];
    let own = source.text().lines().next().and_then(|line| line.strip_prefix(FLAGS_MARK));
    let own = own.unwrap_or("").split_whitespace().map(str::to_owned);
    common.into_iter().chain([format!("--gpu-architecture={target}")]).chain(own).collect()
}

fn module(
    source: &Source,
    target: &str,
    compile: impl FnOnce(&[String]) -> Result<String>,
) -> Result<(Module, String)> {
    let flags = flags(source, target);
    let text = normalised(&compile(&flags)?);
    let ptx = format!("// Generated by `{COMMAND}` from {} for {target}.\n{text}", source.name());
    let parsed = Ptx::parse(&ptx)?;
    if parsed.entries.is_empty() {
        bail!("no `extern \"C\" __global__` function in it");
    }
    if let Some(mangled) = parsed.entries.iter().find(|entry| entry.name.starts_with("_Z")) {
        bail!("{} is not extern \"C\"", mangled.name);
    }
    let name = source.name().trim_end_matches(".cu");
    let module = Module {
        file: format!("{name}.{target}.ptx"),
        name: name.to_owned(),
        target: target.to_owned(),
        source: source.name().to_owned(),
        headers: source.headers(),
        source_xxh3: source.hash(),
        flags,
        ptx_isa: parsed.isa,
        ptx_target: parsed.target,
        ptx_xxh3: hash(ptx.as_bytes()),
        entries: parsed.entries,
    };
    Ok((module, ptx))
}

/// `modules! { .. }` with one line of literals per module, for the crate that embeds them.
fn rust(manifest: &Manifest) -> String {
    let mut text = format!(
        "// @generated by `{COMMAND}`.\n\
         // name, target, PTX version, hash of the PTX, the PTX, entry points\n\
         modules! {{\n"
    );
    for module in &manifest.modules {
        let entries: Vec<_> = module.entries.iter().map(|entry| entry.name.as_str()).collect();
        text += &format!(
            "    ({:?}, {:?}, {:?}, 0x{}, include_str!({:?}), {entries:?});\n",
            module.name, module.target, module.ptx_isa, module.ptx_xxh3, module.file
        );
    }
    text + "}\n"
}

/// Compiles everything with `nvcc`, for a look; nothing that is shipped changes.
pub(crate) fn run_nvcc(root: &Path, nvcc: Option<&Path>) -> Result<()> {
    let nvcc = match (nvcc, std::env::var_os("CUDA_HOME")) {
        (Some(path), _) => path.to_owned(),
        (None, Some(home)) => Path::new(&home).join("bin/nvcc"),
        (None, None) => bail!("say which: --nvcc PATH, or set CUDA_HOME"),
    };
    let output = crate::target(root).join("ptx-nvcc");
    let names = source_files(&sources(root))?;
    if names.is_empty() {
        println!("no .cu files in {}: nothing to compile", sources(root).display());
    }
    build_nvcc(&sources(root), &names, &nvcc, &output)
}

fn build_nvcc(sources: &Path, names: &[String], nvcc: &Path, output: &Path) -> Result<()> {
    fs::create_dir_all(output).with_context(|| format!("making {}", output.display()))?;
    for name in names {
        let source = Source::read(sources, name)?;
        for target in targets(name) {
            let file = format!("{}.{target}.ptx", name.trim_end_matches(".cu"));
            let path = output.join(&file);
            // -default-device is NVRTC's alone.
            let flags = flags(&source, target).into_iter().filter(|flag| flag != "-default-device");
            let mut nvcc = Command::new(nvcc);
            nvcc.arg("--ptx").args(flags).arg(name).arg("--output-file").arg(&path);
            let ran = nvcc.current_dir(sources).output();
            let ran = ran.with_context(|| format!("starting {}", nvcc.get_program().display()))?;
            if !ran.status.success() {
                bail!("{name} for {target}:\n{}", String::from_utf8_lossy(&ran.stderr).trim());
            }
            let ptx = Ptx::parse(&fs::read_to_string(&path)?)
                .with_context(|| format!("reading {}", path.display()))?;
            println!("{}: PTX {}, {} entry points", path.display(), ptx.isa, ptx.entries.len());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_ptx_is_that_of_the_sources() {
        verify(&crate::root()).unwrap();
    }

    const HEADER: &str = r#"
        #pragma once
        #include <cuda_fp16.h>
        __device__ inline float half_to_float(const void* p) { return __half2float(*(const __half*)p); }
    "#;
    /// What the kernels of this project are made of.
    const SOURCE: &str = r#"// build-ptx: --use_fast_math
        #include "shared.cuh"
        extern "C" __global__ void dots(const int* a, const int* b, int* out, float scale) {
            int i = threadIdx.x;
            out[i] = __dp4a(a[i], b[i], (int)(half_to_float(a) * scale));
        }
        struct Pack { unsigned long long base; unsigned rows; float eps; };
        extern "C" __global__ void copies(Pack pack, float* out) {
            __shared__ alignas(16) float tile[256];
            __shared__ alignas(8) unsigned long long barrier;
        #if __CUDA_ARCH__ >= 900
            unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
            unsigned to = (unsigned)__cvta_generic_to_shared(tile);
            asm volatile("griddepcontrol.wait;" ::: "memory");
            if (threadIdx.x == 0) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(at) : "memory");
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                             " [%0], [%1], 1024, [%2];" :: "r"(to), "l"(pack.base), "r"(at) : "memory");
            }
            __syncthreads();
            asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
                         " @!p bra again; }" :: "r"(at) : "memory");
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        #else
            tile[threadIdx.x] = ((const float*)pack.base)[threadIdx.x];
            __syncthreads();
        #endif
            out[threadIdx.x] = tile[255 - threadIdx.x] + pack.eps;
        }
    "#;
    const WARP_GROUP: &str = r#"
        extern "C" __global__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    "#;

    /// The pinned compilers, or `None` and a line that names the skipped test.
    fn toolchain(test: &str) -> Option<Toolchain> {
        let toolchain = Toolchain::unpacked(&crate::target(&crate::root()));
        toolchain.inspect_err(|error| eprintln!("{test}: skipped, {error:#}")).ok()
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn sources_become_modules_that_do_not_depend_on_where_they_were_built() {
        let Some(toolchain) =
            toolchain("sources_become_modules_that_do_not_depend_on_where_they_were_built")
        else {
            return;
        };
        let sources = [("mix.cu", SOURCE), ("shared.cuh", HEADER), ("group_sm90a.cu", WARP_GROUP)];
        let (here, there, shipped) = (folder(&sources), folder(&sources), folder(&[]));
        let files = build(here.path(), &toolchain, Vec::new()).unwrap();
        assert_eq!(build(there.path(), &toolchain, Vec::new()).unwrap(), files);
        let mut names = [
            "group_sm90a.compute_90a.ptx",
            "mix.compute_80.ptx",
            "mix.compute_90.ptx",
            FILE,
            RUST_FILE,
        ];
        names.sort_unstable();
        assert!(files.keys().eq(names.iter()), "{:?}", files.keys());
        for content in files.values() {
            let text = std::str::from_utf8(content).unwrap();
            for path in [here.path(), there.path(), &crate::root(), &crate::target(&crate::root())]
            {
                assert!(!text.contains(path.to_str().unwrap()), "{text}");
            }
        }

        let manifest: Manifest = serde_json::from_slice(&files[FILE]).unwrap();
        let mix = manifest.modules.iter().find(|m| m.file == "mix.compute_90.ptx").unwrap();
        assert_eq!(manifest.compiler, "NVRTC 12.4");
        assert_eq!((mix.ptx_isa.as_str(), mix.ptx_target.as_str()), ("8.4", "sm_90"));
        assert_eq!(mix.headers, ["shared.cuh"]);
        assert_eq!(mix.flags.last().unwrap(), "--use_fast_math");
        let entries =
            mix.entries.iter().map(|e| format!("{}({})", e.name, e.parameters.join(", ")));
        let expected = ["dots(u64, u64, u64, f32)", "copies(b8[16] align 8, u64)"];
        assert_eq!(entries.collect::<Vec<_>>(), expected);

        // What was built is what the cheap comparison accepts, and nothing else is.
        let ours = |name: &str| name.ends_with(".ptx");
        settle(shipped.path(), &files, ours, false, COMMAND).unwrap();
        let verify = || manifest.verify(here.path(), shipped.path()).map_err(|e| format!("{e:#}"));
        verify().unwrap();
        fs::write(here.path().join("shared.cuh"), HEADER.replace("inline", "")).unwrap();
        assert!(verify().unwrap_err().contains("mix.cu or a header of it has changed"));
        fs::write(here.path().join("shared.cuh"), HEADER).unwrap();
        fs::write(here.path().join("new.cu"), WARP_GROUP).unwrap();
        assert_eq!(verify().unwrap_err(), "new.cu was never compiled");
        fs::remove_file(here.path().join("new.cu")).unwrap();
        let edited = String::from_utf8(files[&mix.file].clone()).unwrap().replace("255", "254");
        fs::write(shipped.path().join(&mix.file), edited).unwrap();
        assert_eq!(verify().unwrap_err(), "mix.compute_90.ptx is not the PTX described");
    }

    #[test]
    fn every_fault_of_the_sources_is_said_at_once() {
        let Some(toolchain) = toolchain("every_fault_of_the_sources_is_said_at_once") else {
            return;
        };
        let here = folder(&[
            ("typo.cu", "extern \"C\" __global__ void f(float* p) { *p = undeclared; }"),
            ("mangled.cu", "__global__ void f(float* p) { *p = 0; }"),
            ("empty.cu", "static float unused(float x) { return x; }"),
        ]);
        let said = build(here.path(), &toolchain, Vec::new()).unwrap_err().to_string();
        assert!(said.contains("kernels-ptx/cu/typo.cu(1): error"), "{said}");
        assert!(said.contains("undeclared"), "{said}");
        assert!(said.contains("mangled.cu for compute_90: _Z1fPf is not extern"), "{said}");
        assert!(said.contains("empty.cu for compute_80: no `extern"), "{said}");
    }

    #[test]
    fn an_experiment_with_another_compiler_goes_elsewhere() {
        let here = folder(&[("a.cu", WARP_GROUP), ("b_sm90a.cu", WARP_GROUP)]);
        let output = folder(&[]);
        // Plays nvcc: writes a little PTX to the file after --output-file.
        let nvcc = here.path().join("nvcc");
        let script = "#!/bin/sh\necho \"$@\" >> log\n\
            while [ \"$1\" != --output-file ]; do shift; done\n\
            echo '.version 9.0\n.target sm_90\n.entry f() {}' > \"$2\"\n";
        fs::write(&nvcc, script).unwrap();
        fs::set_permissions(&nvcc, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let names = source_files(here.path()).unwrap();
        build_nvcc(here.path(), &names, &nvcc, output.path()).unwrap();
        let log = fs::read_to_string(here.path().join("log")).unwrap();
        assert_eq!(log.lines().count(), 3, "{log}");
        assert!(log.contains("--gpu-architecture=compute_90a b_sm90a.cu"), "{log}");
        assert!(!log.contains("default-device"), "{log}");
        assert!(output.path().join("b_sm90a.compute_90a.ptx").is_file());
    }

    #[test]
    fn a_source_of_one_architecture_is_compiled_for_it_alone() {
        assert_eq!(targets("embed.cu"), ["compute_80", "compute_90"]);
        assert_eq!(targets("gemm_sm90a.cu"), ["compute_90a"]);
        assert_eq!(targets("bulk_sm90.cu"), ["compute_90"]);
    }
}
