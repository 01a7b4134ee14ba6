//! Launches of models that people use, with the geometry of the device at hand.

use bytemuck::Pod;
use decode_graph::{Backend, CudaBackend};
use kernels_ptx::ops::{
    argmax, embed, gather_rows, gemv_f32, gemv_norm, gemv_norm_swiglu, gemv_q8, gemv_residual,
    head, quantize_q8, rms_norm, rms_norm_add, rms_norm_q8, sample,
};
use kernels_ptx::{DeviceProfile, Kernel, SamplingPack};
use q4k_soa::{PackedLayout, Q8Group, Shape, WeightType};

use crate::cu::cases::{Buf, Builder, Case, Compare, Memory, Random};

/// Makes the case of arguments: they check themselves, geometry is the device's.
macro_rules! case {
    ($buffers:expr, $kernel:expr, $label:expr, $args:expr, $device:expr) => {{
        let args = $args;
        let Buffers { builder, len_bytes } = $buffers;
        let list = args.list($kernel, |buf: Buf| len_bytes[buf.id]);
        builder.case($kernel, $label, list, args.geometry($device))
    }};
}

mod batches;
mod cache;

#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    n_embd: u32,
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    n_ff: u32,
    n_vocab: u32,
    /// Of most matrices, and of the rest.
    types: [WeightType; 2],
    bias: bool,
}

const MODELS: [Model; 4] = [
    Model {
        name: "Llama 3.2 1B",
        n_embd: 2048,
        n_head: 32,
        n_kv_head: 8,
        head_dim: 64,
        n_ff: 8192,
        n_vocab: 128_256,
        types: [WeightType::Q4K, WeightType::Q6K],
        bias: false,
    },
    Model {
        name: "Llama 3.1 8B",
        n_embd: 4096,
        n_head: 32,
        n_kv_head: 8,
        head_dim: 128,
        n_ff: 14_336,
        n_vocab: 32_064, // the rest of 128 256 rows is more of the same
        types: [WeightType::Q4K, WeightType::Q6K],
        bias: false,
    },
    Model {
        name: "Qwen2.5 0.5B",
        n_embd: 896,
        n_head: 14,
        n_kv_head: 2,
        head_dim: 64,
        n_ff: 4864,
        n_vocab: 151_936,
        types: [WeightType::Q5_0, WeightType::Q8_0],
        bias: true,
    },
    Model {
        name: "SmolLM2 135M",
        n_embd: 576,
        n_head: 9,
        n_kv_head: 3,
        head_dim: 64,
        n_ff: 1536,
        n_vocab: 49_152,
        types: [WeightType::Q4_1, WeightType::Q8_0],
        bias: false,
    },
];

/// The cases of a kernel.
pub(crate) fn of(kernel: Kernel, backend: &CudaBackend, seed: u64) -> Vec<Case> {
    let random = &mut Random::new(seed ^ 0x5eed);
    let device = &backend.profile();
    let mut cases = Vec::new();
    for model in MODELS {
        match kernel {
            Kernel::Embed => cases.push(embed_case(model, device, random)),
            Kernel::GatherRows => cases.push(gather_case(model, device, random)),
            Kernel::RmsNorm | Kernel::RmsNormAdd | Kernel::RmsNormQ8 => {
                cases.push(norm_case(kernel, model, device, random));
            }
            Kernel::QuantizeQ8 => cases.push(quantize_case(model, device, random)),
            Kernel::RopeAppendF32 | Kernel::RopeAppendF16 | Kernel::RopeAppendQ8 => {
                cases.push(cache::rope_case(kernel, model, device, random));
            }
            Kernel::AttentionF32
            | Kernel::AttentionF16
            | Kernel::AttentionQ8
            | Kernel::AttentionStepF32
            | Kernel::AttentionStepF16 => {
                let step = matches!(kernel, Kernel::AttentionStepF32 | Kernel::AttentionStepF16);
                let case = if step { cache::attention_step_case } else { cache::attention_case };
                for (n_context, window) in [(1, 0), (777, 0), (4097, 0), (8192, 0), (9000, 1024)] {
                    let context = cache::Context { n_context, max_context_tokens: 8192, window };
                    cases.push(case(kernel, model, context, device, random));
                }
            }
            Kernel::AttentionCombine => cases.push(cache::combine_case(model, device, random)),
            Kernel::Argmax => cases.push(argmax_case(model, device, random)),
            Kernel::Head => cases.push(head_case(model, device, random)),
            Kernel::GemvNorm => cases.push(gemv_norm_case(model, device, random)),
            Kernel::GemvNormSwiglu => cases.push(gemv_norm_swiglu_case(model, device, random)),
            Kernel::GemvResidual => cases.extend(gemv_residual_cases(model, device, random)),
            Kernel::Sample => cases.extend(sample_cases(model, device, random)),
            // Of no model.
            Kernel::ReadBandwidth => {}
            _ => match batches::of(kernel, model, device, random) {
                Some(of_batches) => cases.extend(of_batches),
                None => gemv_cases(kernel, model, device, random, &mut cases),
            },
        }
    }
    cases
}

