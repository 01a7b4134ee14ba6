//! The kernels as the driver has compiled them.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use cust::sys::{CUfunction, CUmodule};
use gpu_slab::cuda::{CudaContext, DriverError};
use kernels_ptx::Kernel;

use super::driver::JIT_ERROR_LOG;
use super::driver::{self, FUNCTION_MAX_DYNAMIC_SHARED_BYTES, FUNCTION_STATIC_SHARED_BYTES, call};
use crate::ptx::{self, Module};

/// Dynamic shared memory that every kernel may have without asking.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// What loading the kernels took.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LoadReport {
    /// The PTX that was chosen: `compute_80`, or `compute_90` with programmatic dependent launch.
    pub target: &'static str,
    /// Time in the driver's compiler, or in reading its cache, all modules together.
    pub milliseconds: f64,
    /// Each module with its target and its time in milliseconds.
    pub modules: Vec<(&'static str, &'static str, f64)>,
}

impl std::fmt::Display for LoadReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} modules of {} PTX", self.modules.len(), self.target)?;
        write!(f, " compiled by the driver in {:.0} ms", self.milliseconds)
    }
}

/// The modules of a selection. Each is loaded once, when it is first needed, or ahead of that by a
/// [`Prefetch`].
pub(super) struct Modules {
    slots: Vec<Slot>,
    /// The slot that has a kernel.
    places: HashMap<Kernel, usize>,
    context: CudaContext,
    pub(super) code_hash: u64,
}

struct Slot {
    module: Module,
    loaded: OnceLock<Result<Loaded, DriverError>>,
}

/// A loaded module with its kernels.
struct Loaded {
    raw: CUmodule,
    functions: HashMap<Kernel, Function>,
    milliseconds: f64,
}

/// A kernel of a loaded module.
pub(super) struct Function {
    raw: CUfunction,
    /// Whether the module has programmatic dependent launch.
    pub(super) programmatic: bool,
    /// What it was allowed to have of dynamic shared memory so far.
    shared_bytes: AtomicU32,
}

// SAFETY: handles of modules and functions may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above; what changes is atomic, or set once.
unsafe impl Sync for Modules {}

impl Modules {
    pub(super) fn new(context: &CudaContext, selection: &[Module]) -> Self {
        let places = selection.iter().enumerate().flat_map(|(place, module)| {
            let kernels = module.entries.iter().filter_map(|entry| Kernel::by_name(entry));
            kernels.map(move |kernel| (kernel, place))
        });
        let slot = |module: &Module| Slot { module: *module, loaded: OnceLock::new() };
        Self {
            places: places.collect(),
            slots: selection.iter().map(slot).collect(),
            context: context.clone(),
            code_hash: ptx::code_hash(selection),
        }
    }

    /// A kernel, loaded; `None` if no module has it.
    pub(super) fn function(&self, kernel: Kernel) -> Option<Result<&Function, DriverError>> {
        let place = *self.places.get(&kernel)?;
        match self.load(place) {
            Ok(loaded) => loaded.functions.get(&kernel).map(Ok),
            Err(error) => Some(Err(error)),
        }
    }

    /// Loads all that are not.
    pub(super) fn report(&self) -> Result<LoadReport, DriverError> {
        let mut report = LoadReport { target: "none", milliseconds: 0.0, modules: Vec::new() };
        for (place, slot) in self.slots.iter().enumerate() {
            let loaded = self.load(place)?;
            report.milliseconds += loaded.milliseconds;
            report.modules.push((slot.module.name, slot.module.target, loaded.milliseconds));
        }
        let selection: Vec<Module> = self.slots.iter().map(|slot| slot.module).collect();
        report.target = ptx::target(&selection);
        Ok(report)
    }

    fn load(&self, place: usize) -> Result<&Loaded, DriverError> {
        let Slot { module, loaded } = &self.slots[place];
        let loaded = loaded.get_or_init(|| {
            let start = Instant::now();
            self.context.make_current()?;
            let mut loaded = Loaded::new(module)?;
            loaded.milliseconds = start.elapsed().as_secs_f64() * 1e3;
            log::info!(target: "decode-graph", "{module:?}: {:.1} ms", loaded.milliseconds);
            Ok(loaded)
        });
        loaded.as_ref().map_err(Clone::clone)
    }
}

