//! The net itself: what the engine has to find, and what it has to let pass.

use std::path::Path;

use half::f16;
use kernels_ptx::Geometry;

use crate::cases::Random;
use crate::compile;
use crate::launch::{HostArg, Library, Storage};

/// Kernels of net.cu and what the report contains; `None` where all is well.
const KERNELS: [(&str, Option<&str>); 27] = [
    ("right", None),
    ("out_of_bounds", Some("reads 4 bytes at 256 of argument in, which has 256")),
    ("before_the_start", Some("reads 4 bytes at -4 of argument in")),
    ("uninitialised", Some("thread 5: reads byte 20 of shared values, uninitialised at net.cu:29")),
    ("reads_output", Some("argument out, uninitialised")),
    ("writes_input", Some("writes argument in, an input")),
    ("misaligned", Some("reads 16 bytes at 4 of argument in, misaligned")),
    ("does_not_wait", Some("writes argument out before waiting for inputs")),
    ("no_barrier", Some("of shared values")),
    ("no_warp_barrier", Some("of shared values")),
    ("warp_barrier", None),
    ("copies", None),
    ("copy_not_waited_for", Some("of shared values, uninitialised")),
    ("copy_without_barrier", Some("of shared values")),
    ("copy_over_copy", Some("where a copy is on its way")),
    ("copy_before_inputs", Some("reads argument in before waiting for inputs")),
    ("write_after_read", Some("race: ")),
    ("two_blocks_write", Some("which another block wrote")),
    ("two_blocks_add", None),
    ("reads_while_others_add", Some("race: ")),
    ("diverged_barrier", Some("diverged barrier: waits at net.cu:")),
    ("left_before_barrier", Some("1 threads have ended without reaching the barrier")),
    ("lanes_missing", Some("warp operation with lane")),
    ("deadlock", Some("deadlock: waits at net.cu:")),
    ("diverged_warp", Some("diverged warp")),
    ("endless", Some("the kernel does not end")),
    ("warp_operations", None),
];

fn library() -> Option<&'static Library> {
    static LIBRARY: std::sync::OnceLock<Library> = std::sync::OnceLock::new();
    let compiler = compile::compiler("net")?;
    Some(LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cu/net.cu");
        let kernels = KERNELS.iter().map(|(name, _)| *name);
        let kernels: Vec<&str> = kernels.chain(["widen", "narrow"]).collect();
        let library = compiler.cached_library("net", &[(source, kernels)]);
        library.and_then(|path| Library::open(&path)).unwrap_or_else(|error| panic!("{error}"))
    }))
}

/// Runs a kernel of `blocks` × 64 threads; one value of `input` and `output` per thread.
fn launch(
    library: &Library,
    kernel: &str,
    blocks: u32,
    input: &[u32],
    outputs: usize,
    seed: u64,
) -> Result<Vec<u32>, String> {
    let mut stores = [
        Storage::new(bytemuck::cast_slice(input)),
        Storage::new(bytemuck::cast_slice(&vec![u32::MAX; outputs])),
    ];
    let mut initialised = [vec![1; 4 * input.len()], vec![0; 4 * outputs]];
    let [input_set, output_set] = &mut initialised;
    let [input_store, output_store] = &mut stores;
    let mut args = [
        HostArg::Buffer {
            name: "in",
            bytes: input_store.bytes_mut(),
            initialised: input_set,
            writable: false,
        },
        HostArg::Buffer {
            name: "out",
            bytes: output_store.bytes_mut(),
            initialised: output_set,
            writable: true,
        },
    ];
    let geometry =
        Geometry { grid: [blocks, 1, 1], block: [64, 1, 1], shared_bytes: 0, cooperative: false };
    library.launch(kernel, &geometry, &mut args, seed, true)?;
    Ok(bytemuck::cast_slice(output_store.bytes()).to_vec())
}

#[test]
fn every_fault_is_found_in_every_order() {
    let Some(library) = library() else { return };
    let input: Vec<u32> = (0..64).map(|i| i * 3).collect();
    for (kernel, expected) in KERNELS {
        let blocks = if kernel.starts_with("two_blocks") { 2 } else { 1 };
        for seed in 1..6 {
            let result = launch(library, kernel, blocks, &input, 64, seed);
            match (expected, result) {
                (None, Ok(_)) => {}
                (Some(text), Err(error)) if error.contains(text) => {}
                (expected, result) => panic!("{kernel}: {expected:?}, got {result:?}"),
            }
        }
    }
}

#[test]
fn warp_operations_move_what_they_should() {
    let Some(library) = library() else { return };
    let input: Vec<u32> = (0..64).map(|i| i * i + 1).collect();
    let output = launch(library, "warp_operations", 1, &input, 64, 3).expect("no fault");
    assert_eq!(output, [13; 64]);
}

#[test]
fn copies_bring_as_many_bytes_as_they_should() {
    let Some(library) = library() else { return };
    let input: Vec<u32> = (0..64).map(|i| i * 0x0101_0101).collect();
    let out = launch(library, "copies", 1, &input, 64, 3).unwrap();
    for (i, &word) in out.iter().enumerate() {
        let expected = match i {
            0..32 => input[31 - i],
            // Thread t copied t bytes to its four words.
            _ => {
                let bytes = ((i - 32) / 4).saturating_sub((i - 32) % 4 * 4).min(4);
                input[i] & ((1u64 << (8 * bytes)) - 1) as u32
            }
        };
        assert_eq!(word, expected, "{i}");
    }
}

#[test]
fn blocks_and_threads_find_their_places() {
    let Some(library) = library() else { return };
    let input: Vec<u32> = (0..64).collect();
    let output = launch(library, "right", 3, &input, 192, 3).expect("no fault");
    assert!(output.iter().enumerate().all(|(i, &value)| value == 63 - i as u32 % 64));
}

#[test]
fn halves_convert_as_everywhere() {
    let Some(library) = library() else { return };
    let halves: Vec<u32> = (0..1 << 16).collect();
    let wide = launch(library, "widen", 1 << 10, &halves, 1 << 16, 1).expect("no fault");
    for (bits, wide) in (0..=u16::MAX).zip(wide) {
        let (expected, found) = (f16::from_bits(bits).to_f32(), f32::from_bits(wide));
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{bits:#x}: {found} is {expected}");
    }

    // Every half, its neighbours in f32, the ties between halves, and anything.
    let mut random = Random::new(crate::cases::seed());
    let mut floats: Vec<u32> = Vec::new();
    for bits in 0..1 << 14 {
        let half = f16::from_bits(bits * 4 + random.below(4) as u16);
        let next = f16::from_bits(half.to_bits().wrapping_add(1));
        let float = half.to_f32().to_bits();
        let tie = (half.to_f32() / 2.0 + next.to_f32() / 2.0).to_bits();
        floats.extend([float.wrapping_add(1), tie, tie.wrapping_sub(1), random.bits() as u32]);
    }
    let narrow = launch(library, "narrow", 1 << 10, &floats, 1 << 16, 1).expect("no fault");
    for (bits, narrow) in floats.into_iter().zip(narrow) {
        let (expected, found) =
            (f16::from_f32(f32::from_bits(bits)), f16::from_bits(narrow as u16));
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{}: {found} is {expected}", f32::from_bits(bits));
    }
}
