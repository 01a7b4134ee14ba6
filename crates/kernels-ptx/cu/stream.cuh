// Units of the stream layout (layout 2 of q4k-soa): 8 rows x up to 32 groups of 32 columns.
//
// Lane (half, k) of a warp has rows 4 half .. 4 half + 4 and groups 2k and 2k + 1 of a unit. What
// it needs lies in 16-byte vectors, those of the lanes side by side, so that no two lanes of a
// load meet in a bank. q4k_soa::StreamUnits has the places.
//
// Activations of a chunk of 1024 columns in shared memory:
//
//   quants   [group odd][upper half of the group][group / 2] of 16 bytes
//   scales   [group odd][group / 2] of { scale, scale * sum of the quants }
//   halves   [group odd][group / 2] of { -32 * sum of the lower 16 quants, of the upper 16 }
#pragma once

#include "persistent_table.cuh"

constexpr u32 UNIT_ROWS = 8, UNIT_GROUPS = 32, CHUNK_ELEMS = 1024;

__device__ __forceinline__ u32 group_bytes(Format format) {
    return format == FORMAT_Q4_K ? 148 : format == FORMAT_Q6_K ? 210 : 272;
}

// Of one chunk.
struct Activations {
    const u8* quants;
    const float2* scales;
    const int2* halves;

    __device__ __forceinline__ int4 load(u32 odd, u32 half, u32 k) const {
        return *reinterpret_cast<const int4*>(quants + ((odd * 2 + half) * 16 + k) * 16);
    }
    __device__ __forceinline__ float2 scale(u32 odd, u32 k) const {
        return scales[odd * 16 + k];
    }
    __device__ __forceinline__ int2 half_sums(u32 odd, u32 k) const {
        return halves[odd * 16 + k];
    }
};

// Unsigned bytes times signed ones.
__device__ __forceinline__ i32 dot4_unsigned(u32 a, i32 b, i32 sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 word_of(const uint4& words, u32 index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ i32 word_of(const int4& words, u32 index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// A lane's sums of its four rows. `groups` is the unit's width; `release` is called when the unit
// has been read.
template <class Release>
__device__ __forceinline__ void dot_q4_k(const u8* unit, u32 groups, const Activations& x, u32 half,
                                         u32 k, float sums[4], Release release) {
    const u32 pairs = groups / 2;
    const u32 lane = half * pairs + k;
    uint4 quants[4][2];
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            quants[r][odd] = load<uint4>(unit + (r * 2 * groups + odd * groups + lane) * 16);
        }
    }
    const uint4 scales = load<uint4>(unit + 128 * groups + lane * 16);
    const uint4 factors = load<uint4>(unit + 144 * groups + (half * (groups / 8) + k / 4) * 16);
    release();
    float scaled[4] = {}, mins[4] = {};
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        const int4 low = x.load(odd, 0, k), high = x.load(odd, 1, k);
        const float2 scale = x.scale(odd, k);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            i32 dot_low = 0, dot_high = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 word = word_of(quants[r][odd], i);
                dot_low = dot4_unsigned(word & 0x0f0f0f0f, word_of(low, i), dot_low);
                dot_high = dot4_unsigned(word & 0xf0f0f0f0, word_of(high, i), dot_high);
            }
            const u32 pair = word_of(scales, r) >> (16 * odd);
            // 16 times the product: the upper nibbles were left where they are.
            const i32 dot = (dot_low * 16 + dot_high) * i32(pair & 0xff);
            scaled[r] += scale.x * float(dot);
            // A byte as a float: 2^23 + byte, less 2^23.
            const float min = __uint_as_float(0x4b000000 | (pair >> 8 & 0xff)) - 8388608.0f;
            mins[r] += scale.y * min;
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 pair = word_of(factors, r);
        sums[r] = half_to_float(u16(pair & 0xffff)) * (scaled[r] * 0.0625f) -
                  half_to_float(u16(pair >> 16)) * mins[r];
    }
}

