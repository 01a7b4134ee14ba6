//! Matrix × one vector, with what comes before and behind it in the same kernel.

use kernels_ptx::Kernel;
use kernels_ptx::ops::{gemv_norm, gemv_norm_swiglu, gemv_residual, head};
use q4k_soa::WeightType::{self, Q4_1, Q4K, Q6K, Q8_0};

use super::vocab::places;
use super::{Buf, Builder, Case, Compare, Random, SMALL};

/// Activations that make results of the size of 1.
fn vector(n_in: u32, random: &mut Random) -> Vec<f32> {
    let scale = 1.0 / (n_in as f32).sqrt();
    random.floats(n_in as usize).iter().map(|x| x * scale).collect()
}

fn grouped() -> impl Iterator<Item = WeightType> {
    WeightType::ALL.into_iter().filter(|&ty| kernels_ptx::ops::is_grouped(ty))
}

/// Every type at one block, with groups that do not go round the lanes, and with more stages than are
/// on their way at a time; then rows of several pieces, the last of which is short.
fn shapes() -> Vec<(WeightType, u32, u32)> {
    let mut shapes = Vec::new();
    for ty in grouped() {
        let block = ty.block_elems();
        shapes.extend([
            (ty, block, 3),
            (ty, 1024 + 256, 29),
            (ty, 2048, 121),
            (ty, block * 3, 250),
        ]);
    }
    shapes.extend([(Q4K, 13 * 1024 + 512, 5), (Q6K, 25 * 1024, 3), (Q8_0, 12 * 1024 + 32, 9)]);
    shapes
}

/// Type and rows of up to three matrices.
type Parts = [Option<(WeightType, u32)>; 3];

pub(crate) fn gemv_norm(random: &mut Random) -> Vec<Case> {
    let mut matrices: Vec<(Parts, u32, bool)> = shapes()
        .into_iter()
        .map(|(ty, n_in, n_out)| ([Some((ty, n_out)), None, None], n_in, n_out == 29))
        .collect();
    let three = [Some((Q4K, 50)), Some((Q4K, 9)), Some((Q6K, 30))];
    matrices.push((three, 768, true));
    matrices.push(([Some((Q8_0, 4)), None, Some((Q4_1, 77))], 96, false));
    matrices.push(([Some((Q6K, 1)), Some((Q4K, 1)), Some((Q8_0, 1))], 256, true));
    let kernel = Kernel::GemvNorm;
    let case = |(parts, n_in, biased): (Parts, u32, bool)| {
        let mut b = Builder::default();
        let mut matrix = |part: Option<(WeightType, u32)>| {
            part.map(|(ty, rows)| b.matrix(ty, rows, n_in, random))
        };
        let [w0, w1, w2] = parts.map(&mut matrix);
        let types = parts.map(|part| part.map_or(0, |(ty, _)| ty.ggml_id()));
        let rows = parts.map(|part| part.map_or(0, |(_, rows)| rows));
        let total: u32 = rows.iter().sum();
        let numbered = [0, 1, 2].map(|i| (types[i], rows[i]));
        let blocks = gemv_norm::blocks(numbered, n_in, &SMALL);
        let [blocks0, blocks1, blocks2] = blocks;
        let args = gemv_norm::Args {
            w0: w0.expect("always"),
            w1,
            w2,
            x: b.input(&vector(n_in, random)),
            norm: b.input(&random.floats(n_in as usize)),
            bias: biased.then(|| b.input(&random.floats(total as usize))),
            out: b.output::<f32>(total, Compare::F32 { per: total as usize }),
            type0: types[0],
            type1: types[1],
            type2: types[2],
            n_out0: rows[0],
            n_out1: rows[1],
            n_out2: rows[2],
            blocks0,
            blocks1,
            blocks2,
            n_in,
            ring_bytes: gemv_norm::product(numbered, blocks, n_in, &SMALL).ring_bytes,
            eps: 1e-4,
        };
        let label = format!("{parts:?} × {n_in}, bias {biased}");
        b.case(kernel, label, args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    matrices.into_iter().map(case).collect()
}

pub(crate) fn gemv_norm_swiglu(random: &mut Random) -> Vec<Case> {
    let kernel = Kernel::GemvNormSwiglu;
    let case = |(ty, n_in, n_out): (WeightType, u32, u32)| {
        let mut b = Builder::default();
        // Results of the size of 1: beyond, SwiGLU makes much of little differences.
        let norm: Vec<f32> = vector(n_in, random);
        let args = gemv_norm_swiglu::Args {
            gate: b.matrix(ty, n_out, n_in, random),
            up: b.matrix(ty, n_out, n_in, random),
            x: b.input(&vector(n_in, random)),
            norm: b.input(&norm),
            out: b.output::<f32>(n_out, Compare::F32 { per: n_out as usize }),
            ggml_type: ty.ggml_id(),
            n_out,
            n_in,
            ring_bytes: gemv_norm_swiglu::product(ty.ggml_id(), n_out, n_in, &SMALL).ring_bytes,
            eps: 1e-4,
        };
        let label = format!("{ty} {n_out} × {n_in}");
        b.case(kernel, label, args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    shapes().into_iter().map(case).collect()
}

pub(crate) fn gemv_residual(random: &mut Random) -> Vec<Case> {
    let kernel = Kernel::GemvResidual;
    let case = |(ty, n_in, n_out): (WeightType, u32, u32)| {
        let mut b = Builder::default();
        let args = gemv_residual::Args {
            w: b.matrix(ty, n_out, n_in, random),
            x: b.input(&vector(n_in, random)),
            residual: b.input(&random.floats(n_out as usize)),
            out: b.output::<f32>(n_out, Compare::F32 { per: n_out as usize }),
            ggml_type: ty.ggml_id(),
            n_out,
            n_in,
            ring_bytes: gemv_residual::product(ty.ggml_id(), n_out, n_in, &SMALL).ring_bytes,
        };
        let label = format!("{ty} {n_out} × {n_in}");
        b.case(kernel, label, args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    shapes().into_iter().map(case).collect()
}

pub(crate) fn head(random: &mut Random) -> Vec<Case> {
    let kernel = Kernel::Head;
    let mut places = places().into_iter().cycle();
    let case = |(ty, n_in, n_vocab): (WeightType, u32, u32)| {
        let (tokens, max_context_tokens, steps) = places.next().expect("endless");
        let mut b = Builder::default();
        let args = head::Args {
            w: b.matrix(ty, n_vocab, n_in, random),
            x: b.input(&vector(n_in, random)),
            norm: b.input(&random.floats(n_in as usize)),
            logits: b.output::<f32>(n_vocab, Compare::F32 { per: n_vocab as usize }),
            best: b.input(&[0u32, 0]),
            arrivals: b.input(&[0u32]),
            token: b.output::<u32>(1, Compare::Exact),
            tokens: b.input(&tokens),
            step_count: b.input(&[steps]),
            ggml_type: ty.ggml_id(),
            n_vocab,
            n_in,
            ring_bytes: gemv_residual::product(ty.ggml_id(), n_vocab, n_in, &SMALL).ring_bytes,
            max_context_tokens,
            eps: 1e-4,
        };
        let label = format!("{ty} {n_vocab} × {n_in}");
        b.case(kernel, label, args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    shapes().into_iter().map(case).collect()
}
