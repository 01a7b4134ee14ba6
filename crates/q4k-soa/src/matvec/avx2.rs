//! AVX2 with FMA and F16C.
//!
//! 8-bit products of quantised types go by *octets* of eight groups, 256 weights. Two groups of
//! nibbles, a *pair*, fill a register: 16 bytes of one in the lower lane, of the next in the upper.
//! So the activations are arranged once to lie the same way, and every weight byte is loaded once,
//! masked, and multiplied. Behind its whole octets a row goes on by pairs, and a group that is left
//! over is a pair with zeros.

#![allow(unsafe_code)]

mod exact;
mod weights;

use alloc::vec::Vec;
use core::arch::x86_64::*;
use core::ops::Range;

use self::weights::{
    bytes_4, bytes_5, bytes_6, half_pairs, halves, halves_2, halves_4, k_scales_and_offsets,
    load_2, load_16, load_floats, load_i8, load_i16, load_i32, spread, widen,
};
use super::scalar;
use crate::block::{BlockBf16, BlockF16, BlockF32, HalfBytes};
use crate::{GROUP_ELEMS, PackedMatrix, Q8Group, WeightType};

/// Whether the processor has what this module needs.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// The activations of [`rows_dot_q8`]; none where the processor is too old.
pub(super) fn arranged(quants: &[i8], groups: &[Q8Group]) -> Vec<Octet> {
    if !available() {
        return Vec::new();
    }
    // SAFETY: the processor has all the features that the function enables.
    unsafe { arrange(quants, groups) }
}

/// [`rows_dot_q8`](super::rows_dot_q8) of checked arguments; `octets` is what [`arranged`] made of
/// the others. False where the processor is too old.
pub(super) fn rows_dot_q8(
    matrix: &PackedMatrix<'_>,
    rows: Range<u32>,
    quants: &[i8],
    groups: &[Q8Group],
    octets: &[Octet],
    out: &mut [f32],
) -> bool {
    if !available() {
        return false;
    }
    // SAFETY: the processor has all the features that these functions enable.
    unsafe {
        match matrix.weight_type() {
            WeightType::F32 => dot_q8_f32(matrix, rows, quants, groups, out),
            WeightType::F16 => dot_q8_f16(matrix, rows, quants, groups, out),
            WeightType::Bf16 => dot_q8_bf16(matrix, rows, quants, groups, out),
            WeightType::Q4_0 => dot_q4_0(matrix, rows, octets, out),
            WeightType::Q4_1 => dot_q4_1(matrix, rows, octets, out),
            WeightType::Q5_0 => dot_q5_0(matrix, rows, octets, out),
            WeightType::Q5_1 => dot_q5_1(matrix, rows, octets, out),
            WeightType::Q8_0 => dot_q8_0(matrix, rows, octets, out),
            WeightType::Q4K => dot_q4_k(matrix, rows, octets, out),
            WeightType::Q5K => dot_q5_k(matrix, rows, octets, out),
            WeightType::Q6K => dot_q6_k(matrix, rows, octets, out),
        }
    }
    true
}

pub(super) use exact::Pair as ExactPair;

/// The activations of [`rows_dot_f32`]; none where the processor is too old.
pub(super) fn arranged_f32(x: &[f32]) -> Vec<ExactPair> {
    if available() { exact::arranged(x) } else { Vec::new() }
}

/// [`rows_dot_f32`](super::rows_dot_f32) of checked arguments; `pairs` is what [`arranged_f32`]
/// made of `x`. False where the processor is too old.
pub(super) fn rows_dot_f32(
    matrix: &PackedMatrix<'_>,
    rows: Range<u32>,
    x: &[f32],
    pairs: &[ExactPair],
    out: &mut [f32],
) -> bool {
    if !available() {
        return false;
    }
    // SAFETY: the processor has all the features that these functions enable.
    unsafe {
        match matrix.weight_type() {
            WeightType::F32 => dot_f32_f32(matrix, rows, x, out),
            WeightType::F16 => dot_f32_f16(matrix, rows, x, out),
            WeightType::Bf16 => dot_f32_bf16(matrix, rows, x, out),
            WeightType::Q4_0 => exact::dot_q4_0(matrix, rows, pairs, out),
            WeightType::Q4_1 => exact::dot_q4_1(matrix, rows, pairs, out),
            WeightType::Q5_0 => exact::dot_q5_0(matrix, rows, pairs, out),
            WeightType::Q5_1 => exact::dot_q5_1(matrix, rows, pairs, out),
            WeightType::Q8_0 => exact::dot_q8_0(matrix, rows, pairs, out),
            WeightType::Q4K => exact::dot_q4_k(matrix, rows, pairs, out),
            WeightType::Q5K => exact::dot_q5_k(matrix, rows, pairs, out),
            WeightType::Q6K => exact::dot_q6_k(matrix, rows, pairs, out),
        }
    }
    true
}

