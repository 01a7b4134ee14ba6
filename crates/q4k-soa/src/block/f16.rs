//! F16: single numbers, in one plane that equals the source.

use bytemuck::{Pod, Zeroable};

use super::half_float::half_to_f32;
use super::{Block, Float, PlaneSpec, Planes, PlanesMut, plane};

/// One number: IEEE half, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct BlockF16(pub [u8; 2]);

const _: () = assert!(size_of::<BlockF16>() == 2);

impl Block for BlockF16 {
    const GGML_ID: u32 = 1;
    const NAME: &'static str = "F16";
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
        Self(half::f16::from_f32(value).to_le_bytes())
    }
}

impl Float for BlockF16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        half_to_f32(u16::from_le_bytes(self.0))
    }
}
