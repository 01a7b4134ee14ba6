//! Writing a GGUF: the header in one piece, then the tensors streamed in order.

use std::io::{self, Write};

use super::{DEFAULT_ALIGNMENT_BYTES, GgmlType, MAGIC, ValueType};

/// Collects the metadata and the tensor list of a new file.
///
/// Methods that name something twice, or a shape that a type cannot have, are the caller's
/// mistakes: they are not checked here, and [`Gguf::open`](super::Gguf::open) refuses the file.
#[derive(Debug)]
pub struct GgufWriter {
    version: u32,
    alignment_bytes: u64,
    metadata: Vec<u8>,
    n_keys: u64,
    tensors: Vec<u8>,
    sizes_bytes: Vec<u64>,
    data_bytes: u64,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// An empty file of version 3 with the default alignment.
    pub fn new() -> Self {
        Self {
            version: 3,
            alignment_bytes: DEFAULT_ALIGNMENT_BYTES,
            metadata: Vec::new(),
            n_keys: 0,
            tensors: Vec::new(),
            sizes_bytes: Vec::new(),
            data_bytes: 0,
        }
    }

    /// Another version number.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Another alignment, a power of two; to be set before the first tensor.
    pub fn alignment(&mut self, alignment_bytes: u32) -> &mut Self {
        self.alignment_bytes = u64::from(alignment_bytes);
        self.u32("general.alignment", alignment_bytes)
    }

    /// Adds a string.
    pub fn str(&mut self, key: &str, value: &str) -> &mut Self {
        self.key(key, ValueType::String);
        put_string(&mut self.metadata, value.as_bytes());
        self
    }

    /// Adds a u16.
    pub fn u16(&mut self, key: &str, value: u16) -> &mut Self {
        self.raw(key, ValueType::U16, &value.to_le_bytes())
    }

