//! Two backends run through the same step launch by launch: which launch is the first whose
//! results differ?

use decode_graph::{Backend, ByteRange, Drive, Launch};
use gpu_slab::DeviceMemory;
use half::f16;
use kernels_ptx::{Access, Elem, Kernel, ParamKind};
use kv_paged::{KvLayout, KvType};

use crate::decoder::Decoder;
use crate::generate::token_params;
use crate::residency::ResidencyError;

/// The first value that differs by more than the tolerance.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Number of the launch in the step.
    pub launch: usize,
    /// Place in the step: layer and what it computes.
    pub label: String,
    /// Kernel.
    pub kernel: &'static str,
    /// Argument that was written.
    pub argument: &'static str,
    /// Element of the argument.
    pub index: usize,
    /// Values of the first and the second backend.
    pub values: (f64, f64),
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "launch {} ({}, {}): {}[{}] is {} and {}",
            self.launch,
            self.label,
            self.kernel,
            self.argument,
            self.index,
            self.values.0,
            self.values.1
        )
    }
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Launches compared.
    pub launches: usize,
    /// Largest relative difference of any f32 output.
    pub worst: f64,
    /// The first beyond the tolerance.
    pub first: Option<Difference>,
}

/// Runs the step of the last of `ids` on both decoders, launch by launch from equal memory, and
/// compares everything that each launch writes. Both must be loaded by the same plan.
///
/// f32 may differ by `tolerance` of the largest value in the same buffer, f16 by a last bit more;
/// integers must be equal.
pub fn diff<A: Backend, B: Backend>(
    a: &mut Decoder<A>,
    b: &mut Decoder<B>,
    ids: &[u32],
    tolerance: f64,
) -> Result<Comparison, ResidencyError> {
    let (a, b) = (a.residency_mut(), b.residency_mut());
    let Some((&kv, &step)) = a.arenas() else {
        return Err(ResidencyError::Missing("step arena"));
    };
    let max_context_tokens = kv.config.max_context_tokens();
    for (position, &id) in ids.iter().enumerate() {
        let params = token_params(position as u32, max_context_tokens, id);
        if position + 1 < ids.len() {
            a.replay(Drive::Host(&[params]))?;
        } else {
            a.slab_mut().write_view(step.tokens, 0, bytemuck::bytes_of(&params))?;
        }
    }
    // Everything behind the weights, from one memory to the other.
    let first = kv.blocks.offset_bytes();
    let state =
        ByteRange { offset_bytes: first, len_bytes: a.slab().permanent_end_bytes() - first };
    copy(a.slab().memory(), b.slab_mut().memory_mut(), state)?;

    let cache = kv.config.layout();
    let launches = a.launches().to_vec();
    let mut found = Comparison { launches: launches.len(), worst: 0.0, first: None };
    for (index, launch) in launches.iter().enumerate() {
        a.run_launch(launch)?;
        b.run_launch(launch)?;
        for (name, range, elem) in written(launch, cache) {
            let values = read(a.slab().memory(), range, elem)?;
            let others = read(b.slab().memory(), range, elem)?;
            let scale = values.iter().fold(0.0f64, |max, v| max.max(v.abs()));
            let allowed = match elem {
                Compared::Integer(_) => 0.0,
                Compared::F32 => tolerance * scale,
                Compared::F16 => (tolerance + 1e-3) * scale,
                // A quant may round to its neighbour.
                Compared::Q8(_) => (tolerance + 1.0 / 127.0) * scale,
            };
            for (at, (&x, &y)) in values.iter().zip(&others).enumerate() {
                let distance = (x - y).abs();
                let same = x == y || (x.is_nan() && y.is_nan());
                if same {
                    continue;
                }
                if elem == Compared::F32 && scale > 0.0 {
                    found.worst = found.worst.max(distance / scale);
                }
                if (distance > allowed || distance.is_nan()) && found.first.is_none() {
                    found.first = Some(Difference {
                        launch: index,
                        label: launch.label.to_string(),
                        kernel: launch.kernel.name(),
                        argument: name,
                        index: at,
                        values: (x, y),
                    });
                }
            }
            if found.first.is_some() {
                return Ok(found);
            }
            // From here on both are equal again: differences do not add up.
            copy(a.slab().memory(), b.slab_mut().memory_mut(), range)?;
        }
    }
    Ok(found)
}