template <class Release>
__device__ __forceinline__ void dot_q6_k(const u8* unit, u32 groups, const Activations& x, u32 half,
                                         u32 k, float sums[4], Release release) {
    const u32 pairs = groups / 2;
    const u32 lane = half * pairs + k;
    uint4 low_bits[4][2], high_bits[4];
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            low_bits[r][odd] = load<uint4>(unit + (r * 2 * groups + odd * groups + lane) * 16);
        }
        high_bits[r] = load<uint4>(unit + 128 * groups + (r * groups + lane) * 16);
    }
    const uint4 scales = load<uint4>(unit + 192 * groups + lane * 16);
    const uint2 factors = load<uint2>(unit + 208 * groups + (half * (groups / 8) + k / 4) * 8);
    release();
    float scaled[4] = {};
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        const int4 low = x.load(odd, 0, k), high = x.load(odd, 1, k);
        const float2 scale = x.scale(odd, k);
        const int2 start = x.half_sums(odd, k);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            // The quants are 32 too large: their products with 32 are where the sums start.
            i32 dot_low = start.x, dot_high = start.y;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 word = word_of(low_bits[r][odd], i);
                const u32 bits = word_of(high_bits[r], 2 * odd + i % 2);
                const u32 upper = i < 2 ? bits << 4 : bits << 2;
                const u32 upper_high = i < 2 ? bits : bits >> 2;
                dot_low = dot4_unsigned((word & 0x0f0f0f0f) | (upper & 0x30303030),
                                        word_of(low, i), dot_low);
                dot_high = dot4_unsigned((word >> 4 & 0x0f0f0f0f) | (upper_high & 0x30303030),
                                         word_of(high, i), dot_high);
            }
            const u32 pair = word_of(scales, r) >> (16 * odd);
            const i32 dot = i32(i8(pair & 0xff)) * dot_low + i32(i8(pair >> 8 & 0xff)) * dot_high;
            scaled[r] += scale.x * float(dot);
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 word = r < 2 ? factors.x : factors.y;
        sums[r] = half_to_float(u16(word >> (16 * (r % 2)) & 0xffff)) * scaled[r];
    }
}

template <class Release>
__device__ __forceinline__ void dot_q8_0(const u8* unit, u32 groups, const Activations& x, u32 half,
                                         u32 k, float sums[4], Release release) {
    // Groups may be odd in number: then the last lane of a half has one.
    const u32 even = (groups + 1) / 2, odd_groups = groups / 2;
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        sums[r] = 0.0f;
    }
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        const bool there = odd == 0 || k < odd_groups;
        const u32 lane = odd == 0 ? half * even + k : 2 * even + half * odd_groups + k;
        uint4 quants[4][2] = {};
        uint2 factors = {};
        if (there) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
#pragma unroll
                for (u32 upper = 0; upper < 2; upper++) {
                    quants[r][upper] =
                        load<uint4>(unit + ((r * 2 + upper) * 2 * groups + lane) * 16);
                }
            }
            factors = load<uint2>(unit + 256 * groups + (half * groups + 2 * k + odd) * 8);
        }
        if (odd == 1) {
            release();
        }
        if (there) {
            const int4 low = x.load(odd, 0, k), high = x.load(odd, 1, k);
            const float scale = x.scale(odd, k).x;
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                i32 dot = 0;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    dot = __dp4a(i32(word_of(quants[r][0], i)), word_of(low, i), dot);
                    dot = __dp4a(i32(word_of(quants[r][1], i)), word_of(high, i), dot);
                }
                const u32 word = r < 2 ? factors.x : factors.y;
                const float d = half_to_float(u16(word >> (16 * (r % 2)) & 0xffff));
                sums[r] += d * (scale * float(dot));
            }
        }
    }
}

// The sums of a unit's 8 rows, each over 16 lanes, to out[8].
__device__ __forceinline__ void reduce_rows(const float sums[4], u32 lane, float* out) {
    const bool upper = lane & 8, odd = lane & 4;
    float a = upper ? sums[2] : sums[0], b = upper ? sums[3] : sums[1];
    a += __shfl_xor_sync(ALL_LANES, upper ? sums[0] : sums[2], 8);
    b += __shfl_xor_sync(ALL_LANES, upper ? sums[1] : sums[3], 8);
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(ALL_LANES, odd ? a : b, 4);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    if ((lane & 3) == 0) {
        out[lane / 16 * 4 + (upper ? 2 : 0) + (odd ? 1 : 0)] = sum;
    }
}

