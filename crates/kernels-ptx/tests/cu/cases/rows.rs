//! Embedding, norms and quantisation.

use kernels_ptx::ops::{
    embed, gather_rows, quantize_q8, read_bandwidth, rms_norm, rms_norm_add, rms_norm_q8,
};
use kernels_ptx::{DeviceProfile, Kernel};
use q4k_soa::{Q8Group, WeightType};

use super::data::tokens_of;
use super::{Buf, Builder, Case, Compare, Random, SMALL};

pub(crate) fn embed(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        let widths: &[u32] = match ty.block_elems() {
            1 => &[1, 33, 80, 1100],
            32 => &[32, 96, 1088],
            _ => &[256, 1280],
        };
        for &n_embd in widths {
            let (n_vocab, n_tokens) = (5, 3);
            let mut b = Builder::default();
            let ids = [random.below(n_vocab), n_vocab - 1, u32::MAX];
            let args = embed::Args {
                table: b.matrix(ty, n_vocab, n_embd, random),
                tokens: b.input(&ids.map(|id| tokens_of(7, 7, id))),
                x: b.output::<f32>(n_tokens * n_embd, Compare::F32 { per: 1 }),
                ggml_type: ty.ggml_id(),
                n_tokens,
                n_vocab,
                n_embd,
                scale: 1.5,
            };
            let kernel = Kernel::Embed;
            let geometry = args.geometry(&DeviceProfile::A2000);
            cases.push(b.case(
                kernel,
                format!("{ty} × {n_embd}"),
                args.list(kernel, Buf::len_bytes),
                geometry,
            ));
        }
    }
    cases
}

pub(crate) fn gather_rows(random: &mut Random) -> Vec<Case> {
    let case = |(n_tokens, n): (u32, u32)| {
        let mut b = Builder::default();
        let rows = [n_tokens - 1, 0, u32::MAX, 0];
        let args = gather_rows::Args {
            x: b.input(&random.floats((n_tokens * n) as usize)),
            rows: b.input(&rows),
            y: b.output::<f32>(rows.len() as u32 * n, Compare::Exact),
            n_tokens,
            n_rows: rows.len() as u32,
            n,
        };
        let (kernel, geometry) = (Kernel::GatherRows, args.geometry(&DeviceProfile::A2000));
        b.case(kernel, format!("{n_tokens} × {n}"), args.list(kernel, Buf::len_bytes), geometry)
    };
    [(1, 1), (3, 7), (2, 256), (5, 4100)].into_iter().map(case).collect()
}

pub(crate) fn rms_norm(random: &mut Random) -> Vec<Case> {
    let shapes = [(1, 1), (2, 7), (1, 32), (3, 80), (1, 256), (2, 1001), (1, 4100), (2, 5120)];
    let case = |(n_tokens, n): (u32, u32)| {
        let mut b = Builder::default();
        let args = rms_norm::Args {
            x: b.input(&random.floats((n_tokens * n) as usize)),
            weight: b.input(&random.floats(n as usize)),
            y: b.output::<f32>(n_tokens * n, Compare::F32 { per: 1 }),
            n_tokens,
            n,
            eps: 1e-2,
        };
        let kernel = Kernel::RmsNorm;
        let geometry = args.geometry(&DeviceProfile::A2000);
        b.case(kernel, format!("{n_tokens} × {n}"), args.list(kernel, Buf::len_bytes), geometry)
    };
    shapes.into_iter().map(case).collect()
}

pub(crate) fn rms_norm_add(random: &mut Random) -> Vec<Case> {
    let shapes = [(1, 1), (2, 7), (1, 32), (3, 80), (1, 256), (2, 1001), (1, 4100), (2, 5120)];
    let case = |(n_tokens, n): (u32, u32)| {
        let mut b = Builder::default();
        let args = rms_norm_add::Args {
            x: b.input(&random.floats((n_tokens * n) as usize)),
            weight: b.input(&random.floats(n as usize)),
            residual: b.input(&random.floats((n_tokens * n) as usize)),
            y: b.output::<f32>(n_tokens * n, Compare::F32 { per: n as usize }),
            n_tokens,
            n,
            eps: 1e-2,
        };
        let kernel = Kernel::RmsNormAdd;
        let geometry = args.geometry(&DeviceProfile::A2000);
        b.case(kernel, format!("{n_tokens} × {n}"), args.list(kernel, Buf::len_bytes), geometry)
    };
    shapes.into_iter().map(case).collect()
}

