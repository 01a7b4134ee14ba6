//! What can be wrong with a GGUF file, one variant per failure.

use std::io;
use std::path::PathBuf;

use super::ValueType;

/// Why a GGUF file was refused. Every message is one sentence; offsets count from the start of the
/// file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused to open or read the file.
    #[error("cannot read {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path names a folder, a pipe or a device.
    #[error("{path} is not a regular file", path = path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },
    /// The file holds no bytes at all.
    #[error("the file is empty; if it came from a download, fetch it again")]
    Empty,
    /// The file does not begin with `GGUF`.
    #[error("not a GGUF file: it begins with {found}{hint}")]
    NotGguf {
        /// The first bytes, escaped.
        found: String,
        /// What the file looks like instead, and what to do; may be empty.
        hint: &'static str,
    },
    /// A GGUF file whose numbers are stored big-endian.
    #[error(
        "big-endian GGUF (version {version}) is not supported; convert the model to little-endian"
    )]
    BigEndian {
        /// The version, read the right way round.
        version: u32,
    },
    /// A GGUF version that this reader does not know.
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again")]
    UnsupportedVersion {
        /// The version in the file.
        version: u32,
    },
    /// The file ends before what its header announces.
    #[error(
        "the file ends too early: {what} at byte {offset_bytes} needs {needed_bytes} bytes, \
         the file has {file_bytes} in all; fetch it again"
    )]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where it starts.
        offset_bytes: u64,
        /// How many bytes it takes.
        needed_bytes: u64,
        /// The length of the file.
        file_bytes: u64,
    },
    /// A count that cannot be true of a file of this size.
    #[error(
        "the header announces {count} {what}, which cannot fit: at most {most} could, \
         judging by the size of the file and the limits of this reader"
    )]
    ImpossibleCount {
        /// What is counted.
        what: &'static str,
        /// The count in the file.
        count: u64,
        /// The most that would be believed.
        most: u64,
    },
    /// The header alone is larger than any real one.
    #[error("the header is larger than {limit_bytes} bytes; no real model's is")]
    HeaderTooLarge {
        /// The largest header that is read.
        limit_bytes: u64,
    },
    /// A metadata key that is empty, too long or not UTF-8.
    #[error("the metadata key at byte {offset_bytes} is {problem}")]
    BadKey {
        /// Where the key is.
        offset_bytes: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The same metadata key twice.
    #[error("the metadata key {key:?} appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A value type this reader does not know, so that the next key cannot be found.
    #[error(
        "the metadata key {key:?} has value type {type_id}, which this reader does not know; \
         it cannot tell where the next key begins"
    )]
    UnknownValueType {
        /// The key.
        key: String,
        /// The type id in the file.
        type_id: u32,
    },
    /// Arrays of arrays of arrays, deeper than anything real.
    #[error("the metadata key {key:?} nests arrays more than {limit} deep")]
    NestedTooDeep {
        /// The key.
        key: String,
        /// The deepest nesting that is read.
        limit: u32,
    },
    /// A metadata value of another type than its meaning requires.
    #[error("the metadata key {key:?} should be {expected} and is {found}")]
    WrongType {
        /// The key.
        key: String,
        /// What was asked for.
        expected: &'static str,
        /// What the file has.
        found: ValueType,
    },
    /// A metadata integer too large or too small for its meaning.
    #[error("the metadata key {key:?} is {value}, which is out of range for {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// The value in the file.
        value: i128,
        /// What was asked for.
        expected: &'static str,
    },
    /// A metadata string that is not UTF-8.
    #[error("the metadata key {key:?} holds a string that is not valid UTF-8")]
    NotUtf8 {
        /// The key.
        key: String,
    },
    /// An alignment that is no power of two or less than 8.
    #[error("general.alignment is {alignment_bytes}; it must be a power of two and at least 8")]
    BadAlignment {
        /// The alignment in the file.
        alignment_bytes: u64,
    },
    /// A tensor name that is empty, too long or not UTF-8.
    #[error("the name of tensor {index} is {problem}")]
    BadTensorName {
        /// The tensor's place in the header, from 0.
        index: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The same tensor name twice.
    #[error("the tensor {tensor:?} appears twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// More dimensions than GGUF has.
    #[error("the tensor {tensor:?} has {n_dims} dimensions; GGUF allows at most 4")]
    TooManyDimensions {
        /// The tensor.
        tensor: String,
        /// The number of dimensions in the file.
        n_dims: u32,
    },
    /// A dimension of 0, or a product of dimensions beyond 64 bits.
    #[error("the tensor {tensor:?} has impossible dimensions {dims:?}")]
    BadDimensions {
        /// The tensor.
        tensor: String,
        /// The dimensions in the file.
        dims: Vec<u64>,
    },
    /// A ggml type without a known block size.
    #[error(
        "the tensor {tensor:?} has the unknown quantisation type {type_id}; \
         use a file in a type this program knows, such as Q4_K_M"
    )]
    UnknownTensorType {
        /// The tensor.
        tensor: String,
        /// The type id in the file.
        type_id: u32,
    },
    /// Rows that are no whole number of blocks.
    #[error(
        "the tensor {tensor:?} has rows of {n_in} weights, which is not a multiple of \
         the {block_elems} in a block of {type_name}"
    )]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Weights per row.
        n_in: u64,
        /// The quantisation type.
        type_name: &'static str,
        /// Weights per block.
        block_elems: u64,
    },
    /// Tensor data that does not start at a multiple of the alignment.
    #[error(
        "the data of tensor {tensor:?} is at offset {offset_bytes}, \
         not a multiple of the alignment {alignment_bytes}"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the data section.
        offset_bytes: u64,
        /// The file's alignment.
        alignment_bytes: u64,
    },
    /// Tensor data beyond the end of the file.
    #[error(
        "the tensor {tensor:?} needs {n_bytes} bytes from byte {offset_bytes}, \
         but the file ends at {file_bytes}; {advice}"
    )]
    OutOfFile {
        /// The tensor.
        tensor: String,
        /// Where its data would start.
        offset_bytes: u64,
        /// How long its data would be.
        n_bytes: u64,
        /// The length of the file.
        file_bytes: u64,
        /// What is probably wrong, and what to do.
        advice: &'static str,
    },
    /// Two tensors share bytes.
    #[error(
        "the tensors {first:?} (to byte {first_end_bytes}) and {second:?} \
         (from byte {second_start_bytes}) overlap"
    )]
    Overlap {
        /// The one that starts first.
        first: String,
        /// Where it ends.
        first_end_bytes: u64,
        /// The one that starts before that.
        second: String,
        /// Where it starts.
        second_start_bytes: u64,
    },
    /// A read of tensor bytes that the tensor does not have.
    #[error(
        "bytes {first_byte}..{first_byte}+{n_bytes} of tensor {tensor:?} were asked for, \
         which has {tensor_bytes}"
    )]
    OutOfTensor {
        /// The tensor.
        tensor: String,
        /// The first byte asked for.
        first_byte: u64,
        /// How many were asked for.
        n_bytes: u64,
        /// How many there are.
        tensor_bytes: u64,
    },
    /// The file became shorter, or was rewritten, after it was opened.
    #[error("{path} changed while it was being read: {what}", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What is different.
        what: String,
    },
    /// One part of a split model could not be used.
    #[error("part {path}: {source}", path = path.display())]
    Part {
        /// The part.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<GgufError>,
    },
    /// A split model was opened by another part than its first.
    #[error("this is part {number} of {count}; open the first one{first}")]
    NotFirstPart {
        /// The number of this part, from 1.
        number: u64,
        /// The number of parts.
        count: u64,
        /// `: PATH` of the first part where the file's name tells it.
        first: String,
    },
    /// The parts of a split model do not belong together.
    #[error("the parts of this split model do not belong together: {what}")]
    BadSplit {
        /// What does not agree.
        what: String,
    },
}
