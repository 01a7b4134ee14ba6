//! x86-64 Linux: symbols that jump into libcuda once it is loaded.

mod fallback;
mod library;
mod stubs;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use crate::Missing;
pub use stubs::SYMBOLS;

pub(crate) fn present() -> Result<(), Missing> {
    library::library().map(|_| ()).map_err(Missing::clone)
}

pub(crate) fn symbol(name: &CStr) -> Result<NonNull<c_void>, Missing> {
    let library = library::library().map_err(Missing::clone)?;
    library.find(name).ok_or_else(|| Missing::Symbol {
        library: library.name().to_owned(),
        symbol: name.to_owned(),
    })
}
