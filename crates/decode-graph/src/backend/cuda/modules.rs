//! The kernels as the driver has compiled them.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
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

/// Loaded modules with their kernels.
pub(super) struct Modules {
    functions: HashMap<Kernel, Function>,
    modules: Vec<CUmodule>,
    context: CudaContext,
    pub(super) code_hash: u64,
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
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for Modules {}

impl Modules {
    /// Has the driver compile `selection` and looks up every kernel of the table in it.
    pub(super) fn load(
        context: &CudaContext,
        selection: &[Module],
    ) -> Result<(Self, LoadReport), DriverError> {
        context.make_current()?;
        let mut loaded = Self {
            functions: HashMap::new(),
            modules: Vec::new(),
            context: context.clone(),
            code_hash: ptx::code_hash(selection),
        };
        let mut report =
            LoadReport { target: ptx::target(selection), milliseconds: 0.0, modules: Vec::new() };
        for module in selection {
            let start = Instant::now();
            loaded.add(module)?;
            let milliseconds = start.elapsed().as_secs_f64() * 1e3;
            log::debug!(target: "decode-graph", "{module:?}: {milliseconds:.1} ms");
            report.milliseconds += milliseconds;
            report.modules.push((module.name, module.target, milliseconds));
        }
        Ok((loaded, report))
    }

    fn add(&mut self, module: &Module) -> Result<(), DriverError> {
        let raw = compile(module)?;
        self.modules.push(raw);
        for entry in module.entries {
            let Some(kernel) = Kernel::by_name(entry) else { continue };
            let function = Function::find(raw, entry, module.has_programmatic_launch())?;
            self.functions.insert(kernel, function);
        }
        Ok(())
    }

    pub(super) fn function(&self, kernel: Kernel) -> Option<&Function> {
        self.functions.get(&kernel)
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
            for &module in &self.modules {
                // SAFETY: loaded by `add`; graphs that run its kernels hold an `Arc` of this.
                let _ = unsafe { driver::cuModuleUnload(module) };
            }
        }
    }
}
