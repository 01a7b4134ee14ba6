#![doc = include_str!("../README.md")]

mod missing;

#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]
#[path = "loader/mod.rs"]
mod target;
#[cfg(not(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux")))]
#[path = "unsupported.rs"]
mod target;
/// Compiled for tests everywhere: a change must not break it on targets that nobody builds for.
#[cfg(test)]
#[allow(unreachable_pub, reason = "it is public where it is the target")]
mod unsupported;

pub use missing::Missing;
pub use target::SYMBOLS;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// Loads the driver's library if that was not tried yet, and says whether it is there.
///
/// Says nothing of devices: a driver without one answers `cuInit` with an error of its own. The
/// answer never changes during the life of the process.
///
/// # Errors
///
/// Why the library could not be loaded, in a sentence; [`Missing::Unsupported`] on targets other
/// than x86-64 Linux.
pub fn present() -> Result<(), Missing> {
    target::present()
}

/// The address of any symbol of the driver's library, for calls newer than [`SYMBOLS`].
///
/// # Errors
///
/// As [`present`], and [`Missing::Symbol`] when the driver has no such symbol.
pub fn symbol(name: &CStr) -> Result<NonNull<c_void>, Missing> {
    target::symbol(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_targets_say_that_they_are_not_supported() {
        let missing = unsupported::present().expect_err("always");
        assert!(missing.to_string().contains("x86_64 linux"), "{missing}");
        assert_eq!(unsupported::symbol(c"cuInit"), Err(missing));
        assert!(unsupported::SYMBOLS.is_empty());
    }

    #[test]
    fn symbols_are_sorted_and_single() {
        assert!(SYMBOLS.is_sorted_by(|a, b| a < b));
    }
}
