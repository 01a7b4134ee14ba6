//! One layer of the paged KV cache: blocks of `[K, V][kv head][token in block][dim]`. In q8, i8
//! elements, each block goes on with one f32 scale per row, `[K, V][kv head][token in block]`; both
//! parts of a block begin at multiples of 16 bytes.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::params::ParamError;
use crate::table::Kernel;

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheType {
    F32,
    F16,
    Q8,
}

impl CacheType {
    /// Of a kernel's cache.
    pub(super) fn of(kernel: Kernel) -> Self {
        match kernel {
            Kernel::RopeAppendF32 | Kernel::AttentionF32 | Kernel::AttentionStepF32 => Self::F32,
            Kernel::RopeAppendQ8 | Kernel::AttentionQ8 => Self::Q8,
            _ => Self::F16,
        }
    }

    fn elem_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q8 => 1,
        }
    }

    /// Refuses a size that is not that of the kernel's cache.
    pub(super) fn expect(self, kernel: Kernel, kv_elem_bytes: u32) -> Result<(), ParamError> {
        if kv_elem_bytes as usize == self.elem_bytes() {
            return Ok(());
        }
        Err(ParamError::Value {
            kernel: kernel.name(),
            param: "kv_elem_bytes",
            value: u64::from(kv_elem_bytes),
            reason: "must be the element size of the kernel's cache",
        })
    }
}

/// Bytes of `n_blocks` blocks.
pub(super) fn bytes(
    n_blocks: u64,
    n_kv_head: u64,
    block_size: u64,
    head_dim: u64,
    elem_bytes: u64,
) -> u64 {
    let rows = 2 * n_kv_head * block_size;
    let elems = rows * head_dim * elem_bytes;
    n_blocks * if elem_bytes == 1 { scales_at(elems) + scales_at(rows * 4) } else { elems }
}

/// Where the part of a block behind one of so many bytes begins.
fn scales_at(bytes: u64) -> u64 {
    bytes.next_multiple_of(16)
}

/// Where the rows of a layer's cache are, and what they hold.
#[derive(Clone, Copy)]
pub(super) struct CacheIndex {
    pub(super) cache_type: CacheType,
    pub(super) n_kv_head: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
    block_bytes: usize,
    /// In q8, from the beginning of a block to its scales.
    scales_at: usize,
}

/// A token's key or value of one head.
#[derive(Clone, Copy)]
pub(super) struct Row {
    elems: usize,
    /// In q8.
    scale: usize,
}

impl CacheIndex {
    pub(super) fn new(
        cache_type: CacheType,
        n_kv_head: u32,
        block_size: u32,
        head_dim: u32,
    ) -> Self {
        let (heads, tokens, dims) = (n_kv_head.into(), block_size.into(), head_dim.into());
        Self {
            cache_type,
            n_kv_head: n_kv_head as usize,
            block_size: block_size as usize,
            head_dim: head_dim as usize,
            block_bytes: bytes(1, heads, tokens, dims, cache_type.elem_bytes() as u64) as usize,
            scales_at: scales_at(2 * heads * tokens * dims) as usize,
        }
    }

    pub(super) fn row(&self, table: &[u32], slot: usize, value: bool, head: usize) -> Row {
        let block = table[slot / self.block_size] as usize;
        let plane = usize::from(value) * self.n_kv_head + head;
        let row = plane * self.block_size + slot % self.block_size;
        let first = block * self.block_bytes;
        Row { elems: first + row * self.row_bytes(), scale: first + self.scales_at + row * 4 }
    }

    /// Where a row begins, in elements, of a cache without scales.
    pub(super) fn first_elem(&self, table: &[u32], slot: usize, value: bool, head: usize) -> usize {
        self.row(table, slot, value, head).elems / self.cache_type.elem_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.head_dim * self.cache_type.elem_bytes()
    }

    pub(super) fn load(&self, kv: &[u8], row: Row, to: &mut [f32]) {
        let elems = &kv[row.elems..][..self.row_bytes()];
        match self.cache_type {
            CacheType::F32 => to.copy_from_slice(bytemuck::cast_slice(elems)),
            CacheType::F16 => bytemuck::cast_slice::<_, f16>(elems).convert_to_f32_slice(to),
            CacheType::Q8 => {
                let scale: f32 = bytemuck::pod_read_unaligned(&kv[row.scale..][..4]);
                let quants: &[i8] = bytemuck::cast_slice(elems);
                to.iter_mut().zip(quants).for_each(|(to, q)| *to = scale * f32::from(*q));
            }
        }
    }

