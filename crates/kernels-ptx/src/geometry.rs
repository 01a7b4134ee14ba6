//! Launch geometry: a function of the problem and of what the device says about itself.

/// Extent of a grid or block.
pub type Dim3 = [u32; 3];

/// What geometry may depend on; read from the device, never assumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceProfile {
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Shared memory that one block may have, bytes.
    pub shared_per_block_bytes: u32,
    /// Shared memory of one SM, bytes.
    pub shared_per_sm_bytes: u32,
    /// Compute capability, major × 10 + minor.
    pub compute_capability: u32,
}

impl DeviceProfile {
    /// An RTX A2000: what the host backend records for, so that plans made without a GPU have
    /// a definite geometry.
    pub const A2000: Self = Self {
        sm_count: 26,
        l2_bytes: 3 << 20,
        shared_per_block_bytes: 99 << 10,
        shared_per_sm_bytes: 100 << 10,
        compute_capability: 86,
    };

    /// Segments that attention is cut into: two blocks for every SM at full context and no third,
    /// never more than the context has segments of [`Self::SEGMENT_MIN`] tokens.
    pub fn attention_segments(&self, n_kv_head: u32, max_context_tokens: u32) -> u32 {
        let wanted = 2 * self.sm_count / n_kv_head.max(1);
        wanted.min(max_context_tokens.div_ceil(Self::SEGMENT_MIN)).max(1)
    }

    /// Fewest tokens of an attention segment.
    pub const SEGMENT_MIN: u32 = 64;
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Blocks.
    pub grid: Dim3,
    /// Threads per block.
    pub block: Dim3,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    /// Whether all blocks have to run at the same time, because they wait for each other.
    pub cooperative: bool,
}

impl Geometry {
    pub(crate) fn grid(grid: Dim3) -> Self {
        Self { grid, block: [1, 1, 1], shared_bytes: 0, cooperative: false }
    }

    pub(crate) fn threads(mut self, threads: u32) -> Self {
        self.block = [threads, 1, 1];
        self
    }

    /// One block per token's row of `n` elements, one thread per four of them.
    pub(crate) fn token_rows(n_tokens: u32, n: u32) -> Self {
        let threads = n.div_ceil(4).next_multiple_of(32).clamp(32, 1024);
        Self::grid([n_tokens, 1, 1]).threads(threads)
    }

    /// Blocks that share the rows of matrices times one vector: as many as fit the device at once,
    /// and where kernels overlap (programmatic launch) half of that, so that the next one's have
    /// room.
    pub(crate) fn decode_gemv_blocks(n_in: u32, n_out: u32, device: &DeviceProfile) -> u32 {
        let per_sm = if device.compute_capability >= 90 { 1 } else { 2 };
        Self::with_rows(n_in, n_out, per_sm * device.sm_count)
    }

    /// The same where nothing comes after.
    pub(crate) fn last_decode_gemv_blocks(n_in: u32, n_out: u32, device: &DeviceProfile) -> u32 {
        Self::with_rows(n_in, n_out, 2 * device.sm_count)
    }

    /// At most so many blocks that no team of warps is without a row.
    fn with_rows(n_in: u32, n_out: u32, blocks: u32) -> u32 {
        let [_, teams] = Self::decode_gemv_warps(n_in);
        n_out.div_ceil(teams).min(blocks).max(1)
    }

    /// A block of teams of warps, a warp per slice of 1024 elements of the input.
    pub(crate) fn decode_gemv(n_in: u32, blocks: u32) -> Self {
        let [slice_warps, teams] = Self::decode_gemv_warps(n_in);
        let slices = n_in.div_ceil(Self::SLICE).next_multiple_of(slice_warps);
        Self {
            grid: [blocks, 1, 1],
            block: [32 * slice_warps, teams, 1],
            // A byte per element, and scale and sum of 32.
            shared_bytes: slices * (Self::SLICE + Self::SLICE / 32 * 8),
            cooperative: false,
        }
    }

    /// Warps of a team and teams of a block, together at most ten: with 96 registers a thread two
    /// such blocks fit an SM. A team goes over the slices as often as it has too few warps for
    /// them, or oftener where few warps would do anything otherwise.
    fn decode_gemv_warps(n_in: u32) -> [u32; 2] {
        const MAX_WARPS: u32 = 10;
        let n_slices = n_in.div_ceil(Self::SLICE).max(1);
        let fewest = n_slices.div_ceil(MAX_WARPS);
        let mut best = [0, 0];
        for passes in fewest..fewest + 3 {
            let slice_warps = n_slices.div_ceil(passes);
            let teams = MAX_WARPS / slice_warps;
            // A slice in ten may be one of nothing.
            let idle = passes * slice_warps - n_slices;
            let better = slice_warps * teams > best[0] * best[1] && idle * 10 <= n_slices;
            if passes == fewest || better {
                best = [slice_warps, teams];
            }
            if best[0] * best[1] >= 8 {
                break;
            }
        }
        best
    }

    /// Elements of the input that a warp works on.
    const SLICE: u32 = 1024;

    /// Four warps a block, each striding over rows, at most sixteen blocks an SM.
    pub(crate) fn rows(n_rows: u32, device: &DeviceProfile) -> Self {
        Self::grid([n_rows.div_ceil(4).min(16 * device.sm_count).max(1), 1, 1]).threads(128)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_warps_of_a_block_are_occupied_whatever_the_input_is() {
        let warps = |n_in| Geometry::decode_gemv_warps(n_in);
        for n_in in (32..60_000).step_by(32) {
            let [slice_warps, teams] = warps(n_in);
            assert!((7..=10).contains(&(slice_warps * teams)), "{n_in}: {slice_warps} x {teams}");
            let block = Geometry::decode_gemv(n_in, 5);
            let slices = block.shared_bytes / (Geometry::SLICE / 32 * 40);
            assert!(slices * Geometry::SLICE >= n_in && slices.is_multiple_of(slice_warps));
        }
        assert_eq!([2048, 3072, 4096, 8192].map(warps), [[2, 5], [3, 3], [4, 2], [8, 1]]);
        assert_eq!([5120, 14_336].map(warps), [[5, 2], [5, 2]]);
    }
}
