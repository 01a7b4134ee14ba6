//! BF16: single numbers, in one plane that equals the source.

use bytemuck::{Pod, Zeroable};

use super::{Block, Float, PlaneSpec, Planes, PlanesMut, plane};

/// One number: bfloat16, the upper half of an f32, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct BlockBf16(pub [u8; 2]);

const _: () = assert!(size_of::<BlockBf16>() == 2);

impl Block for BlockBf16 {
    const GGML_ID: u32 = 30;
    const NAME: &'static str = "BF16";
    const ELEMS: usize = 1;
    const PLANES: &'static [PlaneSpec] = &[plane("values", 2)];

    fn pack(blocks: &[Self], [values, ..]: PlanesMut<'_>) {
        values.copy_from_slice(bytemuck::cast_slice(blocks));
    }

    fn unpack([values, ..]: Planes<'_>, blocks: &mut [Self]) {
        bytemuck::cast_slice_mut(blocks).copy_from_slice(values);
    }

    fn dequantize(&self, out: &mut [f32]) {
        out[0] = self.to_f32();
    }

    fn quantize(values: &[f32]) -> Self {
        let value = values[0];
        Self(half::bf16::from_f32(value).to_le_bytes())
    }
}

impl Float for BlockBf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(self.0)) << 16)
    }
}