/// Groups that are multiplied together.
const OCTET_GROUPS: usize = 8;

/// The activations of eight groups, arranged.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Octet {
    pairs: [Pair; 4],
    scales: [f32; 8],
    scaled_sums: [f32; 8],
    /// Of a group's quants, for types whose integers carry a bias.
    sums: [i32; 8],
    /// Of 16 quants each, for Q6_K.
    half_sums: [i16; 16],
}

/// Two neighbouring groups: the first halves of both, then the second halves of both.
#[derive(Clone, Copy)]
struct Pair {
    first: [i8; 32],
    second: [i8; 32],
}

impl Octet {
    const ZERO: Self = Self {
        pairs: [Pair { first: [0; 32], second: [0; 32] }; 4],
        scales: [0.0; 8],
        scaled_sums: [0.0; 8],
        sums: [0; 8],
        half_sums: [0; 16],
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
fn arrange(quants: &[i8], groups: &[Q8Group]) -> Vec<Octet> {
    let quants = quants.as_chunks::<GROUP_ELEMS>().0.chunks(OCTET_GROUPS);
    let octets = quants.zip(groups.chunks(OCTET_GROUPS)).map(|(quants, groups)| {
        let mut octet = Octet::ZERO;
        for (index, (quants, group)) in quants.iter().zip(groups).enumerate() {
            let pair = &mut octet.pairs[index / 2];
            let lane = 16 * (index % 2)..16 * (index % 2) + 16;
            pair.first[lane.clone()].copy_from_slice(&quants[..16]);
            pair.second[lane].copy_from_slice(&quants[16..]);
            octet.scales[index] = group.scale;
            octet.scaled_sums[index] = group.scaled_sum;
            let sum = |half: &[i8]| half.iter().map(|&quant| i16::from(quant)).sum::<i16>();
            let sums = [sum(&quants[..16]), sum(&quants[16..])];
            octet.half_sums[2 * index..2 * index + 2].copy_from_slice(&sums);
            octet.sums[index] = i32::from(sums[0]) + i32::from(sums[1]);
        }
        octet
    });
    octets.collect()
}

/// The rows of a type: `$octet` is called with eight groups of activations and the bytes that
/// they meet in each plane. What is left of a row goes `by_pairs` to another function, with two of
/// the eight; of types whose blocks are octets `nothing` is left.
macro_rules! rows_of {
    ($name:ident, $octet:ident, $rest:ident $($pair:ident)?, $($plane:ident: $bytes:literal),+) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name(matrix: &PackedMatrix<'_>, rows: Range<u32>, x: &[Octet], out: &mut [f32]) {
            for (row, out) in rows.zip(out) {
                let [$($plane,)+ ..] = matrix.row_planes(row);
                $( let $plane = $plane.as_chunks::<$bytes>(); )+
                let mut sums = Sums::zero();
                let whole = first!($($plane),+).0.len();
                for (index, x) in x[..whole].iter().enumerate() {
                    sums.$octet(x, $(&$plane.0[index]),+);
                }
                $rest!(sums, $($pair)?, x.get(whole), $($plane: $bytes),+);
                *out = sums.total();
            }
        }
    };
}

macro_rules! nothing {
    ($($any:tt)*) => {};
}

macro_rules! by_pairs {
    ($sums:ident, $pair:ident, $x:expr, $($plane:ident: $bytes:literal),+) => {
        if let Some(x) = $x {
            $( let $plane = $plane.1.as_chunks::<{ $bytes / 4 }>(); )+
            let pairs = first!($($plane),+).0.len();
            for index in 0..pairs {
                $sums.$pair(x, index, $(&$plane.0[index]),+);
            }
            if !first!($($plane),+).1.is_empty() {
                $(
                    let mut padded = [0; $bytes / 4];
                    padded[..$bytes / 8].copy_from_slice($plane.1);
                    let $plane = padded;
                )+
                $sums.$pair(x, pairs, $(&$plane),+);
            }
        }
    };
}

macro_rules! first {
    ($first:ident $(, $rest:ident)*) => {
        $first
    };
}
use first;

rows_of!(dot_q4_0, q4_0, by_pairs q4_0_pair, quants: 128, d: 16);
rows_of!(dot_q4_1, q4_1, by_pairs q4_1_pair, quants: 128, d: 32);
rows_of!(dot_q5_0, q5_0, by_pairs q5_0_pair, quants: 128, high: 32, d: 16);
rows_of!(dot_q5_1, q5_1, by_pairs q5_1_pair, quants: 128, high: 32, d: 32);
rows_of!(dot_q8_0, q8_0, by_pairs q8_0_pair, quants: 256, d: 16);
rows_of!(dot_q4_k, q4_k, nothing, quants: 128, scales: 12, d: 4);
rows_of!(dot_q5_k, q5_k, nothing, quants: 128, high: 32, scales: 12, d: 4);
rows_of!(dot_q6_k, q6_k, nothing, low: 128, high: 64, scales: 16, d: 2);

/// A row's result so far: group i of every octet in element i, groups of pairs anywhere.
#[derive(Clone, Copy)]
struct Sums {
    products: __m256,
    offsets: __m256,
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn zero() -> Self {
        Self { products: _mm256_setzero_ps(), offsets: _mm256_setzero_ps() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn total(self) -> f32 {
        let sums = _mm256_add_ps(self.products, self.offsets);
        let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
        _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)))
    }

