//! From logits to the next token.

use kernels_ptx::ops::{argmax, sample};
use kernels_ptx::{DeviceProfile, Kernel, SamplingPack};

use super::{Buf, Builder, Case, Random};

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

/// Parameters of a token, its ring's slots, and steps made: wherever a sequence may be.
pub(super) fn places() -> [([u32; 3], u32, u32); 5] {
    [
        ([0, 0, 3], 512, 0),
        ([511, 511, 3], 512, 7),
        ([5000, 3, 3], 7, u32::MAX),
        ([u32::MAX, 6, 3], 7, 1),
        ([9, 0, 3], 1, 9),
    ]
}

pub(crate) fn argmax(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for n_vocab in [1, 5, 255, 1000, 1025, 4099, 70_000] {
        for (kind, (tokens, max_context_tokens, steps)) in (0..).zip(places()) {
            let mut b = Builder::default();
            let mut logits = logits(n_vocab, kind, random);
            if let Some(last_of_block) = logits.get_mut(255).filter(|_| kind == 1) {
                *last_of_block = 99.0;
            }
            let args = argmax::Args {
                logits: b.input(&logits),
                outputs: b.input(&[0u32]),
                best: b.input(&[0u32, 0]),
                arrivals: b.input(&[0u32]),
                token: b.input(&[0u32]),
                tokens: b.input(&tokens),
                step_count: b.input(&[steps]),
                n_vocab,
                n_tokens: 1,
                n_outputs: 1,
                max_context_tokens,
            };
            let kernel = Kernel::Argmax;
            let geometry = args.geometry(&DeviceProfile::A2000);
            let label = format!("{n_vocab}, logits {kind}, {tokens:?}");
            cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
        }
    }
    for n_vocab in [7, 3000] {
        let mut b = Builder::default();
        let rows = Rows::new(random);
        let args = argmax::Args {
            logits: b.input(&rows.logits(n_vocab, random)),
            outputs: b.input(&rows.outputs),
            best: b.input(&[0u32; 2 * Rows::OUTPUTS]),
            arrivals: b.input(&[0u32; Rows::OUTPUTS]),
            token: b.input(&[77u32; Rows::OUTPUTS]),
            tokens: b.input(&rows.tokens),
            step_count: b.input(&rows.steps),
            n_vocab,
            n_tokens: Rows::ROWS,
            n_outputs: Rows::OUTPUTS as u32,
            max_context_tokens: 512,
        };
        let (kernel, geometry) = (Kernel::Argmax, args.geometry(&DeviceProfile::A2000));
        let label = format!("{n_vocab}, outputs {:?}", rows.outputs);
        cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
    }
    cases
}

/// Rows of a step with outputs in another order, two of them without a row.
struct Rows {
    outputs: [u32; Rows::OUTPUTS],
    tokens: Vec<u32>,
    steps: [u32; Rows::OUTPUTS],
}

impl Rows {
    const ROWS: u32 = 6;
    const OUTPUTS: usize = 5;

    fn new(random: &mut Random) -> Self {
        let tokens = (0..Self::ROWS).flat_map(|_| [random.below(1000), random.below(512), 5]);
        Self {
            tokens: tokens.collect(),
            outputs: [5, 0, u32::MAX, 3, Self::ROWS],
            steps: [1, 0, 7, u32::MAX, 4],
        }
    }

    fn logits(&self, n_vocab: u32, random: &mut Random) -> Vec<f32> {
        (0..Self::OUTPUTS as u32).flat_map(|kind| logits(n_vocab, kind, random)).collect()
    }
}

pub(crate) fn sample(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |n_vocab: u32, kind: u32, pack: SamplingPack, random: &mut Random| {
        let mut b = Builder::default();
        let args = sample::Args {
            logits: b.input(&logits(n_vocab, kind, random)),
            outputs: b.input(&[0u32]),
            sampling: b.input(&[pack]),
            tokens: b.input(&[random.below(1 << 20), random.below(512), 0]),
            step_count: b.input(&[random.below(9)]),
            token: b.input(&[0u32]),
            n_vocab,
            n_tokens: 1,
            n_outputs: 1,
            max_context_tokens: 512,
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
    for n_vocab in [40, 1500] {
        let mut b = Builder::default();
        let rows = Rows::new(random);
        let packs = [
            pack(2.0, 100, 0.9, 0.0),
            pack(0.0, 0, 1.0, 0.0),
            pack(1.0, 0, 1.0, 0.0),
            pack(50.0, 7, 1.0, 0.0),
            pack(1.0, 0, 1.0, 0.0),
        ];
        let args = sample::Args {
            logits: b.input(&rows.logits(n_vocab, random)),
            outputs: b.input(&rows.outputs),
            sampling: b.input(&packs),
            tokens: b.input(&rows.tokens),
            step_count: b.input(&rows.steps),
            token: b.input(&[77u32; Rows::OUTPUTS]),
            n_vocab,
            n_tokens: Rows::ROWS,
            n_outputs: Rows::OUTPUTS as u32,
            max_context_tokens: 512,
        };
        let (kernel, geometry) = (Kernel::Sample, args.geometry(&DeviceProfile::A2000));
        let label = format!("{n_vocab}, outputs {:?}", rows.outputs);
        cases.push(b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry));
    }
    cases
}
