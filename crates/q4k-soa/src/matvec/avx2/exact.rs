//! Exact products of quantised types, by pairs of groups: the integers of both become floats four
//! at a time in each of eight lanes, lanes 0 to 3 of the one group, 4 to 7 of the other.

use alloc::vec::Vec;
use core::arch::x86_64::*;
use core::ops::Range;

use super::first;
use super::weights::{
    bytes_4, bytes_5, bytes_6, halves_2, halves_4, k_scales_and_offsets, load_16, load_floats,
    load_i8, spread,
};
use crate::block::HalfBytes;
use crate::matvec::scalar::{QUANT_UNIT, group_sums};
use crate::{GROUP_ELEMS, PackedMatrix};

/// The activations of two neighbouring groups, arranged.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Pair {
    /// Of the first 16 of both groups, then of the others: which of four that lie side by side, by
    /// lane. In units that make up for integers in the uppermost byte.
    halves: [[[f32; 8]; 4]; 2],
    sums: [f32; 8],
}

/// What belongs to the whole groups of `x`; a group without a neighbour has zeros for one.
pub(super) fn arranged(x: &[f32]) -> Vec<Pair> {
    let pairs = x.as_chunks::<GROUP_ELEMS>().0.chunks(2).map(|groups| {
        let mut pair = Pair { halves: [[[0.0; 8]; 4]; 2], sums: [0.0; 8] };
        for (side, group) in groups.iter().enumerate() {
            for (i, x) in group.iter().enumerate() {
                pair.halves[i / 16][i % 4][4 * side + i % 16 / 4] = x * QUANT_UNIT;
            }
            pair.sums[4 * side..4 * side + 4].copy_from_slice(&group_sums(group));
        }
        pair
    });
    pairs.collect()
}

/// The weights of two neighbouring groups: `scale * quant + offset`.
struct Weights {
    /// The first 16 of both groups, then the others; signed bytes.
    quants: [__m256i; 2],
    /// By half and lane.
    scales: [__m256; 2],
    /// By lane.
    offsets: Option<__m256>,
}

