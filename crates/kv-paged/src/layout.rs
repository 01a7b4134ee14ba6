//! Where each element of the cache lies.

use crate::{KvError, KvType, PagedKvConfig};

/// Alignment of the parts of a block that carries scales, in bytes.
const SCALED_PART_ALIGN_BYTES: u64 = 16;

/// The key or the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KvPart {
    /// The key, first in a block.
    Key = 0,
    /// The value.
    Value = 1,
}

/// Names one element of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvCoord {
    /// Layer.
    pub layer: u32,
    /// Physical block of that layer.
    pub block: u32,
    /// Key or value.
    pub part: KvPart,
    /// KV head.
    pub head: u32,
    /// Token slot inside the block.
    pub token: u32,
    /// Element of the head.
    pub dim: u32,
}

/// Strides of the cache, in elements of its [`KvType`]:
/// `[layer][physical block][K | V][KV head][token in block][dim]`.
///
/// The block is outermost inside a layer, so that a layer's blocks are added at its end and no
/// address changes; a layer that is to grow in place only needs its stride to be reserved
/// ([`with_reserved_blocks`](Self::with_reserved_blocks)). Inside a block the head is outside
/// the token, so that the rows of one head, all that an attention kernel reads of a block, are
/// one contiguous run of `block_size x head_dim` elements.
///
/// [`KvType::Q8`] puts a second array behind the elements of each block, one `f32` scale per
/// `[K | V][KV head][token in block]`, so that a block stays one run of bytes: it is copied,
/// swapped and added as a whole. The block stride includes the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    n_layer: u32,
    n_kv_head: u32,
    head_dim: u32,
    block_size_tokens: u32,
    blocks_per_layer: u32,
    reserved_blocks: u32,
    kv_type: KvType,
    layer_stride: u64,
    block_stride: u64,
    kv_stride: u64,
    head_stride: u64,
    token_stride: u64,
    scales_offset_bytes: u64,
}

impl KvLayout {
    /// The layout with as many physical blocks per layer as there are logical ones.
    pub fn new(config: &PagedKvConfig) -> Self {
        Self::compute(config, config.blocks_per_layer()).expect("validated with the configuration")
    }

    /// The layout with another number of physical blocks per layer, as a pool of blocks for many
    /// sequences needs.
    pub fn with_blocks(config: &PagedKvConfig, blocks_per_layer: u32) -> Result<Self, KvError> {
        Self::compute(config, blocks_per_layer)
    }

    /// The same layout with address space for `reserved_blocks` in each layer, of which the first
    /// [`blocks_per_layer`](Self::blocks_per_layer) exist. Layers lie as if all existed, so every
    /// address stays valid while the number of blocks grows up to the reservation.
    pub fn with_reserved_blocks(self, reserved_blocks: u32) -> Result<Self, KvError> {
        if reserved_blocks < self.blocks_per_layer {
            let blocks_per_layer = self.blocks_per_layer;
            return Err(KvError::ReservationTooSmall { blocks_per_layer, reserved_blocks });
        }
        let layer_stride = self.block_stride.checked_mul(u64::from(reserved_blocks));
        let total = layer_stride
            .and_then(|stride| stride.checked_mul(u64::from(self.n_layer)))
            .and_then(|elems| elems.checked_mul(self.kv_type.elem_bytes()));
        match (layer_stride, total) {
            (Some(layer_stride), Some(_)) => Ok(Self { reserved_blocks, layer_stride, ..self }),
            _ => Err(KvError::TooLarge {
                what: "total_bytes",
                n_layer: self.n_layer,
                n_kv_head: self.n_kv_head,
                head_dim: self.head_dim,
                blocks_per_layer: reserved_blocks,
                block_size_tokens: self.block_size_tokens,
            }),
        }
    }

