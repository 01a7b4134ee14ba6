//! A whole GGUF: metadata, tensors, and where their bytes are.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use super::header::HeaderReader;
use super::metadata::{Index, checked_name};
use super::{DEFAULT_ALIGNMENT_BYTES, GgmlType, GgufError, MAGIC, Metadata, Source, split};

/// The largest mixture-of-experts models, one tensor per expert, have about 50 000.
const MAX_TENSORS: u64 = 1 << 18;
/// ggml itself stops at 63.
const MAX_TENSOR_NAME_BYTES: usize = 1024;
const MAX_DIMS: u32 = 4;

/// One tensor as the header describes it, checked against the file.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    name: Box<str>,
    dims: [u64; MAX_DIMS as usize],
    n_dims: u32,
    ggml_type: GgmlType,
    part: u32,
    offset_bytes: u64,
    n_bytes: u64,
}

impl TensorInfo {
    /// The name, such as `blk.0.attn_q.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The dimensions, the contiguous one first: `[n_in, n_out]` for a weight matrix.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.n_dims as usize]
    }

    /// The number of weights.
    pub fn n_elems(&self) -> u64 {
        self.dims().iter().product()
    }

    /// The type of the weights.
    pub fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    /// Where the data starts in its file, in bytes.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// The length of the data, in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }
}

/// A GGUF that was found to be sound: every count, length and offset in its header fits its file.
///
/// A model split into `-00001-of-0000N.gguf` files is one `Gguf`.
#[derive(Debug)]
pub struct Gguf {
    sources: Vec<Source>,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<Box<str>, usize>,
}

impl Gguf {
    /// Opens a file and, where it is the first part of a split model, the other parts beside it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let first = Part::read(Source::open(path)?, 0)?;
        split::join(first, path)
    }

    /// Reads a GGUF that is part of the program. Its header and data are used where they are.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self, GgufError> {
        Self::from_memory(Cow::Borrowed(bytes))
    }

    /// Reads a GGUF from bytes that the program has made or received.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::from_memory(Cow::Owned(bytes))
    }

    fn from_memory(bytes: Cow<'static, [u8]>) -> Result<Self, GgufError> {
        let part = Part::read(Source::Memory(bytes), 0)?;
        split::refuse_parts(&part)?;
        Self::from_parts(vec![part])
    }

    /// Makes one GGUF of parts in order; the metadata is the first one's.
    pub(super) fn from_parts(parts: Vec<Part>) -> Result<Self, GgufError> {
        let mut sources = Vec::with_capacity(parts.len());
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut head = None;
        for part in parts {
            sources.push(part.source);
            tensors.extend(part.tensors);
            head.get_or_insert((part.version, part.metadata));
        }
        let (version, metadata) = head.expect("at least one part");
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), index).is_some() {
                return Err(GgufError::DuplicateTensor { tensor: tensor.name().to_owned() });
            }
        }
        Ok(Self { sources, version, metadata, tensors, by_name })
    }

    /// The GGUF version of the file.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The key-value pairs.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the order of the header.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index(name).map(|index| &self.tensors[index])
    }

    /// The place in [`tensors`](Self::tensors) of the tensor with this name.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The files the model is in; one, unless it is split.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The size of all its files together, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.sources.iter().map(Source::len_bytes).sum()
    }

    /// Fills `out` with the tensor's bytes from `first_byte` on.
    pub fn read_tensor(
        &self,
        tensor: &TensorInfo,
        first_byte: u64,
        out: &mut [u8],
    ) -> Result<(), GgufError> {
        check_range(tensor, first_byte, out.len() as u64)?;
        self.sources[tensor.part as usize].read_at(tensor.offset_bytes + first_byte, out)
    }

    /// The whole tensor in a new buffer.
    pub fn tensor_to_vec(&self, tensor: &TensorInfo) -> Result<Vec<u8>, GgufError> {
        // The size was checked against the length of the file.
        let mut out = vec![0; tensor.n_bytes as usize];
        self.read_tensor(tensor, 0, &mut out)?;
        Ok(out)
    }

    /// The tensor's bytes where they are, if the model is in memory anyway.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        let Source::Memory(bytes) = &self.sources[tensor.part as usize] else { return None };
        let end = tensor.offset_bytes + tensor.n_bytes;
        bytes.get(tensor.offset_bytes as usize..end as usize)
    }

    /// Whether all files still look as they did when they were opened; see
    /// [`Source::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<(), GgufError> {
        self.sources.iter().try_for_each(Source::check_unchanged)
    }
}

