//! Types with a scale and an offset: w = scale·q + offset, q in `0..=q_max`.

use super::{half, magnitude, map, round, sum};
use crate::GROUP_ELEMS;
use crate::block::HalfBytes;

/// The values of a group, divided by the largest of its block.
type Values = [f32; GROUP_ELEMS];

/// Guesses of the scale are range / (q_max + this · q_max / 15): from a little wider than the
/// values to cutting off their ends, which pays where the tails are long.
const GUESSES: [f32; 20] = {
    let mut guesses = [0.0; 20];
    let mut index = 0;
    while index < guesses.len() {
        guesses[index] = index as f32 * 0.25 - 1.25;
        index += 1;
    }
    guesses
};

/// Fits Q4_1 or Q5_1: scale, offset, integers.
pub(crate) fn block(values: &[f32], q_max: u8) -> (HalfBytes, HalfBytes, [u8; GROUP_ELEMS]) {
    let q_max = f32::from(q_max);
    let Some(amax) = magnitude(values) else {
        return Default::default();
    };
    let x: Values = core::array::from_fn(|i| values[i] / amax);
    let line = fit(&x, q_max, Offset::Free);
    let (d, m) = (half(line.scale * amax), half(line.offset * amax));
    let line = Line { scale: d.to_f32() / amax, offset: m.to_f32() / amax };
    (d, m, line.quants(&x, q_max).map(|quant| quant as u8))
}

/// A fitted Q4_K or Q5_K super-block.
pub(crate) struct SuperBlock {
    pub(crate) d: HalfBytes,
    pub(crate) dmin: HalfBytes,
    pub(crate) scales: [u8; 8],
    pub(crate) mins: [u8; 8],
    pub(crate) quants: [[u8; GROUP_ELEMS]; 8],
}

/// Fits Q4_K or Q5_K.
pub(crate) fn super_block(values: &[f32], q_max: u8) -> SuperBlock {
    let q_max = f32::from(q_max);
    let Some(amax) = magnitude(values) else {
        return SuperBlock {
            d: HalfBytes::default(),
            dmin: HalfBytes::default(),
            scales: [0; 8],
            mins: [0; 8],
            quants: [[0; GROUP_ELEMS]; 8],
        };
    };
    let x: [Values; 8] =
        core::array::from_fn(|group| core::array::from_fn(|i| values[32 * group + i] / amax));
    let lines = x.each_ref().map(|x| fit(x, q_max, Offset::NotPositive));
    let largest = |of: fn(&Line) -> f32| lines.iter().map(of).fold(0.0, f32::max);
    let steps = Steps {
        d: half(largest(|line| line.scale) / 63.0 * amax),
        dmin: half(largest(|line| -line.offset) / 63.0 * amax),
    };
    let mut best = steps.choose(&x, &lines, q_max, amax);
    // The scales of the scales that suit these integers best usually differ a little from those
    // that the largest group gave.
    for _ in 0..2 {
        let better = best.solve_steps(&x, q_max, amax).choose(&x, &lines, q_max, amax);
        if better.error >= best.error {
            break;
        }
        best = better;
    }
    best.finish(&x, q_max, amax)
}

/// d and dmin of a super-block.
#[derive(Clone, Copy)]
struct Steps {
    d: HalfBytes,
    dmin: HalfBytes,
}

/// A super-block's 6-bit numbers with the squared error they leave.
struct Choice {
    steps: Steps,
    scales: [f32; 8],
    mins: [f32; 8],
    error: f32,
}

impl Steps {
    /// The line of a group with these 6-bit numbers.
    fn line(self, scale: f32, min: f32, amax: f32) -> Line {
        Line { scale: self.d.to_f32() / amax * scale, offset: -(self.dmin.to_f32() / amax * min) }
    }

    /// The best 6-bit numbers next to those that the fitted lines ask for.
    fn choose(self, x: &[Values; 8], lines: &[Line; 8], q_max: f32, amax: f32) -> Choice {
        let nearest = |wanted: f32, step: HalfBytes| {
            let step = step.to_f32() / amax;
            if step > 0.0 { round((wanted / step).clamp(0.0, 63.0)) } else { 0.0 }
        };
        let mut choice = Choice { steps: self, scales: [0.0; 8], mins: [0.0; 8], error: 0.0 };
        for (group, (x, line)) in x.iter().zip(lines).enumerate() {
            let scale_0 = nearest(line.scale, self.d);
            let min_0 = nearest(-line.offset, self.dmin);
            let mut least_error = f32::INFINITY;
            for scale in [scale_0 - 1.0, scale_0, scale_0 + 1.0].map(|scale| scale.clamp(0.0, 63.0))
            {
                for min in [min_0 - 1.0, min_0, min_0 + 1.0].map(|min| min.clamp(0.0, 63.0)) {
                    let line = self.line(scale, min, amax);
                    let error = line.error(x, &line.quants(x, q_max));
                    if error < least_error {
                        least_error = error;
                        (choice.scales[group], choice.mins[group]) = (scale, min);
                    }
                }
            }
            choice.error += least_error;
        }
        choice
    }
}

