//! Matrix products on tensor cores, and the f16 that they read.

use half::f16;
use kernels_ptx::ops::{GemmForm, HalfOrder, gemm_skinny, gemm_tiled, half_bytes, rms_norm_f16};
use kernels_ptx::{DeviceProfile, Kernel};
use q4k_soa::WeightType;

use super::{Buf, Builder, Case, Compare, Random, SMALL};

/// Types and rows of up to three matrices, and the rest of a launch.
#[derive(Clone, Copy)]
struct Shape {
    parts: [Option<(WeightType, u32)>; 3],
    n_in: u32,
    n_tokens: u32,
    bias: bool,
    form: GemmForm,
}

impl Shape {
    fn n_out(&self, part: usize) -> u32 {
        self.parts[part].map_or(0, |(_, n_out)| n_out)
    }

    fn ggml_type(&self, part: usize) -> u32 {
        self.parts[part].map_or(0, |(ty, _)| ty.ggml_id())
    }

    fn label(&self) -> String {
        let parts: Vec<String> =
            self.parts.iter().flatten().map(|(ty, n_out)| format!("{ty} {n_out}")).collect();
        let Self { n_in, n_tokens, bias, form, .. } = self;
        format!("{form:?} [{}] × {n_in}, {n_tokens} tokens, bias {bias}", parts.join(", "))
    }
}

/// Every type with every form, blocks of 128 columns that are not full, rows and tokens beyond one
/// tile and short of it, matrices of several types.
fn shapes(tokens: [u32; 3], rows: u32) -> Vec<Shape> {
    use GemmForm::{Add, Store, Swiglu};
    use WeightType::{F16, F32, Q4_1, Q4K, Q6K, Q8_0};
    let mut shapes = Vec::new();
    for (index, ty) in WeightType::ALL.into_iter().enumerate() {
        let block = ty.block_elems().max(32);
        for (i, form) in [Store, Add, Swiglu].into_iter().enumerate() {
            // Every second type has the other activation.
            let form = if form == Swiglu && index % 2 == 1 { GemmForm::Geglu } else { form };
            let second = (i == 2).then_some((ty, 5 + rows));
            let n_in = [block, block * 5, 512][(index + i) % 3];
            shapes.push(Shape {
                parts: [Some((ty, 5 + rows)), second, None],
                n_in,
                n_tokens: tokens[(index + i) % 3],
                bias: i == index % 3,
                form,
            });
        }
    }
    let three = [Some((Q4K, rows + 33)), Some((Q6K, 3)), Some((Q8_0, 40))];
    let gap = [Some((F16, 4)), None, Some((F32, 70))];
    let middle = [Some((Q4_1, rows + 9)), Some((Q8_0, rows + 9)), None];
    for (parts, n_in, form) in [(three, 768, Store), (gap, 96, Add), (middle, 160, Swiglu)] {
        shapes.push(Shape { parts, n_in, n_tokens: tokens[2], bias: true, form });
    }
    shapes
}

macro_rules! case {
    ($op:ident $(($tile_rows:ident))?, $kernel:expr, $shape:expr, $order:expr, $device:expr, $random:expr) => {{
        let (kernel, shape, random): (Kernel, Shape, &mut Random) = ($kernel, $shape, $random);
        let Shape { n_in, n_tokens, form, .. } = shape;
        let [n_out0, n_out1, n_out2] = [0, 1, 2].map(|part| shape.n_out(part));
        let n_rows = n_out0 + n_out1 + n_out2;
        let mut b = Builder::default();
        let mut w = [0, 1, 2]
            .map(|part| shape.parts[part].map(|(ty, n_out)| b.matrix(ty, n_out, n_in, random)));
        // Results of the size of 1; what is beyond rows and columns is there, and of no effect.
        let scale = 1.0 / (n_in as f32).sqrt();
        let x: Vec<f16> = (0..half_bytes($order, n_tokens, n_in) / 2)
            .map(|_| f16::from_f32(random.float() * scale * 4.0))
            .collect();
        let out = match form {
            GemmForm::Swiglu | GemmForm::Geglu => super::Memory {
                bytes: vec![0; half_bytes($order, n_tokens, n_out0) as usize],
                set: None,
                compare: Compare::Half,
            },
            _ => super::Memory {
                bytes: vec![0; (n_tokens * n_rows * 4) as usize],
                set: Some(Vec::new()),
                compare: Compare::Sums { per: n_rows as usize },
            },
        };
        let residual = random.floats((n_tokens * n_rows) as usize);
        let args = $op::Args {
            w0: w[0].take().expect("always"),
            w1: w[1],
            w2: w[2],
            x: b.input(&x),
            bias: shape.bias.then(|| b.input(&random.floats(n_rows as usize))),
            residual: (form == GemmForm::Add).then(|| b.input(&residual)),
            out: b.add(out),
            type0: shape.ggml_type(0),
            type1: shape.ggml_type(1),
            type2: shape.ggml_type(2),
            n_out0,
            n_out1,
            n_out2,
            n_in,
            n_tokens,
            form: form as u32,
            $($tile_rows,)?
            x_scale: 0.25,
        };
        let geometry = args.geometry($device);
        b.case(kernel, shape.label(), args.list(kernel, Buf::len_bytes), geometry)
    }};
}

