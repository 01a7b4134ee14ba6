//! Kernels for steps of many rows: a part of each model's rows, all of its columns.

use half::f16;
use kernels_ptx::ops::{
    GemmForm, HalfOrder, attention_chunk, attention_rows, gemm_skinny, gemm_tiled, half_bytes,
    rms_norm_f16,
};
use kernels_ptx::{DeviceProfile, Kernel};

use super::cache::{BLOCK_SIZE, layout};
use super::{Buf, Buffers, Case, Compare, Memory, Model, Random};
use crate::cu::cases::kv::cache_contents;

/// The cases of a kernel, if it is for many rows.
pub(super) fn of(
    kernel: Kernel,
    model: Model,
    device: &DeviceProfile,
    random: &mut Random,
) -> Option<Vec<Case>> {
    Some(match kernel {
        Kernel::GemmSkinny8 => gemm_cases(kernel, 7, model, device, random),
        Kernel::GemmSkinny32 => gemm_cases(kernel, 27, model, device, random),
        Kernel::GemmTiled => gemm_cases(kernel, 140, model, device, random),
        Kernel::RmsNormF16 => vec![norm_case(model, device, random)],
        Kernel::AttentionRows => vec![rows_case(model, device, random)],
        Kernel::AttentionChunk64 | Kernel::AttentionChunk128 | Kernel::AttentionChunk256 => {
            // Heads of other models may have other sizes.
            let fits = attention_chunk::kernel_for(model.head_dim) == Some(kernel);
            let head_dim = if fits { model.head_dim } else { 256 };
            let kernel = attention_chunk::kernel_for(head_dim).expect("an eight");
            vec![chunk_case(kernel, Model { head_dim, ..model }, device, random)]
        }
        _ => return None,
    })
}

fn gemm_cases(
    kernel: Kernel,
    n_tokens: u32,
    model: Model,
    device: &DeviceProfile,
    random: &mut Random,
) -> Vec<Case> {
    let Model { n_embd, n_ff, types: [most, rest], .. } = model;
    let products = [
        (GemmForm::Store, [(most, 200), (most, 72), (rest, 72)], n_embd),
        (GemmForm::Add, [(rest, 256), (rest, 0), (rest, 0)], n_ff),
        (GemmForm::Swiglu, [(most, 192), (most, 192), (rest, 0)], n_embd),
    ];
    let mut cases = Vec::new();
    for (form, parts, n_in) in products {
        let order = match kernel {
            Kernel::GemmTiled => HalfOrder::Rows,
            _ => HalfOrder::Fragments,
        };
        let mut b = Buffers::default();
        let [n_out0, n_out1, n_out2] = parts.map(|(_, n_out)| n_out);
        let n_rows = n_out0 + n_out1 + n_out2;
        let mut w = parts.map(|(ty, n_out)| (n_out > 0).then(|| b.matrix(ty, n_out, n_in, random)));
        let scale = 1.0 / (n_in as f32).sqrt();
        let x: Vec<f16> = (0..half_bytes(order, n_tokens, n_in) / 2)
            .map(|_| f16::from_f32(random.float() * scale))
            .collect();
        let (len, compare) = match form {
            GemmForm::Swiglu => {
                let compare = Compare::Weighted { per: n_out0 as usize };
                (half_bytes(order, n_tokens, n_out0), compare)
            }
            _ => (u64::from(n_tokens * n_rows) * 4, Compare::Sums { per: n_rows as usize }),
        };
        let residual = random.floats((n_tokens * n_rows) as usize);
        let n_out = [n_out0, n_out1, n_out2];
        let tile_rows = gemm_skinny::tile_rows(n_out, n_in, n_tokens, form, device);
        macro_rules! gemm {
            ($op:ident $(, $tile_rows:ident)?) => {{
                let args = $op::Args {
                    w0: w[0].take().expect("always"),
                    w1: w[1],
                    w2: w[2],
                    x: b.input(&x),
                    bias: model.bias.then(|| b.input(&random.floats(n_rows as usize))),
                    residual: (form == GemmForm::Add).then(|| b.input(&residual)),
                    out: b.memory(Memory { bytes: vec![0; len as usize], set: None, compare }),
                    type0: parts[0].0.ggml_id(),
                    type1: parts[1].0.ggml_id(),
                    type2: parts[2].0.ggml_id(),
                    n_out0,
                    n_out1,
                    n_out2,
                    n_in,
                    n_tokens,
                    form: form as u32,
                    $($tile_rows,)?
                    x_scale: 1.0,
                };
                case!(b, kernel, format!("{}, {form:?} × {n_in}", model.name), args, device)
            }};
        }
        cases.push(match kernel {
            Kernel::GemmTiled => gemm!(gemm_tiled),
            _ => gemm!(gemm_skinny, tile_rows),
        });
    }
    cases
}