    /// Adds `dots * d * scale_x`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_products(&mut self, x: &Octet, dots: __m256i, d: __m256) {
        let scales = _mm256_mul_ps(d, load_floats(&x.scales));
        self.products = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales, self.products);
    }

    /// Adds `offset * scaled_sum_x`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_offsets(&mut self, x: &Octet, offsets: __m256) {
        self.offsets = _mm256_fmadd_ps(offsets, load_floats(&x.scaled_sums), self.offsets);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q4_0(&mut self, x: &Octet, quants: &[u8; 128], d: &[u8; 16]) {
        let dots = without_bias::<8>(x, dots_4(x, quants));
        self.add_products(x, dots, halves(d));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q4_1(&mut self, x: &Octet, quants: &[u8; 128], d: &[u8; 32]) {
        let [d, m] = half_pairs(d);
        self.add_products(x, dots_4(x, quants), d);
        self.add_offsets(x, m);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q5_0(&mut self, x: &Octet, quants: &[u8; 128], high: &[u8; 32], d: &[u8; 16]) {
        let dots = without_bias::<16>(x, dots_5(x, quants, high));
        self.add_products(x, dots, halves(d));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q5_1(&mut self, x: &Octet, quants: &[u8; 128], high: &[u8; 32], d: &[u8; 32]) {
        let [d, m] = half_pairs(d);
        self.add_products(x, dots_5(x, quants, high), d);
        self.add_offsets(x, m);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q8_0(&mut self, x: &Octet, quants: &[u8; 256], d: &[u8; 16]) {
        self.add_products(x, dots_8(x, quants), halves(d));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q4_k(&mut self, x: &Octet, quants: &[u8; 128], scales: &[u8; 12], d: &[u8; 4]) {
        self.add_k(x, dots_4(x, quants), scales, d);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q5_k(
        &mut self,
        x: &Octet,
        quants: &[u8; 128],
        high: &[u8; 32],
        scales: &[u8; 12],
        d: &[u8; 4],
    ) {
        self.add_k(x, dots_5(x, quants, high), scales, d);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_k(&mut self, x: &Octet, dots: __m256i, scales: &[u8; 12], d: &[u8; 4]) {
        let [scales, offsets] = k_scales_and_offsets(scales, d);
        self.add_products(x, dots, scales);
        self.add_offsets(x, offsets);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q6_k(
        &mut self,
        x: &Octet,
        low: &[u8; 128],
        high: &[u8; 64],
        scales: &[u8; 16],
        d: &[u8; 2],
    ) {
        let scales = _mm256_cvtepi8_epi16(load_16(scales));
        // Four groups' scales in both lanes, for the pairs 0 and 1, and 2 and 3.
        let by_pairs = [
            _mm256_permute2x128_si256::<0x00>(scales, scales),
            _mm256_permute2x128_si256::<0x11>(scales, scales),
        ];
        let mut dots = [_mm256_setzero_si256(); 4];
        for (pair, dots) in dots.iter_mut().enumerate() {
            let (low, high) = (&low.as_chunks::<32>().0[pair], &high.as_chunks::<16>().0[pair]);
            let [first, second] = bytes_6(low, high);
            let x = &x.pairs[pair];
            let scales = by_pairs[pair / 2];
            let place = _mm256_set1_epi8(8 * (pair % 2) as i8);
            let scale = |half: __m256i| _mm256_shuffle_epi8(scales, _mm256_add_epi8(place, half));
            let of_first = scale(_mm256_setr_m128i(_mm_set1_epi16(0x0100), _mm_set1_epi16(0x0504)));
            let of_second =
                scale(_mm256_setr_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0706)));
            *dots = _mm256_add_epi32(
                _mm256_madd_epi16(_mm256_maddubs_epi16(first, load_i8(&x.first)), of_first),
                _mm256_madd_epi16(_mm256_maddubs_epi16(second, load_i8(&x.second)), of_second),
            );
        }
        // All with q in 0..64; the bias of 32 leaves in one step.
        let bias = _mm256_madd_epi16(scales, load_i16(&x.half_sums));
        let dots = _mm256_sub_epi32(by_group(dots), _mm256_slli_epi32::<5>(bias));
        self.add_products(x, dots, _mm256_set1_ps(HalfBytes(*d).to_f32()));
    }
}

/// Pairs: four partial dot products of a group in each lane, which are added up at the end of the
/// row.
impl Sums {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q4_0_pair(&mut self, x: &Octet, pair: usize, quants: &[u8; 32], d: &[u8; 4]) {
        let dots = without_pair_bias::<8>(x, pair, pair_4(x, pair, quants));
        self.add_pair(x, pair, dots, spread::<0, 1>(halves_2(d)));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q4_1_pair(&mut self, x: &Octet, pair: usize, quants: &[u8; 32], d: &[u8; 8]) {
        let d = halves_4(d);
        self.add_pair(x, pair, pair_4(x, pair, quants), spread::<0, 2>(d));
        self.add_pair_offsets(x, pair, spread::<1, 3>(d));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q5_0_pair(
        &mut self,
        x: &Octet,
        pair: usize,
        quants: &[u8; 32],
        high: &[u8; 8],
        d: &[u8; 4],
    ) {
        let dots = without_pair_bias::<16>(x, pair, pair_5(x, pair, quants, high));
        self.add_pair(x, pair, dots, spread::<0, 1>(halves_2(d)));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q5_1_pair(
        &mut self,
        x: &Octet,
        pair: usize,
        quants: &[u8; 32],
        high: &[u8; 8],
        d: &[u8; 8],
    ) {
        let d = halves_4(d);
        self.add_pair(x, pair, pair_5(x, pair, quants, high), spread::<0, 2>(d));
        self.add_pair_offsets(x, pair, spread::<1, 3>(d));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn q8_0_pair(&mut self, x: &Octet, pair: usize, quants: &[u8; 64], d: &[u8; 4]) {
        let quants = quants.as_chunks::<32>().0;
        let [a, b] = [0, 1].map(|lane| group_8(x, 2 * pair + lane, &quants[lane]));
        // The halves of each group's partial sums, added: a's in the lower lane, b's in the upper.
        let dots = _mm256_add_epi32(
            _mm256_permute2x128_si256::<0x20>(a, b),
            _mm256_permute2x128_si256::<0x31>(a, b),
        );
        self.add_pair(x, pair, dots, spread::<0, 1>(halves_2(d)));
    }

    /// As [`add_products`](Self::add_products).
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_pair(&mut self, x: &Octet, pair: usize, dots: __m256i, d: __m256) {
        let scales = spread::<0, 1>(load_2(&x.scales.as_chunks::<2>().0[pair]));
        let scales = _mm256_mul_ps(d, scales);
        self.products = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales, self.products);
    }

    /// As [`add_offsets`](Self::add_offsets); one element of each lane is enough.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add_pair_offsets(&mut self, x: &Octet, pair: usize, offsets: __m256) {
        let sums = spread::<0, 1>(load_2(&x.scaled_sums.as_chunks::<2>().0[pair]));
        let products = _mm256_mul_ps(offsets, sums);
        let first = _mm256_blend_ps::<0b0001_0001>(_mm256_setzero_ps(), products);
        self.offsets = _mm256_add_ps(self.offsets, first);
    }
}

/// Dot products of eight groups of nibbles, group i in element i.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots_4(x: &Octet, quants: &[u8; 128]) -> __m256i {
    let mut dots = [_mm256_setzero_si256(); 4];
    for (pair, dots) in dots.iter_mut().enumerate() {
        *dots = pair_4(x, pair, &quants.as_chunks::<32>().0[pair]);
    }
    by_group(dots)
}

/// As [`dots_4`], with a fifth bit per weight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots_5(x: &Octet, quants: &[u8; 128], high: &[u8; 32]) -> __m256i {
    let mut dots = [_mm256_setzero_si256(); 4];
    for (pair, dots) in dots.iter_mut().enumerate() {
        let (quants, high) = (&quants.as_chunks::<32>().0[pair], &high.as_chunks::<8>().0[pair]);
        *dots = pair_5(x, pair, quants, high);
    }
    by_group(dots)
}

/// As [`dots_4`], of signed bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots_8(x: &Octet, quants: &[u8; 256]) -> __m256i {
    let quants = quants.as_chunks::<32>().0;
    let mut dots = [_mm256_setzero_si256(); 8];
    for (group, dots) in dots.iter_mut().enumerate() {
        *dots = group_8(x, group, &quants[group]);
    }
    let [a, b, c, d, e, f, g, h] = dots;
    let add = |a, b| _mm256_hadd_epi32(a, b);
    let first = add(add(a, b), add(c, d));
    let second = add(add(e, f), add(g, h));
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(first, second),
        _mm256_permute2x128_si256::<0x31>(first, second),
    )
}

/// Four partial dot products of each of two groups of nibbles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pair_4(x: &Octet, pair: usize, quants: &[u8; 32]) -> __m256i {
    dot_pair(&x.pairs[pair], bytes_4(quants))
}

/// As [`pair_4`], with a fifth bit per weight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pair_5(x: &Octet, pair: usize, quants: &[u8; 32], high: &[u8; 8]) -> __m256i {
    dot_pair(&x.pairs[pair], bytes_5(quants, high))
}

/// Eight partial dot products of a group of signed bytes. Both factors may be -128, so they are
/// widened first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group_8(x: &Octet, group: usize, quants: &[u8; 32]) -> __m256i {
    let (pair, quants) = (&x.pairs[group / 2], quants.as_chunks::<16>().0);
    let widened = |bytes: &[u8; 16]| _mm256_cvtepi8_epi16(load_16(bytes));
    let lane = |half: &[i8; 32]| {
        let bytes: &[u8; 32] = bytemuck::cast_ref(half);
        widened(&bytes.as_chunks::<16>().0[group % 2])
    };
    _mm256_add_epi32(
        _mm256_madd_epi16(widened(&quants[0]), lane(&pair.first)),
        _mm256_madd_epi16(widened(&quants[1]), lane(&pair.second)),
    )
}

