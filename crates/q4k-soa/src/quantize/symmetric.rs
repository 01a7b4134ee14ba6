//! Types with a scale alone: w = scale·q, q in `-bias..bias`, the scale of either sign.

use super::{half, magnitude, map, round, sum};
use crate::block::HalfBytes;

/// Guesses of the scale put the largest magnitude at bias + this · bias / 8, once on the negative
/// side, which reaches one further, and once on the positive.
const GUESSES: [f32; 14] = {
    let mut guesses = [0.0; 14];
    let mut index = 0;
    while index < guesses.len() {
        guesses[index] = index as f32 * 0.25 - 1.5;
        index += 1;
    }
    guesses
};

/// Fits Q4_0 (bias 8) or Q5_0 (bias 16): scale and integers with the bias added.
pub(crate) fn block(values: &[f32], bias: u8) -> (HalfBytes, [u8; 32]) {
    let Some(amax) = magnitude(values) else {
        return (HalfBytes::default(), [bias; 32]);
    };
    let x: [f32; 32] = core::array::from_fn(|i| values[i] / amax);
    let d = half(fit(&x, f32::from(bias)) * amax);
    (d, stored(&x, d.to_f32() / amax, f32::from(bias)))
}

/// A fitted Q6_K super-block.
pub(crate) struct SuperBlock {
    pub(crate) d: HalfBytes,
    pub(crate) scales: [i8; 16],
    /// With the bias of 32 added.
    pub(crate) quants: [u8; 256],
}

type Values = [f32; 16];

/// Fits Q6_K.
pub(crate) fn super_block(values: &[f32]) -> SuperBlock {
    const BIAS: f32 = 32.0;
    let Some(amax) = magnitude(values) else {
        return SuperBlock { d: HalfBytes::default(), scales: [0; 16], quants: [32; 256] };
    };
    let x: [Values; 16] =
        core::array::from_fn(|part| core::array::from_fn(|i| values[16 * part + i] / amax));
    let wanted = x.each_ref().map(|x| fit(x, BIAS));
    let largest = wanted.iter().fold(
        0.0f32,
        |best, &scale| {
            if scale.abs() > best.abs() { scale } else { best }
        },
    );

    let mut best = choose(&x, &wanted, half(largest / -128.0 * amax), amax);
    for _ in 0..2 {
        let better = choose(&x, &wanted, best.solve_d(&x, amax), amax);
        if better.error >= best.error {
            break;
        }
        best = better;
    }

    let mut quants = [0; 256];
    for (part, quants) in quants.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        *quants = stored(&x[part], best.scale(part, amax), BIAS);
    }
    SuperBlock { d: best.d, scales: best.scales.map(|scale| scale as i8), quants }
}

/// A super-block's 8-bit scales with the squared error they leave.
struct Choice {
    d: HalfBytes,
    scales: [f32; 16],
    error: f32,
}

/// The best 8-bit scales next to the wanted ones.
fn choose(x: &[Values; 16], wanted: &[f32; 16], d: HalfBytes, amax: f32) -> Choice {
    let step = d.to_f32() / amax;
    let mut choice = Choice { d, scales: [0.0; 16], error: 0.0 };
    for (part, (x, wanted)) in x.iter().zip(wanted).enumerate() {
        let nearest = if step != 0.0 { round((wanted / step).clamp(-128.0, 127.0)) } else { 0.0 };
        let mut least_error = f32::INFINITY;
        for scale in [nearest - 1.0, nearest, nearest + 1.0] {
            let scale = scale.clamp(-128.0, 127.0);
            let error = error(x, step * scale, &quants(x, step * scale, 32.0));
            if error < least_error {
                (choice.scales[part], least_error) = (scale, error);
            }
        }
        choice.error += least_error;
    }
    choice
}

impl Choice {
    fn scale(&self, part: usize, amax: f32) -> f32 {
        self.d.to_f32() / amax * self.scales[part]
    }

    /// Least squares for d over all 256 weights, integers held.
    fn solve_d(&self, x: &[Values; 16], amax: f32) -> HalfBytes {
        let (mut squares, mut products) = (0.0f64, 0.0f64);
        for (part, x) in x.iter().enumerate() {
            for (x, quant) in x.iter().zip(quants(x, self.scale(part, amax), 32.0)) {
                let product = f64::from(self.scales[part] * quant);
                squares += product * product;
                products += product * f64::from(*x);
            }
        }
        if squares > 0.0 { half((products / squares) as f32 * amax) } else { self.d }
    }
}

#[inline(always)]
fn quants<const N: usize>(x: &[f32; N], scale: f32, bias: f32) -> [f32; N] {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    map(x, |x| round((x * inverse).clamp(-bias, bias - 1.0)))
}

fn stored<const N: usize>(x: &[f32; N], scale: f32, bias: f32) -> [u8; N] {
    quants(x, scale, bias).map(|quant| (quant + bias) as u8)
}

#[inline(always)]
fn error<const N: usize>(x: &[f32; N], scale: f32, quants: &[f32; N]) -> f32 {
    sum::<N>(|i| {
        let error = scale * quants[i] - x[i];
        error * error
    })
}

/// The best scale found for values that share one.
fn fit<const N: usize>(x: &[f32; N], bias: f32) -> f32 {
    let extreme = x.iter().fold(0.0f32, |best, &x| if x.abs() > best.abs() { x } else { best });
    if extreme.abs() < 1e-6 {
        return 0.0;
    }
    let (mut best, mut least_error) = (0.0, f32::INFINITY);
    for guess in GUESSES {
        for place in [-bias - guess * bias / 8.0, bias - 1.0 + guess * bias / 8.0] {
            let mut scale = extreme / place;
            for _ in 0..2 {
                let quants = quants(x, scale, bias);
                let squares = sum::<N>(|i| quants[i] * quants[i]);
                let products = sum::<N>(|i| quants[i] * x[i]);
                if squares == 0.0 || products == 0.0 {
                    break;
                }
                scale = products / squares;
            }
            let error = error(x, scale, &quants(x, scale, bias));
            if error < least_error {
                (best, least_error) = (scale, error);
            }
        }
    }
    best
}
