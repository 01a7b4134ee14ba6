//! Every kernel against its twin, each argument in device memory of its own.
//!
//! A case runs twice. First in allocations of exactly the bytes that the shapes name, outputs and
//! everything that nobody may read left as the driver gives it, so that compute-sanitizer sees
//! whatever goes beyond. Then between guards, everything poisoned with ones: no guard may change,
//! and the results must be bit for bit those of the first run.

use decode_graph::{CudaBackend, Label, Launch};
use gpu_slab::DeviceMemory;
use gpu_slab::cuda::CudaMemory;
use kernels_ptx::{Access, Arg, Kernel, ParamKind, Slice, TwinArgs};

use crate::appended;
use crate::cu::cases::{self, Buf, Case, Compare, check_q8_cache};
use crate::device::{self, say};
use crate::model_shapes;

const GUARD_BYTES: usize = 256;
const POISON: u8 = 0xff;
/// What the twin's outputs hold before: an element that neither writes differs.
const TWIN_POISON: u8 = 0x7e;
/// Failing cases of a kernel that are told.
const TOLD: usize = 6;

fn check(test: &str, kernel: Kernel, shapes: fn(Kernel, &CudaBackend, u64) -> Vec<Case>) {
    let Some(mut backend) = device::gpu(test) else { return };
    let seed = device::seed();
    let cases = shapes(kernel, &backend, seed);
    // Reading memory has no shape of a model.
    assert!(!cases.is_empty() || kernel == Kernel::ReadBandwidth, "no cases");
    let (mut failures, mut worst, count) = (Vec::new(), 0.0f64, cases.len());
    for case in cases {
        match run(&case, &mut backend) {
            Ok(error) => worst = worst.max(error),
            Err(error) => failures.push(format!("  {}: {error}", case.label)),
        }
    }
    say(&format!(
        "{test}: {count} cases, {} failed, largest error {worst:.1e} of its tolerance\n",
        failures.len()
    ));
    if !failures.is_empty() {
        let told = failures[..failures.len().min(TOLD)].join("\n");
        panic!("KERNELS_SEED={seed}, {} of {count} cases fail:\n{told}", failures.len());
    }
}

macro_rules! tests {
    ($($name:ident: $kernel:ident,)*) => {
        /// Awkward shapes: those that the host build of the kernels is checked with.
        mod awkward {
            $( #[test] fn $name() {
                let shapes = |kernel, _: &_, seed| super::cases::of(kernel, seed);
                super::check(concat!("awkward ", stringify!($name)), super::Kernel::$kernel, shapes);
            } )*
        }

        /// Shapes of models that people use, with the geometry of this device.
        mod model {
            $( #[test] fn $name() {
                let shapes = super::model_shapes::of;
                super::check(concat!("model ", stringify!($name)), super::Kernel::$kernel, shapes);
            } )*
        }

        #[test]
        fn every_kernel_has_a_test() {
            let tested = [$(Kernel::$kernel),*];
            // The persistent step has a test of its own.
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

/// A buffer of a case with what the kernel does with it.
pub(crate) struct Used<'a> {
    pub(crate) name: &'static str,
    access: Access,
    pub(crate) memory: &'a cases::Memory,
}

fn buffers(case: &Case) -> Vec<Used<'_>> {
    let used = |(arg, param): (&Arg<Buf>, &kernels_ptx::Param)| match (arg, param.kind) {
        (Arg::Buffer(buf), ParamKind::Buffer { access, .. }) => {
            Some(Used { name: param.name, access, memory: &case.memory[buf.id] })
        }
        _ => None,
    };
    case.args.iter().zip(case.kernel.params()).filter_map(used).collect()
}

/// The arguments with other buffers, which come in the order of the signature.
fn with_buffers<B, C>(
    case: &Case,
    buffers: impl IntoIterator<Item = C>,
    f: impl Fn(C) -> B,
) -> Vec<Arg<B>> {
    let mut buffers = buffers.into_iter();
    case.args
        .iter()
        .map(|arg| match *arg {
            Arg::Buffer(_) => Arg::Buffer(f(buffers.next().expect("one per buffer"))),
            Arg::Null => Arg::Null,
            Arg::U32(value) => Arg::U32(value),
            Arg::F32(value) => Arg::F32(value),
        })
        .collect()
}