/// A case's buffers with their lengths.
#[derive(Default)]
struct Buffers {
    builder: Builder,
    len_bytes: Vec<u64>,
}

impl Buffers {
    fn input<T: Pod>(&mut self, values: &[T]) -> Buf {
        self.len_bytes.push(size_of_val(values) as u64);
        self.builder.input(values)
    }

    fn output<T: Pod>(&mut self, n: u32, compare: Compare) -> Buf {
        self.len_bytes.push(u64::from(n) * size_of::<T>() as u64);
        self.builder.output::<T>(n, compare)
    }

    fn memory(&mut self, memory: Memory) -> Buf {
        self.len_bytes.push(memory.bytes.len() as u64);
        self.builder.add(memory)
    }

    fn matrix(&mut self, ty: WeightType, n_out: u32, n_in: u32, random: &mut Random) -> Buf {
        let layout = PackedLayout::planes(ty, Shape { n_out, n_in }).expect("a possible shape");
        self.len_bytes.push(layout.len_bytes());
        self.builder.matrix(ty, n_out, n_in, random)
    }
}

fn embed_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_embd, n_vocab, types: [_, ty], .. } = model;
    let mut b = Buffers::default();
    let tokens = [7, 7, random.below(n_vocab), 8, 8, n_vocab - 1];
    let args = embed::Args {
        table: b.matrix(ty, n_vocab, n_embd, random),
        tokens: b.input(&tokens),
        x: b.output::<f32>(2 * n_embd, Compare::F32 { per: 1 }),
        ggml_type: ty.ggml_id(),
        n_tokens: 2,
        n_vocab,
        n_embd,
        scale: 1.0,
    };
    case!(b, Kernel::Embed, format!("{}, {ty}", model.name), args, device)
}

fn norm_case(kernel: Kernel, model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let n = model.n_embd;
    let mut b = Buffers::default();
    let x = b.input(&random.floats(n as usize));
    let weight = b.input(&random.floats(n as usize));
    if kernel == Kernel::RmsNorm {
        let y = b.output::<f32>(n, Compare::F32 { per: 1 });
        let args = rms_norm::Args { x, weight, y, n_tokens: 1, n, eps: 1e-5 };
        return case!(b, kernel, model.name.into(), args, device);
    }
    if kernel == Kernel::RmsNormAdd {
        let residual = b.input(&random.floats(n as usize));
        let y = b.output::<f32>(n, Compare::F32 { per: n as usize });
        let args = rms_norm_add::Args { x, weight, residual, y, n_tokens: 1, n, eps: 1e-5 };
        return case!(b, kernel, model.name.into(), args, device);
    }
    let quants = b.output::<i8>(n, Compare::Exact);
    let groups = b.output::<Q8Group>(n / 32, Compare::F32 { per: 1 });
    let args = rms_norm_q8::Args { x, weight, quants, groups, n_tokens: 1, n, eps: 1e-5 };
    case!(b, kernel, model.name.into(), args, device)
}

