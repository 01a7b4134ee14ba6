//! Every kernel against its twin, each buffer in an allocation of its own.

use kernels_ptx::{Access, Arg, Kernel, ParamKind, Slice, TwinArgs};

use crate::cases::{self, Buf, Case, Compare, Memory, check_q8_cache};
use crate::compile;
use crate::launch::{HostArg, Library, Storage};

/// One kernel's cases; the seed is printed with a failure and can be set to see it again.
fn check(kernel: Kernel) {
    let Some(compiler) = compile::compiler(kernel.name()) else { return };
    let library = LIBRARY.get_or_init(|| {
        let path = compiler.library().unwrap_or_else(|error| panic!("{error}"));
        Library::open(&path).unwrap_or_else(|error| panic!("{error}"))
    });
    let seed = cases::seed();
    let cases = cases::of(kernel, seed);
    assert!(!cases.is_empty());
    for case in cases {
        for order in 0..2 {
            if let Err(error) = run(&case, library, seed + order, true) {
                panic!("{}, KERNELS_SEED={seed}: {error}", case.label);
            }
        }
    }
}

static LIBRARY: std::sync::OnceLock<Library> = std::sync::OnceLock::new();

macro_rules! tests {
    ($($name:ident: $kernel:ident,)*) => {
        $( #[test] fn $name() { check(Kernel::$kernel); } )*

        #[test]
        fn every_kernel_has_a_test() {
            let tested = [$(Kernel::$kernel),*];
            // The persistent step needs the hardware.
            let mut all = Kernel::ALL.iter().filter(|kernel| **kernel != Kernel::Persistent);
            assert!(all.all(|kernel| tested.contains(kernel)));
        }
    };
}

tests! {
    embed: Embed,
    gather_rows: GatherRows,
    rms_norm: RmsNorm,
    rms_norm_add: RmsNormAdd,
    rms_norm_q8: RmsNormQ8,
    rms_norm_f16: RmsNormF16,
    gemm_skinny_8: GemmSkinny8,
    gemm_skinny_32: GemmSkinny32,
    gemm_tiled: GemmTiled,
    quantize_q8: QuantizeQ8,
    gemv_q8_store: GemvQ8Store,
    gemv_q8_add: GemvQ8Add,
    gemv_q8_swiglu: GemvQ8Swiglu,
    gemv_q8_geglu: GemvQ8Geglu,
    gemv_norm: GemvNorm,
    gemv_norm_swiglu: GemvNormSwiglu,
    gemv_residual: GemvResidual,
    gemv_f32_store: GemvF32Store,
    gemv_f32_add: GemvF32Add,
    gemv_f32_swiglu: GemvF32Swiglu,
    gemv_f32_geglu: GemvF32Geglu,
    rope_append_f32: RopeAppendF32,
    rope_append_f16: RopeAppendF16,
    rope_append_q8: RopeAppendQ8,
    attention_f32: AttentionF32,
    attention_f16: AttentionF16,
    attention_q8: AttentionQ8,
    attention_chunk_64: AttentionChunk64,
    attention_chunk_128: AttentionChunk128,
    attention_chunk_256: AttentionChunk256,
    attention_rows: AttentionRows,
    attention_combine: AttentionCombine,
    attention_step_f32: AttentionStepF32,
    attention_step_f16: AttentionStepF16,
    argmax: Argmax,
    head: Head,
    sample: Sample,
    read_bandwidth: ReadBandwidth,
}

fn access_of(kernel: Kernel, param: usize) -> Access {
    match kernel.params()[param].kind {
        ParamKind::Buffer { access, .. } => access,
        ParamKind::Scalar(_) => unreachable!("a scalar has no access"),
    }
}

/// What an output holds before: written over, or seen.
const POISON: u8 = 0xff;

fn storage(memory: &Memory, access: Access) -> Storage {
    match access {
        Access::Write => Storage::new(&vec![POISON; memory.bytes.len()]),
        Access::Read | Access::Update => Storage::new(&memory.bytes),
    }
}

/// Runs kernel and twin on the same arguments and compares.
pub(crate) fn run(case: &Case, library: &Library, order: u64, locate: bool) -> Result<(), String> {
    let kernel = case.kernel;
    let buffers: Vec<(usize, Buf, Access)> = case
        .args
        .iter()
        .enumerate()
        .filter_map(|(param, arg)| match arg {
            Arg::Buffer(buf) => Some((param, *buf, access_of(kernel, param))),
            _ => None,
        })
        .collect();
    let stores = || -> Vec<Storage> {
        buffers.iter().map(|(_, buf, access)| storage(&case.memory[buf.id], *access)).collect()
    };

    let mut found = stores();
    let mut initialised: Vec<Vec<u8>> = buffers
        .iter()
        .map(|(_, buf, access)| match access {
            Access::Write => vec![0; case.memory[buf.id].bytes.len()],
            Access::Read | Access::Update => case.memory[buf.id].initialised(),
        })
        .collect();
    {
        let mut stores = found.iter_mut().zip(&mut initialised).zip(&buffers);
        let mut args: Vec<HostArg<'_>> = case
            .args
            .iter()
            .map(|arg| match arg {
                Arg::U32(value) => HostArg::Scalar(*value),
                Arg::F32(value) => HostArg::Scalar(value.to_bits()),
                Arg::Null => HostArg::Null,
                Arg::Buffer(_) => {
                    let ((store, initialised), (param, _, access)) =
                        stores.next().expect("one per buffer");
                    HostArg::Buffer {
                        name: kernel.params()[*param].name,
                        bytes: store.bytes_mut(),
                        initialised,
                        writable: *access != Access::Read,
                    }
                }
            })
            .collect();
        library.launch(kernel.name(), &case.geometry, &mut args, order, locate)?;
    }

    let mut expected = stores();
    {
        let mut stores = expected.iter_mut().zip(&buffers);
        let mut args = TwinArgs::new();
        for arg in &case.args {
            args.push(match arg {
                Arg::U32(value) => Arg::U32(*value),
                Arg::F32(value) => Arg::F32(*value),
                Arg::Null => Arg::Null,
                Arg::Buffer(_) => {
                    let (store, (_, _, access)) = stores.next().expect("one per buffer");
                    Arg::Buffer(match access {
                        Access::Read => Slice::Shared(store.bytes()),
                        Access::Write | Access::Update => Slice::Exclusive(store.bytes_mut()),
                    })
                }
            });
        }
        kernel.run_twin(args).map_err(|error| error.to_string())?;
    }

    for (index, (param, buf, access)) in buffers.iter().enumerate() {
        let name = kernel.params()[*param].name;
        if *access == Access::Write
            && let Some(byte) = initialised[index].iter().position(|&written| written == 0)
        {
            return Err(format!("{name}: byte {byte} is never written"));
        }
        if *access != Access::Read {
            let compare = case.memory[buf.id].compare;
            compare
                .check(found[index].bytes(), expected[index].bytes())
                .map_err(|error| format!("{name}{error}"))?;
        }
    }
    Ok(())
}

impl Compare {
    /// The error begins with the index.
    fn check(self, found: &[u8], expected: &[u8]) -> Result<(), String> {
        match self {
            Compare::Exact => {
                let differs = found.iter().zip(expected).position(|(a, b)| a != b);
                differs.map_or(Ok(()), |at| {
                    let word = at / 4 * 4..(at / 4 * 4 + 4).min(found.len());
                    let (found, expected) = (&found[word.clone()], &expected[word]);
                    Err(format!("[byte {at}]: {found:x?}, the twin has {expected:x?}"))
                })
            }
            Compare::F32 { per } | Compare::Sums { per } => {
                let part = if matches!(self, Compare::F32 { .. }) { 1e-5 } else { 1e-4 };
                let (found, expected) = (floats(found), floats(expected));
                for (chunk, (found, expected)) in
                    found.chunks(per).zip(expected.chunks(per)).enumerate()
                {
                    let finite = expected.iter().filter(|x| x.is_finite());
                    let scale = finite.fold(0.0f32, |scale, x| scale.max(x.abs()));
                    for (i, (&a, &b)) in found.iter().zip(expected).enumerate() {
                        near(a, b, part * scale, chunk * per + i)?;
                    }
                }
                Ok(())
            }
            Compare::Weighted { per } | Compare::Rounded { per } => {
                let tolerance = |expected: f32, largest: f32| match self {
                    Compare::Rounded { .. } => Compare::rounded_tolerance(expected, largest),
                    _ => 2e-3 * largest,
                };
                let (found, expected): (&[half::f16], &[half::f16]) =
                    (bytemuck::cast_slice(found), bytemuck::cast_slice(expected));
                for (i, (found, expected)) in
                    found.chunks(per).zip(expected.chunks(per)).enumerate()
                {
                    let scale =
                        expected.iter().fold(0.0f32, |scale, x| scale.max(x.to_f32().abs()));
                    for (j, (a, b)) in found.iter().zip(expected).enumerate() {
                        let (a, b) = (a.to_f32(), b.to_f32());
                        near(a, b, tolerance(b, scale), i * per + j)?;
                    }
                }
                Ok(())
            }
            Compare::Q8Cache(layout) => check_q8_cache(&layout, found, expected),
            Compare::Half => {
                let (found, expected): (&[half::f16], &[half::f16]) =
                    (bytemuck::cast_slice(found), bytemuck::cast_slice(expected));
                for (i, (a, b)) in found.iter().zip(expected).enumerate() {
                    let (a, b) = (a.to_f32(), b.to_f32());
                    // The f32 before it may round to the neighbour; it is a difference of numbers
                    // of the size of 1.
                    near(a, b, b.abs() / 1024.0 + 1e-6, i)?;
                }
                Ok(())
            }
        }
    }
}

fn floats(bytes: &[u8]) -> &[f32] {
    bytemuck::cast_slice(bytes)
}

#[test]
fn rounded_results_may_be_neighbours_and_no_more() {
    let bytes = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect()
    };
    let check = |a: &[f32], b: &[f32]| Compare::Rounded { per: 2 }.check(&bytes(a), &bytes(b));
    let step = 1.0 / 1024.0;
    assert!(check(&[1.0 + step, -0.25], &[1.0, -0.25 - step / 4.0]).is_ok());
    assert!(check(&[1.0 + 2.0 * step, 0.0], &[1.0, 0.0]).unwrap_err().starts_with("[0]"));
    assert!(check(&[1.0, 1e-5], &[1.0, 0.0]).is_ok());
    assert!(check(&[1.0, 2e-5], &[1.0, 0.0]).unwrap_err().starts_with("[1]"));
    assert!(check(&[1.0, 0.0, 2e-5, 0.0], &[1.0, 0.0, 2e-5 + 1e-6, 0.0]).is_err());
    assert!(check(&[1.0, f32::NAN], &[1.0, 0.0]).is_err());
    assert!(check(&[f32::INFINITY, 0.0], &[65504.0, 0.0]).is_err());
}

fn near(found: f32, expected: f32, tolerance: f32, at: usize) -> Result<(), String> {
    let same = found == expected
        || (found.is_nan() && expected.is_nan())
        || (found - expected).abs() <= tolerance;
    if same { Ok(()) } else { Err(format!("[{at}] = {found:e}, the twin has {expected:e}")) }
}