impl Choice {
    fn quants(&self, group: usize, x: &Values, q_max: f32, amax: f32) -> Values {
        self.steps.line(self.scales[group], self.mins[group], amax).quants(x, q_max)
    }

    /// Least squares for d and dmin over all 256 weights, integers held.
    fn solve_steps(&self, x: &[Values; 8], q_max: f32, amax: f32) -> Steps {
        let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0f64, 0.0f64, 0.0f64, 0.0f64, 0.0f64);
        for (group, x) in x.iter().enumerate() {
            let min = f64::from(self.mins[group]);
            for (&x, quant) in x.iter().zip(self.quants(group, x, q_max, amax)) {
                let (product, x) = (f64::from(self.scales[group] * quant), f64::from(x));
                aa += product * product;
                ab -= product * min;
                bb += min * min;
                ax += product * x;
                bx -= min * x;
            }
        }
        let determinant = aa * bb - ab * ab;
        let (d, dmin) = if determinant > 1e-9 * aa * bb {
            ((ax * bb - bx * ab) / determinant, (bx * aa - ax * ab) / determinant)
        } else if aa > 0.0 {
            (ax / aa, f64::from(self.steps.dmin.to_f32() / amax))
        } else {
            return self.steps;
        };
        if d <= 0.0 || dmin < 0.0 {
            return self.steps;
        }
        Steps { d: half(d as f32 * amax), dmin: half(dmin as f32 * amax) }
    }

    fn finish(self, x: &[Values; 8], q_max: f32, amax: f32) -> SuperBlock {
        SuperBlock {
            d: self.steps.d,
            dmin: self.steps.dmin,
            scales: self.scales.map(|scale| scale as u8),
            mins: self.mins.map(|min| min as u8),
            quants: core::array::from_fn(|group| {
                self.quants(group, &x[group], q_max, amax).map(|quant| quant as u8)
            }),
        }
    }
}

/// What offsets a type can hold.
#[derive(Clone, Copy, PartialEq)]
enum Offset {
    Free,
    NotPositive,
}

#[derive(Clone, Copy)]
struct Line {
    scale: f32,
    offset: f32,
}

impl Line {
    #[inline(always)]
    fn quants(&self, x: &Values, q_max: f32) -> Values {
        let inverse = if self.scale > 0.0 { 1.0 / self.scale } else { 0.0 };
        map(x, |x| round(((x - self.offset) * inverse).clamp(0.0, q_max)))
    }

    #[inline(always)]
    fn error(&self, x: &Values, quants: &Values) -> f32 {
        sum::<GROUP_ELEMS>(|i| {
            let error = self.scale * quants[i] + self.offset - x[i];
            error * error
        })
    }

    /// The line that suits the integers best.
    #[inline(always)]
    fn solve(x: &Values, quants: &Values, offset: Offset) -> Option<Self> {
        let n = GROUP_ELEMS as f32;
        let (sum_q, sum_x) = (sum::<GROUP_ELEMS>(|i| quants[i]), sum::<GROUP_ELEMS>(|i| x[i]));
        let (sum_qq, sum_qx) = (
            sum::<GROUP_ELEMS>(|i| quants[i] * quants[i]),
            sum::<GROUP_ELEMS>(|i| quants[i] * x[i]),
        );
        let determinant = n * sum_qq - sum_q * sum_q;
        if determinant <= 0.0 {
            return None;
        }
        let scale = (n * sum_qx - sum_q * sum_x) / determinant;
        let line = Self { scale, offset: (sum_x - scale * sum_q) / n };
        if offset == Offset::NotPositive && line.offset > 0.0 {
            return Some(Self { scale: sum_qx / sum_qq, offset: 0.0 });
        }
        Some(line)
    }
}

/// The best line found for a group.
fn fit(x: &Values, q_max: f32, offset: Offset) -> Line {
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let low = if offset == Offset::NotPositive { low.min(0.0) } else { low };
    let range = high - low;
    let mut best = Line { scale: 0.0, offset: low };
    if range < 1e-6 {
        return best;
    }
    let mut least_error = f32::INFINITY;
    for guess in GUESSES {
        let mut line = Line { scale: range / (q_max + guess * q_max / 15.0), offset: low };
        for _ in 0..2 {
            let Some(solved) = Line::solve(x, &line.quants(x, q_max), offset) else { break };
            line = solved;
        }
        let error = line.error(x, &line.quants(x, q_max));
        if error < least_error {
            (best, least_error) = (line, error);
        }
    }
    best
}