fn quantize_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let n = model.n_ff;
    let mut b = Buffers::default();
    let args = quantize_q8::Args {
        x: b.input(&random.floats(n as usize)),
        quants: b.output::<i8>(n, Compare::Exact),
        groups: b.output::<Q8Group>(n / 32, Compare::F32 { per: 1 }),
        n_tokens: 1,
        n,
    };
    case!(b, Kernel::QuantizeQ8, model.name.into(), args, device)
}

/// A matrix product of a step.
struct Product {
    what: &'static str,
    parts: Vec<(WeightType, u32)>,
    n_in: u32,
    bias: bool,
}

fn products(kernel: Kernel, model: Model) -> Vec<Product> {
    let Model { n_embd, n_ff, n_vocab, types: [most, rest], .. } = model;
    let (q, kv) = (model.n_head * model.head_dim, model.n_kv_head * model.head_dim);
    let product = |what, parts, n_in| Product { what, parts, n_in, bias: false };
    match kernel {
        Kernel::GemvQ8Store | Kernel::GemvF32Store => vec![
            Product {
                bias: model.bias,
                ..product("qkv", vec![(most, q), (most, kv), (rest, kv)], n_embd)
            },
            product("logits", vec![(rest, n_vocab)], n_embd),
        ],
        Kernel::GemvQ8Add | Kernel::GemvF32Add => {
            vec![product("o", vec![(most, n_embd)], q), product("down", vec![(rest, n_embd)], n_ff)]
        }
        _ => vec![product("gate and up", vec![(most, n_ff), (most, n_ff)], n_embd)],
    }
}

fn gemv_cases(
    kernel: Kernel,
    model: Model,
    device: &DeviceProfile,
    random: &mut Random,
    cases: &mut Vec<Case>,
) {
    let gated = matches!(
        kernel,
        Kernel::GemvQ8Swiglu | Kernel::GemvQ8Geglu | Kernel::GemvF32Swiglu | Kernel::GemvF32Geglu
    );
    let adds = matches!(kernel, Kernel::GemvQ8Add | Kernel::GemvF32Add);
    let q8 = matches!(
        kernel,
        Kernel::GemvQ8Store | Kernel::GemvQ8Add | Kernel::GemvQ8Swiglu | Kernel::GemvQ8Geglu
    );
    for Product { what, parts, n_in, bias } in products(kernel, model) {
        let part = |index: usize| parts.get(index).copied();
        let n_out = |index| part(index).map_or(0, |(_, rows)| rows);
        let ggml_type = |index| part(index).map_or(0, |(ty, _)| ty.ggml_id());
        let total = n_out(0) + n_out(1) + n_out(2);
        let n_rows = if gated { n_out(0) } else { total };
        let label = format!("{} {what}, {parts:?} × {n_in}", model.name);
        let mut b = Buffers::default();
        let [w0, w1, w2] =
            [0, 1, 2].map(|index| part(index).map(|(ty, rows)| b.matrix(ty, rows, n_in, random)));
        let w0 = w0.expect("a product has a matrix");
        let bias = bias.then(|| b.input(&random.floats(total as usize)));
        let residual = adds.then(|| b.input(&random.floats(n_rows as usize)));
        let out = b.output::<f32>(n_rows, Compare::F32 { per: n_rows as usize });
        // Results of the size of 1: beyond, SwiGLU makes much of little differences.
        let scale = 0.5 / (n_in as f32).sqrt();
        let x: Vec<f32> = random.floats(n_in as usize).iter().map(|x| x * scale).collect();
        macro_rules! args {
            ($op:ident, $($input:tt)*) => {
                $op::Args {
                    w0, w1, w2, $($input)* bias, residual, out,
                    type0: ggml_type(0), type1: ggml_type(1), type2: ggml_type(2),
                    n_out0: n_out(0), n_out1: n_out(1), n_out2: n_out(2),
                    n_rows, n_in, n_tokens: 1,
                }
            };
        }
        cases.push(if q8 {
            let mut quants = vec![0i8; n_in as usize];
            let mut groups = vec![Q8Group::default(); n_in as usize / 32];
            q4k_soa::quantize_q8(&x, &mut quants, &mut groups);
            let (quants, groups) = (b.input(&quants), b.input(&groups));
            case!(b, kernel, label, args!(gemv_q8, quants, groups,), device)
        } else {
            let x = b.input(&x);
            case!(b, kernel, label, args!(gemv_f32, x,), device)
        });
    }
}

