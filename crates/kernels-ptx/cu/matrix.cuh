// Packed weight matrices in the planes layout (layout 1 of q4k-soa).
//
// A matrix [n_out, n_in] is one array per plane, each starting at a multiple of 256 bytes from the
// base and holding block after block in row order. A type is a struct with
//
//   GGML_TYPE       its number in GGUF
//   BLOCK           weights per block
//   place(planes)   finds its planes
//
// and, if its weights are small integers with scales (GROUPED), groups of 32 weights:
//
//   Packed load<From>(group)       the group's bytes; group counts from where the planes begin
//   Group decode(packed, group)    the group's numbers
//   QUANTS                         what its quants are packed as; if not bytes, then also
//   words(packed, to)              the words of them, nibbles first
//   BIAS                           what is subtracted from them
//
// or else
//
//   float weight(index)            one weight
//
// The base is aligned to 16 bytes.
#pragma once

#include "common.cuh"

constexpr u32 GROUP = 32;

// 32 weights: weight i is (d * scales[i / 16]) * quants[i] + offset, quant i in byte i % 4 of
// word i / 4.
struct Group {
    u32 quants[8];
    float d;
    i32 scales[2];
    float offset;
};

// How the quants of a group are packed: weights i in the low nibbles of 16 bytes and 16 + i in the
// high, perhaps with two more bits for each, weights i, 8 + i, 16 + i and 24 + i in one byte.
enum class Quants { BYTES, NIBBLES, NIBBLES_AND_PAIRS };

// Walks the planes of a matrix.
struct Planes {
    Global<const u8> base;
    u64 n_blocks, offset_bytes;

    __device__ __forceinline__ Planes(Global<const u8> base, u32 n_out, u32 blocks_per_row)
        : base(base), n_blocks(u64(n_out) * blocks_per_row), offset_bytes(0) {}

    __device__ __forceinline__ Global<const u8> next(u32 block_bytes) {
        const Global<const u8> plane = base + offset_bytes;
        offset_bytes = (offset_bytes + n_blocks * block_bytes + 255) & ~u64(255);
        return plane;
    }
};

// Where the planes that a type was placed in lie: in device memory, or copied to shared memory.
struct InDevice {
    template <class V>
    __device__ __forceinline__ static V get(Global<const u8> from) {
        return load_constant<V>(from);
    }
};
struct InShared {
    template <class V>
    __device__ __forceinline__ static V get(Global<const u8> from) {
        return ::load<V>(from);
    }
};

// 16 bytes, weight i in the low nibble of byte i and weight 16 + i in the high, to bytes.
__device__ __forceinline__ void unpack_nibbles(uint4 packed, u32 quants[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (u32 i = 0; i < 4; i++) {
        quants[i] = words[i] & 0x0f0f0f0f;
        quants[4 + i] = words[i] >> 4 & 0x0f0f0f0f;
    }
}

// Adds bit i of `bits` as the fifth bit of quant i.
__device__ __forceinline__ void add_fifth_bits(u32 bits, u32 quants[8]) {
    for (u32 i = 0; i < 8; i++) {
        // Bit k of a nibble times 2^(7 k) is at the bottom of byte k.
        const u32 spread = (bits >> (4 * i) & 0xf) * 0x00204081 & 0x01010101;
        quants[i] |= spread << 4;
    }
}

// Subtracts `bias` from each of four bytes below 64; the results are signed.
__device__ __forceinline__ u32 subtract_bytes(u32 bytes, u32 bias) {
    return ((bytes | 0x80808080) - bias * 0x01010101) ^ 0x80808080;
}

__device__ __forceinline__ float low_half(u32 pair) {
    return half_to_float(u16(pair & 0xffff));
}

__device__ __forceinline__ float high_half(u32 pair) {
    return half_to_float(u16(pair >> 16));
}

// The 12 bytes of eight 6-bit scales and mins of a super-block of Q4_K and Q5_K.
struct KScales {
    u32 words[3];

    template <class From>
    __device__ __forceinline__ static KScales load(Global<const u8> plane, u64 super_block) {
        KScales scales;
        for (u32 i = 0; i < 3; i++) {
            scales.words[i] = From::template get<u32>(plane + super_block * 12 + i * 4);
        }
        return scales;
    }

    __device__ __forceinline__ void unpack(u32 index, i32& scale, i32& min) const {
        const u32 shift = 8 * (index % 4);
        const u32 a = words[0] >> shift, b = words[1] >> shift, c = words[2] >> shift;
        scale = index < 4 ? a & 63 : (c & 15) | (a >> 2 & 0x30);
        min = index < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 0x30);
    }
};

