//! The packed form of a model, kept in a file, so that the next start only reads and uploads.
//!
//! The file is `LANECACH` and little-endian u64: the format's version, a key of the model and the
//! way it is packed, the number of matrices and of chunks, each matrix's fingerprint, each chunk's
//! checksum, and the checksum of all that. From the next multiple of 4096 on the packed chunks
//! follow, back to back.
//!
//! It is written under another name and renamed once it is whole and on disk; each chunk is
//! verified before it is used. So whatever happens to the file, the worst is that it is of no use.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::UNIX_EPOCH;

use q4k_soa::{Fingerprint, LayoutId, checksum};
use xxhash_rust::xxh3::Xxh3Default;

use super::chunk::{Chunk, Matrix};
use crate::gguf::{Gguf, GgufError, Source};

const MAGIC: u64 = u64::from_le_bytes(*b"LANECACH");
/// To be raised when the bytes of a chunk or the header change their meaning.
const VERSION: u64 = 1;
const WORD_BYTES: u64 = 8;
const DATA_ALIGN_BYTES: u64 = 4096;
/// Bytes looked at in three places of every matrix, to tell models apart where the system does not
/// say when a file was touched, and another was given the same size and time.
const SAMPLE_BYTES: u64 = 4096;

/// Where the packed form of models is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CachePlace {
    /// Nowhere.
    #[default]
    Off,
    /// Beside the model's file.
    Beside,
    /// In this folder.
    Folder(PathBuf),
}

impl CachePlace {
    /// The file for a model packed in a layout, such as `model.gguf.planes.lane-cache`; `None` for
    /// models that are no file.
    pub(crate) fn path(&self, gguf: &Gguf, layout: LayoutId) -> Option<PathBuf> {
        let model = gguf.sources().first()?.path()?;
        let layout = match layout {
            LayoutId::STREAM => "stream",
            _ => "planes",
        };
        let mut name = model.file_name()?.to_owned();
        name.push(format!(".{layout}.lane-cache"));
        match self {
            Self::Off => None,
            Self::Beside => Some(model.with_file_name(name)),
            Self::Folder(folder) => Some(folder.join(name)),
        }
    }
}

/// Which packed bytes a cache has to hold.
pub(super) struct Identity {
    key: u64,
    n_matrices: usize,
    /// Where the chunks are in the file, and where it ends.
    offsets: Vec<u64>,
}

impl Identity {
    pub(super) fn of(
        gguf: &Gguf,
        matrices: &[Matrix],
        chunks: &[Chunk],
    ) -> Result<Self, GgufError> {
        let mut hash = Xxh3Default::new();
        let mut number = |number: u64| hash.update(&number.to_le_bytes());
        for source in gguf.sources() {
            let modified = source.modified().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            number(source.len_bytes());
            number(modified.map_or(0, |time| time.as_nanos() as u64));
            let (seconds, nanoseconds) = source.touched().unwrap_or_default();
            number(seconds as u64);
            number(nanoseconds as u64);
        }
        for matrix in matrices {
            let (info, layout) = (matrix.tensor.info(gguf), &matrix.layout);
            number(info.offset_bytes() + matrix.tensor.first_byte());
            for of_type in [info.ggml_type().id(), layout.weight_type().ggml_id()] {
                number(of_type.into());
            }
            for of_layout in [layout.layout_id().get(), layout.layout_version().get()] {
                number(of_layout.into());
            }
            number(layout.shape().n_out.into());
            number(layout.shape().n_in.into());
        }
        for chunk in chunks {
            number(chunk.matrix as u64);
            number(chunk.rows.end.into());
        }
        let mut sample = Vec::new();
        for matrix in matrices {
            let (tensor, n_bytes) = (&matrix.tensor, matrix.tensor.n_bytes());
            sample.resize(SAMPLE_BYTES.min(n_bytes) as usize, 0);
            let last = n_bytes - sample.len() as u64;
            for at in [0, last / 2, last] {
                gguf.read_tensor(tensor.info(gguf), tensor.first_byte() + at, &mut sample)?;
                hash.update(&sample);
            }
        }
        let chunk_bytes = chunks.iter().map(Chunk::packed_bytes);
        Ok(Self::new(hash.digest(), matrices.len(), chunk_bytes))
    }

