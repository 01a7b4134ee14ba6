//! Reads all of a buffer once, as fast as it can be read: what other kernels are measured by.
//!
//! `out[b]` is the exclusive or of the words of the tiles b, b + n_blocks, b + 2·n_blocks …; a
//! tile is 1024 quads of words, the last one may be shorter.

use rayon::prelude::*;

use crate::geometry::{DeviceProfile, Geometry};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

/// Quads of words that a block reads at a time.
const TILE_QUADS: u32 = 1024;

kernel_params! {
    buffers {
        /// What is read.
        read data: u32 [n_quads * 4],
        /// `[n_blocks]`.
        write out: u32 [n_blocks],
    }
    scalars {
        /// 16 bytes each.
        n_quads: u32,
        /// See [`blocks`].
        n_blocks: u32,
    }
}

impl<B> Args<B> {
    /// The blocks that share the tiles.
    pub fn geometry(&self, _device: &DeviceProfile) -> Geometry {
        Geometry::grid([self.n_blocks, 1, 1]).threads(256)
    }
}

/// As many blocks as a device runs at once, and none without a tile.
pub fn blocks(n_quads: u32, device: &DeviceProfile) -> u32 {
    n_quads.div_ceil(TILE_QUADS).clamp(1, 8 * device.sm_count)
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let tiles = a.data.chunks(4 * TILE_QUADS as usize);
    let n_blocks = a.n_blocks as usize;
    a.out.par_iter_mut().enumerate().for_each(|(block, out)| {
        let mine = tiles.clone().skip(block).step_by(n_blocks);
        *out = mine.flatten().fold(0, |found, word| found ^ word);
    });
    Ok(())
}
