//! Kernels that are not of this project, among those that are.

use gpu_slab::cuda::RawStream;
use xxhash_rust::xxh3::Xxh3;

/// Work of the caller's that is recorded into every graph: an opaque node.
///
/// Its name and version enter the key of the graphs; whoever changes what it does changes one of
/// them.
pub struct External {
    pub(super) name: String,
    pub(super) version: u32,
    pub(super) before: usize,
    pub(super) record: Box<dyn FnMut(RawStream) -> Result<(), i32> + Send>,
}

impl External {
    /// Work that comes before launch number `before` of a recording; their number: behind the last.
    ///
    /// `record` queues kernels on the stream that it is given, which is being captured: it must not
    /// allocate, wait, or use another stream, and what it points at must live as long as the
    /// graphs. It returns the driver's code where it fails.
    pub fn new(
        name: impl Into<String>,
        version: u32,
        before: usize,
        record: impl FnMut(RawStream) -> Result<(), i32> + Send + 'static,
    ) -> Self {
        Self { name: name.into(), version, before, record: Box::new(record) }
    }

    pub(super) fn hash(&self, hasher: &mut Xxh3) {
        hasher.update(&(self.name.len() as u64).to_le_bytes());
        hasher.update(self.name.as_bytes());
        hasher.update(&self.version.to_le_bytes());
        hasher.update(&(self.before as u64).to_le_bytes());
    }
}

impl std::fmt::Debug for External {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} v{} before launch {}", self.name, self.version, self.before)
    }
}
