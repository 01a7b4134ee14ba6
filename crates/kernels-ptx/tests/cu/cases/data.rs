//! Random contents.

use bytemuck::Pod;
use half::{bf16, f16};
use kernels_ptx::{ArgList, Geometry, Kernel};
use q4k_soa::{PackedLayout, Shape, WeightType};

use super::{Buf, Case, Compare, Memory};

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }

    /// In -1 .. 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    pub(crate) fn shuffled(&mut self, n: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n).collect();
        for i in 1..n {
            all.swap(i as usize, self.below(i + 1) as usize);
        }
        all
    }
}

/// Collects the buffers of a case.
#[derive(Default)]
pub(crate) struct Builder {
    memory: Vec<Memory>,
}

impl Builder {
    pub(crate) fn add(&mut self, memory: Memory) -> Buf {
        let buf = Buf { id: self.memory.len(), len_bytes: memory.bytes.len() as u64 };
        self.memory.push(memory);
        buf
    }

    pub(crate) fn input<T: Pod>(&mut self, values: &[T]) -> Buf {
        let bytes = bytemuck::cast_slice(values).to_vec();
        self.add(Memory { bytes, set: None, compare: Compare::Exact })
    }

    pub(crate) fn output<T: Pod>(&mut self, n: u32, compare: Compare) -> Buf {
        let bytes = vec![0; n as usize * size_of::<T>()];
        self.add(Memory { bytes, set: None, compare })
    }

    /// A packed matrix of random bytes with halves and floats that are numbers. What lies
    /// between its planes is not set.
    pub(crate) fn matrix(
        &mut self,
        ty: WeightType,
        n_out: u32,
        n_in: u32,
        random: &mut Random,
    ) -> Buf {
        let layout = PackedLayout::planes(ty, Shape { n_out, n_in }).expect("a possible shape");
        let mut bytes = vec![0; layout.len_bytes() as usize];
        let mut set = Vec::new();
        for plane in layout.plane_list() {
            let start = plane.offset_bytes as usize;
            set.push(start..start + plane.len_bytes as usize);
            let plane_bytes = &mut bytes[start..][..plane.len_bytes as usize];
            match (ty, plane.name.starts_with('d')) {
                (WeightType::F32, _) => plane_bytes
                    .chunks_exact_mut(4)
                    .for_each(|to| to.copy_from_slice(&random.float().to_le_bytes())),
                (WeightType::Bf16, _) => plane_bytes.chunks_exact_mut(2).for_each(|to| {
                    to.copy_from_slice(&bf16::from_f32(random.float()).to_le_bytes());
                }),
                (WeightType::F16, _) | (_, true) => {
                    let scale = if ty == WeightType::F16 { 1.0 } else { 0.02 };
                    plane_bytes.chunks_exact_mut(2).for_each(|to| {
                        let value = f16::from_f32(random.float() * scale);
                        to.copy_from_slice(&value.to_le_bytes());
                    });
                }
                _ => plane_bytes.iter_mut().for_each(|to| *to = random.bits() as u8),
            }
        }
        self.add(Memory { bytes, set: Some(set), compare: Compare::Exact })
    }

    pub(crate) fn case(
        self,
        kernel: Kernel,
        label: String,
        args: Result<ArgList<Buf>, kernels_ptx::ParamError>,
        geometry: Geometry,
    ) -> Case {
        let args = args.unwrap_or_else(|error| panic!("{label}: {error}"));
        let label = format!("{}, {label}", kernel.name());
        Case { kernel, label, args, geometry, memory: self.memory }
    }
}

/// `[position, slot, token]` of each token.
pub(crate) fn tokens_of(position: u32, ring_slot: u32, token_id: u32) -> [u32; 3] {
    [position, ring_slot, token_id]
}
