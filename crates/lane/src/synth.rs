//! Models with random weights at the shapes of real ones.
//!
//! For measuring speed where the real weights cannot be had: the file has the tensors, types and
//! sizes of the real model, llama.cpp loads it too, and the activations keep a healthy scale, so
//! that nothing is faster for being zero or slower for being NaN.

use std::f64::consts::PI;
use std::io::{self, Write};
use std::ops::Range;

use half::f16;
use q4k_soa::WeightType;
use rayon::prelude::*;

use crate::gguf::GgufWriter;

mod random;
mod vocabulary;

use random::Random;

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shape {
    /// Llama 3.2 1B: tied output, 16 layers.
    Llama32_1b,
    /// Llama 3.2 3B: tied output, 28 layers.
    Llama32_3b,
    /// Llama 3 8B: its own output matrix, 32 layers.
    Llama3_8b,
    /// About 1 MB: four query heads to each key head, heads that are not `n_embd / n_head`.
    Tiny,
}

/// Which matrices have which type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mix {
    /// Every matrix Q4_K.
    Q4K,
    /// llama.cpp's Q4_K_M: the output matrix and about half of `attn_v` and `ffn_down` are Q6_K.
    Q4KM,
}

/// The dimensions behind a [`Shape`].
struct Dims {
    n_layer: u32,
    n_embd: u32,
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    n_ff: u32,
    n_vocab: u32,
    n_special: u32,
    context_length: u32,
    tied_output: bool,
    /// Whether the file has Llama 3.2's `rope_freqs.weight`.
    rope_freqs: bool,
}

impl Shape {
    /// Every shape.
    pub const ALL: [Self; 4] = [Self::Llama32_1b, Self::Llama32_3b, Self::Llama3_8b, Self::Tiny];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama32_1b => "llama-3.2-1b",
            Self::Llama32_3b => "llama-3.2-3b",
            Self::Llama3_8b => "llama-3-8b",
            Self::Tiny => "tiny",
        }
    }

    /// The shape with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.name() == name)
    }

    fn dims(self) -> Dims {
        let llama_3 = Dims {
            n_layer: 32,
            n_embd: 4096,
            n_head: 32,
            n_kv_head: 8,
            head_dim: 128,
            n_ff: 14336,
            n_vocab: 128_256,
            n_special: 256,
            context_length: 8192,
            tied_output: false,
            rope_freqs: false,
        };
        let llama_3_2 =
            Dims { context_length: 131_072, tied_output: true, rope_freqs: true, ..llama_3 };
        match self {
            Self::Llama3_8b => llama_3,
            Self::Llama32_1b => {
                Dims { n_layer: 16, n_embd: 2048, head_dim: 64, n_ff: 8192, ..llama_3_2 }
            }
            Self::Llama32_3b => {
                Dims { n_layer: 28, n_embd: 3072, n_head: 24, n_ff: 8192, ..llama_3_2 }
            }
            Self::Tiny => Dims {
                n_layer: 2,
                n_embd: 256,
                n_head: 8,
                n_kv_head: 2,
                head_dim: 64,
                n_ff: 512,
                n_vocab: 512,
                n_special: 16,
                context_length: 256,
                ..llama_3_2
            },
        }
    }
}

impl Mix {
    /// Every mix.
    pub const ALL: [Self; 2] = [Self::Q4K, Self::Q4KM];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4K => "q4_k",
            Self::Q4KM => "q4_k_m",
        }
    }

    /// The mix with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mix| mix.name() == name)
    }

    /// llama.cpp's number for it, `general.file_type`.
    fn file_type(self) -> u32 {
        match self {
            Self::Q4K => 14,
            Self::Q4KM => 15,
        }
    }

    /// The type of the matrix that makes the logits.
    fn output(self) -> WeightType {
        match self {
            Self::Q4K => WeightType::Q4K,
            Self::Q4KM => WeightType::Q6K,
        }
    }

    /// The type of `attn_v` and `ffn_down` in a layer.
    fn sensitive(self, layer: u32, n_layer: u32) -> WeightType {
        let eighth = n_layer / 8;
        // As llama.cpp: the first and the last eighth, and every third layer between.
        let more_bits =
            layer < eighth || layer >= 7 * n_layer / 8 || (layer.saturating_sub(eighth)) % 3 == 2;
        match self {
            Self::Q4KM if more_bits => WeightType::Q6K,
            _ => WeightType::Q4K,
        }
    }
}