// w = d * scale * q - dmin * min
struct Q4_K {
    static constexpr u32 GGML_TYPE = 12, BLOCK = 256;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = true;
    static constexpr Quants QUANTS = Quants::NIBBLES;
    static constexpr u32 BIAS = 0;
    Global<const u8> quants, scales, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(128);
        scales = planes.next(12);
        d = planes.next(4);
    }

    struct Packed {
        uint4 quants;
        KScales scales;
        u32 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), KScales::load<From>(scales, group / 8),
                From::template get<u32>(d + group / 8 * 4)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64 group) {
        Group out;
        i32 min;
        unpack_nibbles(packed.quants, out.quants);
        packed.scales.unpack(group % 8, out.scales[0], min);
        out.d = low_half(packed.d);
        out.scales[1] = out.scales[0];
        out.offset = -(high_half(packed.d) * float(min));
        return out;
    }

    __device__ __forceinline__ static void words(const Packed& packed, u32 to[4]) {
        to[0] = packed.quants.x, to[1] = packed.quants.y;
        to[2] = packed.quants.z, to[3] = packed.quants.w;
    }
};

// w = d * scale * q - dmin * min
struct Q5_K {
    static constexpr u32 GGML_TYPE = 13, BLOCK = 256;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = true;
    static constexpr Quants QUANTS = Quants::BYTES;
    Global<const u8> quants, high, scales, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(128);
        high = planes.next(32);
        scales = planes.next(12);
        d = planes.next(4);
    }

    struct Packed {
        uint4 quants;
        u32 high;
        KScales scales;
        u32 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), From::template get<u32>(high + group * 4),
                KScales::load<From>(scales, group / 8), From::template get<u32>(d + group / 8 * 4)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64 group) {
        Group out;
        i32 min;
        unpack_nibbles(packed.quants, out.quants);
        add_fifth_bits(packed.high, out.quants);
        packed.scales.unpack(group % 8, out.scales[0], min);
        out.d = low_half(packed.d);
        out.scales[1] = out.scales[0];
        out.offset = -(high_half(packed.d) * float(min));
        return out;
    }
};

// w = d * scale * (q - 32), one scale per 16 weights
struct Q6_K {
    static constexpr u32 GGML_TYPE = 14, BLOCK = 256;
    static constexpr bool GROUPED = true, TWO_SCALES = true, OFFSET = false;
    static constexpr Quants QUANTS = Quants::NIBBLES_AND_PAIRS;
    static constexpr u32 BIAS = 32;
    Global<const u8> low, high, scales, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        low = planes.next(128);
        high = planes.next(64);
        scales = planes.next(16);
        d = planes.next(2);
    }

    struct Packed {
        uint4 low;
        uint2 high;
        u16 scales, d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(low + group * 16), From::template get<uint2>(high + group * 8),
                From::template get<u16>(scales + group * 2), From::template get<u16>(d + group / 8 * 2)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        Group out;
        unpack_nibbles(packed.low, out.quants);
        for (u32 i = 0; i < 8; i++) {
            // Byte i holds the high bits of weights i, 8 + i, 16 + i, 24 + i.
            const u32 high = i % 2 == 0 ? packed.high.x : packed.high.y;
            out.quants[i] |= (high >> (i / 2 * 2) & 0x03030303) << 4;
            out.quants[i] = subtract_bytes(out.quants[i], 32);
        }
        out.d = half_to_float(packed.d);
        out.scales[0] = i8(packed.scales & 0xff);
        out.scales[1] = i8(packed.scales >> 8);
        out.offset = 0.0f;
        return out;
    }

    __device__ __forceinline__ static void words(const Packed& packed, u32 to[6]) {
        to[0] = packed.low.x, to[1] = packed.low.y, to[2] = packed.low.z, to[3] = packed.low.w;
        to[4] = packed.high.x, to[5] = packed.high.y;
    }
};

