//! Launches in the host build of the kernels.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;

use kernels_ptx::Geometry;

/// Bytes at an address that is a multiple of 16 and not of 32: what kernels are promised and no
/// more.
pub(crate) struct Storage {
    words: Vec<u128>,
    first: usize,
    len: usize,
}

impl Storage {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let words = vec![0u128; bytes.len().div_ceil(16) + 1];
        let first = if (words.as_ptr() as usize).is_multiple_of(32) { 16 } else { 0 };
        let mut storage = Self { words, first, len: bytes.len() };
        storage.bytes_mut().copy_from_slice(bytes);
        storage
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.first..self.first + self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.first..self.first + self.len]
    }
}

/// An argument.
pub(crate) enum HostArg<'a> {
    Scalar(u32),
    Null,
    Buffer {
        name: &'static str,
        bytes: &'a mut [u8],
        /// One byte for each byte of the buffer: 0 where it must not be read. Afterwards 0 where
        /// it was never written either.
        initialised: &'a mut [u8],
        writable: bool,
    },
}

/// The `ShimArg` of `engine.cpp`.
#[repr(C)]
struct ShimArg {
    kind: u32,
    bits: u32,
    at: *mut u8,
    bytes: u64,
    initialised: *mut u8,
    writable: u32,
    name: *const c_char,
}

type Launch = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    *const u32,
    u32,
    *const ShimArg,
    usize,
    u64,
    c_int,
    *mut c_char,
    usize,
) -> c_int;

/// A library that [`super::compile`] made.
pub(crate) struct Library {
    launch: Launch,
    // Keeps `launch` valid.
    _library: libloading::Library,
}

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: the library is our engine and kernels; its initialisers only link a list.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| e.to_string())?;
        // SAFETY: `shim_launch` of engine.cpp has this signature.
        let launch = *unsafe { library.get::<Launch>(c"shim_launch".to_bytes_with_nul()) }
            .map_err(|e| e.to_string())?;
        Ok(Self { launch, _library: library })
    }

    /// Runs a kernel; the seed orders threads and blocks. The error is what the engine says,
    /// with source lines if `locate`.
    pub(crate) fn launch(
        &self,
        kernel: &str,
        geometry: &Geometry,
        args: &mut [HostArg<'_>],
        seed: u64,
        locate: bool,
    ) -> Result<(), String> {
        let kernel = CString::new(kernel).map_err(|e| e.to_string())?;
        let null = std::ptr::null_mut();
        let scalar = |kind, bits| ShimArg {
            kind,
            bits,
            at: null,
            bytes: 0,
            initialised: null,
            writable: 0,
            name: c"".as_ptr(),
        };
        let mut names = Vec::new();
        let args: Vec<ShimArg> = args
            .iter_mut()
            .map(|arg| match arg {
                HostArg::Scalar(bits) => scalar(0, *bits),
                HostArg::Null => scalar(2, 0),
                HostArg::Buffer { name, bytes, initialised, writable } => {
                    assert_eq!(bytes.len(), initialised.len());
                    names.push(CString::new(*name).expect("names have no NUL"));
                    ShimArg {
                        kind: 1,
                        bits: 0,
                        at: bytes.as_mut_ptr(),
                        bytes: bytes.len() as u64,
                        initialised: initialised.as_mut_ptr(),
                        writable: u32::from(*writable),
                        name: names[names.len() - 1].as_ptr(),
                    }
                }
            })
            .collect();
        let mut error = [0 as c_char; 1024];
        // SAFETY: every pointer is to as much as its length says and outlives the call; the
        // engine touches the buffers only inside their bounds, which is what it checks.
        let failed = unsafe {
            (self.launch)(
                kernel.as_ptr(),
                geometry.grid.as_ptr(),
                geometry.block.as_ptr(),
                geometry.shared_bytes,
                args.as_ptr(),
                args.len(),
                seed,
                c_int::from(locate),
                error.as_mut_ptr(),
                error.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: snprintf ends the text inside the array.
        Err(unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned())
    }
}