    /// Adds a u32.
    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, ValueType::U32, &value.to_le_bytes())
    }

    /// Adds an i32.
    pub fn i32(&mut self, key: &str, value: i32) -> &mut Self {
        self.raw(key, ValueType::I32, &value.to_le_bytes())
    }

    /// Adds a u64.
    pub fn u64(&mut self, key: &str, value: u64) -> &mut Self {
        self.raw(key, ValueType::U64, &value.to_le_bytes())
    }

    /// Adds an f32.
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, ValueType::F32, &value.to_le_bytes())
    }

    /// Adds a truth value.
    pub fn bool(&mut self, key: &str, value: bool) -> &mut Self {
        self.raw(key, ValueType::Bool, &[u8::from(value)])
    }

    /// Adds an array of strings.
    pub fn strings<S: AsRef<str>>(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = S>,
    ) -> &mut Self {
        self.array(key, ValueType::String, values, |value, out| {
            put_string(out, value.as_ref().as_bytes());
        })
    }

    /// Adds an array of i32.
    pub fn i32s(&mut self, key: &str, values: impl IntoIterator<Item = i32>) -> &mut Self {
        self.array(key, ValueType::I32, values, |value, out| {
            out.extend_from_slice(&value.to_le_bytes());
        })
    }

    /// Adds an array of f32.
    pub fn f32s(&mut self, key: &str, values: impl IntoIterator<Item = f32>) -> &mut Self {
        self.array(key, ValueType::F32, values, |value, out| {
            out.extend_from_slice(&value.to_le_bytes());
        })
    }

    /// Adds a value of any type from its little-endian bytes as GGUF stores them.
    pub fn raw(&mut self, key: &str, ty: ValueType, bytes: &[u8]) -> &mut Self {
        self.key(key, ty);
        self.metadata.extend_from_slice(bytes);
        self
    }

    /// Announces the next tensor, of `dims` with the contiguous one first.
    ///
    /// # Panics
    ///
    /// If a row of `dims[0]` weights is no whole number of blocks of the type.
    pub fn tensor(
        &mut self,
        name: &str,
        dims: &[u64],
        ggml_type: impl Into<GgmlType>,
    ) -> &mut Self {
        let ggml_type = ggml_type.into();
        let n_in = dims.first().copied().unwrap_or(1);
        let row_bytes = ggml_type.row_bytes(n_in).expect("rows are whole blocks");
        let n_bytes = row_bytes * dims.iter().skip(1).product::<u64>();
        put_string(&mut self.tensors, name.as_bytes());
        self.tensors.extend_from_slice(&(dims.len() as u32).to_le_bytes());
        for dim in dims {
            self.tensors.extend_from_slice(&dim.to_le_bytes());
        }
        self.tensors.extend_from_slice(&ggml_type.id().to_le_bytes());
        self.tensors.extend_from_slice(&self.data_bytes.to_le_bytes());
        self.sizes_bytes.push(n_bytes);
        self.data_bytes = (self.data_bytes + n_bytes).next_multiple_of(self.alignment_bytes);
        self
    }

    /// The length of the finished file, in bytes.
    pub fn file_bytes(&self) -> u64 {
        let header = 24 + self.metadata.len() as u64 + self.tensors.len() as u64;
        header.next_multiple_of(self.alignment_bytes) + self.data_bytes
    }

    /// Writes the header. The tensors' bytes follow through the [`TensorSink`], in the order in
    /// which they were announced.
    pub fn begin<W: Write>(&self, mut out: W) -> io::Result<TensorSink<W>> {
        let n_tensors = self.sizes_bytes.len() as u64;
        out.write_all(&MAGIC)?;
        out.write_all(&self.version.to_le_bytes())?;
        out.write_all(&n_tensors.to_le_bytes())?;
        out.write_all(&self.n_keys.to_le_bytes())?;
        out.write_all(&self.metadata)?;
        out.write_all(&self.tensors)?;
        let header = 24 + self.metadata.len() as u64 + self.tensors.len() as u64;
        pad(&mut out, header, self.alignment_bytes)?;
        Ok(TensorSink {
            out,
            alignment_bytes: self.alignment_bytes,
            sizes_bytes: self.sizes_bytes.clone(),
            next: 0,
            written_bytes: 0,
        })
    }

    fn key(&mut self, key: &str, ty: ValueType) {
        self.n_keys += 1;
        put_string(&mut self.metadata, key.as_bytes());
        self.metadata.extend_from_slice(&ty.id().to_le_bytes());
    }

    fn array<T>(
        &mut self,
        key: &str,
        element: ValueType,
        values: impl IntoIterator<Item = T>,
        put: impl Fn(T, &mut Vec<u8>),
    ) -> &mut Self {
        self.key(key, ValueType::Array);
        self.metadata.extend_from_slice(&element.id().to_le_bytes());
        let len_at = self.metadata.len();
        self.metadata.extend_from_slice(&[0; 8]);
        let mut len = 0u64;
        for value in values {
            put(value, &mut self.metadata);
            len += 1;
        }
        self.metadata[len_at..len_at + 8].copy_from_slice(&len.to_le_bytes());
        self
    }
}

/// Takes the tensors' bytes, in pieces of any size.
#[derive(Debug)]
#[must_use = "the file is complete only after `finish`"]
pub struct TensorSink<W> {
    out: W,
    alignment_bytes: u64,
    sizes_bytes: Vec<u64>,
    next: usize,
    written_bytes: u64,
}

impl<W: Write> TensorSink<W> {
    /// Appends bytes of the current tensor, which may be all of it. The sink goes on to the next
    /// tensor when this one is complete.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let Some(&size_bytes) = self.sizes_bytes.get(self.next) else {
            return invalid("all announced tensors are already written");
        };
        if bytes.len() as u64 > size_bytes - self.written_bytes {
            return invalid("more bytes than the announced tensor has");
        }
        self.out.write_all(bytes)?;
        self.written_bytes += bytes.len() as u64;
        if self.written_bytes == size_bytes {
            pad(&mut self.out, size_bytes, self.alignment_bytes)?;
            self.next += 1;
            self.written_bytes = 0;
        }
        Ok(())
    }

    /// Flushes and gives the writer back, if every announced tensor is complete.
    pub fn finish(mut self) -> io::Result<W> {
        if self.next != self.sizes_bytes.len() {
            let what = format!(
                "{} of {} announced tensors are complete",
                self.next,
                self.sizes_bytes.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn pad(out: &mut impl Write, written_bytes: u64, alignment_bytes: u64) -> io::Result<()> {
    let mut left = written_bytes.next_multiple_of(alignment_bytes) - written_bytes;
    const ZEROS: [u8; 256] = [0; 256];
    while left > 0 {
        let n = left.min(ZEROS.len() as u64);
        out.write_all(&ZEROS[..n as usize])?;
        left -= n;
    }
    Ok(())
}
