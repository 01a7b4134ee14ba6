//! NVIDIA's run-time compiler, as a shared library opened by its path.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, bail};

// libc has these, and the standard library links it.
unsafe extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;

type Program = *mut c_void;
/// `nvrtcResult`; 0 is success.
type Code = c_int;

/// The functions of the library that are used here, as nvrtc.h declares them.
pub(crate) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
}

impl Nvrtc {
    pub(crate) fn open(library: &Path) -> Result<Self> {
        let path = CString::new(library.as_os_str().as_encoded_bytes())?;
        // SAFETY: `path` is a C string; the library is NVIDIA's, checked by its hash when unpacked.
        let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: dlerror returns null or a C string of this thread.
            let reason = unsafe { text(dlerror()) };
            bail!("{} could not be loaded: {reason}", library.display());
        }
        // SAFETY: the type of each field is the declaration of its function in nvrtc.h, and the
        // library stays open until the process ends.
        unsafe {
            Ok(Self {
                version: function(handle, c"nvrtcVersion")?,
                error_string: function(handle, c"nvrtcGetErrorString")?,
                create: function(handle, c"nvrtcCreateProgram")?,
                compile: function(handle, c"nvrtcCompileProgram")?,
                ptx_size: function(handle, c"nvrtcGetPTXSize")?,
                ptx: function(handle, c"nvrtcGetPTX")?,
                log_size: function(handle, c"nvrtcGetProgramLogSize")?,
                log: function(handle, c"nvrtcGetProgramLog")?,
                destroy: function(handle, c"nvrtcDestroyProgram")?,
            })
        }
    }

    pub(crate) fn version(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two places to write an int to.
        self.succeed(unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok(format!("{major}.{minor}"))
    }

    /// Compiles `source`, known to the compiler as `name`, to PTX. `headers` are found by the names
    /// that `#include` gives them.
    ///
    /// # Errors
    ///
    /// The compiler's own messages. A warning is no error; it goes to stderr.
    pub(crate) fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(String, String)],
        options: &[String],
    ) -> Result<String> {
        let strings = |texts: &mut dyn Iterator<Item = &str>| {
            texts.map(CString::new).collect::<Result<Vec<_>, _>>().context("a zero byte in a text")
        };
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (name_text, source) = (CString::new(name)?, CString::new(source)?);
        let header_names = strings(&mut headers.iter().map(|header| header.0.as_str()))?;
        let header_texts = strings(&mut headers.iter().map(|header| header.1.as_str()))?;
        let options = strings(&mut options.iter().map(String::as_str))?;

        let mut program = Created { nvrtc: self, program: ptr::null_mut() };
        // SAFETY: every pointer is to a C string or to an array of as many of them as its count
        // says, all alive for the call; the compiler copies them.
        self.succeed(unsafe {
            (self.create)(
                &mut program.program,
                source.as_ptr(),
                name_text.as_ptr(),
                c_int::try_from(headers.len())?,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        })?;
        // SAFETY: a created program, and an array of as many C strings as the count says.
        let code = unsafe {
            let count = c_int::try_from(options.len())?;
            (self.compile)(program.program, count, pointers(&options).as_ptr())
        };
        let log = self.read(program.program, self.log_size, self.log)?;
        if code != 0 {
            bail!("{name}: {}\n{}", self.error(code), log.trim());
        }
        if !log.trim().is_empty() {
            eprintln!("{}", log.trim());
        }
        self.read(program.program, self.ptx_size, self.ptx)
    }

    fn read(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: a created program, and a place to write a size to.
        self.succeed(unsafe { size(program, &mut bytes) })?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that the library asked for, its final zero included.
        self.succeed(unsafe { get(program, buffer.as_mut_ptr().cast()) })?;
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        buffer.truncate(end);
        String::from_utf8(buffer).context("the compiler's answer is not UTF-8")
    }

    fn succeed(&self, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { bail!("NVRTC: {}", self.error(code)) }
    }

    fn error(&self, code: Code) -> String {
        // SAFETY: takes any code and returns a static C string.
        unsafe { text((self.error_string)(code)) }
    }
}

/// A program that is destroyed whatever happens to it.
struct Created<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created and not yet destroyed; nothing uses it after this.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

/// # Safety
///
/// `handle` is an open library and `F` the type of a pointer to its function `name`.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the handle is open by this function's contract, and `name` is a C string.
    let address = unsafe { dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        bail!("the NVRTC library has no {}", name.to_string_lossy());
    }
    // SAFETY: not null, of the size of `F`, and of its type by this function's contract.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// # Safety
///
/// Null or a C string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: not null, so a C string by this function's contract.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