/// A thread that loads kernels ahead of their use. One alone: the driver compiles one module at a
/// time, eight threads are no quicker (measured with 580.159 on an H200).
pub(super) struct Prefetch {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Prefetch {
    pub(super) fn start(modules: &Arc<Modules>, kernels: &[Kernel]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (modules, kernels, stopped) = (modules.clone(), kernels.to_vec(), stop.clone());
        let work = move || {
            for kernel in kernels {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                // Whoever needs the kernel is told of its error.
                let _ = modules.function(kernel);
            }
        };
        // Without the thread, whoever needs a kernel loads it.
        Self { thread: thread::Builder::new().name("kernels".into()).spawn(work).ok(), stop }
    }
}

impl Drop for Prefetch {
    /// Nothing is loaded any more when the backend is gone.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Loaded {
    fn new(module: &Module) -> Result<Self, DriverError> {
        let raw = compile(module)?;
        // Unloaded again if one of its kernels is not to be had.
        let functions = HashMap::new();
        let mut loaded = Self { raw, functions, milliseconds: 0.0 };
        for entry in module.entries {
            let Some(kernel) = Kernel::by_name(entry) else { continue };
            let function = Function::find(raw, entry, module.has_programmatic_launch())?;
            loaded.functions.insert(kernel, function);
        }
        Ok(loaded)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded by `new`, and the context is current: there, or in `Modules`, which drops
        // this. Graphs that run its kernels hold an `Arc` of that.
        let _ = unsafe { driver::cuModuleUnload(self.raw) };
    }
}

fn compile(module: &Module) -> Result<CUmodule, DriverError> {
    let text = CString::new(module.text).unwrap_or_default();
    let mut log = vec![0u8; 8 << 10];
    let mut values: [*mut c_void; 2] =
        [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len())];
    let mut raw = std::ptr::null_mut();
    // SAFETY: the text ends with a zero; the options are the log's address and its length, which is
    // passed in the pointer itself, as this interface wants it; the driver writes one handle.
    let loaded = unsafe {
        call!(cuModuleLoadDataEx(
            &mut raw,
            text.as_ptr().cast(),
            JIT_ERROR_LOG.len() as u32,
            JIT_ERROR_LOG.as_ptr(),
            values.as_mut_ptr(),
        ))
    };
    loaded.map_err(|mut error| {
        let log = String::from_utf8_lossy(&log);
        let log = log.trim_end_matches('\0').trim();
        error.message =
            format!("{module:?}: {}{}{log}", error.message, if log.is_empty() { "" } else { ": " });
        error
    })?;
    Ok(raw)
}

impl Function {
    fn find(module: CUmodule, name: &str, programmatic: bool) -> Result<Self, DriverError> {
        let c_name = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero; the driver writes one handle.
        unsafe { call!(cuModuleGetFunction(&mut raw, module, c_name.as_ptr())) }?;
        let mut unused = 0;
        // Modules are loaded lazily; asking for an attribute loads the kernel now, and not at its
        // first launch, which may be inside of a capture.
        // SAFETY: the function exists; the driver writes one number.
        unsafe { call!(cuFuncGetAttribute(&mut unused, FUNCTION_STATIC_SHARED_BYTES, raw)) }?;
        Ok(Self { raw, programmatic, shared_bytes: SHARED_BYTES_UNASKED.into() })
    }

    pub(super) fn raw(&self) -> CUfunction {
        self.raw
    }

    /// Allows launches with so much dynamic shared memory.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<(), DriverError> {
        if bytes <= self.shared_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (attribute, value) = (FUNCTION_MAX_DYNAMIC_SHARED_BYTES, bytes as c_int);
        // SAFETY: the function exists as long as its module, which owns `self`.
        unsafe { call!(cuFuncSetAttribute(self.raw, attribute, value)) }?;
        self.shared_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            self.slots.clear();
        } else {
            // Without their context the modules are gone.
            std::mem::take(&mut self.slots).into_iter().for_each(std::mem::forget);
        }
    }
}
