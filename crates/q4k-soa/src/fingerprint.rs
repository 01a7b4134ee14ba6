//! The content key of a weight, computed from its source before anything is packed.

use core::fmt;
use core::num::{NonZeroU64, ParseIntError};
use core::str::FromStr;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::{PackedLayout, Result};

/// A non-zero key of type, shape, layout and source bytes; written as 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(NonZeroU64);

impl Fingerprint {
    /// A key kept elsewhere.
    pub const fn new(key: NonZeroU64) -> Self {
        Self(key)
    }

    /// The number.
    pub const fn get(self) -> NonZeroU64 {
        self.0
    }

    /// The number.
    pub const fn as_u64(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for Fingerprint {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        // The standard parser would take a sign, which the written form never has.
        let text = if text.starts_with('+') { "" } else { text };
        let key = u64::from_str_radix(text, 16)?;
        NonZeroU64::try_from(key).map(Self).or_else(|_| "0".parse().map(Self))
    }
}

/// Computes a [`Fingerprint`] from consecutive pieces of the source.
///
/// XXH3-64 without seed over five little-endian u64 — GGUF type, n_in, n_out, layout id, layout
/// version — and then the source bytes; 0 becomes 1.
#[derive(Clone)]
pub struct FingerprintHasher {
    hash: Xxh3Default,
}

impl FingerprintHasher {
    /// Begins with what the layout says.
    pub fn new(layout: &PackedLayout) -> Self {
        let mut hash = Xxh3Default::new();
        let shape = layout.shape();
        let header = [
            layout.weight_type().ggml_id(),
            shape.n_in,
            shape.n_out,
            layout.layout_id().get(),
            layout.layout_version().get(),
        ];
        for number in header {
            hash.update(&u64::from(number).to_le_bytes());
        }
        Self { hash }
    }

    /// Adds the next bytes of the source.
    pub fn update(&mut self, source: &[u8]) {
        self.hash.update(source);
    }

    /// The key of everything so far. How many bytes that should have been, the caller knows.
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(NonZeroU64::new(self.hash.digest()).unwrap_or(NonZeroU64::MIN))
    }
}

impl fmt::Debug for FingerprintHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintHasher").field("so_far", &self.finish()).finish()
    }
}

/// The key of a whole source.
pub fn fingerprint(layout: &PackedLayout, source: &[u8]) -> Result<Fingerprint> {
    layout.check_source(&layout.all_rows(), source.len())?;
    let mut hasher = FingerprintHasher::new(layout);
    hasher.update(source);
    Ok(hasher.finish())
}

/// XXH3-64 of bytes as they are: the second hash, of packed bytes kept in a file.
pub fn checksum(packed: &[u8]) -> u64 {
    xxh3_64(packed)
}
