// Tensor cores: arithmetic on pairs of f16, matrix instructions, and the f16 activations that matrix
// products read.
#pragma once

#include "matrix.cuh"

#ifndef KERNEL_SHIM

// Bytes as f16.
__device__ __forceinline__ u16* as_halves(u8* bytes) {
    return reinterpret_cast<u16*>(bytes);
}
__device__ __forceinline__ const u16* as_halves(const u8* bytes) {
    return reinterpret_cast<const u16*>(bytes);
}

// Pairs of f16 in a word, the first in the low half; each operation rounds once.
__device__ __forceinline__ u32 half2_add(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
__device__ __forceinline__ u32 half2_multiply(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ u32 half2_multiply_add(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// 2^x, 0 where that is below the normal numbers.
__device__ __forceinline__ float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// (a & b) | c, in one instruction.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// c += a * b for a tile of 16 x 16 f16 and one of 16 x 8, sums in f32. Lane 4 i + j holds of a the
// rows i and 8 + i at columns 2 j, 2 j + 1 (a[0], a[1]) and 8 + 2 j, 9 + 2 j (a[2], a[3]); of b the
// same rows of column i (b[0], b[1]); of c rows i (c[0], c[1]) and 8 + i at columns 2 j, 2 j + 1.
__device__ __forceinline__ void multiply_tiles(float c[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 f16 from shared memory: lane 8 m + i gives the address of row i of matrix
// m, 16 bytes; lane 4 i + j gets of each matrix row i, elements 2 j and 2 j + 1.
__device__ __forceinline__ void load_matrices(u32 out[4], const u16* row) {
    const u32 at = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 out[4], const u16* row) {
    const u32 at = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}

#endif  // KERNEL_SHIM

// Both halves of a pair.
__device__ __forceinline__ u32 half2_of(float value) {
    return float_to_half(value) * 0x00010001u;
}
__device__ __forceinline__ u32 half2_of(float low, float high) {
    return float_to_half(low) | u32(float_to_half(high)) << 16;
}

// As f16, the largest finite number in place of what is beyond; a NaN stays one.
__device__ __forceinline__ u16 float_to_finite_half(float value) {
    return float_to_half(value == value ? fminf(fmaxf(value, -65504.0f), 65504.0f) : value);
}

__device__ __forceinline__ u32 finite_pair(float low, float high) {
    return float_to_finite_half(low) | u32(float_to_finite_half(high)) << 16;
}

// A group of 32 weights ready to become f16: weight i is scales[i / 16] * quant i + offset, where
// the parts of the formula are f16 and it is rounded once.
template <class Type>
struct HalfGroup {
    static constexpr Quants KIND = Type::QUANTS;
    u32 quants[KIND == Quants::NIBBLES ? 4 : KIND == Quants::NIBBLES_AND_PAIRS ? 6 : 8];
    u32 scales[2], offset;  // pairs of equal halves

    HalfGroup() = default;
    __device__ __forceinline__ HalfGroup(const typename Type::Packed& packed, u64 index) {
        const Group group = Type::decode(packed, index);
        if constexpr (KIND == Quants::BYTES) {
            for (u32 i = 0; i < 8; i++) {
                quants[i] = group.quants[i] ^ 0x80808080;  // plus 128 each: without a sign
            }
        } else {
            Type::words(packed, quants);
        }
        scales[0] = half2_of(group.d * float(group.scales[0]));
        scales[1] = Type::TWO_SCALES ? half2_of(group.d * float(group.scales[1])) : scales[0];
        offset = Type::OFFSET ? half2_of(group.offset) : 0;
    }

    // Quants 4 i and 4 i + 2, or 4 i + 1 and 4 i + 3, as f16. 0x6400 + n is the f16 1024 + n.
    __device__ __forceinline__ u32 pair(u32 i, u32 odd) const {
        if constexpr (KIND == Quants::BYTES) {
            const u32 biased = __byte_perm(quants[i], 0x64646464, odd ? 0x4341 : 0x4240);
            return half2_add(biased, 0xe480e480);  // - 1152
        } else {
            const bool high = i >= 4;
            const u32 word = odd ? quants[i % 4] >> 8 : quants[i % 4];
            u32 biased = and_or(word, high ? 0x00f000f0 : 0x000f000f, 0x64006400);
            u32 bias = Type::BIAS;
            if constexpr (KIND == Quants::NIBBLES_AND_PAIRS) {
                // To above the nibbles.
                const u32 bits = quants[4 + i % 2], up = i / 2 % 2 ? 2 : 4;
                biased = and_or(odd ? bits >> (8 - up) : bits << up,
                                high ? 0x03000300 : 0x00300030, biased);
            }
            return high ? half2_multiply_add(biased, 0x2c002c00, half2_of(-64.0f - bias))  // / 16
                        : half2_add(biased, half2_of(-1024.0f - bias));
        }
    }

    // Weights 4 i and 4 i + 2, or 4 i + 1 and 4 i + 3.
    __device__ __forceinline__ u32 weights(u32 i, u32 odd) const {
        const u32 scale = scales[i / 4];
        return Type::OFFSET ? half2_multiply_add(pair(i, odd), scale, offset)
                            : half2_multiply(pair(i, odd), scale);
    }
};

// f16 activations [rows][n], n rounded up to a multiple of 128; what is beyond n is finite. Of four
// elements the second and the third are exchanged, because weights come out of their words like
// that. Orders:
//
//   rows        row after row
//   fragments   as lanes hold them, element 32 * b + 8 * a + e of the columns:
//               up to 8 rows   [128 columns][a][row][b][8 elements]
//               up to 32       [128 columns][row / 16][a][e % 2][row % 8][b][e / 4][row / 8 % 2][2]
struct HalfRows {
    static constexpr u32 COLUMNS = 128;
    u32 n_rows, n;
    bool fragments;

    __device__ __forceinline__ u32 padded() const {
        return div_ceil(n, COLUMNS) * COLUMNS;
    }
    // Where elements k and k + 2 of a row are, one after the other; k % 4 is 0 or 1.
    __device__ __forceinline__ u64 pair(u32 row, u32 k) const {
        const u32 four = k % 8 / 4, odd = k % 2;
        if (!fragments) {
            return u64(row) * padded() + k / 4 * 4 + odd * 2;
        }
        const u32 a = k % 32 / 8, b = k % COLUMNS / 32;
        const u64 columns = k / COLUMNS;
        if (n_rows <= 8) {
            return ((columns * 4 + a) * 8 + row) * 32 + b * 8 + four * 4 + odd * 2;
        }
        const u64 tile = ((columns * 2 + row / 16) * 4 + a) * 2 + odd;
        return (tile * 8 + row % 8) * 32 + b * 8 + four * 4 + row / 8 % 2 * 2;
    }
    __device__ __forceinline__ u64 at(u32 row, u32 k) const {
        return pair(row, k & ~2u) + k / 2 % 2;
    }
    // Stores elements k .. k + 7, k a multiple of 8: 0 and 2, 1 and 3, 4 and 6, 5 and 7.
    __device__ __forceinline__ void store_eight(Global<u16> to, u32 row, u32 k,
                                                const u32 pairs[4]) const {
        if (!fragments || n_rows <= 8) {
            store(to + pair(row, k), uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
            return;
        }
        for (u32 i = 0; i < 4; i++) {
            store(to + pair(row, k + i / 2 * 4 + i % 2), pairs[i]);
        }
    }
};

// Up to three matrices with one input, and what becomes of their products. Chosen without arrays,
// which would lie in memory.
struct GemmArgs {
    Global<const u8> w0, w1, w2;
    Global<const float> bias, residual;
    Global<u8> out;
    u32 type0, type1, type2, n_out0, n_out1, n_out2;
    u32 n_in, n_tokens, form;

    __device__ __forceinline__ Global<const u8> matrix(u32 part) const {
        return part == 0 ? w0 : part == 1 ? w1 : w2;
    }
    __device__ __forceinline__ u32 type(u32 part) const {
        return part == 0 ? type0 : part == 1 ? type1 : type2;
    }
    __device__ __forceinline__ u32 n_out(u32 part) const {
        return part == 0 ? n_out0 : part == 1 ? n_out1 : n_out2;
    }
    // Rows of an output that is no SwiGLU.
    __device__ __forceinline__ u32 n_rows() const {
        return n_out0 + n_out1 + n_out2;
    }
    __device__ __forceinline__ float biased(float sum, u32 row) const {
        return bias ? sum + bias[row] : sum;
    }
};

// The matrix of a block's tile, and where in it the tile begins.
struct TilePlace {
    u32 part, row, before;  // rows of the parts before

    __device__ __forceinline__ TilePlace(const GemmArgs& args, u32 tile, u32 rows)
        : part(0), before(0) {
        u32 tiles = div_ceil(args.n_out0, rows);
        while (part < 2 && tile >= tiles) {
            tile -= tiles;
            before += args.n_out(part);
            part++;
            tiles = div_ceil(args.n_out(part), rows);
        }
        row = tile * rows;
    }
};

// Forms of a product y = w x + bias: y in f32; residual + y in f32; from GATED on, f(y of w0) * (y of
// w1) as f16 times 1/16, so that it does not overflow: f is silu(z) = z / (1 + e^-z) of form SWIGLU,
// gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) of form GEGLU.
constexpr u32 STORE = 0, ADD = 1, SWIGLU = 2, GEGLU = 3, GATED = 2;
constexpr float MIDDLE_SCALE = 0x1p-4f;

__device__ __forceinline__ u16 gated_half(u32 form, float gate, float up) {
    const float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
    const float activated =
        form == GEGLU ? 0.5f * gate * (1.0f + tanhf(inner)) : gate / (1.0f + expf(-gate));
    return float_to_finite_half(activated * up * MIDDLE_SCALE);
}