/// Four partial dot products per lane. Unsigned weights below 32: the sums of four products stay
/// within i16 (4 · 31 · 128 = 15872).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_pair(x: &Pair, [first, second]: [__m256i; 2]) -> __m256i {
    let sums = _mm256_add_epi16(
        _mm256_maddubs_epi16(first, load_i8(&x.first)),
        _mm256_maddubs_epi16(second, load_i8(&x.second)),
    );
    _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
}

/// The partial sums of four pairs, added up and in the order of the groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn by_group([a, b, c, d]: [__m256i; 4]) -> __m256i {
    // The lower lane has the even groups, the upper one the odd.
    let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// From dot products with q to ones with q − BIAS.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn without_bias<const BIAS: i32>(x: &Octet, dots: __m256i) -> __m256i {
    let bias = _mm256_mullo_epi32(load_i32(&x.sums), _mm256_set1_epi32(BIAS));
    _mm256_sub_epi32(dots, bias)
}

/// As [`without_bias`], of the partial dot products of a pair.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn without_pair_bias<const BIAS: i32>(x: &Octet, pair: usize, dots: __m256i) -> __m256i {
    let [a, b] = x.sums.as_chunks::<2>().0[pair];
    _mm256_sub_epi32(dots, _mm256_setr_epi32(BIAS * a, 0, 0, 0, BIAS * b, 0, 0, 0))
}