fn norm_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let (n, n_tokens, order) = (model.n_embd, 32, HalfOrder::Fragments);
    let mut b = Buffers::default();
    let args = rms_norm_f16::Args {
        x: b.input(&random.floats((n_tokens * n) as usize)),
        weight: Some(b.input(&random.floats(n as usize))),
        y: b.memory(Memory {
            bytes: vec![0; half_bytes(order, n_tokens, n) as usize],
            set: None,
            compare: Compare::Half,
        }),
        n_tokens,
        n,
        order: order as u32,
        eps: 1e-5,
    };
    case!(b, Kernel::RmsNormF16, model.name.into(), args, device)
}

/// Two sequences of some hundred tokens.
const LOGICAL: u32 = 48;

fn rows_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_head, n_kv_head, head_dim, .. } = model;
    let positions = [700u32, 3, 64, 511, 63];
    let n_tokens = positions.len() as u32;
    let (n_blocks, n_segments, order) = (2 * LOGICAL, 3, HalfOrder::Fragments);
    let tokens: Vec<u32> = positions.iter().flat_map(|p| [*p, *p, 0]).collect();
    let record = 2 + head_dim;
    let kv = cache_contents(&layout(Kernel::AttentionRows, model, n_blocks), random);
    let partials = random.floats((n_tokens * n_head * n_segments * record) as usize);
    let mut b = Buffers::default();
    let args = attention_rows::Args {
        q: b.input(&random.floats((n_tokens * n_head * head_dim) as usize)),
        kv: b.memory(Memory { bytes: kv, set: None, compare: Compare::Exact }),
        sequences: b.input(&[0u32, 1, 1, 0, 0]),
        block_table: b.input(&random.shuffled(n_blocks)),
        tokens: b.input(&tokens),
        partials: b.memory(Memory {
            bytes: bytemuck::cast_slice(&partials).to_vec(),
            set: None,
            compare: Compare::F32 { per: record as usize },
        }),
        arrivals: b.input(&vec![0u32; (n_tokens * n_kv_head) as usize]),
        out: b.memory(Memory {
            bytes: vec![0; half_bytes(order, n_tokens, n_head * head_dim) as usize],
            set: None,
            compare: Compare::Rounded { per: head_dim as usize },
        }),
        n_tokens,
        n_head,
        n_kv_head,
        head_dim,
        block_size: BLOCK_SIZE,
        n_blocks,
        n_sequences: 2,
        table_stride: LOGICAL,
        n_logical: LOGICAL,
        max_context_tokens: LOGICAL * BLOCK_SIZE,
        n_segments,
        segment_min: DeviceProfile::SEGMENT_MIN,
        window: 0,
        order: order as u32,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    case!(b, Kernel::AttentionRows, model.name.into(), args, device)
}

fn chunk_case(kernel: Kernel, model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_head, n_kv_head, head_dim, .. } = model;
    let (n_tokens, first, n_blocks, order) = (128, 500, 2 * LOGICAL, HalfOrder::Rows);
    let tokens: Vec<u32> = (first..first + n_tokens).flat_map(|p| [p, p, 0]).collect();
    let kv = cache_contents(&layout(kernel, model, n_blocks), random);
    let mut b = Buffers::default();
    let args = attention_chunk::Args {
        q: b.input(&random.floats((n_tokens * n_head * head_dim) as usize)),
        kv: b.memory(Memory { bytes: kv, set: None, compare: Compare::Exact }),
        sequences: b.input(&vec![1u32; n_tokens as usize]),
        block_table: b.input(&random.shuffled(n_blocks)),
        tokens: b.input(&tokens),
        out: b.memory(Memory {
            bytes: vec![0; half_bytes(order, n_tokens, n_head * head_dim) as usize],
            set: None,
            compare: Compare::Weighted { per: head_dim as usize },
        }),
        n_tokens,
        run_tokens: n_tokens,
        n_head,
        n_kv_head,
        head_dim,
        block_size: BLOCK_SIZE,
        n_blocks,
        n_sequences: 2,
        table_stride: LOGICAL,
        n_logical: LOGICAL,
        window: 0,
        order: order as u32,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    case!(b, kernel, model.name.into(), args, device)
}
