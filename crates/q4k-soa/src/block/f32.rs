//! F32: single numbers, in one plane that equals the source.

use bytemuck::{Pod, Zeroable};

use super::{Block, Float, PlaneSpec, Planes, PlanesMut, plane};

/// One number: IEEE single, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct BlockF32(pub [u8; 4]);

const _: () = assert!(size_of::<BlockF32>() == 4);

impl Block for BlockF32 {
    const GGML_ID: u32 = 0;
    const NAME: &'static str = "F32";
    const ELEMS: usize = 1;
    const PLANES: &'static [PlaneSpec] = &[plane("values", 4)];

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
        Self(value.to_le_bytes())
    }
}

impl Float for BlockF32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_le_bytes(self.0)
    }
}
