// Attention of runs of tokens over one layer of the paged KV cache, on tensor cores: a chunk of a
// prompt, each of whose tokens sees those before it and itself.
//
// The row at absolute_position p attends to the slots j <= p, with a window to p - j < window; slot j
// holds the token at position j: rings that have turned are not for this kernel. With q as f16,
// score_j = scale * q . k_j, out = sum of weight_j v_j / sum of weight_j, weight_j =
// e^(score_j - a maximum so far) as f16, sums in f32; 0 where there is nothing to attend to.
//
// q             [n_tokens][n_head][head_dim], head_dim a multiple of 8
// kv            f16 [n_blocks][K, V][n_kv_head][block_size][head_dim]
// sequences     [n_tokens], which beyond the last count as the last
// block_table   [n_logical] every table_stride, for each of n_sequences
// tokens        [n_tokens][3]
// out           f16 [n_tokens][n_head * head_dim], in row order (0) or fragment order (1)
//
// Rows come in runs of run_tokens of one sequence, at positions that follow each other, padding
// last: the rows of a block's tile are of the first one's sequence, and those at positions before its
// are padding and get 0. attention_chunk_N is for head_dim up to N.
//
// Geometry: grid (n_head, tiles of 64 rows of a run), block 128: a warp has 16 rows. Shared memory:
// queries, and two stages of keys and values of KEYS slots; 16 bytes of a line lie at their number
// xor the line's.
// Alignment: q and kv 16 bytes.
#include "tables.cuh"
#include "tensor.cuh"

constexpr u32 ROWS = 64, THREADS = 128;
constexpr float LOG2_E = 1.44269504088896340736f;

// Lines of DIM f16 in shared memory.
template <u32 DIM>
struct Lines {
    Global<u16> base;

    __device__ __forceinline__ Global<u16> eight(u32 line, u32 index) const {
        return base + line * DIM + (index ^ line % 8) * 8;
    }
};

template <u32 DIM, u32 KEYS>
struct ChunkAttention {
    static constexpr u32 LINES = KEYS / (THREADS / 32);  // that a warp copies

    Lines<DIM> queries;
    Global<u8> shared;
    Global<const u16> kv;
    CacheIndex index;
    u32 kv_head, end;  // slots that are read end before
    u64 key;           // of the lane's slot of those that are copied next
    bool there;        // whether it is read

    // Sums of 16 rows and a tile of 8 elements each, and what is known of rows i and 8 + i.
    float sums[DIM / 8][4], max[2], total[2];

    __device__ __forceinline__ Lines<DIM> stage(u32 number, u32 part) const {
        return {as_halves(shared + (ROWS + (number % 2 * 2 + part) * KEYS) * DIM * 2)};
    }

