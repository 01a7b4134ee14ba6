//! Kernels of other PTX than the backend chooses: recorded into graphs as work of the caller's.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use decode_graph::backend::cuda::External;
use decode_graph::{ByteRange, CudaBackend, Launch, ptx};
use gpu_slab::cuda::RawStream;
use kernels_ptx::Arg;

type Handle = *mut c_void;

#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: RawStream,
    attributes: *mut [u64; 9],
    attribute_count: c_uint,
}

unsafe extern "C" {
    fn cuModuleLoadDataEx(
        module: *mut Handle,
        image: *const c_char,
        option_count: c_uint,
        options: *const c_uint,
        values: *mut *mut c_void,
    ) -> c_int;
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> c_int;
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> c_int;
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: RawStream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    fn cuLaunchKernelEx(
        config: *const Config,
        function: Handle,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
}

fn check(code: c_int) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// When a kernel lets the next one's blocks move in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger {
    /// Behind its wait for inputs, as the sources have it.
    After,
    /// Just before that wait.
    Before,
    /// At its end.
    Never,
}

/// Loaded kernels.
pub(crate) struct Variant {
    functions: HashMap<&'static str, Handle>,
    programmatic: bool,
}

// SAFETY: handles of functions may be used from any thread.
unsafe impl Send for Variant {}
// SAFETY: as above.
unsafe impl Sync for Variant {}

impl Variant {
    /// Has the driver compile the PTX of a target, changed as `trigger` says. The modules are never
    /// unloaded.
    pub(crate) fn load(
        backend: &CudaBackend,
        compute_capability: u32,
        trigger: Trigger,
    ) -> Result<Arc<Self>, Box<dyn std::error::Error>> {
        backend.stream().context().make_current()?;
        let modules = ptx::select(compute_capability, backend.cuda_device().driver_version)?;
        let mut functions = HashMap::new();
        for module in &modules {
            let (let_next, wait) = ("griddepcontrol.launch_dependents;", "griddepcontrol.wait;");
            let text = match trigger {
                Trigger::After => module.text.to_owned(),
                Trigger::Never => module.text.replace(let_next, ""),
                Trigger::Before => {
                    module.text.replace(let_next, "").replace(wait, &format!("{let_next}\n{wait}"))
                }
            };
            let text = CString::new(text)?;
            let mut raw = std::ptr::null_mut();
            let (no_options, no_values) = (std::ptr::null(), std::ptr::null_mut());
            // SAFETY: the text ends with a zero; the driver writes one handle.
            let loaded =
                unsafe { cuModuleLoadDataEx(&mut raw, text.as_ptr(), 0, no_options, no_values) };
            check(loaded).map_err(|code| format!("{module:?}: error {code}"))?;
            for entry in module.entries {
                let name = CString::new(*entry)?;
                let mut function = std::ptr::null_mut();
                // SAFETY: the module is loaded; the driver writes one handle.
                check(unsafe { cuModuleGetFunction(&mut function, raw, name.as_ptr()) })
                    .map_err(|code| format!("{entry}: error {code}"))?;
                functions.insert(*entry, function);
            }
        }
        let programmatic = ptx::target(&modules) != "compute_80";
        Ok(Arc::new(Self { functions, programmatic }))
    }

    /// The launches as work that a capture records.
    pub(crate) fn external(
        self: &Arc<Self>,
        launches: &[Launch<ByteRange>],
        base_address: u64,
    ) -> External {
        let (variant, launches) = (self.clone(), launches.to_vec());
        External::new("variant", 1, 0, move |stream| {
            launches.iter().try_for_each(|launch| variant.queue(stream, launch, base_address))
        })
    }

    fn queue(
        &self,
        stream: RawStream,
        launch: &Launch<ByteRange>,
        base_address: u64,
    ) -> Result<(), i32> {
        const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
        const INVALID_HANDLE: i32 = 400;
        let function = *self.functions.get(launch.kernel.name()).ok_or(INVALID_HANDLE)?;
        let mut words: Vec<u64> = launch
            .args
            .iter()
            .map(|arg| match *arg {
                Arg::Buffer(range) => base_address + range.offset_bytes,
                Arg::Null => 0,
                Arg::U32(value) => value.into(),
                Arg::F32(value) => value.to_bits().into(),
            })
            .collect();
        let mut pointers: Vec<*mut c_void> =
            words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let geometry = launch.geometry;
        let shared = geometry.shared_bytes;
        if shared > 48 << 10 {
            let (attribute, bytes) = (MAX_DYNAMIC_SHARED_BYTES, shared as c_int);
            // SAFETY: the function exists.
            check(unsafe { cuFuncSetAttribute(function, attribute, bytes) })?;
        }
        let (arguments, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        let ([gx, gy, gz], [bx, by, bz]) = (geometry.grid, geometry.block);
        if !self.programmatic {
            // SAFETY: the function exists; arguments are those of its signature, their addresses of
            // memory that outlives the graph.
            return check(unsafe {
                cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, none)
            });
        }
        // Number 6, and 1 for yes: programmatic serialisation.
        let mut attribute = [6, 1, 0, 0, 0, 0, 0, 0, 0];
        let config = Config {
            grid: geometry.grid,
            block: geometry.block,
            shared_bytes: shared,
            stream,
            attributes: &mut attribute,
            attribute_count: 1,
        };
        // SAFETY: as above.
        check(unsafe { cuLaunchKernelEx(&config, function, arguments, none) })
    }
}