fn check_range(tensor: &TensorInfo, first_byte: u64, n_bytes: u64) -> Result<(), GgufError> {
    match first_byte.checked_add(n_bytes) {
        Some(end) if end <= tensor.n_bytes => Ok(()),
        _ => Err(GgufError::OutOfTensor {
            tensor: tensor.name().to_owned(),
            first_byte,
            n_bytes,
            tensor_bytes: tensor.n_bytes,
        }),
    }
}

/// One file of a GGUF.
pub(super) struct Part {
    pub(super) source: Source,
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
}

impl Part {
    /// Reads and checks the header of the file that is number `part` of its model, from 0.
    pub(super) fn read(source: Source, part: u32) -> Result<Self, GgufError> {
        let mut header = HeaderReader::new(&source);
        let version = read_version(&mut header)?;
        let n_tensors = header.u64("the tensor count")?;
        let n_keys = header.u64("the metadata key count")?;
        // Name length, one byte of name, dimension count, type, offset.
        header.check_count("tensors", n_tensors, 8 + 1 + 4 + 4 + 8, MAX_TENSORS)?;
        let index = Index::read(&mut header, n_keys)?;
        let mut tensors = Vec::new();
        for number in 0..n_tensors {
            tensors.push(read_tensor_info(&mut header, number, part)?);
        }
        let header_bytes = header.position() as u64;
        let metadata = index.over(header.into_bytes());
        place_tensors(&mut tensors, &metadata, header_bytes, source.len_bytes())?;
        Ok(Self { source, version, metadata, tensors })
    }
}

/// Reads the magic and the version, and says what the file is instead where it is no GGUF.
fn read_version(header: &mut HeaderReader<'_>) -> Result<u32, GgufError> {
    if header.remaining_bytes() == 0 {
        return Err(GgufError::Empty);
    }
    let n_first = header.remaining_bytes().min(4);
    let first = header.take("the magic", n_first)?;
    if !MAGIC.starts_with(first) {
        let hint = match first {
            b"vers" => "; it is a Git LFS pointer, fetch the file itself (git lfs pull)",
            b"PK\x03\x04" => "; it is a ZIP archive, perhaps a PyTorch checkpoint: convert it",
            b"lmgg" | b"ggml" | b"tjgg" | b"fmgg" => {
                "; it is an older ggml format, convert the model again"
            }
            b"<!DO" | b"<!do" | b"<htm" => "; it is a web page, the download went wrong",
            _ => "",
        };
        return Err(GgufError::NotGguf { found: first.escape_ascii().to_string(), hint });
    }
    if n_first < 4 {
        header.take("the magic", 4 - n_first)?;
    }
    let version = header.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        // Every version so far is small, so its bytes are at the other end when they are swapped.
        _ if version.trailing_zeros() >= 16 && version != 0 => {
            Err(GgufError::BigEndian { version: version.swap_bytes() })
        }
        _ => Err(GgufError::UnsupportedVersion { version }),
    }
}

