//! Why there is no driver.

use std::ffi::CString;
use std::fmt;

/// Why libcuda, or one symbol of it, is not there. Its text is one sentence for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// This crate defines nothing on this target; link the toolkit's libcuda instead.
    Unsupported {
        /// Processor architecture the crate was compiled for.
        arch: &'static str,
        /// Operating system it was compiled for.
        os: &'static str,
    },
    /// `CUDA_LOAD_LIBRARY` is set and empty: whoever set it wants no driver.
    Disabled,
    /// The dynamic loader could not load the library.
    NotLoaded {
        /// The name or path that was asked for.
        library: String,
        /// The dynamic loader's own words.
        reason: String,
    },
    /// The library was loaded and has no `cuInit`: it is no CUDA driver.
    NotADriver {
        /// The name or path that was asked for.
        library: String,
    },
    /// The driver is there and does not have this symbol: it is older than the caller's wish.
    Symbol {
        /// The name or path of the library.
        library: String,
        /// The symbol that it lacks.
        symbol: CString,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported { arch, os } => write!(
                f,
                "libcuda is not loaded at run time on {arch} {os}: only on x86_64 linux; \
                 link the CUDA toolkit's library there"
            ),
            Self::Disabled => {
                write!(f, "no CUDA driver is loaded, because CUDA_LOAD_LIBRARY is empty")
            }
            Self::NotLoaded { library, reason } => {
                write!(f, "no CUDA driver: {library} could not be loaded ({reason})")
            }
            Self::NotADriver { library } => {
                write!(f, "no CUDA driver: {library} was loaded but has no cuInit")
            }
            Self::Symbol { library, symbol } => {
                write!(
                    f,
                    "the CUDA driver is too old: {library} has no {}",
                    symbol.to_string_lossy()
                )
            }
        }
    }
}

impl std::error::Error for Missing {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_one_line_that_names_what_is_missing() {
        let library = || "libcuda.so.1".to_owned();
        let reasons = [
            (Missing::Unsupported { arch: "riscv64", os: "linux" }, "riscv64 linux"),
            (Missing::Disabled, "CUDA_LOAD_LIBRARY"),
            (Missing::NotLoaded { library: library(), reason: "no such file".into() }, "no such"),
            (Missing::NotADriver { library: library() }, "libcuda.so.1"),
            (Missing::Symbol { library: library(), symbol: c"cuFuture".to_owned() }, "cuFuture"),
        ];
        for (reason, named) in reasons {
            let text = reason.to_string();
            assert!(text.contains(named), "{text}");
            assert!(!text.contains('\n') && !text.contains("  "), "{text}");
        }
    }
}
