//! What the driver said, with its own number kept.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::format;
use std::ptr;
use std::string::String;

use super::driver::{cuGetErrorName, cuGetErrorString};
use crate::MemoryError;

/// A refusal of the CUDA driver, or of what stands in for one that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverError {
    /// The function that refused, or what was being done.
    pub call: &'static str,
    /// The driver's number, a `CUresult`; newer drivers have numbers that no header here knows.
    pub code: i32,
    /// The driver's words for it, or the reason that was found before the driver was asked.
    pub message: String,
}

impl DriverError {
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: i32 = 100;
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub const INVALID_DEVICE: i32 = 101;

    /// Nothing for 0, which is success, and the error of any other code.
    ///
    /// # Errors
    ///
    /// Every code but 0.
    pub fn check(call: &'static str, code: i32) -> Result<(), DriverError> {
        if code == 0 { Ok(()) } else { Err(Self::from_code(call, code)) }
    }

    /// The error of a code, in the driver's words.
    #[must_use]
    pub fn from_code(call: &'static str, code: i32) -> Self {
        let name = text_of(code, cuGetErrorName).unwrap_or("a code unknown to the driver");
        let message = match text_of(code, cuGetErrorString) {
            Some(text) => format!("{name}, {text}"),
            None => name.into(),
        };
        Self { call, code, message }
    }

    pub(super) fn other(call: &'static str, code: i32, message: String) -> Self {
        Self { call, code, message }
    }

    /// Whether the context is lost with it: every later call on the device fails the same way.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        // ECC, NVLink; illegal address, launch timeout, assertion, hardware stack, illegal
        // instruction, misaligned address, invalid address space and program counter, failed
        // launch; unknown.
        matches!(self.code, 214 | 220 | 700 | 702 | 710 | 714..=719 | 999)
    }

    /// Whether it says that a stream capture was disturbed: `CUDA_ERROR_STREAM_CAPTURE_*`.
    #[must_use]
    pub fn is_capture(&self) -> bool {
        (900..=908).contains(&self.code)
    }

    pub(super) fn memory(self, operation: &'static str, requested_bytes: u64) -> MemoryError {
        let code = i64::from(self.code);
        let message = format!("{}: {}", self.call, self.message);
        MemoryError::new(operation, requested_bytes, message).with_code(code)
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (code {})", self.call, self.message, self.code)
    }
}

impl std::error::Error for DriverError {}

fn text_of(
    code: i32,
    ask: unsafe extern "C" fn(i32, *mut *const c_char) -> i32,
) -> Option<&'static str> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: the driver writes one pointer, null or to a string with a zero at its end.
    let known = unsafe { ask(code, &mut text) } == 0;
    if !known || text.is_null() {
        return None;
    }
    // SAFETY: as above, and the string is a constant of the library, which is never unloaded.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}