pub(crate) fn skinny(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let tokens = if kernel == Kernel::GemmSkinny8 { [8, 1, 5] } else { [32, 9, 17] };
    let mut shapes = shapes(tokens, 0);
    // More columns than the warps take at once, more rows than a tile.
    shapes.push(Shape {
        n_in: 2304,
        parts: [Some((WeightType::Q4K, 70)), None, None],
        ..shapes[0]
    });
    shapes.push(Shape { n_in: 4352, ..shapes[shapes.len() - 4] });
    // Tiles of two matrices side by side.
    let pair = [Some((WeightType::Q4_0, 70)); 2];
    let form = GemmForm::Swiglu;
    shapes.push(Shape { parts: [pair[0], pair[1], None], n_in: 160, form, ..shapes[0] });
    let order = HalfOrder::Fragments;
    let mut cases = Vec::new();
    for shape in shapes {
        // Many warps side by side, and as many as there can be with the same rows.
        let large = DeviceProfile { sm_count: 100, compute_capability: 90, ..SMALL };
        for (tile_rows, device) in [(16, &SMALL), (24, &large)] {
            cases.push(case!(gemm_skinny(tile_rows), kernel, shape, order, device, random));
        }
    }
    cases
}

pub(crate) fn tiled(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let mut shapes = shapes([33, 1, 130], 0);
    let large = [Some((WeightType::Q4_0, 140)), None, None];
    shapes.push(Shape { parts: large, n_tokens: 140, ..shapes[0] });
    let order = HalfOrder::Rows;
    shapes
        .into_iter()
        .map(|shape| case!(gemm_tiled, kernel, shape, order, &SMALL, random))
        .collect()
}

pub(crate) fn rms_norm_f16(random: &mut Random) -> Vec<Case> {
    let shapes = [(1, 8), (2, 32), (8, 256), (9, 136), (32, 264), (3, 9000), (40, 128)];
    let mut cases = Vec::new();
    for (n_tokens, n) in shapes {
        for order in [HalfOrder::Rows, HalfOrder::Fragments] {
            if order == HalfOrder::Fragments && n_tokens > HalfOrder::MAX_FRAGMENT_ROWS {
                continue;
            }
            for normed in [true, false] {
                let mut b = Builder::default();
                let mut x = random.floats((n_tokens * n) as usize);
                if !normed {
                    (x[0], x[1], x[2]) = (1e9, -1e6, f32::NAN);
                }
                let args = rms_norm_f16::Args {
                    x: b.input(&x),
                    weight: normed.then(|| b.input(&random.floats(n as usize))),
                    y: b.add(super::Memory {
                        bytes: vec![0; half_bytes(order, n_tokens, n) as usize],
                        set: Some(Vec::new()),
                        compare: Compare::Half,
                    }),
                    n_tokens,
                    n,
                    order: order as u32,
                    eps: 1e-2,
                };
                let kernel = Kernel::RmsNormF16;
                let geometry = args.geometry(&DeviceProfile::A2000);
                let label = format!("{n_tokens} × {n}, {order:?}, normed {normed}");
                cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
            }
        }
    }
    cases
}
