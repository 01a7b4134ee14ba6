//! Any other target: nothing is defined, and whoever asks is told so.

use std::env::consts::{ARCH, OS};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use crate::Missing;

/// Every driver symbol that this crate defines: none on this target.
pub const SYMBOLS: &[&str] = &[];

const UNSUPPORTED: Missing = Missing::Unsupported { arch: ARCH, os: OS };

pub(crate) fn present() -> Result<(), Missing> {
    Err(UNSUPPORTED)
}

pub(crate) fn symbol(_: &CStr) -> Result<NonNull<c_void>, Missing> {
    Err(UNSUPPORTED)
}