    fn new(key: u64, n_matrices: usize, chunk_bytes: impl ExactSizeIterator<Item = usize>) -> Self {
        let n_words = (6 + n_matrices + chunk_bytes.len()) as u64;
        let mut end = (n_words * WORD_BYTES).next_multiple_of(DATA_ALIGN_BYTES);
        let mut offsets = vec![end];
        for bytes in chunk_bytes {
            end += bytes as u64;
            offsets.push(end);
        }
        Self { key, n_matrices, offsets }
    }

    fn n_chunks(&self) -> usize {
        self.offsets.len() - 1
    }

    fn file_bytes(&self) -> u64 {
        self.offsets[self.n_chunks()]
    }

    /// The header's words up to the tables.
    fn head(&self) -> [u64; 5] {
        [MAGIC, VERSION, self.key, self.n_matrices as u64, self.n_chunks() as u64]
    }
}

/// A whole cache of the model that is being loaded.
pub(super) struct Cache {
    source: Source,
    path: PathBuf,
    offsets: Vec<u64>,
    fingerprints: Vec<Fingerprint>,
    checksums: Vec<u64>,
    /// The first thing that was wrong with it.
    damage: Mutex<Option<String>>,
}

impl Cache {
    /// Opens the file if it is there and of this model, packed in this way. What else may be there
    /// is made anew.
    pub(super) fn open(path: &Path, identity: &Identity) -> Option<Self> {
        if !path.exists() {
            return None;
        }
        let source = Source::open(path).map_err(|error| error.to_string());
        let found = source.and_then(|source| Self::read_header(source, path, identity));
        found.map_err(|reason| log::info!(target: "lane", "{}: {reason}", path.display())).ok()
    }

    fn read_header(source: Source, path: &Path, identity: &Identity) -> Result<Self, String> {
        let (found, expected) = (source.len_bytes(), identity.file_bytes());
        if found != expected {
            return Err(format!("{found} bytes, not {expected}: incomplete, or of another model"));
        }
        let head = identity.head();
        let n_words = head.len() + identity.n_matrices + identity.n_chunks() + 1;
        let mut bytes = vec![0; n_words * WORD_BYTES as usize];
        source.read_at(0, &mut bytes).map_err(|error| error.to_string())?;
        let (content, sum) = bytes.split_at(bytes.len() - WORD_BYTES as usize);
        if checksum(content).to_le_bytes() != sum {
            return Err("its header is damaged".into());
        }
        let words: Vec<u64> =
            content.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (found, tables) = words.split_at(head.len());
        if found != head {
            return Err("of another model, or of one that has changed".into());
        }
        let (fingerprints, checksums) = tables.split_at(identity.n_matrices);
        let fingerprints = fingerprints.iter().map(|&key| NonZeroU64::new(key));
        let fingerprints: Option<Vec<_>> =
            fingerprints.map(|key| key.map(Fingerprint::new)).collect();
        Ok(Self {
            source,
            path: path.to_owned(),
            offsets: identity.offsets.clone(),
            fingerprints: fingerprints.ok_or("a fingerprint in it is 0")?,
            checksums: checksums.to_vec(),
            damage: Mutex::default(),
        })
    }

    /// Reads and verifies a chunk; false where it cannot be had or is not what was written.
    pub(super) fn read(&self, index: usize, packed: &mut [u8]) -> bool {
        let damage = match self.source.read_at(self.offsets[index], packed) {
            Ok(()) if checksum(packed) == self.checksums[index] => return true,
            Ok(()) => format!("bytes from {} on have changed", self.offsets[index]),
            Err(error) => error.to_string(),
        };
        // Whoever panicked meanwhile left a value.
        let mut first = self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        first.get_or_insert(damage);
        false
    }

    pub(super) fn fingerprints(&self) -> &[Fingerprint] {
        &self.fingerprints
    }

    /// Removes the file if something was wrong with it: the next start makes it anew.
    pub(super) fn close(self) {
        let damage = self.damage.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(damage) = damage else { return };
        let path = self.path.display();
        let what = "the model itself was read where it is damaged";
        log::warn!(target: "lane", "{path}: {damage}; {what}");
        if let Err(error) = fs::remove_file(&self.path) {
            log::warn!(target: "lane", "{path}: cannot be removed: {error}");
        }
    }
}