/// A row's result so far.
struct Sums {
    halves: [__m256; 2],
    offsets: __m256,
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn zero() -> Self {
        Self { halves: [_mm256_setzero_ps(); 2], offsets: _mm256_setzero_ps() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add(&mut self, x: &Pair, weights: Weights) {
        for half in 0..2 {
            let mut dot = _mm256_setzero_ps();
            for (place, x) in x.halves[half].iter().enumerate() {
                // One byte of each four, uppermost in its lane and with zeros below.
                let place = _mm256_set1_epi32((place as i32) << 24);
                let first = _mm_setr_epi32(0x0080_8080, 0x0480_8080, 0x0880_8080, 0x0c80_8080);
                let first = _mm256_broadcastsi128_si256(first);
                let from = _mm256_add_epi32(first, place);
                let quants = _mm256_shuffle_epi8(weights.quants[half], from);
                dot = _mm256_fmadd_ps(_mm256_cvtepi32_ps(quants), load_floats(x), dot);
            }
            self.halves[half] = _mm256_fmadd_ps(dot, weights.scales[half], self.halves[half]);
        }
        if let Some(offsets) = weights.offsets {
            self.offsets = _mm256_fmadd_ps(offsets, load_floats(&x.sums), self.offsets);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn total(self) -> f32 {
        let sums = _mm256_add_ps(_mm256_add_ps(self.halves[0], self.halves[1]), self.offsets);
        let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
        _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)))
    }
}

/// The rows of a type whose blocks are groups: the bytes of two in each plane, and their weights.
macro_rules! rows_of_groups {
    ($name:ident, $($plane:ident: $bytes:literal),+ => $weights:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $name(
            matrix: &PackedMatrix<'_>,
            rows: Range<u32>,
            x: &[Pair],
            out: &mut [f32],
        ) {
            for (row, out) in rows.zip(out) {
                let [$($plane,)+ ..] = matrix.row_planes(row);
                $( let $plane = $plane.as_chunks::<$bytes>(); )+
                let mut sums = Sums::zero();
                let whole = first!($($plane),+).0.len();
                for (index, x) in x[..whole].iter().enumerate() {
                    $( let $plane = &$plane.0[index]; )+
                    sums.add(x, $weights);
                }
                if let Some(x) = x.get(whole) {
                    $(
                        let mut padded = [0; $bytes];
                        padded[..$bytes / 2].copy_from_slice($plane.1);
                        let $plane = &padded;
                    )+
                    sums.add(x, $weights);
                }
                *out = sums.total();
            }
        }
    };
}

rows_of_groups!(dot_q4_0, quants: 32, d: 4 => {
    let scale = spread::<0, 1>(halves_2(d));
    Weights { quants: less::<8>(bytes_4(quants)), scales: [scale; 2], offsets: None }
});
rows_of_groups!(dot_q4_1, quants: 32, d: 8 => {
    let d = halves_4(d);
    let offsets = Some(spread::<1, 3>(d));
    Weights { quants: bytes_4(quants), scales: [spread::<0, 2>(d); 2], offsets }
});
rows_of_groups!(dot_q5_0, quants: 32, high: 8, d: 4 => {
    let scale = spread::<0, 1>(halves_2(d));
    Weights { quants: less::<16>(bytes_5(quants, high)), scales: [scale; 2], offsets: None }
});
rows_of_groups!(dot_q5_1, quants: 32, high: 8, d: 8 => {
    let d = halves_4(d);
    let offsets = Some(spread::<1, 3>(d));
    Weights { quants: bytes_5(quants, high), scales: [spread::<0, 2>(d); 2], offsets }
});
rows_of_groups!(dot_q8_0, quants: 64, d: 4 => {
    let [a, b] = [0, 1].map(|group| load_i8(bytemuck::cast_ref(&quants.as_chunks::<32>().0[group])));
    let quants =
        [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
    let scale = spread::<0, 1>(halves_2(d));
    Weights { quants, scales: [scale; 2], offsets: None }
});

/// The rows of a type whose blocks are eight groups: the bytes of a block in each plane, what its
/// scales are, and the weights of two of its groups.
macro_rules! rows_of_blocks {
    ($name:ident, $($plane:ident: $bytes:literal),+ => $scales:expr, $weights:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $name(
            matrix: &PackedMatrix<'_>,
            rows: Range<u32>,
            x: &[Pair],
            out: &mut [f32],
        ) {
            for (row, out) in rows.zip(out) {
                let [$($plane,)+ ..] = matrix.row_planes(row);
                $( let $plane = $plane.as_chunks::<$bytes>().0; )+
                let mut sums = Sums::zero();
                for (index, x) in x.as_chunks::<4>().0.iter().enumerate() {
                    $( let $plane = &$plane[index]; )+
                    let scales = $scales;
                    for (pair, x) in x.iter().enumerate() {
                        sums.add(x, $weights(pair, scales));
                    }
                }
                *out = sums.total();
            }
        }
    };
}

rows_of_blocks!(dot_q4_k, quants: 128, scales: 12, d: 4 => k_scales_and_offsets(scales, d),
    |pair: usize, [scales, offsets]: [__m256; 2]| Weights {
        quants: bytes_4(&quants.as_chunks::<32>().0[pair]),
        scales: [spread_pair(scales, pair); 2],
        offsets: Some(spread_pair(offsets, pair)),
    }
);
rows_of_blocks!(dot_q5_k, quants: 128, high: 32, scales: 12, d: 4 =>
    k_scales_and_offsets(scales, d),
    |pair: usize, [scales, offsets]: [__m256; 2]| Weights {
        quants: bytes_5(&quants.as_chunks::<32>().0[pair], &high.as_chunks::<8>().0[pair]),
        scales: [spread_pair(scales, pair); 2],
        offsets: Some(spread_pair(offsets, pair)),
    }
);
rows_of_blocks!(dot_q6_k, low: 128, high: 64, scales: 16, d: 2 => {
        let d = _mm256_set1_ps(HalfBytes(*d).to_f32());
        let bytes = load_16(scales);
        [bytes, _mm_srli_si128::<8>(bytes)].map(|eight| {
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)))
        })
    },
    |pair: usize, scales: [__m256; 2]| {
        let quants = bytes_6(&low.as_chunks::<32>().0[pair], &high.as_chunks::<16>().0[pair]);
        // A scale for each half of a group, those of two pairs in a register.
        let of_half = |half: usize| {
            let first = (4 * (pair % 2) + half) as i32;
            let places = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
            let places = _mm256_add_epi32(places, _mm256_set1_epi32(first));
            _mm256_permutevar8x32_ps(scales[pair / 2], places)
        };
        Weights { quants: less::<32>(quants), scales: [of_half(0), of_half(1)], offsets: None }
    }
);

/// Without the bias of a type's integers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn less<const BIAS: i8>(quants: [__m256i; 2]) -> [__m256i; 2] {
    quants.map(|quants| _mm256_sub_epi8(quants, _mm256_set1_epi8(BIAS)))
}

/// Elements 2 · `pair` in the lower lane, 2 · `pair` + 1 in the upper.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn spread_pair(from: __m256, pair: usize) -> __m256 {
    let places = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    let places = _mm256_add_epi32(places, _mm256_set1_epi32(2 * pair as i32));
    _mm256_permutevar8x32_ps(from, places)
}