/// Reads one tensor's description. Its offset is still relative to the data section.
fn read_tensor_info(
    header: &mut HeaderReader<'_>,
    number: u64,
    part: u32,
) -> Result<TensorInfo, GgufError> {
    let name = checked_name(header.string("a tensor name")?, MAX_TENSOR_NAME_BYTES)
        .map_err(|problem| GgufError::BadTensorName { index: number, problem })?;
    let n_dims = header.u32("a tensor's dimension count")?;
    if n_dims > MAX_DIMS {
        return Err(GgufError::TooManyDimensions { tensor: name.into(), n_dims });
    }
    let mut dims = [1; MAX_DIMS as usize];
    for dim in &mut dims[..n_dims as usize] {
        *dim = header.u64("a tensor's dimensions")?;
    }
    let type_id = header.u32("a tensor's type")?;
    let offset_bytes = header.u64("a tensor's offset")?;

    let Some(ggml_type) = GgmlType::from_id(type_id) else {
        return Err(GgufError::UnknownTensorType { tensor: name.into(), type_id });
    };
    let bad_dims = |name: Box<str>| GgufError::BadDimensions {
        tensor: name.into(),
        dims: dims[..n_dims as usize].to_vec(),
    };
    let n_elems = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    if n_elems.is_none_or(|n_elems| n_elems == 0) {
        return Err(bad_dims(name));
    }
    let n_in = dims[0];
    if !n_in.is_multiple_of(ggml_type.block_elems()) {
        return Err(GgufError::PartialBlock {
            tensor: name.into(),
            n_in,
            type_name: ggml_type.name(),
            block_elems: ggml_type.block_elems(),
        });
    }
    let n_rows: u64 = dims[1..].iter().product();
    let n_bytes = ggml_type.row_bytes(n_in).and_then(|row_bytes| row_bytes.checked_mul(n_rows));
    let Some(n_bytes) = n_bytes else { return Err(bad_dims(name)) };
    Ok(TensorInfo { name, dims, n_dims, ggml_type, part, offset_bytes, n_bytes })
}

/// Turns offsets in the data section into offsets in the file, checking that all data is there,
/// aligned and apart.
fn place_tensors(
    tensors: &mut [TensorInfo],
    metadata: &Metadata,
    header_bytes: u64,
    file_bytes: u64,
) -> Result<(), GgufError> {
    let alignment_bytes = metadata.u64("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT_BYTES);
    if !alignment_bytes.is_power_of_two() || alignment_bytes < 8 {
        return Err(GgufError::BadAlignment { alignment_bytes });
    }
    let data_start = header_bytes.checked_next_multiple_of(alignment_bytes);
    // Where the data ends when the tensors lie back to back.
    let data_end = tensors.iter().fold(data_start, |end, tensor| {
        end?.checked_next_multiple_of(alignment_bytes)?.checked_add(tensor.n_bytes)
    });
    let room_for_all = data_end.is_some_and(|end| end <= file_bytes);
    let beyond = |tensor: &TensorInfo, start: Option<u64>| GgufError::OutOfFile {
        tensor: tensor.name().to_owned(),
        offset_bytes: start.unwrap_or(u64::MAX),
        n_bytes: tensor.n_bytes,
        file_bytes,
        advice: if room_for_all {
            "though all tensors would have room; the offset is wrong, convert the model again"
        } else {
            "it is incomplete, fetch it again"
        },
    };
    for tensor in &mut *tensors {
        if !tensor.offset_bytes.is_multiple_of(alignment_bytes) {
            return Err(GgufError::Misaligned {
                tensor: tensor.name().to_owned(),
                offset_bytes: tensor.offset_bytes,
                alignment_bytes,
            });
        }
        let start = data_start.and_then(|start| start.checked_add(tensor.offset_bytes));
        let end = start.and_then(|start| start.checked_add(tensor.n_bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => tensor.offset_bytes = start,
            _ => return Err(beyond(tensor, start)),
        }
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset_bytes);
    for pair in by_offset.windows(2) {
        let first_end_bytes = pair[0].offset_bytes + pair[0].n_bytes;
        if first_end_bytes > pair[1].offset_bytes {
            return Err(GgufError::Overlap {
                first: pair[0].name().to_owned(),
                first_end_bytes,
                second: pair[1].name().to_owned(),
                second_start_bytes: pair[1].offset_bytes,
            });
        }
    }
    Ok(())
}