    __device__ __forceinline__ void load_queries(Global<const float> q, u32 row_stride,
                                                 u32 n_rows) const {
        for (u32 piece = threadIdx.x; piece < ROWS * (DIM / 8); piece += THREADS) {
            const u32 row = piece / (DIM / 8), at = piece % (DIM / 8);
            u32 pairs[4] = {};
            if (row < n_rows && at * 8 < index.head_dim) {
                for (u32 i = 0; i < 2; i++) {
                    const float4 quad = load<float4>(q + (u64(row) * row_stride + at * 8 + i * 4));
                    pairs[2 * i] = finite_pair(quad.x, quad.y);
                    pairs[2 * i + 1] = finite_pair(quad.z, quad.w);
                }
            }
            store(queries.eight(row, at), uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
        }
    }

    // Looks up where the keys of the slots from `first` on are that the warp copies, a lane each.
    __device__ __forceinline__ void find(u32 first) {
        const u32 slot = first + warp_id() * LINES + lane_id() % LINES;
        there = slot < end;
        key = there ? index.key(slot, kv_head) : 0;
    }

    // Begins to copy keys and values of KEYS slots, which have been found, and finds the next ones;
    // zeros in place of what is beyond.
    __device__ __forceinline__ void copy(u32 number, u32 first) {
        if (first < end) {
            const u64 to_value = u64(index.n_kv_head) * index.block_size * index.head_dim;
#pragma unroll
            for (u32 i = 0; i < LINES * (DIM / 8) / 32; i++) {
                const u32 piece = i * 32 + lane_id(), line = piece / (DIM / 8), at = piece % (DIM / 8);
                const u32 there_low = __shfl_sync(ALL_LANES, u32(key), line);
                const u32 there_high = __shfl_sync(ALL_LANES, u32(key >> 32), line);
                const bool copied = __shfl_sync(ALL_LANES, u32(there), line) && at * 8 < index.head_dim;
                const Global<const u16> from =
                    kv + (copied ? (u64(there_high) << 32 | there_low) + at * 8 : 0);
                const u32 to = warp_id() * LINES + line, n_bytes = copied ? 16 : 0;
                copy_async(stage(number, 0).eight(to, at), from, n_bytes);
                copy_async(stage(number, 1).eight(to, at), from + (copied ? to_value : 0), n_bytes);
            }
            find(first + KEYS);
        }
        close_copies();
    }

    // Attends to KEYS slots. positions: of rows i and 8 + i. All slots are seen unless `masked`.
    __device__ __forceinline__ void attend(u32 number, u32 first, const u32 positions[2],
                                           u32 window, bool masked, float scale) {
        const Lines<DIM> keys = stage(number, 0), values = stage(number, 1);
        const u32 lane = lane_id();
        float scores[KEYS / 8][4];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[n][i] = 0.0f;
            }
        }
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
            u32 a[4];
            load_matrices(a, queries.eight(warp_id() * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; n++) {
                u32 b[4];
                const u32 line = n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b, keys.eight(line, k * 2 + lane / 8 % 2));
                multiply_tiles(scores[2 * n], a, b);
                multiply_tiles(scores[2 * n + 1], a, b + 2);
            }
        }

        // One branch for all, or there would be one for each.
        if (masked) {
            const u32 seen = window == 0 ? 0xffffffff : window;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 slot = first + n * 8 + lane % 4 * 2 + i % 2;
                    // Of a slot behind the position it is large.
                    const u32 age = positions[i / 2] - slot;
                    scores[n][i] = age < seen && slot <= positions[i / 2] ? scores[n][i] : -infinity();
                }
            }
        }
        float best[2] = {max[0], max[1]}, base[2];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[n][i] *= scale;
                best[i / 2] = fmaxf(best[i / 2], scores[n][i]);
            }
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            best[r] = fmaxf(best[r], __shfl_xor_sync(ALL_LANES, best[r], 1));
            best[r] = fmaxf(best[r], __shfl_xor_sync(ALL_LANES, best[r], 2));
            // Nothing seen yet: -infinity - -infinity would be NaN.
            base[r] = best[r] == -infinity() ? 0.0f : best[r];
            const float factor = exp2_of(max[r] - base[r]);
            max[r] = best[r];
            total[r] *= factor;
#pragma unroll
            for (u32 n = 0; n < DIM / 8; n++) {
                sums[n][2 * r] *= factor;
                sums[n][2 * r + 1] *= factor;
            }
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 16; n++) {
            // Weights as f16, in the order of a tile of 16 rows and 16 slots.
            u32 a[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 r = i % 2;
                u32 pair = 0;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const float score = scores[2 * n + i / 2][2 * r + j];
                    const u16 weight = float_to_half(exp2_of(score - base[r]));
                    total[r] += half_to_float(weight);
                    pair |= u32(weight) << 16 * j;
                }
                a[i] = pair;
            }
#pragma unroll
            for (u32 d = 0; d < DIM / 16; d++) {
                u32 b[4];
                load_matrices_transposed(b, values.eight(n * 16 + lane % 16, d * 2 + lane / 16));
                multiply_tiles(sums[2 * d], a, b);
                multiply_tiles(sums[2 * d + 1], a, b + 2);
            }
        }
    }
};

