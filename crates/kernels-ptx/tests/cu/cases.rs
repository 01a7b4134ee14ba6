//! Arguments to run kernels on: shapes that models have, awkward ones, random contents.

use kernels_ptx::{ArgList, DeviceProfile, Geometry, Kernel};
use kv_paged::KvLayout;

mod attention;
mod data;
mod fused;
mod gemm;
mod gemv;
pub(crate) mod kv;
mod rows;
mod vocab;

pub(crate) use data::{Builder, Random};

/// A buffer of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buf {
    pub(crate) id: usize,
    len_bytes: u64,
}

impl Buf {
    fn len_bytes(self) -> u64 {
        self.len_bytes
    }
}

/// How a result has to agree with the twin's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Compare {
    /// Bit for bit.
    Exact,
    /// To 1e-5 of the largest magnitude among each `per` elements.
    F32 { per: usize },
    /// Long sums in the order and with the rounding of tensor cores: to 1e-4 of the largest
    /// magnitude among each `per` elements.
    Sums { per: usize },
    /// f16 sums by weights that are f16, too: to 2e-3 of the largest magnitude among each `per`.
    Weighted { per: usize },
    /// f16 of sums in f32: to 1e-5 of the largest magnitude among each `per` elements, and half a
    /// step of f16 for the rounding of each of the two.
    Rounded { per: usize },
    /// f16, to the neighbouring number.
    Half,
    /// Scales to 1e-5, and one of a hundred quants to the neighbour.
    Q8Cache(KvLayout),
}

impl Compare {
    /// How far a result may be from the `expected` one where [`Self::Rounded`] is asked for.
    pub(crate) fn rounded_tolerance(expected: f32, largest: f32) -> f32 {
        // Below the normal numbers the steps of f16 are as those of the smallest.
        let exponent = expected.abs().max(2f32.powi(-14)).to_bits() & 0xff << 23;
        1e-5 * largest + f32::from_bits(exponent) / 1024.0
    }
}

/// Contents of a buffer before the launch.
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    /// Byte ranges that hold something; all if `None`.
    pub(crate) set: Option<Vec<std::ops::Range<usize>>>,
    pub(crate) compare: Compare,
}

impl Memory {
    /// One byte for each: 0 where there is nothing to read.
    pub(crate) fn initialised(&self) -> Vec<u8> {
        let Some(set) = &self.set else { return vec![1; self.bytes.len()] };
        let mut initialised = vec![0; self.bytes.len()];
        set.iter().for_each(|range| initialised[range.clone()].fill(1));
        initialised
    }
}

/// A launch to check.
pub(crate) struct Case {
    pub(crate) kernel: Kernel,
    pub(crate) label: String,
    pub(crate) args: ArgList<Buf>,
    pub(crate) geometry: Geometry,
    pub(crate) memory: Vec<Memory>,
}

/// Rows of a q8 cache that agree but for roundings.
pub(crate) fn check_q8_cache(
    layout: &KvLayout,
    found: &[u8],
    expected: &[u8],
) -> Result<(), String> {
    let block = layout.block_bytes() as usize;
    let scales = layout.scales_offset_in_block_bytes().ok_or("the cache has no scales")? as usize;
    let mut neighbours = 0;
    for (at, (&a, &b)) in found.iter().zip(expected).enumerate() {
        if at % block < scales && a != b {
            if (a as i8).abs_diff(b as i8) > 1 {
                return Err(format!("[byte {at}] = {}, the twin has {}", a as i8, b as i8));
            }
            neighbours += 1;
        }
    }
    if neighbours > 1 + expected.len() / 100 {
        return Err(format!(": {neighbours} quants are not those of the twin"));
    }
    for at in (0..found.len()).step_by(block).flat_map(|at| (at + scales..at + block).step_by(4)) {
        let [a, b]: [f32; 2] =
            [found, expected].map(|kv| bytemuck::pod_read_unaligned(&kv[at..at + 4]));
        if (a - b).abs() > b.abs() * 1e-5 || a.is_nan() != b.is_nan() {
            return Err(format!("[byte {at}] = {a:e}, the twin has {b:e}"));
        }
    }
    Ok(())
}

/// One multiprocessor: grids so small that blocks have to stride.
const SMALL: DeviceProfile = DeviceProfile { sm_count: 1, ..DeviceProfile::A2000 };

/// The seed of this run: `KERNELS_SEED`, or always the same.
pub(crate) fn seed() -> u64 {
    std::env::var("KERNELS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_260)
}

/// The cases of a kernel.
pub(crate) fn of(kernel: Kernel, seed: u64) -> Vec<Case> {
    let random = &mut Random::new(seed);
    match kernel {
        Kernel::Embed => rows::embed(random),
        Kernel::GatherRows => rows::gather_rows(random),
        Kernel::RmsNorm => rows::rms_norm(random),
        Kernel::RmsNormAdd => rows::rms_norm_add(random),
        Kernel::RmsNormQ8 => rows::rms_norm_q8(random),
        Kernel::RmsNormF16 => gemm::rms_norm_f16(random),
        Kernel::GemmSkinny8 | Kernel::GemmSkinny32 => gemm::skinny(kernel, random),
        Kernel::GemmTiled => gemm::tiled(kernel, random),
        Kernel::QuantizeQ8 => rows::quantize_q8(random),
        Kernel::GemvQ8Store | Kernel::GemvQ8Add | Kernel::GemvQ8Swiglu | Kernel::GemvQ8Geglu => {
            gemv::q8(kernel, random)
        }
        Kernel::GemvNorm => fused::gemv_norm(random),
        Kernel::GemvNormSwiglu => fused::gemv_norm_swiglu(random),
        Kernel::GemvResidual => fused::gemv_residual(random),
        Kernel::GemvF32Store
        | Kernel::GemvF32Add
        | Kernel::GemvF32Swiglu
        | Kernel::GemvF32Geglu => gemv::f32(kernel, random),
        Kernel::RopeAppendF32 | Kernel::RopeAppendF16 | Kernel::RopeAppendQ8 => {
            kv::rope_append(kernel, random)
        }
        Kernel::AttentionF32 | Kernel::AttentionF16 | Kernel::AttentionQ8 => {
            attention::attention(kernel, random)
        }
        Kernel::AttentionStepF32 | Kernel::AttentionStepF16 => attention::step(kernel, random),
        Kernel::AttentionChunk64 | Kernel::AttentionChunk128 | Kernel::AttentionChunk256 => {
            attention::chunk(kernel, random)
        }
        Kernel::AttentionRows => attention::rows(random),
        Kernel::AttentionCombine => attention::combine(random),
        Kernel::Argmax => vocab::argmax(random),
        Kernel::Head => fused::head(random),
        Kernel::Sample => vocab::sample(random),
        Kernel::ReadBandwidth => rows::read_bandwidth(random),
        other => panic!("{} has no cases", other.name()),
    }
}
