//! Matrix × vector.

use kernels_ptx::Kernel;
use kernels_ptx::ops::{gemv_f32, gemv_q8};
use q4k_soa::{Q8Group, WeightType};

use super::{Buf, Builder, Case, Compare, Random, SMALL};

/// Types and rows of up to three matrices, and the rest of a launch.
struct Shape {
    parts: [Option<(WeightType, u32)>; 3],
    n_in: u32,
    n_tokens: u32,
    bias: bool,
}

impl Shape {
    fn label(&self) -> String {
        let parts: Vec<String> =
            self.parts.iter().flatten().map(|(ty, n_out)| format!("{ty} {n_out}")).collect();
        let bias = if self.bias { " + bias" } else { "" };
        format!("[{}] × {}{bias}, {} tokens", parts.join(", "), self.n_in, self.n_tokens)
    }

    fn n_out(&self, part: usize) -> u32 {
        self.parts[part].map_or(0, |(_, n_out)| n_out)
    }

    fn ggml_type(&self, part: usize) -> u32 {
        self.parts[part].map_or(0, |(ty, _)| ty.ggml_id())
    }

    fn total(&self) -> u32 {
        (0..3).map(|part| self.n_out(part)).sum()
    }

    fn matrix(&self, part: usize, b: &mut Builder, random: &mut Random) -> Option<Buf> {
        self.parts[part].map(|(ty, n_out)| b.matrix(ty, n_out, self.n_in, random))
    }
}

/// Every type at one block and at more groups than one turn of a warp takes, every type beside
/// others, rows beyond one turn of the grid.
fn shapes(swiglu: bool) -> Vec<Shape> {
    use WeightType::{F16, F32, Q4_1, Q4K, Q6K, Q8_0};
    let second = |ty, n_out| swiglu.then_some((ty, n_out));
    let mut shapes = Vec::new();
    for ty in WeightType::ALL {
        let block = ty.block_elems().max(32);
        // Of many elements many rows: the largest of two sums may be small by chance.
        for (n_in, n_out) in [(block, 3), (block * 5, 7), (4096 + 256, 18)] {
            let parts = [Some((ty, n_out)), second(ty, n_out), None];
            shapes.push(Shape { parts, n_in, n_tokens: 1, bias: n_out == 7 });
        }
    }
    let parts = [Some((Q8_0, 130)), second(Q4_1, 130), None];
    shapes.push(Shape { parts, n_in: 64, n_tokens: 2, bias: true });
    if !swiglu {
        let three = [Some((Q4K, 5)), Some((Q6K, 3)), Some((Q8_0, 70))];
        shapes.push(Shape { parts: three, n_in: 512, n_tokens: 3, bias: true });
        let gap = [Some((F16, 4)), None, Some((F32, 2))];
        shapes.push(Shape { parts: gap, n_in: 96, n_tokens: 1, bias: false });
    }
    shapes
}

pub(crate) fn q8(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let swiglu = matches!(kernel, Kernel::GemvQ8Swiglu | Kernel::GemvQ8Geglu);
    let case = |shape: Shape| {
        let (n_in, n_tokens) = (shape.n_in, shape.n_tokens);
        let n_rows = if swiglu { shape.n_out(0) } else { shape.total() };
        let mut b = Builder::default();
        let quants: Vec<i8> = (0..n_tokens * n_in).map(|_| random.bits() as i8).collect();
        let groups: Vec<Q8Group> = quants
            .chunks_exact(32)
            .map(|quants| {
                let scale = random.float() * 0.005 / (n_in as f32).sqrt();
                let sum: i32 = quants.iter().map(|&q| i32::from(q)).sum();
                Q8Group { scale, scaled_sum: scale * sum as f32 }
            })
            .collect();
        let bias = random.floats(shape.total() as usize);
        let adds = kernel == Kernel::GemvQ8Add;
        let args = gemv_q8::Args {
            w0: shape.matrix(0, &mut b, random).expect("always"),
            w1: shape.matrix(1, &mut b, random),
            w2: shape.matrix(2, &mut b, random),
            quants: b.input(&quants),
            groups: b.input(&groups),
            bias: shape.bias.then(|| b.input(&bias)),
            residual: adds.then(|| b.input(&random.floats((n_tokens * n_rows) as usize))),
            out: b.output::<f32>(n_tokens * n_rows, Compare::F32 { per: n_rows as usize }),
            type0: shape.ggml_type(0),
            type1: shape.ggml_type(1),
            type2: shape.ggml_type(2),
            n_out0: shape.n_out(0),
            n_out1: shape.n_out(1),
            n_out2: shape.n_out(2),
            n_rows,
            n_in,
            n_tokens,
        };
        b.case(kernel, shape.label(), args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    shapes(swiglu).into_iter().map(case).collect()
}

pub(crate) fn f32(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let swiglu = matches!(kernel, Kernel::GemvF32Swiglu | Kernel::GemvF32Geglu);
    let mut shapes = shapes(swiglu);
    // Rows of floats need not be whole groups.
    for (ty, n_in) in [(WeightType::F32, 7), (WeightType::F16, 81), (WeightType::Bf16, 1)] {
        let parts = [Some((ty, 3)), swiglu.then_some((ty, 3)), None];
        shapes.push(Shape { parts, n_in, n_tokens: 2, bias: false });
    }
    let case = |shape: Shape| {
        let (n_in, n_tokens) = (shape.n_in, shape.n_tokens);
        let n_rows = if swiglu { shape.n_out(0) } else { shape.total() };
        let mut b = Builder::default();
        // Results of the size of 1: beyond, SwiGLU makes much of little differences.
        let scale = 0.5 / (n_in as f32).sqrt();
        let x: Vec<f32> =
            random.floats((n_tokens * n_in) as usize).iter().map(|x| x * scale).collect();
        let bias = random.floats(shape.total() as usize);
        let adds = kernel == Kernel::GemvF32Add;
        let args = gemv_f32::Args {
            w0: shape.matrix(0, &mut b, random).expect("always"),
            w1: shape.matrix(1, &mut b, random),
            w2: shape.matrix(2, &mut b, random),
            x: b.input(&x),
            bias: shape.bias.then(|| b.input(&bias)),
            residual: adds.then(|| b.input(&random.floats((n_tokens * n_rows) as usize))),
            out: b.output::<f32>(n_tokens * n_rows, Compare::F32 { per: n_rows as usize }),
            type0: shape.ggml_type(0),
            type1: shape.ggml_type(1),
            type2: shape.ggml_type(2),
            n_out0: shape.n_out(0),
            n_out1: shape.n_out(1),
            n_out2: shape.n_out(2),
            n_rows,
            n_in,
            n_tokens,
        };
        b.case(kernel, shape.label(), args.list(kernel, Buf::len_bytes), args.geometry(&SMALL))
    };
    shapes.into_iter().map(case).collect()
}