#[derive(Clone, Copy, PartialEq)]
enum Compared {
    F32,
    F16,
    /// A part of the cache.
    Q8(KvLayout),
    /// Bytes of each.
    Integer(usize),
}

/// The buffers that a launch writes.
fn written(
    launch: &Launch<ByteRange>,
    cache: KvLayout,
) -> Vec<(&'static str, ByteRange, Compared)> {
    let elem_of = |kernel: Kernel, name: &str| {
        kernel.params().iter().find(|param| param.name == name).map(|param| param.kind)
    };
    let buffers = launch.buffers().filter(|(_, access, _)| *access != Access::Read);
    buffers
        .filter_map(|(name, _, range)| {
            let Some(ParamKind::Buffer { elem, .. }) = elem_of(launch.kernel, name) else {
                return None;
            };
            let compared = match elem {
                // The KV arena.
                Elem::U8 if cache.kv_type() == KvType::F16 => Compared::F16,
                Elem::U8 if cache.kv_type() == KvType::Q8 => Compared::Q8(cache),
                Elem::U8 | Elem::F32 | Elem::Q8Group => Compared::F32,
                Elem::I8 => Compared::Integer(1),
                Elem::U32 | Elem::Candidate => Compared::Integer(4),
                _ => return None,
            };
            Some((name, *range, compared))
        })
        .collect()
}

fn read<M: DeviceMemory>(
    memory: &M,
    range: ByteRange,
    compared: Compared,
) -> Result<Vec<f64>, ResidencyError> {
    let mut bytes = vec![0; range.len_bytes as usize];
    memory.read(range.offset_bytes, &mut bytes).map_err(memory_error)?;
    Ok(match compared {
        Compared::F32 => {
            bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).collect()
        }
        Compared::F16 => {
            bytemuck::pod_collect_to_vec::<u8, f16>(&bytes).into_iter().map(f64::from).collect()
        }
        Compared::Q8(layout) => dequantised(&bytes, &layout),
        Compared::Integer(1) => bytes.iter().map(|&byte| f64::from(byte as i8)).collect(),
        Compared::Integer(_) => {
            bytemuck::pod_collect_to_vec::<u8, u32>(&bytes).into_iter().map(f64::from).collect()
        }
    })
}

/// The elements of whole blocks.
fn dequantised(blocks: &[u8], layout: &KvLayout) -> Vec<f64> {
    let row_elems = layout.head_dim() as usize;
    let elems = 2 * layout.kv_stride() as usize;
    let scales = layout.scales_offset_in_block_bytes().unwrap_or(0) as usize;
    let of_block = |block: &[u8]| {
        let scales: Vec<f32> = bytemuck::pod_collect_to_vec(&block[scales..]);
        let value =
            |(i, &quant): (usize, &u8)| f64::from(scales[i / row_elems]) * f64::from(quant as i8);
        block[..elems].iter().enumerate().map(value).collect::<Vec<f64>>()
    };
    blocks.chunks_exact(layout.block_bytes() as usize).flat_map(of_block).collect()
}

fn copy<M: DeviceMemory, N: DeviceMemory>(
    from: &M,
    to: &mut N,
    range: ByteRange,
) -> Result<(), ResidencyError> {
    const CHUNK: u64 = 16 << 20;
    let mut at = range.offset_bytes;
    while at < range.end_bytes() {
        let mut bytes = vec![0; CHUNK.min(range.end_bytes() - at) as usize];
        from.read(at, &mut bytes).map_err(memory_error)?;
        to.write(at, &bytes).map_err(memory_error)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

fn memory_error(source: gpu_slab::MemoryError) -> ResidencyError {
    ResidencyError::Slab(gpu_slab::SlabError::Memory { name: "diff".into(), source })
}
