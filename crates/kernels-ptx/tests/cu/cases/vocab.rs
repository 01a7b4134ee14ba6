//! From logits to the next token.

use kernels_ptx::ops::{advance, argmax_finish, argmax_slices, sample};
use kernels_ptx::{Candidate, DeviceProfile, Kernel, SamplingPack};

use super::{Buf, Builder, Case, Compare, Random};

/// Logits of several kinds: all different, many equal, with what is no number, with both zeros.
fn logits(n: u32, kind: u32, random: &mut Random) -> Vec<f32> {
    let mut logits: Vec<f32> = random.floats(n as usize).iter().map(|x| x * 12.0).collect();
    for x in &mut logits {
        match kind {
            0 => {}
            1 => *x = x.round(),
            2 => {
                *x = match random.below(4) {
                    0 => f32::NAN,
                    1 => -f32::NAN,
                    2 => f32::NEG_INFINITY,
                    _ => *x,
                }
            }
            3 => *x = if random.below(2) == 0 { 0.0 } else { -0.0 },
            _ => *x = f32::NEG_INFINITY,
        }
    }
    logits
}

pub(crate) fn argmax_slices(random: &mut Random) -> Vec<Case> {
    let shapes = [(1, 1), (5, 8), (255, 2), (1000, 3), (4099, 4), (7, 3), (2048, 1)];
    let mut cases = Vec::new();
    for (n_vocab, n_slices) in shapes {
        for kind in 0..5 {
            let mut b = Builder::default();
            let args = argmax_slices::Args {
                logits: b.input(&logits(n_vocab, kind, random)),
                // Zeros of either sign are equal.
                best: b.output::<Candidate>(n_slices, Compare::F32 { per: 1 }),
                n_vocab,
                n_slices,
            };
            let kernel = Kernel::ArgmaxSlices;
            let geometry = args.geometry(&DeviceProfile::A2000);
            let label = format!("{n_vocab} in {n_slices}, logits {kind}");
            cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
        }
    }
    cases
}

pub(crate) fn argmax_finish(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for n_slices in [1, 2, 31, 33, 52, 264] {
        for kind in 0..5 {
            let ids = random.shuffled(n_slices);
            let logits = logits(n_slices, kind, random);
            let best: Vec<Candidate> = logits
                .into_iter()
                .zip(ids)
                .map(|(value, index)| Candidate { value, index: index * 100 })
                .collect();
            let mut b = Builder::default();
            let args = argmax_finish::Args {
                best: b.input(&best),
                token: b.output::<u32>(1, Compare::Exact),
                n_slices,
            };
            let kernel = Kernel::ArgmaxFinish;
            let geometry = args.geometry(&DeviceProfile::A2000);
            let label = format!("{n_slices} slices, logits {kind}");
            cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
        }
    }
    cases
}

pub(crate) fn sample(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |n_vocab: u32, kind: u32, pack: SamplingPack, random: &mut Random| {
        let mut b = Builder::default();
        let args = sample::Args {
            logits: b.input(&logits(n_vocab, kind, random)),
            sampling: b.input(&[pack]),
            tokens: b.input(&[random.below(1 << 20), 0, 0]),
            token: b.output::<u32>(1, Compare::Exact),
            n_vocab,
        };
        let kernel = Kernel::Sample;
        let geometry = args.geometry(&DeviceProfile::A2000);
        let label = format!("{n_vocab}, logits {kind}, {pack:?}");
        cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
    };
    let mut seeds = Random::new(random.bits());
    let mut pack = |temperature, top_k, top_p, min_p| {
        let seed = seeds.bits();
        let (seed_low, seed_high) = (seed as u32, (seed >> 32) as u32);
        SamplingPack { temperature, top_k, top_p, min_p, seed_low, seed_high }
    };
    for n_vocab in [1, 2, 40, 1023, 1024, 1025, 5000] {
        push(n_vocab, 0, pack(0.8, 40, 0.95, 0.05), random);
        push(n_vocab, 0, pack(1.0, 0, 1.0, 0.0), random);
        push(n_vocab, 1, pack(5.0, 0, 1.0, 0.0), random);
        push(n_vocab, 1, pack(100.0, 7, 1.0, 0.0), random);
        push(n_vocab, 2, pack(100.0, 33, 1.0, 0.0), random);
    }
    for kind in 0..5 {
        push(3000, kind, pack(0.0, 0, 1.0, 0.0), random);
        push(3000, kind, pack(-1.0, 40, 0.5, 0.5), random);
    }
    for _ in 0..12 {
        push(500, 0, pack(2.0, 100, 0.9, 0.0), random);
        push(500, 0, pack(2.0, 100, 1.0, 0.2), random);
        push(500, 0, pack(3.0, 0, 0.7, 0.01), random);
        push(500, 3, pack(1.0, 90, 1.0, 0.0), random);
        push(9, 0, pack(50.0, 1 << 20, 1.0, 0.0), random);
        push(9, 0, pack(50.0, 3, 0.0, 0.0), random);
        // Most likelihoods are lost beside the first; none is cut.
        push(9, 4, pack(1e6, 0, 1.0, 0.0), random);
        push(300, 0, pack(1e6, 0, 1.0, 0.0), random);
    }
    cases
}

pub(crate) fn advance(_: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for (position, ring_slot, steps, max_context_tokens) in [
        (0, 0, 0, 512),
        (511, 511, 7, 512),
        (5000, 3, u32::MAX, 7),
        (u32::MAX, 6, 1, 7),
        (9, 0, 9, 1),
    ] {
        let mut b = Builder::default();
        let args = advance::Args {
            token: b.input(&[77u32]),
            tokens: b.input(&[position, ring_slot, 5u32]),
            step_count: b.input(&[steps]),
            max_context_tokens,
        };
        let kernel = Kernel::Advance;
        let geometry = args.geometry(&DeviceProfile::A2000);
        cases.push(b.case(
            kernel,
            format!("at {position}"),
            args.list(kernel, Buf::len_bytes),
            geometry,
        ));
    }
    cases
}
