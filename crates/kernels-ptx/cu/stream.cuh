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

// A lane's activations of group 2k + odd of a chunk.
struct Activations {
    int4 low, high;
    float2 scale;
    int2 halves;
};

// Where those of a chunk are.
struct ActivationPlaces {
    const u8* quants;
    const float2* scales;
    const int2* halves;

    __device__ __forceinline__ Activations operator()(u32 odd) const {
        const u8* group = quants + odd * 512;
        return {load<int4>(group), load<int4>(group + 256), scales[odd * 16], halves[odd * 16]};
    }
    __device__ __forceinline__ ActivationPlaces of_chunk(u32 chunk) const {
        return {quants + chunk * CHUNK_ELEMS, scales + chunk * UNIT_GROUPS,
                halves + chunk * UNIT_GROUPS};
    }
};

// What lies at an address in shared memory. By number and not by pointer: known to be a sum, the
// constant part goes into the instruction, and a register holds the rest.
__device__ __forceinline__ uint4 load_shared4(u32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint2 load_shared2(u32 address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "r"(address)
                 : "memory");
    return value;
}

// A number of which the compiler forgets how it came about.
__device__ __forceinline__ u32 opaque(u32 value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}

__device__ __forceinline__ u32 word_of(const uint4& words, u32 index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ i32 word_of(const int4& words, u32 index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// A lane's part of a unit of Q4_K.
struct UnitQ4K {
    uint4 quants[4][2], scales, factors;

    __device__ __forceinline__ void load(u32 unit, u32 groups, u32 half, u32 k) {
        const u32 lane = opaque(unit + (half * (groups / 2) + k) * 16);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++) {
                quants[r][odd] = load_shared4(lane + (r * 2 + odd) * groups * 16);
            }
        }
        scales = load_shared4(lane + 128 * groups);
        factors = load_shared4(unit + 144 * groups + (half * (groups / 8) + k / 4) * 16);
    }

    // The lane's sums of its four rows.
    __device__ __forceinline__ void multiply(const ActivationPlaces& activations, float sums[4]) const {
        float scaled[4] = {}, mins[4] = {};
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            const Activations x = activations(odd);
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                i32 dot_low = 0, dot_high = 0;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 word = word_of(quants[r][odd], i);
                    dot_low = dot_unsigned(word & 0x0f0f0f0f, word_of(x.low, i), dot_low);
                    dot_high = dot_unsigned(word & 0xf0f0f0f0, word_of(x.high, i), dot_high);
                }
                const u32 pairs_of_row = word_of(scales, r);
                // 16 times the product: the upper nibbles were left where they are.
                const i32 factor = i32(__byte_perm(pairs_of_row, 0, 0x4440 + 2 * odd));
                scaled[r] += x.scale.x * float((dot_low * 16 + dot_high) * factor);
                // A byte as a float: 2^23 + byte, less 2^23.
                const float min =
                    __uint_as_float(__byte_perm(pairs_of_row, 0x4b000000, 0x7441 + 2 * odd)) -
                    8388608.0f;
                mins[r] += x.scale.y * min;
            }
        }
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            const u32 pair = word_of(factors, r);
            sums[r] = half_to_float(u16(pair & 0xffff)) * (scaled[r] * 0.0625f) -
                      half_to_float(u16(pair >> 16)) * mins[r];
        }
    }
};

// A lane's sums of its four rows. `groups` is the unit's width; `release` is called when the unit
// has been read.
template <class Release>
__device__ __forceinline__ void dot_q4_k(u32 unit, u32 groups, const ActivationPlaces& activations, u32 half,
                                         u32 k, float sums[4], Release release) {
    UnitQ4K own;
    own.load(unit, groups, half, k);
    release();
    own.multiply(activations, sums);
}

template <class Release>
__device__ __forceinline__ void dot_q6_k(u32 unit, u32 groups, const ActivationPlaces& activations, u32 half,
                                         u32 k, float sums[4], Release release) {
    const u32 lane = opaque(unit + (half * (groups / 2) + k) * 16);
    uint4 low_bits[4][2], high_bits[4];
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            low_bits[r][odd] = load_shared4(lane + (r * 2 + odd) * groups * 16);
        }
        high_bits[r] = load_shared4(lane + (128 + r * 16) * groups);
    }
    const uint4 scales = load_shared4(lane + 192 * groups);
    const uint2 factors = load_shared2(unit + 208 * groups + (half * (groups / 8) + k / 4) * 8);
    release();
    float scaled[4] = {};
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        const Activations x = activations(odd);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            // The quants are 32 too large: their products with 32 are where the sums start.
            i32 dot_low = x.halves.x, dot_high = x.halves.y;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 word = word_of(low_bits[r][odd], i);
                const u32 bits = word_of(high_bits[r], 2 * odd + i % 2);
                const u32 upper = i < 2 ? bits << 4 : bits << 2;
                const u32 upper_high = i < 2 ? bits : bits >> 2;
                dot_low = dot_unsigned((word & 0x0f0f0f0f) | (upper & 0x30303030),
                                        word_of(x.low, i), dot_low);
                dot_high = dot_unsigned((word >> 4 & 0x0f0f0f0f) | (upper_high & 0x30303030),
                                         word_of(x.high, i), dot_high);
            }
            const u32 pair = word_of(scales, r) >> (16 * odd);
            const i32 dot = i32(i8(pair & 0xff)) * dot_low + i32(i8(pair >> 8 & 0xff)) * dot_high;
            scaled[r] += x.scale.x * float(dot);
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const u32 word = r < 2 ? factors.x : factors.y;
        sums[r] = half_to_float(u16(word >> (16 * (r % 2)) & 0xffff)) * scaled[r];
    }
}

template <class Release>
__device__ __forceinline__ void dot_q8_0(u32 unit, u32 groups, const ActivationPlaces& activations, u32 half,
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
        const u32 lane =
            opaque(unit + (odd == 0 ? half * even + k : 2 * even + half * odd_groups + k) * 16);
        uint4 quants[4][2] = {};
        uint2 factors = {};
        if (there) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
#pragma unroll
                for (u32 upper = 0; upper < 2; upper++) {
                    quants[r][upper] = load_shared4(lane + (r * 2 + upper) * 2 * groups * 16);
                }
            }
            factors = load_shared2(unit + 256 * groups + (half * groups + 2 * k + odd) * 8);
        }
        if (odd == 1) {
            release();
        }
        if (there) {
            const Activations x = activations(odd);
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                i32 dot = 0;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    dot = __dp4a(i32(word_of(quants[r][0], i)), word_of(x.low, i), dot);
                    dot = __dp4a(i32(word_of(quants[r][1], i)), word_of(x.high, i), dot);
                }
                const u32 word = r < 2 ? factors.x : factors.y;
                const float d = half_to_float(u16(word >> (16 * (r % 2)) & 0xffff));
                sums[r] += d * (x.scale.x * float(dot));
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

// One unit times its chunk of the activations, this lane's sums.
template <Format FORMAT, class Release>
__device__ __forceinline__ void unit_dot(u32 unit, u32 groups, const ActivationPlaces& activations, u32 half,
                                         u32 k, float sums[4], Release release) {
    if constexpr (FORMAT == FORMAT_Q4_K) {
        dot_q4_k(unit, groups, activations, half, k, sums, release);
    } else if constexpr (FORMAT == FORMAT_Q6_K) {
        dot_q6_k(unit, groups, activations, half, k, sums, release);
    } else {
        dot_q8_0(unit, groups, activations, half, k, sums, release);
    }
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