    pub(crate) fn compute(config: &PagedKvConfig, blocks_per_layer: u32) -> Result<Self, KvError> {
        if blocks_per_layer == 0 {
            return Err(KvError::ZeroDim { what: "blocks_per_layer" });
        }
        let too_large = |what| KvError::TooLarge {
            what,
            n_layer: config.n_layer(),
            n_kv_head: config.n_kv_head(),
            head_dim: config.head_dim(),
            blocks_per_layer,
            block_size_tokens: config.block_size_tokens(),
        };
        let (n_layer, n_head) = (u64::from(config.n_layer()), u64::from(config.n_kv_head()));
        let kv_type = config.kv_type();

        let table_entries = n_layer * u64::from(blocks_per_layer);
        if table_entries > u64::from(u32::MAX) {
            return Err(too_large("table_entries"));
        }

        let token_stride = u64::from(config.head_dim());
        let head_stride = token_stride * u64::from(config.block_size_tokens());
        // A tuple of `Option`s would hide which step failed, and all mean the same to a caller.
        let sizes = || {
            let kv_stride = head_stride.checked_mul(n_head)?;
            let elems = kv_stride.checked_mul(2)?;
            let (block_stride, scales_offset_bytes) = match kv_type.scale_bytes() {
                0 => (elems, 0),
                scale_bytes => {
                    let scales = (2 * n_head)
                        .checked_mul(u64::from(config.block_size_tokens()))?
                        .checked_mul(scale_bytes)?;
                    let offset = elems.checked_next_multiple_of(SCALED_PART_ALIGN_BYTES)?;
                    let end = offset
                        .checked_add(scales)?
                        .checked_next_multiple_of(SCALED_PART_ALIGN_BYTES)?;
                    // Scaled elements are one byte, so this is a stride in elements too.
                    (end, offset)
                }
            };
            let layer_stride = block_stride.checked_mul(u64::from(blocks_per_layer))?;
            layer_stride.checked_mul(n_layer)?.checked_mul(kv_type.elem_bytes())?;
            Some((kv_stride, block_stride, layer_stride, scales_offset_bytes))
        };
        let (kv_stride, block_stride, layer_stride, scales_offset_bytes) =
            sizes().ok_or_else(|| too_large("total_bytes"))?;

        Ok(Self {
            n_layer: config.n_layer(),
            n_kv_head: config.n_kv_head(),
            head_dim: config.head_dim(),
            block_size_tokens: config.block_size_tokens(),
            blocks_per_layer,
            reserved_blocks: blocks_per_layer,
            kv_type,
            layer_stride,
            block_stride,
            kv_stride,
            head_stride,
            token_stride,
            scales_offset_bytes,
        })
    }

    /// Layers.
    pub const fn n_layer(&self) -> u32 {
        self.n_layer
    }

    /// KV heads of a layer.
    pub const fn n_kv_head(&self) -> u32 {
        self.n_kv_head
    }

    /// Elements of one head of one token.
    pub const fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Token slots of a block.
    pub const fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens
    }

    /// How an element is stored.
    pub const fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Physical blocks that exist in a layer.
    pub const fn blocks_per_layer(&self) -> u32 {
        self.blocks_per_layer
    }

    /// Physical blocks of a layer that there is address space for.
    pub const fn reserved_blocks(&self) -> u32 {
        self.reserved_blocks
    }

    /// From a layer to the next, in elements.
    pub const fn layer_stride(&self) -> u64 {
        self.layer_stride
    }

    /// From a physical block to the next, in elements.
    pub const fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// From a block's keys to its values, in elements.
    pub const fn kv_stride(&self) -> u64 {
        self.kv_stride
    }

    /// From a head to the next inside a block, in elements.
    pub const fn head_stride(&self) -> u64 {
        self.head_stride
    }

    /// From a token to the next inside a head of a block, in elements.
    pub const fn token_stride(&self) -> u64 {
        self.token_stride
    }

    /// Key and value elements in existing blocks, scales excluded.
    pub const fn total_elems(&self) -> u64 {
        self.n_layer as u64 * self.blocks_per_layer as u64 * 2 * self.kv_stride
    }

    /// Bytes of one block of one layer, keys, values and scales.
    pub const fn block_bytes(&self) -> u64 {
        self.block_stride * self.kv_type.elem_bytes()
    }

    /// Bytes from the first to behind the last layer, reserved blocks included.
    pub const fn total_bytes(&self) -> u64 {
        self.layer_stride * self.n_layer as u64 * self.kv_type.elem_bytes()
    }

    /// Where a physical block starts, in bytes.
    pub fn block_offset_bytes(&self, layer: u32, block: u32) -> Result<u64, KvError> {
        Ok(self.block_base(layer, block)? * self.kv_type.elem_bytes())
    }

    /// The index of one element, in elements.
    pub fn elem_index(&self, at: KvCoord) -> Result<u64, KvError> {
        let base = self.row_base(at.layer, at.block, at.head, at.token)?;
        in_range("dim", at.dim, self.head_dim)?;
        Ok(base
            + at.part as u64 * self.kv_stride
            + u64::from(at.head) * self.head_stride
            + u64::from(at.token) * self.token_stride
            + u64::from(at.dim))
    }

    /// Where the `f32` scale of one row is, in bytes; `None` for types without scales.
    /// The coordinate's `dim` plays no part.
    pub fn scale_offset_bytes(&self, at: KvCoord) -> Result<Option<u64>, KvError> {
        let base = self.row_base(at.layer, at.block, at.head, at.token)?;
        let row = (at.part as u64 * u64::from(self.n_kv_head) + u64::from(at.head))
            * u64::from(self.block_size_tokens)
            + u64::from(at.token);
        Ok(match self.kv_type.scale_bytes() {
            0 => None,
            scale_bytes => Some(base + self.scales_offset_bytes + row * scale_bytes),
        })
    }

    /// From the start of a block to its scales, in bytes; `None` for types without scales. The
    /// scales are dense `[K | V][KV head][token in block]`.
    pub const fn scales_offset_in_block_bytes(&self) -> Option<u64> {
        match self.kv_type.scale_bytes() {
            0 => None,
            _ => Some(self.scales_offset_bytes),
        }
    }

    fn block_base(&self, layer: u32, block: u32) -> Result<u64, KvError> {
        in_range("layer", layer, self.n_layer)?;
        in_range("block", block, self.blocks_per_layer)?;
        Ok(u64::from(layer) * self.layer_stride + u64::from(block) * self.block_stride)
    }

    fn row_base(&self, layer: u32, block: u32, head: u32, token: u32) -> Result<u64, KvError> {
        in_range("head", head, self.n_kv_head)?;
        in_range("token", token, self.block_size_tokens)?;
        self.block_base(layer, block)
    }
}

