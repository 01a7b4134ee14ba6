//! Where the time of a step goes, and what could be had.

use std::time::{Duration, Instant};

use gpu_slab::{DeviceMemory, Slab};
use kernels_ptx::{Kernel, TokenParams, ops::read_bandwidth as op};

use crate::backend::{Backend, BackendError};
use crate::graph::{Graph, GraphError};
use crate::launch::{ByteRange, Label, Launch};

/// How to measure the operations of a step.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// The token whose step is measured.
    pub token: TokenParams,
    /// Bytes of one layer's live KV cache at that token.
    pub kv_bytes_per_layer: u64,
    /// The median of so many measurements counts.
    pub repetitions: u32,
}

/// What the launches of one kind take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    /// What they compute, in the model's words.
    pub what: &'static str,
    /// Their kernel.
    pub kernel: Kernel,
    /// How many of them a step has.
    pub launches: usize,
    /// Time of all of them.
    pub seconds: f64,
    /// Weights and live cache that they read.
    pub bytes: u64,
}

/// Replays of a kind that is launched once a step go this often into a measurement, so that the
/// way to the device does not count.
const SINGLE_LAUNCHES: usize = 8;

impl<B: Backend> Graph<B> {
    /// Times each kind of launch by itself: all of the step's, back to back, as one graph. So the
    /// caches hold no more of a layer's weights than in a step, and on a GPU nothing overlaps but
    /// neighbours of the same kind.
    ///
    /// Leaves the step's buffers with whatever comes of it, and its parameters changed.
    pub fn time_ops(
        &self,
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        probe: &Probe,
    ) -> Result<Vec<OpTime>, GraphError> {
        let mut kinds: Vec<(Label, Vec<&Launch<ByteRange>>)> = Vec::new();
        for launch in self.launches() {
            match kinds.iter_mut().find(|(label, _)| label.what == launch.label.what) {
                Some((_, launches)) => launches.push(launch),
                None => kinds.push((launch.label, vec![launch])),
            }
        }
        let time = |(label, launches): (Label, Vec<&Launch<ByteRange>>)| {
            let times = if launches.len() == 1 { SINGLE_LAUNCHES } else { 1 };
            let repeated: Vec<_> =
                std::iter::repeat_n(&launches, times).flatten().map(|&l| l.clone()).collect();
            let seconds = self.time(backend, slab, &repeated, probe)? / times as f64;
            let bytes = launches.iter().map(|launch| bytes_read(launch, probe)).sum();
            let (what, kernel) = (label.what, launches[0].kernel);
            Ok(OpTime { what, kernel, launches: launches.len(), seconds, bytes })
        };
        kinds.into_iter().map(time).collect()
    }

    /// Times the whole step.
    pub fn time_step(
        &self,
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        probe: &Probe,
    ) -> Result<f64, GraphError> {
        self.time(backend, slab, self.launches(), probe)
    }

    fn time(
        &self,
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        launches: &[Launch<ByteRange>],
        probe: &Probe,
    ) -> Result<f64, GraphError> {
        let mut executable = backend.capture(slab.memory_mut(), launches)?;
        let mut seconds = Vec::new();
        for repetition in 0..=probe.repetitions.max(1) {
            self.write_params(slab, &[probe.token])?;
            backend.synchronize()?;
            let start = Instant::now();
            backend.replay(slab.memory_mut(), &mut executable)?;
            backend.synchronize()?;
            // The first is for warming up.
            if repetition > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        Ok(median(seconds))
    }
}

/// Weights, and of attention the live cache. The one row that an embedding takes is nothing.
fn bytes_read(launch: &Launch<ByteRange>, probe: &Probe) -> u64 {
    let matrices = launch
        .buffers()
        .filter(|(name, ..)| ["w", "w0", "w1", "w2", "gate", "up", "weights"].contains(name));
    let weights: u64 = matrices.map(|(_, _, range)| range.len_bytes).sum();
    weights + if attends(launch.kernel) { probe.kv_bytes_per_layer } else { 0 }
}

/// Whether a kernel reads a layer's cache: each that attends, but not what joins their results.
fn attends(kernel: Kernel) -> bool {
    kernel.source().starts_with("attention") && kernel != Kernel::AttentionCombine
}

/// Bytes per second at which `backend` reads memory that no cache holds: the best of several
/// passes over `len_bytes` of random numbers, at least 16.
///
/// # Errors
/// The backend has not that much memory, or fails.
pub fn read_bandwidth<B: Backend>(backend: &mut B, len_bytes: u64) -> Result<f64, BackendError> {
    const PASSES: u32 = 8;
    let name = backend.name();
    let failed = |message: String| {
        let during = "measuring the read bandwidth".to_owned();
        BackendError { backend: name, during, message, code: None }
    };
    let n_quads = (len_bytes / 16).clamp(1, u64::from(u32::MAX) / 4) as u32;
    let n_blocks = op::blocks(n_quads, &backend.profile());
    let data = ByteRange { offset_bytes: 0, len_bytes: u64::from(n_quads) * 16 };
    let out = ByteRange {
        offset_bytes: data.end_bytes().next_multiple_of(256),
        len_bytes: u64::from(n_blocks) * 4,
    };
    let mut memory = backend.allocate(out.end_bytes()).map_err(|e| failed(e.to_string()))?;
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut chunk = vec![0u64; (1 << 20) / 8];
    for start in (0..data.len_bytes).step_by(1 << 20) {
        for word in &mut chunk {
            // Xorshift: memory that compresses might be read faster than any weights.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            *word = random;
        }
        let bytes: &[u8] = bytemuck::cast_slice(&chunk);
        let len = bytes.len().min((data.len_bytes - start) as usize);
        memory.write(start, &bytes[..len]).map_err(|e| failed(e.to_string()))?;
    }
    let args = op::Args { data, out, n_quads, n_blocks };
    let geometry = args.geometry(&backend.profile());
    let kernel = Kernel::ReadBandwidth;
    let args = args.list(kernel, |range: ByteRange| range.len_bytes);
    let args = args.map_err(|e| failed(e.to_string()))?;
    let label = Label { layer: None, what: "reading" };
    let mut pass = backend.capture(&mut memory, &[Launch { kernel, geometry, args, label }])?;
    let mut best = Duration::MAX;
    for _ in 0..=PASSES {
        backend.synchronize()?;
        let start = Instant::now();
        backend.replay(&mut memory, &mut pass)?;
        backend.synchronize()?;
        best = best.min(start.elapsed());
    }
    Ok(data.len_bytes as f64 / best.as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_attention_reads_the_cache_but_the_one_that_joins() {
        let readers: Vec<&str> = Kernel::ALL
            .iter()
            .filter(|kernel| attends(**kernel))
            .map(|kernel| kernel.name())
            .collect();
        assert_eq!(
            readers,
            [
                "attention_f32",
                "attention_f16",
                "attention_q8",
                "attention_chunk_64",
                "attention_chunk_128",
                "attention_chunk_256",
                "attention_rows",
                "attention_step_f32",
                "attention_step_f16",
            ]
        );
    }
}