// w = d * q
struct Q8_0 {
    static constexpr u32 GGML_TYPE = 8, BLOCK = 32;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = false;
    static constexpr Quants QUANTS = Quants::BYTES;
    Global<const u8> quants, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(32);
        d = planes.next(2);
    }

    struct Packed {
        uint4 first, second;
        u16 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 32),
                From::template get<uint4>(quants + group * 32 + 16), From::template get<u16>(d + group * 2)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        return {{packed.first.x, packed.first.y, packed.first.z, packed.first.w, packed.second.x,
                 packed.second.y, packed.second.z, packed.second.w},
                half_to_float(packed.d),
                {1, 1},
                0.0f};
    }
};

// w = d * (q - 8)
struct Q4_0 {
    static constexpr u32 GGML_TYPE = 2, BLOCK = 32;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = false;
    static constexpr Quants QUANTS = Quants::NIBBLES;
    static constexpr u32 BIAS = 8;
    Global<const u8> quants, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(16);
        d = planes.next(2);
    }

    struct Packed {
        uint4 quants;
        u16 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), From::template get<u16>(d + group * 2)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        Group out = {{}, half_to_float(packed.d), {1, 1}, 0.0f};
        unpack_nibbles(packed.quants, out.quants);
        for (u32 i = 0; i < 8; i++) {
            out.quants[i] = subtract_bytes(out.quants[i], 8);
        }
        return out;
    }

    __device__ __forceinline__ static void words(const Packed& packed, u32 to[4]) {
        to[0] = packed.quants.x, to[1] = packed.quants.y;
        to[2] = packed.quants.z, to[3] = packed.quants.w;
    }
};

// w = d * q + m
struct Q4_1 {
    static constexpr u32 GGML_TYPE = 3, BLOCK = 32;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = true;
    static constexpr Quants QUANTS = Quants::NIBBLES;
    static constexpr u32 BIAS = 0;
    Global<const u8> quants, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(16);
        d = planes.next(4);
    }

    struct Packed {
        uint4 quants;
        u32 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), From::template get<u32>(d + group * 4)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        Group out = {{}, low_half(packed.d), {1, 1}, high_half(packed.d)};
        unpack_nibbles(packed.quants, out.quants);
        return out;
    }

    __device__ __forceinline__ static void words(const Packed& packed, u32 to[4]) {
        to[0] = packed.quants.x, to[1] = packed.quants.y;
        to[2] = packed.quants.z, to[3] = packed.quants.w;
    }
};

// w = d * (q - 16)
struct Q5_0 {
    static constexpr u32 GGML_TYPE = 6, BLOCK = 32;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = false;
    static constexpr Quants QUANTS = Quants::BYTES;
    Global<const u8> quants, high, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(16);
        high = planes.next(4);
        d = planes.next(2);
    }

    struct Packed {
        uint4 quants;
        u32 high;
        u16 d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), From::template get<u32>(high + group * 4),
                From::template get<u16>(d + group * 2)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        Group out = {{}, half_to_float(packed.d), {1, 1}, 0.0f};
        unpack_nibbles(packed.quants, out.quants);
        add_fifth_bits(packed.high, out.quants);
        for (u32 i = 0; i < 8; i++) {
            out.quants[i] = subtract_bytes(out.quants[i], 16);
        }
        return out;
    }
};

