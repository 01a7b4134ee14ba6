//! Where the bytes of a GGUF come from.

use std::borrow::Cow;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::GgufError;

/// Bytes at known positions: a file on disk, or a model that is in memory anyway.
///
/// Positioned reads need no shared cursor, so one source serves many threads at once.
#[derive(Debug)]
pub enum Source {
    /// A regular file.
    File(FileSource),
    /// Bytes in memory, mostly those of a model that is part of the program.
    Memory(Cow<'static, [u8]>),
}

/// An open file, with what it looked like when it was opened.
#[derive(Debug)]
pub struct FileSource {
    file: PositionedFile,
    path: PathBuf,
    len_bytes: u64,
    modified: Option<SystemTime>,
    touched: Option<(i64, i64)>,
}

impl Source {
    /// Opens a file, following symbolic links.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let fail = |source| GgufError::Io { path: path.to_owned(), source };
        // Asked before opening: opening a pipe without a writer would wait for ever.
        if !std::fs::metadata(path).map_err(fail)?.is_file() {
            return Err(GgufError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        Ok(Self::File(FileSource {
            file: PositionedFile::new(file),
            path: path.to_owned(),
            len_bytes: meta.len(),
            modified: meta.modified().ok(),
            touched: touched(&meta),
        }))
    }

    /// The length, in bytes, when the source was opened.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::File(file) => file.len_bytes,
            Self::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// When the file was written to last, where that is known, as it was when it was opened.
    pub fn modified(&self) -> Option<SystemTime> {
        match self {
            Self::File(file) => file.modified,
            Self::Memory(_) => None,
        }
    }

    /// When content, name or attributes of the file changed last, where the system says so: in
    /// seconds and nanoseconds, as it was when the file was opened. Unlike
    /// [`modified`](Self::modified) it is nothing that a program can set.
    pub fn touched(&self) -> Option<(i64, i64)> {
        match self {
            Self::File(file) => file.touched,
            Self::Memory(_) => None,
        }
    }

    /// Fills `out` with the bytes from `offset_bytes` on.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), GgufError> {
        let beyond = || GgufError::Truncated {
            what: "data",
            offset_bytes,
            needed_bytes: out.len() as u64,
            file_bytes: self.len_bytes(),
        };
        let end = offset_bytes.checked_add(out.len() as u64).ok_or_else(beyond)?;
        if end > self.len_bytes() {
            return Err(beyond());
        }
        match self {
            Self::Memory(bytes) => {
                // Both ends are at most the length of a slice, so they fit usize.
                out.copy_from_slice(&bytes[offset_bytes as usize..end as usize]);
                Ok(())
            }
            Self::File(file) => file.read_at(offset_bytes, out),
        }
    }

    /// Whether the file still looks as it did when it was opened.
    ///
    /// Worth asking once after everything has been read: a file rewritten in place gives bytes of
    /// both versions and no read error.
    pub fn check_unchanged(&self) -> Result<(), GgufError> {
        let Self::File(file) = self else { return Ok(()) };
        let meta = file
            .file
            .metadata()
            .map_err(|source| GgufError::Io { path: file.path.clone(), source })?;
        let changed = |what| Err(GgufError::Changed { path: file.path.clone(), what });
        if meta.len() != file.len_bytes {
            return changed(format!("it had {} bytes and has {}", file.len_bytes, meta.len()));
        }
        if meta.modified().ok() != file.modified {
            return changed("it was written to".to_owned());
        }
        Ok(())
    }

    /// The file's path; `None` for bytes in memory.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(file) => Some(&file.path),
            Self::Memory(_) => None,
        }
    }
}

#[cfg(unix)]
fn touched(meta: &Metadata) -> Option<(i64, i64)> {
    use std::os::unix::fs::MetadataExt;
    Some((meta.ctime(), meta.ctime_nsec()))
}

#[cfg(not(unix))]
fn touched(_: &Metadata) -> Option<(i64, i64)> {
    None
}

impl FileSource {
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), GgufError> {
        self.file.read_exact_at(offset_bytes, out).map_err(|source| {
            if source.kind() == io::ErrorKind::UnexpectedEof {
                // The range was inside the file when it was opened.
                let what = format!(
                    "it had {} bytes and now ends before byte {}",
                    self.len_bytes,
                    offset_bytes + out.len() as u64
                );
                GgufError::Changed { path: self.path.clone(), what }
            } else {
                GgufError::Io { path: self.path.clone(), source }
            }
        })
    }
}

/// A file read at positions, without a cursor where the system allows it.
#[cfg(unix)]
#[derive(Debug)]
struct PositionedFile(File);

#[cfg(unix)]
impl PositionedFile {
    fn new(file: File) -> Self {
        Self(file)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    fn read_exact_at(&self, offset_bytes: u64, out: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, out, offset_bytes)
    }
}

/// A file read at positions, one reader at a time.
#[cfg(not(unix))]
#[derive(Debug)]
struct PositionedFile(std::sync::Mutex<File>);

#[cfg(not(unix))]
impl PositionedFile {
    fn new(file: File) -> Self {
        Self(std::sync::Mutex::new(file))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        // A reader that panicked leaves only the cursor behind, and every read sets it.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.lock().metadata()
    }

    fn read_exact_at(&self, offset_bytes: u64, out: &mut [u8]) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.lock();
        file.seek(SeekFrom::Start(offset_bytes))?;
        file.read_exact(out)
    }
}
