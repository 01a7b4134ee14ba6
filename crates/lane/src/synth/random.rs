//! Random bytes, fast and the same everywhere.

use std::ops::Range;

/// SplitMix64: a counter and a mixing function, 8 bytes at a time.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed for part number `part` of what `seed` is for.
    pub(super) fn mix(seed: u64, part: u64) -> u64 {
        let mut random = Self(seed ^ part.wrapping_mul(0xd605_bbb5_8c8a_bbad));
        random.next() ^ random.next().rotate_left(32)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in the range, evenly spread.
    pub(super) fn between(&mut self, range: Range<f32>) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        range.start + (range.end - range.start) * unit
    }

    pub(super) fn fill(&mut self, out: &mut [u8]) {
        let mut words = out.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        if !rest.is_empty() {
            let n = rest.len();
            rest.copy_from_slice(&self.next().to_le_bytes()[..n]);
        }
    }
}