/// One tensor to be made.
struct Tensor {
    name: String,
    /// `[n_in]` or `[n_in, n_out]`.
    dims: Vec<u64>,
    content: Content,
}

enum Content {
    /// Random weights of this type.
    Weights(WeightType),
    /// Norm weights near 1.
    Norm,
    /// These values.
    Values(Vec<f32>),
}

/// The size in bytes of the file that [`write`](fn@write) makes.
pub fn file_bytes(shape: Shape, mix: Mix, seed: u64) -> u64 {
    plan(shape, mix, seed).0.file_bytes()
}

/// Writes a GGUF with random weights. The same shape, mix and seed give the same bytes, whatever
/// the number of threads. `progress` is told the bytes of tensor data written so far.
pub fn write(
    shape: Shape,
    mix: Mix,
    seed: u64,
    out: impl Write,
    mut progress: impl FnMut(u64),
) -> io::Result<()> {
    let (writer, tensors) = plan(shape, mix, seed);
    let mut sink = writer.begin(out)?;
    let mut piece = Vec::new();
    let mut written_bytes = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        let seed = Random::mix(seed, index as u64);
        match &tensor.content {
            Content::Values(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                sink.write(&bytes)?;
                written_bytes += bytes.len() as u64;
            }
            Content::Norm => {
                let mut random = Random::new(seed);
                let bytes: Vec<u8> = (0..tensor.dims[0])
                    .flat_map(|_| random.between(0.8..1.2).to_le_bytes())
                    .collect();
                sink.write(&bytes)?;
                written_bytes += bytes.len() as u64;
            }
            Content::Weights(ty) => {
                let n_blocks = tensor.dims.iter().product::<u64>() / u64::from(ty.block_elems());
                let deviation = 1.0 / (tensor.dims[0] as f32).sqrt();
                for first_block in (0..n_blocks).step_by(PIECE_BLOCKS as usize) {
                    let blocks = first_block..(first_block + PIECE_BLOCKS).min(n_blocks);
                    fill(&mut piece, *ty, deviation, seed, blocks);
                    sink.write(&piece)?;
                    written_bytes += piece.len() as u64;
                    progress(written_bytes);
                }
            }
        }
    }
    sink.finish()?;
    Ok(())
}

/// The header of the file and the tensors that follow it.
fn plan(shape: Shape, mix: Mix, seed: u64) -> (GgufWriter, Vec<Tensor>) {
    let dims = shape.dims();
    let mut writer = GgufWriter::new();
    metadata(&mut writer, shape, &dims, mix, seed);
    let tensors = tensors(&dims, mix);
    for tensor in &tensors {
        let ty = match tensor.content {
            Content::Weights(ty) => ty,
            Content::Norm | Content::Values(_) => WeightType::F32,
        };
        writer.tensor(&tensor.name, &tensor.dims, ty);
    }
    (writer, tensors)
}

const ROPE_BASE: f32 = 500_000.0;

fn metadata(writer: &mut GgufWriter, shape: Shape, dims: &Dims, mix: Mix, seed: u64) {
    let name = format!("synthetic {} {} seed {seed}", shape.name(), mix.name());
    writer
        .str("general.architecture", "llama")
        .str("general.type", "model")
        .str("general.name", &name)
        .str("general.description", "Random weights, for measuring speed")
        .u32("general.file_type", mix.file_type())
        .u32("general.quantization_version", 2)
        .u32("llama.block_count", dims.n_layer)
        .u32("llama.context_length", dims.context_length)
        .u32("llama.embedding_length", dims.n_embd)
        .u32("llama.feed_forward_length", dims.n_ff)
        .u32("llama.attention.head_count", dims.n_head)
        .u32("llama.attention.head_count_kv", dims.n_kv_head)
        .u32("llama.attention.key_length", dims.head_dim)
        .u32("llama.attention.value_length", dims.head_dim)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", ROPE_BASE)
        .u32("llama.rope.dimension_count", dims.head_dim)
        .u32("llama.vocab_size", dims.n_vocab);
    vocabulary::metadata(writer, dims.n_vocab, dims.n_special);
}