/// The rows of a float type: `$widen` makes eight floats of as many numbers.
macro_rules! float_rows {
    ($dot_q8:ident, $dot_f32:ident, $block:ident, $bytes:literal, $widen:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $dot_q8(
            matrix: &PackedMatrix<'_>,
            rows: Range<u32>,
            quants: &[i8],
            groups: &[Q8Group],
            out: &mut [f32],
        ) {
            let (quants, last_quants) = quants.as_chunks::<GROUP_ELEMS>();
            let (whole, last_group) = groups.split_at(quants.len());
            for (row, out) in rows.zip(out) {
                let [values, ..] = matrix.row_planes(row);
                let (values, last_values) = values.as_chunks::<{ GROUP_ELEMS * $bytes }>();
                let mut sums = Sums::zero();
                for ((values, x), group) in values.iter().zip(quants).zip(whole) {
                    let mut dot = _mm256_setzero_ps();
                    for (values, x) in values.as_chunks().0.iter().zip(x.as_chunks::<8>().0) {
                        dot = _mm256_fmadd_ps($widen(values), widen(x), dot);
                    }
                    let scale = _mm256_set1_ps(group.scale);
                    sums.products = _mm256_fmadd_ps(dot, scale, sums.products);
                }
                let last_planes = [last_values, &[], &[], &[]];
                let last = scalar::dot_q8_float::<$block>(last_planes, last_quants, last_group);
                *out = sums.total() + last;
            }
        }

        #[target_feature(enable = "avx2,fma,f16c")]
        fn $dot_f32(matrix: &PackedMatrix<'_>, rows: Range<u32>, x: &[f32], out: &mut [f32]) {
            let (x, last_x) = x.as_chunks::<8>();
            for (row, out) in rows.zip(out) {
                let [values, ..] = matrix.row_planes(row);
                let (values, last_values) = values.as_chunks::<{ 8 * $bytes }>();
                let mut lanes = [_mm256_setzero_pd(); 2];
                for (values, x) in values.iter().zip(x) {
                    add_doubles(&mut lanes, $widen(values), x);
                }
                let lanes = bytemuck::cast(lanes);
                *out = scalar::finish_dot_f32::<$block>(lanes, last_values, last_x);
            }
        }
    };
}

float_rows!(dot_q8_f32, dot_f32_f32, BlockF32, 4, |bytes: &[u8; 32]| {
    _mm256_castsi256_ps(load_i8(bytemuck::cast_ref(bytes)))
});
float_rows!(dot_q8_f16, dot_f32_f16, BlockF16, 2, |bytes: &[u8; 16]| halves(bytes));
float_rows!(dot_q8_bf16, dot_f32_bf16, BlockBf16, 2, |bytes: &[u8; 16]| {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_16(bytes))))
});

/// Adds eight products to the lanes of the exact sums. A product of two f32 is exact in f64, so
/// the fused operation gives the bits of the plain one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_doubles(lanes: &mut [__m256d; 2], weights: __m256, x: &[f32; 8]) {
    let x = load_floats(x);
    let low = |floats| _mm256_cvtps_pd(_mm256_castps256_ps128(floats));
    let high = |floats| _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(floats));
    lanes[0] = _mm256_fmadd_pd(low(weights), low(x), lanes[0]);
    lanes[1] = _mm256_fmadd_pd(high(weights), high(x), lanes[1]);
}