    pub(super) fn store(&self, kv: &mut [u8], row: Row, from: &[f32]) {
        let elems = &mut kv[row.elems..][..self.row_bytes()];
        match self.cache_type {
            CacheType::F32 => bytemuck::cast_slice_mut(elems).copy_from_slice(from),
            CacheType::F16 => {
                bytemuck::cast_slice_mut::<_, f16>(elems).convert_from_f32_slice(from);
            }
            CacheType::Q8 => {
                let scale = quantize(from, bytemuck::cast_slice_mut(elems));
                kv[row.scale..][..4].copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }
}

/// 2^-100: rows below become zero, see [`q4k_soa::quantize_q8`].
const SMALLEST_AMAX: f32 = f32::from_bits((127 - 100) << 23);

/// Quantises a row as [`q4k_soa::quantize_q8`] does a group, and returns its scale.
fn quantize(row: &[f32], quants: &mut [i8]) -> f32 {
    quants.fill(0);
    if !row.iter().all(|x| x.is_finite()) {
        return f32::NAN;
    }
    let amax = row.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
    if amax < SMALLEST_AMAX {
        return 0.0;
    }
    let inverse = 127.0 / amax;
    for (quant, x) in quants.iter_mut().zip(row) {
        *quant = (x * inverse).round_ties_even() as i8;
    }
    amax / 127.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_where_the_planner_says() {
        use kv_paged::{KvCoord, KvPart, KvType, PagedKvConfig};
        for (cache_type, kv_type) in [
            (CacheType::F32, KvType::F32),
            (CacheType::F16, KvType::F16),
            (CacheType::Q8, KvType::Q8),
        ] {
            let config = PagedKvConfig::new(1, 3, 5, 40).unwrap().with_block_size(7).unwrap();
            let config = config.with_kv_type(kv_type).unwrap();
            let layout = config.layout();
            let index = CacheIndex::new(cache_type, 3, 7, 5);
            let elem_bytes = kv_type.elem_bytes();
            assert_eq!(bytes(6, 3, 7, 5, elem_bytes), layout.total_bytes());
            let table = [4, 0, 5, 1, 3, 2];
            for (slot, value, head) in [(0, false, 0), (13, true, 2), (39, false, 1)] {
                let row = index.row(&table, slot, value, head);
                let at = KvCoord {
                    layer: 0,
                    block: table[slot / 7],
                    part: if value { KvPart::Value } else { KvPart::Key },
                    head: head as u32,
                    token: slot as u32 % 7,
                    dim: 0,
                };
                assert_eq!(row.elems as u64, layout.elem_index(at).unwrap() * elem_bytes);
                if let Some(scale) = layout.scale_offset_bytes(at).unwrap() {
                    assert_eq!(row.scale as u64, scale);
                }
            }
        }
    }

    #[test]
    fn a_row_comes_back_to_half_a_quant() {
        let index = CacheIndex::new(CacheType::Q8, 1, 2, 5);
        let mut kv = vec![0xffu8; bytes(1, 1, 2, 5, 1) as usize];
        let row = index.row(&[0], 1, true, 0);
        let mut found = [0.0; 5];
        for values in [[1.0, -127.0, 0.4, 63.5, 0.0], [0.0; 5], [1e-40; 5], [1e38; 5]] {
            index.store(&mut kv, row, &values);
            index.load(&kv, row, &mut found);
            let step = values.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
            for (found, value) in found.iter().zip(values) {
                // What is smaller than any number of a model is zero.
                assert!((found - value).abs() <= step * 0.5001 + 1e-30, "{found} for {value}");
            }
        }
        index.store(&mut kv, row, &[1.0, f32::INFINITY, 2.0, 3.0, 4.0]);
        index.load(&kv, row, &mut found);
        assert!(found.iter().all(|x| x.is_nan()));
        // Other rows stay as they are.
        assert_eq!(kv.iter().filter(|&&byte| byte == 0xff).count(), kv.len() - 5 - 4);
    }
}
