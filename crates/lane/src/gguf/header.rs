//! Reading a GGUF header: a cursor that checks every length against the file before it reads.

use std::borrow::Cow;

use super::{GgufError, Source};

/// No real header comes near this: 262 144 tokens with their merges take about 15 MiB.
pub(super) const MAX_HEADER_BYTES: u64 = 256 << 20;

/// How much is read ahead at first; doubled as the header turns out to be longer.
const FIRST_CHUNK_BYTES: u64 = 64 << 10;

/// Goes through the header from front to back, reading the file as it is needed.
///
/// Holds at most twice the bytes that the header has, whatever counts stand in it.
pub(super) struct HeaderReader<'s> {
    source: &'s Source,
    bytes: Cow<'static, [u8]>,
    position: usize,
}

impl<'s> HeaderReader<'s> {
    pub(super) fn new(source: &'s Source) -> Self {
        let bytes = match source {
            Source::Memory(Cow::Borrowed(bytes)) => Cow::Borrowed(*bytes),
            _ => Cow::Owned(Vec::new()),
        };
        Self { source, bytes, position: 0 }
    }

    /// Where the next byte comes from.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Bytes of the file that are still ahead.
    pub(super) fn remaining_bytes(&self) -> u64 {
        self.source.len_bytes() - self.position as u64
    }

    /// The next `n_bytes`, which are `what`.
    pub(super) fn take(&mut self, what: &'static str, n_bytes: u64) -> Result<&[u8], GgufError> {
        let start = self.position as u64;
        if n_bytes > self.remaining_bytes() {
            return Err(GgufError::Truncated {
                what,
                offset_bytes: start,
                needed_bytes: n_bytes,
                file_bytes: self.source.len_bytes(),
            });
        }
        let end = start + n_bytes;
        if end > MAX_HEADER_BYTES {
            return Err(GgufError::HeaderTooLarge { limit_bytes: MAX_HEADER_BYTES });
        }
        self.load(end)?;
        // Below MAX_HEADER_BYTES, so it fits any usize.
        let range = self.position..end as usize;
        self.position = range.end;
        Ok(&self.bytes[range])
    }

    /// Reads on until the bytes before `end` are there.
    fn load(&mut self, end: u64) -> Result<(), GgufError> {
        let have = self.bytes.len() as u64;
        if end <= have {
            return Ok(());
        }
        let ahead = have.max(FIRST_CHUNK_BYTES);
        let target = end.max(have + ahead).min(self.source.len_bytes());
        let bytes = self.bytes.to_mut();
        // No more than the file has: this doubles by itself.
        bytes.reserve_exact((target - have) as usize);
        bytes.resize(target as usize, 0);
        self.source.read_at(have, &mut bytes[have as usize..])
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        let bytes = self.take(what, 4)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("took 4 bytes")))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        let bytes = self.take(what, 8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("took 8 bytes")))
    }

    /// A string: its length in 8 bytes, then its bytes.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&[u8], GgufError> {
        let n_bytes = self.u64(what)?;
        self.take(what, n_bytes)
    }

    /// Refuses a count of things that take at least `least_bytes` each when they cannot all be in
    /// the rest of the file, or are more than `limit`.
    pub(super) fn check_count(
        &self,
        what: &'static str,
        count: u64,
        least_bytes: u64,
        limit: u64,
    ) -> Result<(), GgufError> {
        let most = (self.remaining_bytes() / least_bytes).min(limit);
        if count > most {
            return Err(GgufError::ImpossibleCount { what, count, most });
        }
        Ok(())
    }

    /// The bytes read so far, from the first one on.
    pub(super) fn into_bytes(self) -> Cow<'static, [u8]> {
        match self.bytes {
            Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[..self.position]),
            Cow::Owned(mut bytes) => {
                bytes.truncate(self.position);
                bytes.shrink_to_fit();
                Cow::Owned(bytes)
            }
        }
    }
}