/// Activations that make results of the size of 1.
fn vector(n: u32, random: &mut Random) -> Vec<f32> {
    let scale = 1.0 / (n as f32).sqrt();
    random.floats(n as usize).iter().map(|x| x * scale).collect()
}

fn gemv_norm_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_embd: n_in, types: [most, rest], .. } = model;
    let (q, kv) = (model.n_head * model.head_dim, model.n_kv_head * model.head_dim);
    let [type0, type1, type2] = [most, most, rest].map(WeightType::ggml_id);
    let matrices = [(type0, q), (type1, kv), (type2, kv)];
    let blocks = gemv_norm::blocks(matrices, n_in, device);
    let [blocks0, blocks1, blocks2] = blocks;
    let total = q + 2 * kv;
    let mut b = Buffers::default();
    let args = gemv_norm::Args {
        w0: b.matrix(most, q, n_in, random),
        w1: Some(b.matrix(most, kv, n_in, random)),
        w2: Some(b.matrix(rest, kv, n_in, random)),
        x: b.input(&vector(n_in, random)),
        norm: b.input(&random.floats(n_in as usize)),
        bias: model.bias.then(|| b.input(&random.floats(total as usize))),
        out: b.output::<f32>(total, Compare::F32 { per: total as usize }),
        type0,
        type1,
        type2,
        n_out0: q,
        n_out1: kv,
        n_out2: kv,
        blocks0,
        blocks1,
        blocks2,
        n_in,
        ring_bytes: gemv_norm::product(matrices, blocks, n_in, device).ring_bytes,
        eps: 1e-5,
    };
    case!(b, Kernel::GemvNorm, format!("{} qkv", model.name), args, device)
}

fn gemv_norm_swiglu_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_embd: n_in, n_ff: n_out, types: [ty, _], .. } = model;
    let mut b = Buffers::default();
    let args = gemv_norm_swiglu::Args {
        gate: b.matrix(ty, n_out, n_in, random),
        up: b.matrix(ty, n_out, n_in, random),
        x: b.input(&vector(n_in, random)),
        norm: b.input(&vector(n_in, random)),
        out: b.output::<f32>(n_out, Compare::F32 { per: n_out as usize }),
        ggml_type: ty.ggml_id(),
        n_out,
        n_in,
        ring_bytes: gemv_norm_swiglu::product(ty.ggml_id(), n_out, n_in, device).ring_bytes,
        eps: 1e-5,
    };
    case!(b, Kernel::GemvNormSwiglu, format!("{} gate and up", model.name), args, device)
}

fn gemv_residual_cases(model: Model, device: &DeviceProfile, random: &mut Random) -> Vec<Case> {
    let Model { n_embd: n_out, n_ff, types: [most, rest], .. } = model;
    let q = model.n_head * model.head_dim;
    let case = |(what, ty, n_in): (&str, WeightType, u32)| {
        let mut b = Buffers::default();
        let args = gemv_residual::Args {
            w: b.matrix(ty, n_out, n_in, random),
            x: b.input(&vector(n_in, random)),
            residual: b.input(&random.floats(n_out as usize)),
            out: b.output::<f32>(n_out, Compare::F32 { per: n_out as usize }),
            ggml_type: ty.ggml_id(),
            n_out,
            n_in,
            ring_bytes: gemv_residual::product(ty.ggml_id(), n_out, n_in, device).ring_bytes,
        };
        case!(b, Kernel::GemvResidual, format!("{} {what}, {ty}", model.name), args, device)
    };
    [("o", most, q), ("down", most, n_ff), ("down", rest, n_ff)].into_iter().map(case).collect()
}

