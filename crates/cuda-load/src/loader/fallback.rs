//! What a driver function answers when there is nobody to ask. The codes are `CUresult`s.

use std::ffi::{CStr, c_char, c_void};

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const NO_DEVICE: u32 = 100;
const NOT_FOUND: u32 = 500;

/// Every code that reaches a caller when no driver was loaded, with the driver's own texts.
const ERRORS: [(u32, &CStr, &CStr); 4] = [
    (SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
];

/// The function to call instead of `symbol` when no driver was loaded. Reading no argument, one
/// function stands in for all: the caller cleans the stack in this calling convention.
pub(crate) fn without_driver(symbol: &CStr) -> *mut c_void {
    extern "C" fn no_device() -> u32 {
        NO_DEVICE
    }
    // cust asks for these two to print its errors, and its Display fails, with a panic in
    // to_string, when they do.
    if symbol == c"cuGetErrorString" {
        return get_error_string as *mut c_void;
    }
    if symbol == c"cuGetErrorName" {
        return get_error_name as *mut c_void;
    }
    no_device as *mut c_void
}

/// The function to call when the driver was loaded and lacks the symbol.
pub(crate) fn not_found() -> *mut c_void {
    extern "C" fn not_found() -> u32 {
        NOT_FOUND
    }
    not_found as *mut c_void
}

unsafe extern "C" fn get_error_name(code: u32, text: *mut *const c_char) -> u32 {
    let known = ERRORS.iter().find(|error| error.0 == code).map(|error| error.1);
    // SAFETY: the caller keeps the contract of cuGetErrorName, which is `answer`'s.
    unsafe { answer(known, text) }
}

unsafe extern "C" fn get_error_string(code: u32, text: *mut *const c_char) -> u32 {
    let known = ERRORS.iter().find(|error| error.0 == code).map(|error| error.2);
    // SAFETY: the caller keeps the contract of cuGetErrorString, which is `answer`'s.
    unsafe { answer(known, text) }
}

/// As the driver does: null and `INVALID_VALUE` for a code without a text.
///
/// # Safety
///
/// `text` is null or valid for writing a pointer.
unsafe fn answer(known: Option<&'static CStr>, text: *mut *const c_char) -> u32 {
    if text.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, so valid for the write by this function's contract.
    unsafe { text.write(known.map_or(std::ptr::null(), CStr::as_ptr)) };
    if known.is_some() { SUCCESS } else { INVALID_VALUE }
}