/// Reads bytes as the cache file of a model, as a start would: each chunk, or `None` where it is not
/// what was written; or why the file is not used. For fuzzing, which makes up the model.
#[doc(hidden)]
pub fn read_cache(
    bytes: &[u8],
    key: u64,
    n_matrices: usize,
    chunk_bytes: &[usize],
) -> Result<Vec<Option<Vec<u8>>>, String> {
    let identity = Identity::new(key, n_matrices, chunk_bytes.iter().copied());
    let source = Source::Memory(bytes.to_vec().into());
    let cache = Cache::read_header(source, Path::new(""), &identity)?;
    let chunk = |(index, &len): (usize, &usize)| {
        let mut packed = vec![0; len];
        cache.read(index, &mut packed).then_some(packed)
    };
    Ok(chunk_bytes.iter().enumerate().map(chunk).collect())
}

/// A cache being written. Whatever fails is said once and ends the writing, not the loading.
pub(super) struct CacheWriter<'a> {
    identity: &'a Identity,
    path: &'a Path,
    part: Part,
    checksums: Vec<u64>,
    failed: bool,
}

impl<'a> CacheWriter<'a> {
    pub(super) fn create(path: &'a Path, identity: &'a Identity) -> Option<Self> {
        remove_abandoned(path);
        let create = || {
            let mut part = Part::create(path)?;
            part.file.seek(SeekFrom::Start(identity.offsets[0]))?;
            Ok::<_, io::Error>(part)
        };
        match create() {
            Ok(part) => Some(Self { identity, path, part, checksums: Vec::new(), failed: false }),
            Err(error) => {
                warn(path, &error);
                None
            }
        }
    }

    /// Adds the next chunk.
    pub(super) fn append(&mut self, packed: &[u8]) {
        if self.failed {
            return;
        }
        self.checksums.push(checksum(packed));
        if let Err(error) = self.part.file.write_all(packed) {
            warn(self.path, &error);
            self.failed = true;
        }
    }

    /// Writes the header and gives the file its name.
    pub(super) fn finish(mut self, fingerprints: &[Fingerprint]) {
        if self.failed {
            return;
        }
        let keys = fingerprints.iter().map(|key| key.as_u64());
        let words = self.identity.head().into_iter().chain(keys).chain(self.checksums);
        let mut header: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        header.extend(checksum(&header).to_le_bytes());
        let mut finish = || {
            self.part.file.seek(SeekFrom::Start(0))?;
            self.part.file.write_all(&header)?;
            self.part.file.flush()?;
            self.part.file.get_ref().sync_all()?;
            fs::rename(&self.part.path, self.path)
        };
        match finish() {
            Ok(()) => self.part.kept = true,
            Err(error) => warn(self.path, &error),
        }
    }
}

fn warn(path: &Path, error: &io::Error) {
    log::warn!(target: "lane", "{}: the packed model cannot be kept: {error}", path.display());
}

/// The file under its temporary name, which holds the process's number; removed unless kept.
struct Part {
    file: BufWriter<File>,
    path: PathBuf,
    kept: bool,
}

const PART: &str = ".part";

/// The temporary files that this process is writing.
static WRITING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn writing() -> MutexGuard<'static, Vec<PathBuf>> {
    // Whoever panicked meanwhile left a list.
    WRITING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Part {
    /// Begins the file, in place of one that is left of an earlier process of the same number.
    fn create(path: &Path) -> io::Result<Self> {
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
        name.push(format!(".{}{PART}", std::process::id()));
        // One name for one file, however it is spelled.
        let path = fs::canonicalize(folder_of(path))?.join(name);
        let mut writing = writing();
        if !writing.contains(&path) && path.exists() {
            fs::remove_file(&path)?;
        }
        let file = BufWriter::with_capacity(1 << 20, File::create_new(&path)?);
        writing.push(path.clone());
        Ok(Self { file, path, kept: false })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut writing = writing();
        if !self.kept {
            // Left behind it would only take room, until the next start.
            let _ = fs::remove_file(&self.path);
        }
        writing.retain(|path| *path != self.path);
    }
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Removes what processes that were killed while they wrote have left behind. Needs `/proc` to
/// know who is alive; where it is missing nothing is removed.
fn remove_abandoned(path: &Path) {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return };
    let Ok(entries) = fs::read_dir(folder_of(path)) else { return };
    for entry in entries.flatten() {
        let file_name = entry.file_name();
        let process = file_name.to_str().and_then(|file_name| {
            let number = file_name.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(PART)?;
            number.parse::<u32>().ok()
        });
        let alive = |process: u32| Path::new(&format!("/proc/{process}")).exists();
        // That this process is found says that the others would be, too.
        if process.is_some_and(|process| alive(std::process::id()) && !alive(process)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