// w = d * q + m
struct Q5_1 {
    static constexpr u32 GGML_TYPE = 7, BLOCK = 32;
    static constexpr bool GROUPED = true, TWO_SCALES = false, OFFSET = true;
    static constexpr Quants QUANTS = Quants::BYTES;
    Global<const u8> quants, high, d;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        quants = planes.next(16);
        high = planes.next(4);
        d = planes.next(4);
    }

    struct Packed {
        uint4 quants;
        u32 high, d;
    };

    template <class From = InDevice>
    __device__ __forceinline__ Packed load(u64 group) const {
        return {From::template get<uint4>(quants + group * 16), From::template get<u32>(high + group * 4),
                From::template get<u32>(d + group * 4)};
    }

    __device__ __forceinline__ static Group decode(const Packed& packed, u64) {
        Group out = {{}, low_half(packed.d), {1, 1}, high_half(packed.d)};
        unpack_nibbles(packed.quants, out.quants);
        add_fifth_bits(packed.high, out.quants);
        return out;
    }
};

struct F32 {
    static constexpr u32 GGML_TYPE = 0, BLOCK = 1;
    static constexpr bool GROUPED = false;
    Global<const u8> values;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        values = planes.next(4);
    }

    __device__ __forceinline__ float weight(u64 index) const {
        return load_constant<float>(values + index * 4);
    }
};

struct F16 {
    static constexpr u32 GGML_TYPE = 1, BLOCK = 1;
    static constexpr bool GROUPED = false;
    Global<const u8> values;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        values = planes.next(2);
    }

    __device__ __forceinline__ float weight(u64 index) const {
        return half_to_float(load_constant<u16>(values + index * 2));
    }
};

struct BF16 {
    static constexpr u32 GGML_TYPE = 30, BLOCK = 1;
    static constexpr bool GROUPED = false;
    Global<const u8> values;

    template <class Walk>
    __device__ __forceinline__ void place(Walk planes) {
        values = planes.next(2);
    }

    __device__ __forceinline__ float weight(u64 index) const {
        return __uint_as_float(u32(load_constant<u16>(values + index * 2)) << 16);
    }
};

// Weights of a group in f32, the same bits as q4k-soa computes.
template <class Type>
__device__ __forceinline__ void dequantize(const Group& group, float out[GROUP]) {
    for (u32 half = 0; half < 2; half++) {
        const float scale = group.d * float(group.scales[Type::TWO_SCALES ? half : 0]);
        for (u32 i = 16 * half; i < 16 * half + 16; i++) {
            const float quant = float(i8(group.quants[i / 4] >> (8 * (i % 4)) & 0xff));
            out[i] = Type::OFFSET ? mul_then_add(scale, quant, group.offset) : scale * quant;
        }
    }
}

template <class Type, class Visitor>
__device__ __forceinline__ void visit_as(Global<const u8> base, u32 n_out, u32 n_in,
                                         Visitor& visitor) {
    Type matrix;
    matrix.place(Planes(base, n_out, n_in / Type::BLOCK));
    visitor.visit(matrix);
}

// Calls visitor.visit(matrix as its type's struct); nothing for a number that is no type.
template <class Visitor>
__device__ __forceinline__ void visit_matrix(Global<const u8> base, u32 ggml_type, u32 n_out,
                                             u32 n_in, Visitor& visitor) {
    switch (ggml_type) {
    case F32::GGML_TYPE: return visit_as<F32>(base, n_out, n_in, visitor);
    case F16::GGML_TYPE: return visit_as<F16>(base, n_out, n_in, visitor);
    case BF16::GGML_TYPE: return visit_as<BF16>(base, n_out, n_in, visitor);
    case Q4_0::GGML_TYPE: return visit_as<Q4_0>(base, n_out, n_in, visitor);
    case Q4_1::GGML_TYPE: return visit_as<Q4_1>(base, n_out, n_in, visitor);
    case Q5_0::GGML_TYPE: return visit_as<Q5_0>(base, n_out, n_in, visitor);
    case Q5_1::GGML_TYPE: return visit_as<Q5_1>(base, n_out, n_in, visitor);
    case Q8_0::GGML_TYPE: return visit_as<Q8_0>(base, n_out, n_in, visitor);
    case Q4_K::GGML_TYPE: return visit_as<Q4_K>(base, n_out, n_in, visitor);
    case Q5_K::GGML_TYPE: return visit_as<Q5_K>(base, n_out, n_in, visitor);
    case Q6_K::GGML_TYPE: return visit_as<Q6_K>(base, n_out, n_in, visitor);
    }
}