/// Groups of all kinds, not only ordinary ones: none, hardly any, not a number, half ties.
fn activations(n: usize, special: bool, random: &mut Random) -> Vec<f32> {
    let mut x = random.floats(n);
    for (index, group) in x.chunks_exact_mut(32).enumerate() {
        match if special { index % 8 } else { 7 } {
            0 => group.fill(0.0),
            1 => group.iter_mut().for_each(|x| *x *= 1e-36),
            2 => group[random.below(32) as usize] = f32::NAN,
            3 => group[random.below(32) as usize] = f32::NEG_INFINITY,
            4 => group.iter_mut().for_each(|x| *x *= 1e30),
            5 => {
                group.iter_mut().for_each(|x| *x = (*x * 100.0).round() + 0.5);
                group[random.below(32) as usize] = -127.0;
            }
            _ => {}
        }
    }
    x
}

const Q8_SHAPES: [(u32, u32); 6] = [(1, 32), (3, 96), (2, 256), (1, 1056), (1, 4128), (2, 5120)];

pub(crate) fn rms_norm_q8(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for (n_tokens, n) in Q8_SHAPES {
        let mut b = Builder::default();
        // With a NaN in a row every scale of it is NaN; the twin's rows have none here.
        let mut x = activations((n_tokens * n) as usize, true, random);
        x.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.5);
        let args = rms_norm_q8::Args {
            x: b.input(&x.iter().map(|x| x.clamp(-1e9, 1e9)).collect::<Vec<_>>()),
            weight: b.input(&random.floats(n as usize)),
            quants: b.output::<i8>(n_tokens * n, Compare::Exact),
            groups: b.output::<Q8Group>(n_tokens * n / 32, Compare::F32 { per: 1 }),
            n_tokens,
            n,
            eps: 1e-2,
        };
        let kernel = Kernel::RmsNormQ8;
        let geometry = args.geometry(&DeviceProfile::A2000);
        cases.push(b.case(
            kernel,
            format!("{n_tokens} × {n}"),
            args.list(kernel, Buf::len_bytes),
            geometry,
        ));
    }
    cases
}

pub(crate) fn quantize_q8(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for (n_tokens, n) in Q8_SHAPES {
        let mut b = Builder::default();
        let args = quantize_q8::Args {
            x: b.input(&activations((n_tokens * n) as usize, true, random)),
            quants: b.output::<i8>(n_tokens * n, Compare::Exact),
            groups: b.output::<Q8Group>(n_tokens * n / 32, Compare::F32 { per: 1 }),
            n_tokens,
            n,
        };
        let kernel = Kernel::QuantizeQ8;
        let geometry = args.geometry(&DeviceProfile::A2000);
        cases.push(b.case(
            kernel,
            format!("{n_tokens} × {n}"),
            args.list(kernel, Buf::len_bytes),
            geometry,
        ));
    }
    cases
}

pub(crate) fn read_bandwidth(random: &mut Random) -> Vec<Case> {
    let one = |(n_quads, device): (u32, DeviceProfile)| {
        let mut b = Builder::default();
        let n_blocks = read_bandwidth::blocks(n_quads, &device);
        let words: Vec<u32> = (0..n_quads * 4).map(|_| random.bits() as u32).collect();
        let args = read_bandwidth::Args {
            data: b.input(&words),
            out: b.output::<u32>(n_blocks, Compare::Exact),
            n_quads,
            n_blocks,
        };
        let kernel = Kernel::ReadBandwidth;
        let geometry = args.geometry(&device);
        b.case(kernel, format!("{n_quads} quads"), args.list(kernel, Buf::len_bytes), geometry)
    };
    let small = [1, 255, 1000, 1024, 1025, 8193, 9000].map(|n_quads| (n_quads, SMALL));
    small.into_iter().chain([(5000, DeviceProfile::A2000)]).map(one).collect()
}
