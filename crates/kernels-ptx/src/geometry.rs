//! Launch geometry: a function of the problem and of what the device says about itself.

use q4k_soa::{PackedLayout, Plane, Shape, WeightType};

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

    /// A block of attention: six warps, shared memory for what each knows of four query heads and
    /// for `more_heads` rows of a head. Teams of lanes hold 64, 128 or 256 elements of a head; over
    /// an f32 cache, or of a head that is no multiple of 8, always 256.
    pub(crate) fn attention_block(
        self,
        head_dim: u32,
        kv_elem_bytes: u32,
        more_heads: u32,
    ) -> Self {
        const WARPS: u32 = 6;
        const HEADS: u32 = 4;
        let head = match kv_elem_bytes <= 2 && head_dim.is_multiple_of(8) {
            true => head_dim.next_power_of_two().max(64),
            false => 256,
        };
        let mut geometry = self.threads(32 * WARPS);
        let records = WARPS * HEADS * (2 + head) + 2 * HEADS;
        geometry.shared_bytes = 4 * (records + more_heads * head);
        geometry
    }

    /// Four warps a block, each striding over rows, at most sixteen blocks an SM.
    pub(crate) fn rows(n_rows: u32, device: &DeviceProfile) -> Self {
        Self::grid([n_rows.div_ceil(4).min(16 * device.sm_count).max(1), 1, 1]).threads(128)
    }
}

/// How the rows of matrices times one vector are shared out, and how much of them is on its way to
/// shared memory: the geometry of `cu/decode_gemv.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorProduct {
    /// Blocks that share the rows.
    pub blocks: u32,
    /// Warps of a block, each with rows of its own.
    pub warps: u32,
    /// Bytes of a warp's ring: whole stages, a piece of a row of each matrix that a result needs.
    pub ring_bytes: u32,
    /// Bytes of the quantised input in front of the rings.
    staged_bytes: u32,
}

impl VectorProduct {
    /// Warps of a block, if there is room for their rings.
    const WARPS: u32 = 16;
    /// Blocks of one SM.
    const BLOCKS_PER_SM: u32 = 2;
    /// Weights of the longest piece of a row.
    const PIECE: u32 = 4096;
    /// Stages that a ring has at most.
    const MAX_STAGES: u32 = 8;
    /// Bytes of 32 elements of the input: quants, scale and sum, sums of halves.
    const GROUP_BYTES: u32 = 32 + 8 + 4;

    /// Blocks for `n_rows` results: all that the device runs at once, but none whose warps have no
    /// row.
    pub(crate) fn blocks(n_rows: u32, device: &DeviceProfile) -> u32 {
        n_rows.div_ceil(Self::WARPS).min(Self::BLOCKS_PER_SM * device.sm_count).max(1)
    }

    /// Of `blocks` blocks, the busiest of which has `rows_of_block` results. `types` are the
    /// matrices' GGUF types; a result needs a row of `matrices` of them.
    pub(crate) fn new(
        n_in: u32,
        types: &[u32],
        matrices: u32,
        blocks: u32,
        rows_of_block: u32,
        device: &DeviceProfile,
    ) -> Self {
        let stages = types.iter().map(|&ty| matrices * Self::piece_bytes(ty, n_in));
        let stage_bytes = stages.max().unwrap_or(0).max(16);
        let staged_bytes = (n_in / 32 * Self::GROUP_BYTES).next_multiple_of(16);
        // The driver keeps 1 KiB of every block's, static arrays need less than another.
        let of_block = device.shared_per_sm_bytes / Self::BLOCKS_PER_SM - 2048;
        let room = of_block.min(device.shared_per_block_bytes).saturating_sub(staged_bytes);
        // Of a very long input there may be room for the rings of a few warps only.
        let warps = (room / stage_bytes).clamp(1, Self::WARPS);
        let pieces = rows_of_block.div_ceil(warps) * n_in.div_ceil(Self::PIECE);
        let stages = (room / warps / stage_bytes).min(Self::MAX_STAGES).min(pieces).max(1);
        Self { blocks, warps, ring_bytes: stages * stage_bytes, staged_bytes }
    }

    /// Bytes of the longest piece of a row, each plane's part as if it began anywhere.
    fn piece_bytes(ggml_type: u32, n_in: u32) -> u32 {
        let Some(ty) = WeightType::from_ggml_id(ggml_type) else { return 0 };
        let block = Shape { n_out: 1, n_in: ty.block_elems() };
        let Ok(layout) = PackedLayout::planes(ty, block) else { return 0 };
        let count = n_in.min(Self::PIECE) / ty.block_elems();
        let window = |plane: &Plane| {
            let bytes = plane.len_bytes as u32;
            (count * bytes + if bytes.is_multiple_of(16) { 0 } else { 30 }) & !15
        };
        layout.plane_list().iter().map(window).sum()
    }

    /// Grid, block and shared memory.
    pub(crate) fn geometry(&self) -> Geometry {
        let mut geometry = Geometry::grid([self.blocks, 1, 1]).threads(32 * self.warps);
        geometry.shared_bytes = self.staged_bytes + self.warps * self.ring_bytes;
        geometry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: DeviceProfile = DeviceProfile {
        sm_count: 132,
        l2_bytes: 60 << 20,
        shared_per_block_bytes: 227 << 10,
        shared_per_sm_bytes: 228 << 10,
        compute_capability: 90,
    };

    #[test]
    fn a_product_fits_the_device_twice_up_to_the_longest_inputs_of_models() {
        let types = [2, 3, 6, 7, 8, 12, 13, 14];
        for device in [H200, DeviceProfile::A2000] {
            for n_in in (256..=28_672).step_by(256).chain([60_160]) {
                let product = VectorProduct::new(n_in, &types, 2, 9, 1000, &device);
                let bytes = product.geometry().shared_bytes;
                assert!(product.ring_bytes > 0 && product.ring_bytes.is_multiple_of(16));
                let twice = device.shared_per_sm_bytes / 2 - 2048;
                let room = if n_in < 30_000 { twice } else { device.shared_per_block_bytes };
                assert!(bytes <= room, "{n_in}: {product:?}");
            }
        }
    }

    #[test]
    fn as_much_waits_as_there_is_room_for_and_no_more_than_there_is() {
        let q4_k = 12;
        let of = |n_in, matrices, rows| {
            VectorProduct::new(n_in, &[q4_k], matrices, 264, rows, &H200).ring_bytes
        };
        // A piece: 16 bytes a group, and for eight of them 12 and 4 with room to begin anywhere.
        let window = |bytes: u32| (bytes + 30) & !15;
        let piece = |groups: u32| groups * 16 + window(groups / 8 * 12) + window(groups / 8 * 4);
        assert_eq!(of(3072, 1, 12), piece(96));
        assert_eq!(of(3072, 1, 100), 3 * piece(96));
        assert_eq!(of(3072, 2, 100), 2 * piece(96));
        assert_eq!(of(8192, 1, 12), 2 * piece(128));
        assert_eq!(of(256, 1, 4000), 8 * piece(8));
    }
}
