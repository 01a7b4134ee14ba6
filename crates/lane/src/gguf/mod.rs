//! Reading and writing GGUF files: validate first, then view.
//!
//! [`Gguf::open`] reads the header of a file (or of every part of a split one), checks each count,
//! length and offset in it against the file's real size before anything is allocated, and from
//! then on answers questions about it. Tensor data is read on demand with positioned reads; the
//! file is never mapped, so one that shrinks or is replaced meanwhile gives an error, not a crash.

mod error;
mod file;
mod ggml_type;
mod header;
mod metadata;
mod source;
mod split;
mod write;

pub use error::GgufError;
pub use file::{Gguf, TensorInfo};
pub use ggml_type::GgmlType;
pub use metadata::{Array, ByteStrings, Metadata, Strings, Value, ValueType};
pub use source::Source;
pub use write::{GgufWriter, TensorSink};

/// The first four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Tensor data starts at multiples of this unless the file says otherwise.
pub const DEFAULT_ALIGNMENT_BYTES: u64 = 32;
