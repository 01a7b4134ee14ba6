//! Kernels as shared objects: found compiler, flags, a cache under cargo's target folder.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use kernels_ptx::Kernel;

/// The folder of the kernels.
pub(crate) fn cu() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cu")
}

fn shim() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("shim")
}

/// A C++ compiler that runs.
pub(crate) struct Compiler {
    tool: cc::Tool,
}

/// The system's compiler, or `None` after saying that `test` is skipped.
pub(crate) fn compiler(test: &str) -> Option<&'static Compiler> {
    static FOUND: OnceLock<Result<Compiler, String>> = OnceLock::new();
    match FOUND.get_or_init(Compiler::find) {
        Ok(compiler) => Some(compiler),
        Err(reason) => {
            // Past the capture of a passing test's output.
            let _ = writeln!(std::io::stderr(), "{test}: skipped, {reason}");
            None
        }
    }
}

impl Compiler {
    fn find() -> Result<Self, String> {
        if !cfg!(target_os = "linux") {
            return Err("the host build of the kernels is for Linux".to_owned());
        }
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let tool = cc::Build::new()
            .cpp(true)
            .target(&target)
            .host(&target)
            .opt_level(0)
            .cargo_metadata(false)
            .cargo_warnings(false)
            .try_get_compiler()
            .map_err(|error| format!("no C++ compiler: {error}"))?;
        match Command::new(tool.path()).arg("--version").output() {
            Ok(output) if output.status.success() => Ok(Self { tool }),
            _ => Err(format!("no C++ compiler: {} does not run", tool.path().display())),
        }
    }

    fn run(&self, args: &[&str], inputs: &[&Path], output: &Path) -> Result<(), String> {
        let mut command = Command::new(self.tool.path());
        command.args(["-std=c++17", "-fPIC", "-fvisibility=hidden", "-g1"]);
        // Frame pointers lead from an error back to the kernel's line.
        command.args(["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]);
        if self.tool.is_like_gnu() {
            // Else statics of templates would be shared between the libraries of one process.
            command.arg("-fno-gnu-unique");
        }
        command.args(args).args(inputs).arg("-o").arg(output);
        let result = command.output().map_err(|error| error.to_string())?;
        if result.status.success() {
            return Ok(());
        }
        Err(format!("{command:?}\n{}", String::from_utf8_lossy(&result.stderr)))
    }

    /// The object of the engine.
    fn engine(&self) -> Result<PathBuf, String> {
        let object = cached("engine", &files_of(&shim())?)?.with_extension("o");
        if !object.exists() {
            let args = ["-O2", "-Wall", "-Wextra", "-Werror", "-c"];
            in_place_of(&object, |to| self.run(&args, &[&shim().join("engine.cpp")], to))?;
        }
        Ok(object)
    }

    /// The object of one source with the named kernels in it; `cu` is where it finds headers.
    fn unit(&self, source: &Path, kernels: &[&str], cu: &Path, to: &Path) -> Result<(), String> {
        let wrapper = to.with_extension("cpp");
        let mut text = format!("#include {:?}\n", shim().join("shim.hpp"));
        text += &format!("#include {source:?}\n");
        kernels.iter().for_each(|kernel| text += &format!("SHIM_KERNEL({kernel})\n"));
        fs::write(&wrapper, text).map_err(|error| error.to_string())?;
        let include = format!("-I{}", cu.display());
        // Uninitialised variables are filled with a pattern: their use does not go unseen.
        let args = ["-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-Wall"];
        let args = [&args[..], &["-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]];
        let args = [&args.concat()[..], &["-Werror=return-type", &include, "-c"]].concat();
        self.run(&args, &[&wrapper], to)
    }

    /// A library of one source of its own, made in `folder`; `cu` is where it finds headers.
    pub(crate) fn library_of(
        &self,
        source: &Path,
        kernels: &[&str],
        cu: &Path,
        folder: &Path,
    ) -> Result<PathBuf, String> {
        let (object, library) = (folder.join("kernels.o"), folder.join("kernels.so"));
        self.unit(source, kernels, cu, &object)?;
        self.run(&["-shared"], &[&self.engine()?, &object], &library)?;
        Ok(library)
    }

    /// The library of all kernels.
    pub(crate) fn library(&self) -> Result<PathBuf, String> {
        let path = |source| cu().join(source).with_extension("cu");
        let units: Vec<_> = kernels_by_source()
            .into_iter()
            .map(|(source, kernels)| (path(source), kernels))
            .collect();
        self.cached_library("kernels", &units)
    }

    /// The library of some sources, compiled once for the text that they and all headers have.
    pub(crate) fn cached_library(
        &self,
        name: &str,
        units: &[(PathBuf, Vec<&str>)],
    ) -> Result<PathBuf, String> {
        let mut sources = [files_of(&shim())?, files_of(&cu())?].concat();
        sources.extend(units.iter().map(|(source, _)| source.clone()));
        let library = cached(name, &sources)?.with_extension("so");
        if library.exists() {
            return Ok(library);
        }
        let folder = scratch(name)?;
        let mut objects = vec![self.engine()?];
        for (index, (source, kernels)) in units.iter().enumerate() {
            let object = folder.join(format!("{index}.o"));
            self.unit(source, kernels, &cu(), &object)?;
            objects.push(object);
        }
        let objects: Vec<&Path> = objects.iter().map(PathBuf::as_path).collect();
        in_place_of(&library, |to| self.run(&["-shared"], &objects, to))?;
        fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
        Ok(library)
    }
}

/// The sources of the table, each with its kernels.
pub(crate) fn kernels_by_source() -> Vec<(&'static str, Vec<&'static str>)> {
    let mut sources: Vec<(&str, Vec<&str>)> = Vec::new();
    // What is made for one processor's own instructions does not run here.
    for kernel in Kernel::ALL.iter().filter(|kernel| kernel.compute_capability() == 80) {
        match sources.iter_mut().find(|(source, _)| *source == kernel.source()) {
            Some((_, kernels)) => kernels.push(kernel.name()),
            None => sources.push((kernel.source(), vec![kernel.name()])),
        }
    }
    sources
}

/// Sorted.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    Ok(files)
}

/// A folder of its own for this process, empty.
pub(crate) fn scratch(name: &str) -> Result<PathBuf, String> {
    let name = format!("{name}-{}", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    Ok(folder)
}

/// A path that depends on the contents of the sources and on this file's flags.
fn cached(name: &str, sources: &[PathBuf]) -> Result<PathBuf, String> {
    let mut hasher = DefaultHasher::new();
    include_str!("compile.rs").hash(&mut hasher);
    for source in sources {
        let text = fs::read(source).map_err(|error| format!("{}: {error}", source.display()))?;
        (source, text).hash(&mut hasher);
    }
    let file = format!("{name}-{:016x}", hasher.finish());
    Ok(Path::new(env!("CARGO_TARGET_TMPDIR")).join(file))
}

/// Makes a file under another name and renames it, so that nobody sees half of it.
fn in_place_of(path: &Path, make: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), String> {
    // Tests of one process run at the same time, and several may find the file missing.
    let maker = format!("{}-{:?}", std::process::id(), std::thread::current().id());
    let temporary = path.with_extension(format!("{}.tmp.o", maker.replace(['(', ')'], "")));
    make(&temporary)?;
    fs::rename(&temporary, path)
        .map_err(|error| format!("{} to {}: {error}", temporary.display(), path.display()))
}
