//! Attention that appends a key and a value to an f16 cache and attends to them at once.
//!
//! Sine and cosine of twin and device differ in the last bit of f32. Where an element of the new
//! key lies that near the middle of two halves it is rounded to the neighbour, which moves its
//! score by one ulp of f16 times the query's element: far more than f32 results may differ. So
//! results are compared with those that follow from the cache as the device left it. The cache
//! itself may differ from the twin's by that rounding and no more.

use kernels_ptx::{Arg, Kernel, Slice, TwinArgs};

use crate::cu::cases::{Buf, Case};
use crate::kernels::{Aligned, Used};

/// Puts what follows from the cache that was `found` in place of the `expected` results.
pub(crate) fn follow(
    case: &Case,
    used: &[Used<'_>],
    found: &[Vec<u8>],
    expected: &mut [Aligned],
) -> Result<(), String> {
    let place = |name| used.iter().position(|used| used.name == name).expect("a buffer's name");
    let inputs: Vec<_> =
        used.iter().map(|used| (used.name, Aligned::new(&used.memory.bytes))).collect();
    let [partials_at, out_at] = ["partials", "out"].map(place);
    // One token of one sequence, whose table is the cache's.
    let sequences = Aligned::new(&0u32.to_le_bytes());
    let Arg::U32(n_blocks) = argument(case, "n_blocks") else { unreachable!("a number") };
    let one_token = || {
        vec![
            ("n_tokens", Arg::U32(1)),
            ("n_sequences", Arg::U32(1)),
            ("sequences", Arg::Buffer(Slice::Shared(sequences.bytes()))),
            ("table_stride", Arg::U32(n_blocks)),
            ("n_logical", Arg::U32(n_blocks)),
        ]
    };

    let mut q = Aligned::new(&vec![0; expected[out_at].bytes().len()]);
    let mut scratch = Aligned::new(inputs[place("kv")].1.bytes());
    let mut own = one_token();
    own.extend([
        ("q", Arg::Buffer(Slice::Exclusive(q.bytes_mut()))),
        ("kv", Arg::Buffer(Slice::Exclusive(scratch.bytes_mut()))),
    ]);
    run(Kernel::RopeAppendF16, case, &inputs, own)?;

    let kv = Aligned::new(&found[place("kv")]);
    let mut partials = Aligned::new(inputs[partials_at].1.bytes());
    let mut own = one_token();
    own.extend([
        ("q", Arg::Buffer(Slice::Shared(q.bytes()))),
        ("kv", Arg::Buffer(Slice::Shared(kv.bytes()))),
        ("partials", Arg::Buffer(Slice::Exclusive(partials.bytes_mut()))),
    ]);
    run(Kernel::AttentionF16, case, &inputs, own)?;

    let mut own = one_token();
    own.extend([
        ("partials", Arg::Buffer(Slice::Shared(partials.bytes()))),
        ("out", Arg::Buffer(Slice::Exclusive(expected[out_at].bytes_mut()))),
    ]);
    run(Kernel::AttentionCombine, case, &inputs, own)?;

    // What the kernel leaves alone stays as it was.
    let before = inputs[partials_at].1.bytes().chunks(4);
    let after = expected[partials_at].bytes_mut().chunks_mut(4);
    for ((after, before), partial) in after.zip(before).zip(partials.bytes().chunks(4)) {
        if after != before {
            after.copy_from_slice(partial);
        }
    }
    Ok(())
}

/// Runs a twin with arguments of its `own`; the others are those of the case that have their names.
fn run<'a>(
    kernel: Kernel,
    case: &Case,
    inputs: &'a [(&'static str, Aligned)],
    mut own: Vec<(&'static str, Arg<Slice<'a>>)>,
) -> Result<(), String> {
    let mut args = TwinArgs::new();
    for param in kernel.params() {
        if let Some(at) = own.iter().position(|(name, _)| *name == param.name) {
            args.push(own.swap_remove(at).1);
            continue;
        }
        let arg = argument(case, param.name);
        let input = || inputs.iter().find(|(name, _)| *name == param.name).expect("a buffer");
        let shared = arg.try_map(|_| Ok::<_, String>(Slice::Shared(input().1.bytes())));
        args.push(shared?);
    }
    kernel.run_twin(args).map_err(|error| error.to_string())
}

fn argument(case: &Case, name: &str) -> Arg<Buf> {
    let at = case.kernel.params().iter().position(|param| param.name == name);
    case.args[at.expect("it has one")]
}
