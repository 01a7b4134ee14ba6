// The input of an operation of the persistent step: read from where its owners published it, normed
// and quantised into shared memory, by every block for itself.
#pragma once

#include "persistent_block.cuh"

// Vectors of 8 activations that a thread has in flight.
constexpr u32 BATCH = 3;

// Quantises N times 8 elements, four lanes a group, as q4k_soa::quantize_q8 does: those from
// 8 (v + i CONSUMERS) on. All lanes of a warp; those beyond the input store nothing.
//
// One stage after the other for all N, and without branches, so that N chains of dependent
// instructions take the time of one.
template <u32 N>
__device__ __forceinline__ void quantise(const Block& b, u32 v, u32 n_vectors, const float x[N][8]) {
    u32 amax_bits[N], words[N][2];
    i32 half[N], other_half[N];
    float scale[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        amax_bits[i] = max(largest_magnitude({x[i][0], x[i][1], x[i][2], x[i][3]}),
                           largest_magnitude({x[i][4], x[i][5], x[i][6], x[i][7]}));
    }
#pragma unroll
    for (u32 offset = 1; offset < 4; offset *= 2) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            amax_bits[i] = max(amax_bits[i], __shfl_xor_sync(ALL_LANES, amax_bits[i], offset));
        }
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        const Q8Range range(amax_bits[i]);
        words[i][0] = range.quantize({x[i][0], x[i][1], x[i][2], x[i][3]});
        words[i][1] = range.quantize({x[i][4], x[i][5], x[i][6], x[i][7]});
        scale[i] = range.scale;
        half[i] = sum_of_bytes(words[i][0], sum_of_bytes(words[i][1], 0));
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        half[i] += __shfl_xor_sync(ALL_LANES, half[i], 1);
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        other_half[i] = __shfl_xor_sync(ALL_LANES, half[i], 2);
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        const u32 at = v + i * CONSUMERS, group = at / 4, part = at % 4;
        const u32 chunk = group / UNIT_GROUPS, odd = group % 2, k = group % UNIT_GROUPS / 2;
        if (at < n_vectors) {
            u8* quants = b.shared + b.h.quants_at + chunk * CHUNK_ELEMS;
            store(quants + ((odd * 2 + part / 2) * 16 + k) * 16 + part % 2 * 8,
                  make_uint2(words[i][0], words[i][1]));
        }
        if (at < n_vectors && part == 0) {
            const u32 place = chunk * UNIT_GROUPS + odd * 16 + k;
            const Q8Group both = q8_group(scale[i], half[i] + other_half[i]);
            reinterpret_cast<float2*>(b.shared + b.h.scales_at)[place] = {both.scale, both.scaled_sum};
            reinterpret_cast<int2*>(b.shared + b.h.halves_at)[place] = {-32 * half[i],
                                                                        -32 * other_half[i]};
        }
    }
}

// Weights of the norm for N times 8 elements.
template <u32 N>
__device__ __forceinline__ void load_norm(const float* norm, u32 v, u32 n_vectors, float out[N][8]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        const u8* from = reinterpret_cast<const u8*>(norm + (v + i * CONSUMERS) * 8);
        const bool there = v + i * CONSUMERS < n_vectors;
        uint4 low = {}, high = {};
        load_constant_if(there, from, low);
        load_constant_if(there, from + 16, high);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            out[i][j] = __uint_as_float(word_of(low, j));
            out[i][4 + j] = __uint_as_float(word_of(high, j));
        }
    }
}

// The sum of the squares of N times 8 elements. Norms them, if there is a norm.
template <u32 N>
__device__ __forceinline__ float sum_and_norm(float x[N][8], const float* norm,
                                              const float weights[N][8]) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        float squares = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            squares += x[i][j] * x[i][j];
        }
        sum += squares;
    }
    if (norm) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                x[i][j] = __fmul_rn(x[i][j], weights[i][j]);
            }
        }
    }
    return sum;
}