/// Every tensor of the model, in the order of llama.cpp's converter.
fn tensors(dims: &Dims, mix: Mix) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, dims: Vec<u64>, content| {
        tensors.push(Tensor { name, dims, content });
    };
    let n_embd = u64::from(dims.n_embd);
    let n_ff = u64::from(dims.n_ff);
    let n_vocab = u64::from(dims.n_vocab);
    let q_elems = u64::from(dims.n_head * dims.head_dim);
    let kv_elems = u64::from(dims.n_kv_head * dims.head_dim);
    let q4k = WeightType::Q4K;

    if dims.rope_freqs {
        let factors = llama_3_factors(dims.head_dim);
        add("rope_freqs.weight".into(), vec![factors.len() as u64], Content::Values(factors));
    }
    let embed = if dims.tied_output { mix.output() } else { q4k };
    add("token_embd.weight".into(), vec![n_embd, n_vocab], Content::Weights(embed));
    for layer in 0..dims.n_layer {
        let sensitive = mix.sensitive(layer, dims.n_layer);
        let mut matrix = |own: &str, n_in, n_out, ty| {
            let name = format!("blk.{layer}.{own}.weight");
            add(name, vec![n_in, n_out], Content::Weights(ty));
        };
        matrix("attn_q", n_embd, q_elems, q4k);
        matrix("attn_k", n_embd, kv_elems, q4k);
        matrix("attn_v", n_embd, kv_elems, sensitive);
        matrix("attn_output", q_elems, n_embd, q4k);
        matrix("ffn_gate", n_embd, n_ff, q4k);
        matrix("ffn_up", n_embd, n_ff, q4k);
        matrix("ffn_down", n_ff, n_embd, sensitive);
        add(format!("blk.{layer}.attn_norm.weight"), vec![n_embd], Content::Norm);
        add(format!("blk.{layer}.ffn_norm.weight"), vec![n_embd], Content::Norm);
    }
    add("output_norm.weight".into(), vec![n_embd], Content::Norm);
    if !dims.tied_output {
        add("output.weight".into(), vec![n_embd, n_vocab], Content::Weights(mix.output()));
    }
    tensors
}

/// The rope factors of Llama 3.2: slow frequencies are divided by 32, fast ones kept.
fn llama_3_factors(head_dim: u32) -> Vec<f32> {
    const FACTOR: f64 = 32.0;
    const LOW_FREQUENCY: f64 = 1.0;
    const HIGH_FREQUENCY: f64 = 4.0;
    const ORIGINAL_CONTEXT_TOKENS: f64 = 8192.0;
    (0..head_dim / 2)
        .map(|pair| {
            let exponent = 2.0 * f64::from(pair) / f64::from(head_dim);
            let wave_tokens = 2.0 * PI * f64::from(ROPE_BASE).powf(exponent);
            let turns = ORIGINAL_CONTEXT_TOKENS / wave_tokens;
            let kept = ((turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - kept) / FACTOR + kept)) as f32
        })
        .collect()
}

/// Blocks that are made and written at a time: about 9 MB of Q4_K.
const PIECE_BLOCKS: u64 = 1 << 16;
/// Blocks with one random sequence of their own, so that threads can share the work in any way.
const CHUNK_BLOCKS: u64 = 1 << 10;

/// Makes `blocks` of a tensor, in parallel. `blocks` starts at a multiple of [`CHUNK_BLOCKS`].
fn fill(out: &mut Vec<u8>, ty: WeightType, deviation: f32, seed: u64, blocks: Range<u64>) {
    let block_bytes = ty.block_bytes() as usize;
    out.resize((blocks.end - blocks.start) as usize * block_bytes, 0);
    let first_chunk = blocks.start / CHUNK_BLOCKS;
    out.par_chunks_mut(CHUNK_BLOCKS as usize * block_bytes).enumerate().for_each(|(i, chunk)| {
        let mut random = Random::new(Random::mix(seed, first_chunk + i as u64));
        for block in chunk.chunks_exact_mut(block_bytes) {
            random.fill(block);
            match ty {
                WeightType::Q4K => q4k_scales(block, deviation, &mut random),
                WeightType::Q6K => q6k_scales(block, deviation, &mut random),
                _ => unreachable!("no mix has other types"),
            }
        }
    });
}