fn in_range(what: &'static str, index: u32, limit: u32) -> Result<(), KvError> {
    if index < limit {
        return Ok(());
    }
    Err(KvError::OutOfRange { what, index: u64::from(index), limit: u64::from(limit) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn config() -> PagedKvConfig {
        PagedKvConfig::new(3, 2, 5, 20).unwrap().with_block_size(4).unwrap()
    }

    fn coords(layout: &KvLayout) -> impl Iterator<Item = KvCoord> + use<> {
        let l = *layout;
        (0..l.n_layer()).flat_map(move |layer| {
            (0..l.blocks_per_layer()).flat_map(move |block| {
                [KvPart::Key, KvPart::Value].into_iter().flat_map(move |part| {
                    (0..l.n_kv_head()).flat_map(move |head| {
                        (0..l.block_size_tokens()).flat_map(move |token| {
                            (0..l.head_dim()).map(move |dim| KvCoord {
                                layer,
                                block,
                                part,
                                head,
                                token,
                                dim,
                            })
                        })
                    })
                })
            })
        })
    }

    #[test]
    fn coordinates_in_layout_order_are_consecutive() {
        let layout = config().layout();
        for (expected, at) in coords(&layout).enumerate() {
            assert_eq!(layout.elem_index(at), Ok(expected as u64));
        }
        assert_eq!(coords(&layout).count() as u64, layout.total_elems());
    }

    #[test]
    fn elements_and_scales_of_q8_tile_the_cache_without_overlap() {
        let layout = config().with_kv_type(KvType::Q8).unwrap().layout();
        let mut used = vec![0u8; layout.total_bytes() as usize];
        for at in coords(&layout) {
            used[layout.elem_index(at).unwrap() as usize] += 1;
            if at.dim == 0 {
                let scale = layout.scale_offset_bytes(at).unwrap().unwrap() as usize;
                assert_eq!(scale % 4, 0);
                for byte in &mut used[scale..scale + 4] {
                    *byte += 1;
                }
            }
        }
        assert!(used.iter().all(|&n| n <= 1));
        let rows = layout.total_elems() / u64::from(layout.head_dim());
        let used_bytes = used.iter().map(|&n| u64::from(n)).sum::<u64>();
        assert_eq!(used_bytes, layout.total_elems() + 4 * rows);
        assert_eq!(layout.block_bytes() % 16, 0);
    }

    #[test]
    fn growing_inside_a_reservation_moves_nothing() {
        let small = KvLayout::with_blocks(&config(), 2).unwrap().with_reserved_blocks(8).unwrap();
        let large = KvLayout::with_blocks(&config(), 7).unwrap().with_reserved_blocks(8).unwrap();
        for at in coords(&small) {
            assert_eq!(small.elem_index(at), large.elem_index(at));
        }
        assert_eq!(small.total_bytes(), large.total_bytes());
        assert_eq!(
            small.with_reserved_blocks(1),
            Err(KvError::ReservationTooSmall { blocks_per_layer: 2, reserved_blocks: 1 })
        );
    }

    #[test]
    fn each_coordinate_is_checked() {
        let layout = config().layout();
        let at = KvCoord { layer: 0, block: 0, part: KvPart::Key, head: 0, token: 0, dim: 0 };
        let refused = |at, what, index, limit| {
            assert_eq!(layout.elem_index(at), Err(KvError::OutOfRange { what, index, limit }));
        };
        refused(KvCoord { layer: 3, ..at }, "layer", 3, 3);
        refused(KvCoord { block: 5, ..at }, "block", 5, 5);
        refused(KvCoord { head: 2, ..at }, "head", 2, 2);
        refused(KvCoord { token: 9, ..at }, "token", 9, 4);
        refused(KvCoord { dim: 5, ..at }, "dim", 5, 5);
        assert_eq!(layout.scale_offset_bytes(at), Ok(None));
    }
}