// The first input: the row of the embedding matrix, which every block dequantises for itself.
__device__ __forceinline__ float take_embedding(const Block& b, const Op& op) {
    const Header& h = b.h;
    const u32 n_vectors = op.n_in / 8;
    const u32 row = min(b.misc.token_id, h.n_vocab - 1);
    const float* norm = op.norm == NONE ? nullptr : b.floats(op.norm);
    // Rows of n_embd that are this block's own: blocks of 8, as vectors are.
    const Run& own = b.ops[OP_OUTPUT].runs[0];
    const u32 first_own = own.first_row / 8;
    float squares = 0.0f;
#pragma unroll 1
    for (u32 start = warp_id() * 32; start < n_vectors; start += CONSUMERS) {
        const u32 v = start + lane_id();
        float x[1][8] = {}, weights[1][8] = {};
        if (norm) {
            load_norm<1>(norm, v, n_vectors, weights);
        }
        if (v < n_vectors) {
            dequantize8(b.weights + u64(h.embed) * 16, Format(h.embed_format), h.n_embd / 32, row,
                        v / 4, v % 4, x[0]);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                x[0][i] *= h.embed_scale;
            }
            if (v >= first_own && v - first_own < own.n_blocks) {
                float* residual = reinterpret_cast<float*>(b.shared + h.residual_at);
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    residual[(v - first_own) * 8 + i] = x[0][i];
                }
            }
        }
        squares += sum_and_norm<1>(x, norm, weights);
        quantise<1>(b, v, n_vectors, x);
    }
    return squares;
}

// An input that other blocks publish, N vectors of 8 a thread at a time.
template <u32 N>
__device__ __forceinline__ float take_vector(const Block& b, const Op& op, u32 op_index) {
    const u32 n_vectors = op.n_in / 8;
    const u32* vector = b.peers.exchange + op.input;
    const float* norm = op.norm == NONE ? nullptr : b.floats(op.norm);
    float weights[N][8] = {};
    if (norm) {
        load_norm<N>(norm, threadIdx.x, n_vectors, weights);
    }
    if (threadIdx.x == 0) {
        const u32 target = (b.epoch + 1) * (op.n_in / 2);
        const u32* counter = b.peers.exchange + op.counter_in;
        b.peers.wait(WAIT_HINT, op_index, [&] { return i32(load_relaxed(counter) - target) >= 0; });
    }
    sync_consumers();
    float squares = 0.0f;
#pragma unroll 1
    for (u32 start = warp_id() * 32; start < n_vectors; start += N * CONSUMERS) {
        const u32 v = start + lane_id();
        uint4 words[N];
        const auto load_all = [&] {
#pragma unroll
            for (u32 i = 0; i < N; i++) {
                // Zeros in this step's phase behind the end.
                words[i] = make_uint4(b.phase, b.phase, b.phase, b.phase);
                load_relaxed4_if(v + i * CONSUMERS < n_vectors, vector + (v + i * CONSUMERS) * 4,
                                 words[i]);
            }
            u32 differs = 0;
#pragma unroll
            for (u32 i = 0; i < N; i++) {
                differs |= out_of_phase(words[i], b.phase);
            }
            return (opaque(differs) & 1) == 0;
        };
        if (!load_all()) {
            b.peers.wait(WAIT_WORDS, op_index, load_all);
        }
        __syncwarp();
        if (threadIdx.x == 0) {
            // What was read is here: weights may come in again.
            *static_cast<volatile u32*>(&b.misc.limit) = b.h.outstanding_busy;
        }
        if (norm && start >= N * CONSUMERS) {
            load_norm<N>(norm, v, n_vectors, weights);
        }
        float x[N][8];
#pragma unroll
        for (u32 i = 0; i < N; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 word = word_of(words[i], j);
                x[i][2 * j] = pair_low(word);
                x[i][2 * j + 1] = pair_high(word);
            }
        }
        squares += sum_and_norm<N>(x, norm, weights);
        quantise<N>(b, v, n_vectors, x);
    }
    return squares;
}

// The operation's input to shared memory; returns this thread's share of the sum of its squares.
__device__ __forceinline__ float take_input(const Block& b, const Op& op, u32 op_index) {
    if (op.input == NONE) {
        return take_embedding(b, op);
    }
    return op.n_in <= 8 * CONSUMERS ? take_vector<1>(b, op, op_index)
                                    : take_vector<BATCH>(b, op, op_index);
}
