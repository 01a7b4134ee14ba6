//! IQ4_NL: 32 weights of 4 bits that choose among sixteen values, w = d·value(q).
//!
//! The values are whole numbers of Q8_0's range: nothing is lost.

use bytemuck::{Pod, Zeroable};

use super::Source;
use crate::block::bits::nibbles;
use crate::block::{BlockQ8_0, HalfBytes};

/// 32 weights in 18 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: HalfBytes,
    /// Byte i is weight i in the low nibble and weight 16 + i in the high.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockIq4Nl>() == 18);

/// What the quants stand for: closer together near zero, where most weights are.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of 16 bytes of nibbles: low ones, then high ones.
pub(super) fn values(qs: &[u8; 16]) -> [i8; 32] {
    nibbles(qs).map(|quant| VALUES[quant as usize])
}

impl Source for BlockIq4Nl {
    const GGML_ID: u32 = 20;
    const NAME: &'static str = "IQ4_NL";
    const ELEMS: usize = 32;

    fn dequantize(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (out, value) in out.iter_mut().zip(values(&self.qs)) {
            *out = d * f32::from(value);
        }
    }

    fn transcode(&self, out: &mut [BlockQ8_0]) {
        out[0] = BlockQ8_0 { d: self.d, qs: values(&self.qs) };
    }
}
