//! Types that nothing here computes with as they are: each becomes Q8_0 when it is loaded.
//!
//! Where a type's weights are small integers with one scale per 16 or 32, the integers move into
//! the Q8_0 block as they are and nothing is lost; the file for each type says what it costs.

mod iq4_nl;
mod iq4_xs;
mod q2_k;
mod q3_k;

pub use self::iq4_nl::BlockIq4Nl;
pub use self::iq4_xs::BlockIq4Xs;
pub use self::q2_k::BlockQ2K;
pub use self::q3_k::BlockQ3K;

use core::fmt;

use bytemuck::Pod;

use crate::block::{Block, BlockQ8_0, HalfBytes};
use crate::{Error, Result, WeightType};

/// A type that is read, and computed with as [`TranscodedType::TARGET`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the documentation
pub enum TranscodedType {
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
}

/// A block of such a type.
trait Source: Pod {
    const GGML_ID: u32;
    const NAME: &'static str;
    const ELEMS: usize;

    /// The type's formula; `out` has `ELEMS` places.
    fn dequantize(&self, out: &mut [f32]);
    /// The same weights, as nearly as Q8_0 has them; `out` has `ELEMS / 32` places.
    fn transcode(&self, out: &mut [BlockQ8_0]);
}

struct Entry {
    ggml_id: u32,
    name: &'static str,
    block_elems: u32,
    block_bytes: u32,
    dequantize: fn(&[u8], &mut [f32]),
    transcode: fn(&[u8], &mut [u8]),
}

static TABLE: [Entry; 4] =
    [entry::<BlockQ2K>(), entry::<BlockQ3K>(), entry::<BlockIq4Nl>(), entry::<BlockIq4Xs>()];

const fn entry<S: Source>() -> Entry {
    const { assert!(align_of::<S>() == 1 && S::ELEMS.is_multiple_of(BlockQ8_0::ELEMS)) };
    Entry {
        ggml_id: S::GGML_ID,
        name: S::NAME,
        block_elems: S::ELEMS as u32,
        block_bytes: size_of::<S>() as u32,
        dequantize: |source, out| {
            let blocks: &[S] = bytemuck::cast_slice(source);
            for (block, out) in blocks.iter().zip(out.chunks_exact_mut(S::ELEMS)) {
                block.dequantize(out);
            }
        },
        transcode: |source, out| {
            let blocks: &[S] = bytemuck::cast_slice(source);
            let out: &mut [BlockQ8_0] = bytemuck::cast_slice_mut(out);
            for (block, out) in blocks.iter().zip(out.chunks_exact_mut(S::ELEMS / 32)) {
                block.transcode(out);
            }
        },
    }
}

impl TranscodedType {
    /// Every type, in the order of the declaration.
    pub const ALL: [Self; 4] = [Self::Q2K, Self::Q3K, Self::Iq4Nl, Self::Iq4Xs];

    /// What they become.
    pub const TARGET: WeightType = WeightType::Q8_0;

    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// The number that a GGUF file gives it.
    pub fn ggml_id(self) -> u32 {
        self.entry().ggml_id
    }

    /// The type with this number, if it is one of these.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.ggml_id() == id)
    }

    /// Its usual name, such as `Q3_K`.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Weights per block.
    pub fn block_elems(self) -> u32 {
        self.entry().block_elems
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u32 {
        self.entry().block_bytes
    }

    /// Dequantises whole blocks as a GGUF file holds them, by the type's formula.
    pub fn dequantize(self, source: &[u8], out: &mut [f32]) -> Result<()> {
        let expected_elems = self.source_elems(source)?;
        if out.len() as u64 != expected_elems {
            return Err(Error::ValuesLength { expected_elems, actual_elems: out.len() as u64 });
        }
        (self.entry().dequantize)(source, out);
        Ok(())
    }

    /// Turns whole blocks into as many weights of [`Self::TARGET`].
    ///
    /// ```
    /// use q4k_soa::TranscodedType;
    ///
    /// let source = [0; 2 * 18]; // two blocks of IQ4_NL
    /// let mut q8_0 = [0; 2 * 34];
    /// TranscodedType::Iq4Nl.transcode(&source, &mut q8_0)?;
    /// # Ok::<(), q4k_soa::Error>(())
    /// ```
    pub fn transcode(self, source: &[u8], out: &mut [u8]) -> Result<()> {
        let elems = self.source_elems(source)?;
        let blocks = elems / u64::from(Self::TARGET.block_elems());
        let expected_bytes = blocks * u64::from(Self::TARGET.block_bytes());
        if out.len() as u64 != expected_bytes {
            return Err(Error::SourceLength { expected_bytes, actual_bytes: out.len() as u64 });
        }
        (self.entry().transcode)(source, out);
        Ok(())
    }

    /// Weights that whole blocks hold.
    fn source_elems(self, source: &[u8]) -> Result<u64> {
        let (name, block_bytes) = (self.name(), self.block_bytes());
        let actual_bytes = source.len() as u64;
        if !actual_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(Error::PartialBlock { name, block_bytes, actual_bytes });
        }
        Ok(actual_bytes / u64::from(block_bytes) * u64::from(self.block_elems()))
    }
}

impl fmt::Display for TranscodedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A scale as a half. A product beyond its range is cut to it; NaN and infinity stay, so that what
/// is computed with them is not quietly wrong.
fn scale(value: f32) -> HalfBytes {
    let most = half::f16::MAX.to_f32();
    HalfBytes::from_f32(if value.is_finite() { value.clamp(-most, most) } else { value })
}

/// Weights that have to be rounded again; such as are no numbers make the block none.
fn rounded(values: &[f32]) -> BlockQ8_0 {
    if values.iter().all(|value| value.is_finite()) {
        return BlockQ8_0::quantize(values);
    }
    BlockQ8_0 { d: HalfBytes::from_f32(f32::NAN), qs: [1; 32] }
}