/// The largest error as a part of what is tolerated.
fn run(case: &Case, backend: &mut CudaBackend) -> Result<f64, String> {
    let used = buffers(case);
    let mut expected = twin(case, &used)?;
    let exact = on_device(case, &used, backend, 0)?;
    let guarded = on_device(case, &used, backend, GUARD_BYTES)?;
    if case.kernel == Kernel::AttentionStepF16 {
        appended::follow(case, &used, &guarded, &mut expected)?;
    }
    let mut worst = 0.0f64;
    for (((used, exact), guarded), expected) in used.iter().zip(exact).zip(guarded).zip(expected) {
        if used.access == Access::Read {
            continue;
        }
        let error = compare(used.memory.compare, &guarded, expected.bytes())
            .map_err(|error| format!("{}{error}", used.name))?;
        worst = worst.max(error);
        if let Some(byte) = exact.iter().zip(&guarded).position(|(a, b)| a != b) {
            let (name, at) = (used.name, byte / 4 * 4);
            let word = |bytes: &[u8]| format!("{:x?}", &bytes[at..(at + 4).min(bytes.len())]);
            return Err(format!(
                "{name}[byte {byte}]: {} in an exact allocation, {} between guards: it depends on \
                 what nobody wrote",
                word(&exact),
                word(&guarded)
            ));
        }
    }
    Ok(worst)
}

/// Runs the kernel and reads all buffers back; those that are only read come back empty.
fn on_device(
    case: &Case,
    used: &[Used<'_>],
    backend: &mut CudaBackend,
    guard: usize,
) -> Result<Vec<Vec<u8>>, String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let mut memories = Vec::new();
    for used in used {
        let len = used.memory.bytes.len();
        let mut memory =
            CudaMemory::new(backend.stream(), (len + 2 * guard) as u64).map_err(|e| said(&e))?;
        if guard > 0 {
            memory.fill(0, memory.len_bytes(), POISON).map_err(|e| said(&e))?;
        }
        let whole = 0..len;
        let set = match (used.access, &used.memory.set) {
            (Access::Write, _) => &[][..],
            // An update keeps what it does not touch, which is compared.
            (Access::Read, Some(set)) => set,
            _ => std::slice::from_ref(&whole),
        };
        for range in set.iter().filter(|range| !range.is_empty()) {
            let bytes = &used.memory.bytes[range.clone()];
            memory.write((guard + range.start) as u64, bytes).map_err(|e| said(&e))?;
        }
        memories.push(memory);
    }
    let args = with_buffers(case, &memories, |memory| memory.base_address() + guard as u64);
    let (kernel, geometry) = (case.kernel, case.geometry);
    let launch = Launch { kernel, geometry, args, label: Label { layer: None, what: "test" } };
    // SAFETY: every buffer has the bytes of its shape, checked where the case was made, and is of
    // the backend's context and stream; allocations are aligned to 256 bytes and apart.
    unsafe { backend.launch_addressed(&launch) }.map_err(|e| said(&e))?;
    if let Err(error) = gpu_wait(backend) {
        // Nothing can follow in this process.
        say(&format!("{}: {error}\n", case.label));
        panic!("{}: {error}", case.label);
    }
    let mut found = Vec::new();
    for (used, memory) in used.iter().zip(&memories) {
        if used.access == Access::Read && guard == 0 {
            found.push(Vec::new());
            continue;
        }
        let mut bytes = vec![0; memory.len_bytes() as usize];
        memory.read(0, &mut bytes).map_err(|e| said(&e))?;
        let end = bytes.len() - guard;
        let outside = bytes[..guard].iter().chain(&bytes[end..]).position(|&b| b != POISON);
        if let Some(at) = outside {
            let (before, at) = (at < guard, at as i64 - guard as i64);
            let place = if before { at } else { at + (end - guard) as i64 };
            return Err(format!("{}: byte {place} of {} was written", used.name, end - guard));
        }
        found.push(bytes[guard..end].to_vec());
    }
    Ok(found)
}

fn gpu_wait(backend: &mut CudaBackend) -> Result<(), decode_graph::BackendError> {
    decode_graph::Backend::synchronize(backend)
}