// One unit times its chunk of the activations.
template <class Release>
__device__ __forceinline__ void unit_dot(Format format, const u8* unit, u32 groups,
                                         const Activations& x, float* out, Release release) {
    const u32 lane = lane_id(), half = lane / 16, k = lane % 16;
    float sums[4] = {};
    if (groups == UNIT_GROUPS) {
        switch (format) {
        case FORMAT_Q4_K: dot_q4_k(unit, UNIT_GROUPS, x, half, k, sums, release); break;
        case FORMAT_Q6_K: dot_q6_k(unit, UNIT_GROUPS, x, half, k, sums, release); break;
        default: dot_q8_0(unit, UNIT_GROUPS, x, half, k, sums, release); break;
        }
    } else {
        const auto later = [] {};
        if (k < (groups + 1) / 2) {
            switch (format) {
            case FORMAT_Q4_K: dot_q4_k(unit, groups, x, half, k, sums, later); break;
            case FORMAT_Q6_K: dot_q6_k(unit, groups, x, half, k, sums, later); break;
            default: dot_q8_0(unit, groups, x, half, k, sums, later); break;
            }
        }
        __syncwarp();
        release();
    }
    reduce_rows(sums, lane, out);
}

// Elements 8 part .. 8 part + 8 of one group of a row in the stream layout, the same bits as
// q4k-soa dequantises. `matrix` is in device memory.
__device__ __forceinline__ void dequantize8(const u8* matrix, Format format, u32 row_groups, u32 row,
                                            u32 group, u32 part, float out[8]) {
    const u32 bytes = group_bytes(format);
    const u32 chunk = group / UNIT_GROUPS, g = group % UNIT_GROUPS;
    const u32 c = min(row_groups - chunk * UNIT_GROUPS, UNIT_GROUPS);
    const u8* unit = matrix + (u64(row / UNIT_ROWS) * row_groups + chunk * UNIT_GROUPS) * bytes;
    const u32 r = row % 4, half = row / 4 % 2, odd = g % 2, k = g / 2;
    const u32 even = (c + 1) / 2;
    const u32 vector = (odd ? 2 * even + half * (c / 2) : half * even) + k;
    const u32 lane = half * (c / 2) + k;
    if (format == FORMAT_Q8_0) {
        const u32 at = ((r * 2 + part / 2) * 2 * c + vector) * 16 + part % 2 * 8;
        const uint2 quants = load<uint2>(unit + at);
        const float d = half_to_float(load<u16>(unit + 256 * c + (half * c + g) * 8 + r * 2));
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 word = i < 4 ? quants.x : quants.y;
            out[i] = d * float(i8(word >> (8 * (i % 4)) & 0xff));
        }
        return;
    }
    // Elements 0..16 are lower nibbles, 16..32 upper ones.
    const uint2 nibbles = load<uint2>(unit + (r * 2 * c + vector) * 16 + part % 2 * 8);
    const u32 shift = part / 2 * 4;
    const u32 low[2] = {nibbles.x >> shift & 0x0f0f0f0f, nibbles.y >> shift & 0x0f0f0f0f};
    if (format == FORMAT_Q4_K) {
        const u32 factors = load<u32>(unit + 144 * c + (half * (c / 8) + g / 8) * 16 + r * 4);
        const u16 pair = load<u16>(unit + 128 * c + lane * 16 + r * 4 + odd * 2);
        const float scale = half_to_float(u16(factors & 0xffff)) * float(pair & 0xff);
        const float offset = -(half_to_float(u16(factors >> 16)) * float(pair >> 8));
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            out[i] = mul_then_add(scale, float(low[i / 4] >> (8 * (i % 4)) & 0xff), offset);
        }
    } else {
        const uint2 bits = load<uint2>(unit + 128 * c + (r * c + lane) * 16 + odd * 8);
        const u32 high[2] = {bits.x >> (2 * part) & 0x03030303, bits.y >> (2 * part) & 0x03030303};
        const float d = half_to_float(load<u16>(unit + 208 * c + (half * (c / 8) + g / 8) * 8 + r * 2));
        const i32 s = i8(unit[192 * c + lane * 16 + r * 4 + odd * 2 + part / 2]);
        const float scale = d * float(s);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 quant = (low[i / 4] | high[i / 4] << 4) >> (8 * (i % 4)) & 0xff;
            out[i] = scale * float(i32(quant) - 32);
        }
    }
}