/// Turns 144 random bytes into a Q4_K block of mean 0 and about the given standard deviation.
///
/// A weight is `d * scale * q - dmin * min` with `q` uniform in 0..16. With `min` near `scale` and
/// `dmin = 7.5 d` its mean is near 0, and its deviation `d * scale * sqrt(21.25)`.
fn q4k_scales(block: &mut [u8], deviation: f32, random: &mut Random) {
    // The root mean square of 32..64.
    const SCALE_RMS: f32 = 48.4;
    let d = deviation / (21.25f32.sqrt() * SCALE_RMS) * random.between(0.9..1.1);
    block[0..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    block[2..4].copy_from_slice(&f16::from_f32(7.5 * d).to_le_bytes());
    let bits = random.next();
    // Six bits each: the top bit set, the other five random, so 32..64.
    let scale = |group: u64| 32 | (bits >> (5 * group)) as u8 & 31;
    let min = |group: u64| (scale(group) + ((bits >> (40 + 2 * group)) as u8 & 3)).min(64) - 1;
    for group in 0..4u64 {
        let (low, high) = (group as usize, group + 4);
        block[4 + low] = scale(group) | (scale(high) >> 4) << 6;
        block[8 + low] = min(group) | (min(high) >> 4) << 6;
        block[12 + low] = scale(high) & 15 | min(high) << 4;
    }
}

/// Turns 210 random bytes into a Q6_K block of mean 0 and about the given standard deviation.
///
/// A weight is `d * scale * (q - 32)` with `q` uniform in 0..64, whose deviation is
/// `d * scale * sqrt(341.5)`; the signs of the scales make the mean 0.
fn q6k_scales(block: &mut [u8], deviation: f32, random: &mut Random) {
    // The root mean square of 64..128.
    const SCALE_RMS: f32 = 97.3;
    let d = deviation / (341.5f32.sqrt() * SCALE_RMS) * random.between(0.9..1.1);
    block[208..210].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    for scale in &mut block[192..208] {
        // Six random bits below a set one, and a random sign.
        let magnitude = (*scale & 63 | 64).cast_signed();
        *scale = if *scale & 64 == 0 { magnitude } else { -magnitude }.cast_unsigned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        assert!(Shape::ALL.iter().all(|&shape| Shape::from_name(shape.name()) == Some(shape)));
        assert!(Mix::ALL.iter().all(|&mix| Mix::from_name(mix.name()) == Some(mix)));
        assert_eq!(Shape::from_name("llama-9"), None);
    }

    #[test]
    fn q4_k_m_gives_more_bits_where_llama_cpp_does() {
        let q6k = |n_layer| -> Vec<u32> {
            let is_q6k = |&layer: &u32| Mix::Q4KM.sensitive(layer, n_layer) == WeightType::Q6K;
            (0..n_layer).filter(is_q6k).collect()
        };
        assert_eq!(q6k(16), [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!(q6k(28), [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]);
        assert_eq!(q6k(6), [2, 5]);
        assert!((0..32).all(|layer| Mix::Q4K.sensitive(layer, 32) == WeightType::Q4K));
    }

    #[test]
    fn files_have_the_sizes_of_the_real_ones() {
        // Llama-3.2-3B-Instruct-Q4_K_M.gguf is 2.02 GB, Llama-3.2-1B's 808 MB, Llama 3 8B's 4.92.
        let gigabytes = |shape| file_bytes(shape, Mix::Q4KM, 0) as f64 / 1e9;
        assert!((gigabytes(Shape::Llama32_3b) - 2.02).abs() < 0.01);
        assert!((gigabytes(Shape::Llama32_1b) - 0.808).abs() < 0.005);
        assert!((gigabytes(Shape::Llama3_8b) - 4.92).abs() < 0.02);
        assert!((gigabytes(Shape::Tiny) - 0.001).abs() < 0.0004);
    }

    #[test]
    fn rope_factors_are_llama_3_2s() {
        let factors = llama_3_factors(128);
        assert_eq!(factors.len(), 64);
        assert_eq!(factors[0], 1.0);
        assert_eq!(factors[63], 32.0);
        assert!(factors.is_sorted());
    }
}