template <u32 DIM, u32 KEYS>
__device__ __forceinline__ void attention_chunk(Global<const float> q, Global<const u8> kv,
                                                const Tables& tables, Global<const u32> tokens,
                                                Global<u16> out, u32 n_tokens, u32 run_tokens,
                                                u32 n_head, CacheIndex index, u32 window, u32 order,
                                                float scale) {
    begin();
    DYNAMIC_SHARED(shared);
    const u32 head = blockIdx.x, tiles = div_ceil(run_tokens, ROWS);
    const u32 in_run = blockIdx.y % tiles * ROWS;
    const u32 first_row = blockIdx.y / tiles * run_tokens + in_run;
    const u32 n_rows = min(ROWS, run_tokens - in_run), head_dim = index.head_dim;
    index.block_table = tables.of_row(first_row);

    auto position = [&](u32 row) {
        return row < n_rows ? u32(tokens[(first_row + row) * TOKEN_WORDS + POSITION]) : 0;
    };
    const u32 lane = lane_id(), lowest = position(0);
    const u32 highest = __reduce_max_sync(ALL_LANES, max(position(lane), position(lane + 32)));
    const u32 row = warp_id() * 16 + lane / 4;
    const u32 positions[2] = {position(row), position(row + 8)};

    ChunkAttention<DIM, KEYS> work;
    work.queries = {as_halves(shared)};
    work.shared = shared;
    work.kv = as_halves(kv);
    work.index = index;
    work.kv_head = head / (n_head / index.n_kv_head);
    work.end = highest + 1;
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            work.sums[n][i] = 0.0f;
        }
    }
    for (u32 r = 0; r < 2; r++) {
        work.max[r] = -infinity();
        work.total[r] = 0.0f;
    }

    const u32 begins = window != 0 && lowest >= window ? (lowest - window + 1) / KEYS * KEYS : 0;
    work.find(begins);
    work.copy(0, begins);
    const u64 query = u64(first_row) * n_head + head;
    work.load_queries(q + query * head_dim, n_head * head_dim, n_rows);
    u32 number = 0;
#pragma unroll 1
    for (u32 first = begins; first < work.end; first += KEYS) {
        work.copy(number + 1, first + KEYS);
        wait_for_copies(1);
        __syncthreads();
        const bool masked = window != 0 || first + KEYS > lowest;
        work.attend(number, first, positions, window, masked, scale * LOG2_E);
        // The next copies go where these keys and values are.
        __syncthreads();
        number++;
    }

    const HalfRows rows = {n_tokens, n_head * head_dim, order != 0};
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        float total = work.total[r];
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        const float inverse = total > 0.0f && positions[r] >= lowest ? 1.0f / total : 0.0f;
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n++) {
            // Two lanes have four elements, the first of them 0 and 1: it stores 0 and 2, the other
            // 1 and 3.
            const u32 dim = n * 8 + lane % 4 * 2, odd = lane % 2;
            const float low = work.sums[n][2 * r] * inverse, high = work.sums[n][2 * r + 1] * inverse;
            const float other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
            if (row + 8 * r < n_rows && dim < head_dim) {
                const u32 pair = odd ? finite_pair(other, high) : finite_pair(low, other);
                store(out + rows.pair(first_row + row + 8 * r, head * head_dim + dim - odd), pair);
            }
        }
    }
}

#define ATTENTION_CHUNK(NAME, DIM, KEYS)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                   \
        Global<const float> q, Global<const u8> kv, Global<const u32> sequences,                  \
        Global<const u32> block_table, Global<const u32> tokens, Global<u16> out, u32 n_tokens,   \
        u32 run_tokens, u32 n_head, u32 n_kv_head, u32 head_dim, u32 block_size, u32 n_blocks,    \
        u32 n_sequences, u32 table_stride, u32 n_logical, u32 window, u32 order, float scale) {   \
        const Tables tables = {block_table, sequences, n_sequences, table_stride};                \
        const CacheIndex index = {nullptr, n_kv_head, block_size, head_dim};                      \
        attention_chunk<DIM, KEYS>(q, kv, tables, tokens, out, n_tokens, run_tokens, n_head,      \
                                   index, window, order, scale);                                  \
    }

ATTENTION_CHUNK(attention_chunk_64, 64, 64)
ATTENTION_CHUNK(attention_chunk_128, 128, 64)
ATTENTION_CHUNK(attention_chunk_256, 256, 32)