/// Bytes aligned for every element type.
pub(crate) struct Aligned {
    words: Vec<u128>,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut aligned = Self { words: vec![0; bytes.len().div_ceil(16)], len: bytes.len() };
        aligned.bytes_mut().copy_from_slice(bytes);
        aligned
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

fn twin(case: &Case, used: &[Used<'_>]) -> Result<Vec<Aligned>, String> {
    let mut stores: Vec<Aligned> = used
        .iter()
        .map(|used| match used.access {
            Access::Write => Aligned::new(&vec![TWIN_POISON; used.memory.bytes.len()]),
            Access::Read | Access::Update => Aligned::new(&used.memory.bytes),
        })
        .collect();
    let lent = with_buffers(case, stores.iter_mut().zip(used), |(store, used)| match used.access {
        Access::Read => Slice::Shared(store.bytes()),
        Access::Write | Access::Update => Slice::Exclusive(store.bytes_mut()),
    });
    let mut args = TwinArgs::new();
    lent.into_iter().for_each(|arg| args.push(arg));
    case.kernel.run_twin(args).map_err(|error| error.to_string())?;
    Ok(stores)
}

/// The largest error as a part of what is tolerated; the complaint begins with the index.
fn compare(how: Compare, found: &[u8], expected: &[u8]) -> Result<f64, String> {
    match how {
        Compare::Exact => {
            let differing: Vec<usize> =
                (0..found.len()).filter(|&i| found[i] != expected[i]).collect();
            let Some(&first) = differing.first() else { return Ok(0.0) };
            let word = first / 4 * 4..(first / 4 * 4 + 4).min(found.len());
            let (a, b) = (&found[word.clone()], &expected[word]);
            let (count, len) = (differing.len(), found.len());
            Err(format!(
                "[byte {first}]: {a:x?}, the twin has {b:x?}; {count} of {len} bytes differ"
            ))
        }
        Compare::F32 { per } | Compare::Sums { per } => {
            let part = if matches!(how, Compare::F32 { .. }) { 1e-5 } else { 1e-4 };
            let (found, expected) = (floats(found), floats(expected));
            let tolerances = expected.chunks(per).flat_map(|chunk| {
                let finite = chunk.iter().filter(|x| x.is_finite());
                let scale = finite.fold(0.0f32, |scale, x| scale.max(x.abs()));
                std::iter::repeat_n(part * scale, chunk.len())
            });
            near(found.iter().copied(), expected.iter().copied(), tolerances)
        }
        Compare::Weighted { per } | Compare::Rounded { per } => {
            let (found, expected) = (halves(found), halves(expected));
            let tolerances = expected.chunks(per).flat_map(|chunk| {
                let scale = chunk.iter().fold(0.0f32, |scale, x| scale.max(x.abs()));
                chunk.iter().map(move |&x| match how {
                    Compare::Rounded { .. } => Compare::rounded_tolerance(x, scale),
                    _ => 2e-3 * scale,
                })
            });
            near(found.iter().copied(), expected.iter().copied(), tolerances)
        }
        Compare::Q8Cache(layout) => check_q8_cache(&layout, found, expected).map(|()| 0.0),
        Compare::Half => {
            let (found, expected) = (halves(found), halves(expected));
            // The f32 before it may round to the neighbour.
            let tolerances: Vec<f32> =
                expected.iter().map(|x| x.abs() / 1024.0 + 2f32.powi(-24)).collect();
            near(found.into_iter(), expected.into_iter(), tolerances.into_iter())
        }
    }
}

fn halves(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec::<u8, half::f16>(bytes).iter().map(|x| x.to_f32()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(bytes)
}

fn near(
    found: impl Iterator<Item = f32>,
    expected: impl Iterator<Item = f32>,
    tolerances: impl Iterator<Item = f32>,
) -> Result<f64, String> {
    let (mut worst, mut differing, mut count) = (0.0f64, Vec::new(), 0);
    for (index, ((a, b), tolerance)) in found.zip(expected).zip(tolerances).enumerate() {
        count += 1;
        if a == b || (a.is_nan() && b.is_nan()) {
            continue;
        }
        let error = f64::from((a - b).abs()) / f64::from(tolerance);
        if error <= 1.0 {
            worst = worst.max(error);
        } else {
            differing.push((index, a, b, error));
        }
    }
    if differing.is_empty() {
        return Ok(worst);
    }
    let told: Vec<String> = differing
        .iter()
        .take(4)
        .map(|(index, a, b, error)| {
            format!("[{index}] = {a:e}, the twin has {b:e} ({error:.1} × the tolerance)")
        })
        .collect();
    Err(format!("{}; {} of {count} differ", told.join(", "), differing.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_sees_what_it_should_see() {
        let bytes = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        let check = |a: &[f32], b: &[f32]| compare(Compare::F32 { per: 2 }, &bytes(a), &bytes(b));
        assert_eq!(check(&[1.0, -0.0], &[1.0, 0.0]), Ok(0.0));
        assert!(check(&[1.0, 9e-6], &[1.0, 0.0]).unwrap() > 0.8);
        assert!(check(&[1.0, 1.1e-5], &[1.0, 0.0]).unwrap_err().starts_with("[1]"));
        assert!(check(&[f32::NAN, 1.0], &[0.0, 1.0]).is_err());
        assert!(check(&[f32::NAN, 1.0], &[f32::NAN, 1.0]).is_ok());
        assert!(check(&[0.0, 1.0], &[f32::NEG_INFINITY, 1.0]).is_err());
        assert!(compare(Compare::Exact, &[1, 2], &[1, 3]).is_err());
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        assert!(compare(Compare::Half, &half(1.0), &half(1.0009)).is_ok());
        assert!(compare(Compare::Half, &half(1.0), &half(1.003)).is_err());
        let rounded = Compare::Rounded { per: 1 };
        assert!(compare(rounded, &half(1.0), &half(1.001)).is_ok());
        assert!(compare(rounded, &half(1.0), &half(1.002)).is_err());
        assert!(compare(rounded, &half(f32::NAN), &half(1.0)).is_err());
    }
}