fn head_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_embd: n_in, n_vocab, types: [_, ty], .. } = model;
    let mut b = Buffers::default();
    let args = head::Args {
        w: b.matrix(ty, n_vocab, n_in, random),
        x: b.input(&vector(n_in, random)),
        norm: b.input(&random.floats(n_in as usize)),
        logits: b.output::<f32>(n_vocab, Compare::F32 { per: n_vocab as usize }),
        best: b.input(&[0u32, 0]),
        arrivals: b.input(&[0u32]),
        token: b.output::<u32>(1, Compare::Exact),
        tokens: b.input(&[8191u32, 8191, 3]),
        step_count: b.input(&[8191u32]),
        ggml_type: ty.ggml_id(),
        n_vocab,
        n_in,
        ring_bytes: gemv_residual::product(ty.ggml_id(), n_vocab, n_in, device).ring_bytes,
        max_context_tokens: 8192,
        eps: 1e-5,
    };
    case!(b, Kernel::Head, format!("{}, {ty}", model.name), args, device)
}

fn gather_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let (n, n_tokens, rows) = (model.n_embd, 33, [32u32, 7, u32::MAX]);
    let mut b = Buffers::default();
    let args = gather_rows::Args {
        x: b.input(&random.floats((n_tokens * n) as usize)),
        rows: b.input(&rows),
        y: b.output::<f32>(3 * n, Compare::Exact),
        n_tokens,
        n_rows: 3,
        n,
    };
    case!(b, Kernel::GatherRows, model.name.into(), args, device)
}

fn argmax_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let n_vocab = model.n_vocab;
    let mut b = Buffers::default();
    let args = argmax::Args {
        logits: b.input(&random.floats(n_vocab as usize)),
        outputs: b.input(&[0u32]),
        best: b.input(&[0u32, 0]),
        arrivals: b.input(&[0u32]),
        token: b.input(&[0u32]),
        tokens: b.input(&[8191u32, 8191, 3]),
        step_count: b.input(&[8191u32]),
        n_vocab,
        n_tokens: 1,
        n_outputs: 1,
        max_context_tokens: 8192,
    };
    case!(b, Kernel::Argmax, model.name.into(), args, device)
}

fn sample_cases(model: Model, device: &DeviceProfile, random: &mut Random) -> Vec<Case> {
    let n_vocab = model.n_vocab;
    let logits: Vec<f32> = random.floats(n_vocab as usize).iter().map(|x| x * 12.0).collect();
    let packs =
        [(0.8, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0), (1.3, 100, 0.9, 0.0), (0.0, 0, 1.0, 0.0)];
    let case = |(temperature, top_k, top_p, min_p)| {
        let (seed_low, seed_high) = (random.bits() as u32, random.bits() as u32);
        let pack = SamplingPack { temperature, top_k, top_p, min_p, seed_low, seed_high };
        let mut b = Buffers::default();
        let args = sample::Args {
            logits: b.input(&logits),
            outputs: b.input(&[0u32]),
            sampling: b.input(&[pack]),
            tokens: b.input(&[random.below(8192), 0, 0]),
            step_count: b.input(&[0u32]),
            token: b.input(&[0u32]),
            n_vocab,
            n_tokens: 1,
            n_outputs: 1,
            max_context_tokens: 8192,
        };
        case!(b, Kernel::Sample, format!("{n_vocab}, {pack:?}"), args, device)
    };
    packs.into_iter().map(case).collect()
}
