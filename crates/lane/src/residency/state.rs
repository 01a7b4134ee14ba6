//! What a residency's cache holds, read out and written back; and what that depends on.

use decode_graph::{Backend, KvArena};
use gpu_slab::View;
use kv_paged::KvLayout;
use q4k_soa::LayoutId;
use xxhash_rust::xxh3::Xxh3;

use super::{Residency, ResidencyError};

impl<B: Backend> Residency<B> {
    /// Identity of the resident blobs and of the weights in a layout, in whatever order they came:
    /// what keys and values depend on. The same weights in another layout have another.
    pub fn fingerprint(&self, layout: LayoutId) -> u64 {
        let weights = self.weights.iter().filter(|(_, weight)| weight.layout == layout);
        let weights = weights.map(|(key, _)| (key.as_u64(), 0));
        let blobs = self.blobs.iter().map(|(&key, blob)| (key, blob.content_hash));
        let mut all: Vec<(u64, u64)> = weights.chain(blobs).collect();
        all.sort_unstable();
        let mut hasher = Xxh3::new();
        for (key, content) in all {
            hasher.update(&key.to_le_bytes());
            hasher.update(&content.to_le_bytes());
        }
        hasher.digest()
    }

    /// The first logical blocks of a sequence that owns the cache, `[layer][block]`.
    pub fn read_blocks(&self, n_blocks: u32) -> Result<Vec<u8>, ResidencyError> {
        let mut bytes = Vec::new();
        for view in self.block_runs(n_blocks)? {
            let start = bytes.len();
            bytes.resize(start + view.len_bytes() as usize, 0);
            self.slab.read_view(view, 0, &mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// Writes what [`read_blocks`](Self::read_blocks) read.
    pub fn write_blocks(&mut self, n_blocks: u32, bytes: &[u8]) -> Result<(), ResidencyError> {
        let views = self.block_runs(n_blocks)?;
        let expected: u64 = views.iter().map(View::len_bytes).sum();
        if expected != bytes.len() as u64 {
            return Err(ResidencyError::OtherShape {
                what: "KV arena",
                resident: format!("{n_blocks} blocks of {expected} bytes"),
                asked: format!("{} bytes", bytes.len()),
            });
        }
        let mut rest = bytes;
        for view in views {
            let (now, later) = rest.split_at(view.len_bytes() as usize);
            self.slab.write_view(view, 0, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Where the first logical blocks of each layer lie, neighbours as one.
    fn block_runs(&self, n_blocks: u32) -> Result<Vec<View>, ResidencyError> {
        let kv: KvArena = self.kv.ok_or(ResidencyError::Missing("KV arena"))?;
        let layout: KvLayout = kv.config.layout();
        let per_layer = kv.config.blocks_per_layer();
        if self.pools.is_some() || n_blocks > per_layer {
            return Err(ResidencyError::Missing("sequence of so many blocks that owns the cache"));
        }
        let mut table = vec![0u32; kv.table.len_bytes() as usize / 4];
        self.slab.read_view(kv.table, 0, bytemuck::cast_slice_mut(&mut table))?;
        let block = layout.block_bytes();
        let layer = u64::from(per_layer) * block;
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for (index, row) in (0..).zip(table.chunks_exact(per_layer as usize)) {
            for &physical in &row[..n_blocks as usize] {
                let start = index * layer + u64::from(physical) * block;
                match runs.last_mut() {
                    Some(run) if run.end == start => run.end += block,
                    _ => runs.push(start..start + block),
                }
            }
        }
        runs.into_iter().map(|run| Ok(kv.blocks.slice(run)?)).collect()
    }
}
