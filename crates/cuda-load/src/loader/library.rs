//! The one libcuda of this process: opened at the first question, never closed.

use std::env;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::Missing;

/// Set to a path: that library is loaded instead of [`SONAME`]. Set and empty: none is.
const OVERRIDE: &str = "CUDA_LOAD_LIBRARY";
/// What a driver package installs, whatever its version; `libcuda.so` belongs to the toolkit.
const SONAME: &str = "libcuda.so.1";

// Rust's standard library links libc, which has these three, on every Linux target.
unsafe extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;
const RTLD_LOCAL: c_int = 0;

pub(crate) struct Library {
    handle: NonNull<c_void>,
    name: String,
}

// SAFETY: a handle of dlopen is an opaque value, valid in every thread, and dlsym is thread-safe
// (POSIX); this one is never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The answer of the first call, for as long as the process lives.
pub(crate) fn library() -> Result<&'static Library, &'static Missing> {
    static LIBRARY: OnceLock<Result<Library, Missing>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| match env::var_os(OVERRIDE) {
            None => Library::open(SONAME.into()),
            // dlopen("") would hand out this program itself, whose cuInit is ours.
            Some(path) if path.is_empty() => Err(Missing::Disabled),
            Some(path) => Library::open(path),
        })
        .as_ref()
}

impl Library {
    fn open(path: OsString) -> Result<Self, Missing> {
        let name = path.to_string_lossy().into_owned();
        let not_loaded = |reason| Missing::NotLoaded { library: name.clone(), reason };
        let path = CString::new(path.into_vec()).map_err(|e| not_loaded(e.to_string()))?;
        // SAFETY: `path` is a C string. Loading runs the initialisers of a library whose name is
        // the driver's, or which the user of this process named.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            return Err(not_loaded(last_error()));
        };
        let library = Self { handle, name };
        if library.find(c"cuInit").is_none() {
            return Err(Missing::NotADriver { library: library.name });
        }
        Ok(library)
    }

    pub(crate) fn find(&self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from dlopen and was never closed; `symbol` is a C string.
        // The search covers the library and what it needs, never this program's own symbols.
        NonNull::new(unsafe { dlsym(self.handle.as_ptr(), symbol.as_ptr()) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

fn last_error() -> String {
    // SAFETY: dlerror takes nothing and returns null or a C string of this thread, which stays
    // until this thread's next call of a dl function; it is copied before that.
    unsafe {
        let text = dlerror();
        if text.is_null() {
            "the dynamic loader gives no reason".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
