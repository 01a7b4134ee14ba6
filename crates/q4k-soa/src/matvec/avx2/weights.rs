//! Weights as they lie in a block, in registers: integers, scales and floats.

use core::arch::x86_64::*;

use crate::block::k_scales::scales_and_mins;

/// The integers of two groups of nibbles: the first halves of both, the second halves of both.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn bytes_4(quants: &[u8; 32]) -> [__m256i; 2] {
    let bytes = load_i8(bytemuck::cast_ref(quants));
    [low_nibbles(bytes), high_nibbles(bytes)]
}

/// As [`bytes_4`], with a fifth bit per weight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn bytes_5(quants: &[u8; 32], high: &[u8; 8]) -> [__m256i; 2] {
    let byte_of = |first: i64, second: i64| {
        _mm256_setr_epi64x(
            0x0101_0101_0101_0101 * first,
            0x0101_0101_0101_0101 * (first + 1),
            0x0101_0101_0101_0101 * second,
            0x0101_0101_0101_0101 * (second + 1),
        )
    };
    let bit_of_byte = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let [first, second] = bytes_4(quants);
    let words = _mm256_set1_epi64x(i64::from_le_bytes(*high));
    let fifth = |bytes: __m256i| {
        let bits = _mm256_and_si256(_mm256_shuffle_epi8(words, bytes), bit_of_byte);
        let set = _mm256_cmpeq_epi8(bits, bit_of_byte);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    };
    [_mm256_or_si256(first, fifth(byte_of(0, 4))), _mm256_or_si256(second, fifth(byte_of(2, 6)))]
}

/// As [`bytes_4`], with two more bits per weight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn bytes_6(low: &[u8; 32], high: &[u8; 16]) -> [__m256i; 2] {
    let [first, second] = bytes_4(low);
    // Each group's 8 bytes twice in its lane: for weights 0..8 and 8..16, 16..24 and 24..32.
    let high = _mm256_permute4x64_epi64::<0x50>(_mm256_castsi128_si256(load_16(high)));
    let mask = _mm256_set1_epi8(0x30);
    let left = _mm256_sllv_epi64(high, _mm256_set_epi64x(2, 4, 2, 4));
    let right = _mm256_srlv_epi64(high, _mm256_set_epi64x(2, 0, 2, 0));
    [
        _mm256_or_si256(first, _mm256_and_si256(left, mask)),
        _mm256_or_si256(second, _mm256_and_si256(right, mask)),
    ]
}

/// A block's eight scales `d·sc` and offsets `−dmin·m`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn k_scales_and_offsets(scales: &[u8; 12], d: &[u8; 4]) -> [__m256; 2] {
    let [scales, mins] = scales_and_mins(scales)
        .map(|bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64))));
    let halves = halves_2(d);
    let minus_dmin = _mm_xor_ps(_mm_movehdup_ps(halves), _mm_set1_ps(-0.0));
    [
        _mm256_mul_ps(_mm256_broadcastss_ps(halves), scales),
        _mm256_mul_ps(_mm256_broadcastss_ps(minus_dmin), mins),
    ]
}

/// Element A in the whole lower lane, B in the upper.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn spread<const A: i32, const B: i32>(from: __m128) -> __m256 {
    let places = _mm256_setr_epi32(A, A, A, A, B, B, B, B);
    _mm256_permutevar8x32_ps(_mm256_castps128_ps256(from), places)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves_2(bytes: &[u8; 4]) -> __m128 {
    _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from_le_bytes(*bytes)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves_4(bytes: &[u8; 8]) -> __m128 {
    _mm_cvtph_ps(_mm_cvtsi64_si128(i64::from_le_bytes(*bytes)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_2(floats: &[f32; 2]) -> __m128 {
    _mm_castsi128_ps(_mm_cvtsi64_si128(bytemuck::cast(*floats)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn low_nibbles(bytes: __m256i) -> __m256i {
    _mm256_and_si256(bytes, _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high_nibbles(bytes: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves(bytes: &[u8; 16]) -> __m256 {
    _mm256_cvtph_ps(load_16(bytes))
}

/// Eight pairs of halves, the first ones and the second ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn half_pairs(bytes: &[u8; 32]) -> [__m256; 2] {
    let [a, b] = [0, 1].map(|i| halves(&bytes.as_chunks::<16>().0[i]));
    // Two at a time come from each lane of a and b; then they are put in order.
    let in_order =
        |mixed| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(mixed)));
    [
        in_order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
        in_order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
    ]
}

/// Eight small integers as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen(quants: &[i8; 8]) -> __m256 {
    let quants = _mm_cvtsi64_si128(bytemuck::cast(*quants));
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quants))
}

macro_rules! loads {
    ($($name:ident: $from:ty => $to:ty, $load:ident;)+) => { $(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $name(from: &$from) -> $to {
            // SAFETY: the reference is to as many bytes as are loaded; any alignment will do.
            unsafe { $load(from.as_ptr().cast()) }
        }
    )+ };
}

loads! {
    load_16: [u8; 16] => __m128i, _mm_loadu_si128;
    load_i8: [i8; 32] => __m256i, _mm256_loadu_si256;
    load_i16: [i16; 16] => __m256i, _mm256_loadu_si256;
    load_i32: [i32; 8] => __m256i, _mm256_loadu_si256;
    load_floats: [f32; 8] => __m256, _mm256_loadu_ps;
}
