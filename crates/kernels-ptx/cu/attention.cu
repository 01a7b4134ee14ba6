// Attention over one layer of the paged KV cache, each segment of the live tokens by itself.
//
// For a token at absolute_position p in slot s of a ring of max_context_tokens slots,
// n_live = min(p + 1, max_context_tokens) slots hold tokens, and slot j holds the token of age
// (s - j) mod max_context_tokens. With a window, ages of `window` and more are not attended to.
// Segment g covers slots g * S .. min((g + 1) * S, n_live), S = max(segment_min,
// ceil(n_live / n_segments) rounded up to block_size). Per query head, over a segment's slots j,
//
//   score_j = scale * q . k_j
//   partials = [max = max score_j, sum = sum e^(score_j - max), values = sum e^(score_j - max) v_j]
//
// and an empty segment is [-infinity, 0, 0 ...].
//
// q             [n_tokens][n_head][head_dim], head_dim at most 256
// kv            [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16
// block_table   [n_blocks]
// tokens        [n_tokens][3]
// partials      [n_tokens][n_head][n_segments][max, sum, head_dim values]
//
// Geometry: grid (n_kv_head, n_segments, n_tokens), block 128. A slot's key and value are read
// once for up to HEADS query heads. The lanes that share a slot hold CHUNK elements of the head
// each; every such team has TILE slots in flight and its own running maximum; teams are joined at
// the end, by shuffles inside a warp and through shared memory between warps.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "common.cuh"

constexpr u32 WARPS = 4, HEADS = 4, CHUNK = 8, MAX_HEAD_DIM = 256;

// CHUNK elements of a cached row, as they lie in memory.
struct F16Chunk {
    static constexpr u32 TILE = 4, ELEM_BYTES = 2;
    uint4 words;

    __device__ __forceinline__ static F16Chunk load_vector(Global<const u8> from) {
        return {load<uint4>(from)};
    }
    __device__ __forceinline__ static F16Chunk load_elements(Global<const u8> from, u32 count) {
        u32 words[4] = {0, 0, 0, 0};
        for (u32 i = 0; i < CHUNK; i++) {
            if (i < count) {
                words[i / 2] |= u32(load<u16>(from + i * 2)) << (i % 2 * 16);
            }
        }
        return {{words[0], words[1], words[2], words[3]}};
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = half_to_float(u16(pairs[i / 2] >> (i % 2 * 16) & 0xffff));
        }
    }
};

struct F32Chunk {
    static constexpr u32 TILE = 2, ELEM_BYTES = 4;
    float values[CHUNK];

    __device__ __forceinline__ static F32Chunk load_vector(Global<const u8> from) {
        const float4 low = load<float4>(from), high = load<float4>(from + 16);
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    }
    __device__ __forceinline__ static F32Chunk load_elements(Global<const u8> from, u32 count) {
        F32Chunk chunk = {};
        for (u32 i = 0; i < CHUNK; i++) {
            if (i < count) {
                chunk.values[i] = load<float>(from + i * 4);
            }
        }
        return chunk;
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = values[i];
        }
    }
};

// Softmax-weighted sum so far: what a team of lanes knows of one query head, CHUNK values a lane.
struct Running {
    float max, sum, values[CHUNK];

    // Brings everything to a new, not smaller maximum.
    __device__ __forceinline__ void rescale(float new_max) {
        // Nothing summed yet: -infinity - -infinity would be NaN.
        const float factor = max == -infinity() ? 0.0f : expf(max - new_max);
        max = new_max;
        sum *= factor;
        for (u32 i = 0; i < CHUNK; i++) {
            values[i] *= factor;
        }
    }

    __device__ __forceinline__ void join(const Running& other) {
        const float new_max = fmaxf(max, other.max);
        Running scaled = other;
        scaled.rescale(new_max);
        rescale(new_max);
        sum += scaled.sum;
        for (u32 i = 0; i < CHUNK; i++) {
            values[i] += scaled.values[i];
        }
    }

    __device__ __forceinline__ Running of_lane_xor(u32 offset) const {
        Running other;
        other.max = __shfl_xor_sync(ALL_LANES, max, offset);
        other.sum = __shfl_xor_sync(ALL_LANES, sum, offset);
        for (u32 i = 0; i < CHUNK; i++) {
            other.values[i] = __shfl_xor_sync(ALL_LANES, values[i], offset);
        }
        return other;
    }
};

// The slots of a segment that this token attends to.
struct Span {
    u32 first, end, ring_slot, max_context_tokens, window;

    __device__ __forceinline__ bool attends(u32 slot) const {
        const u32 age = ring_slot >= slot ? ring_slot - slot
                                          : ring_slot + (max_context_tokens - slot);
        return slot < end && (window == 0 || age < window);
    }
};

__device__ __forceinline__ Span span_of(Global<const u32> tokens, u32 segment, u32 n_segments,
                                        u32 segment_min, u32 block_size, u32 max_context_tokens,
                                        u32 window) {
    const u32 n_live = min(u64(tokens[POSITION]) + 1, u64(max_context_tokens));
    const u32 rounded = div_ceil(div_ceil(n_live, n_segments), block_size) * block_size;
    const u32 per_segment = max(rounded, segment_min);
    const u32 first = min(u64(segment) * per_segment, u64(n_live));
    const u32 end = min(u64(first) + per_segment, u64(n_live));
    return {first, end, tokens[RING_SLOT], max_context_tokens, window};
}

template <class Chunk>
__device__ __forceinline__ void attention(Global<const float> q, Global<const u8> kv,
                                          const CacheIndex& index, const Span& span,
                                          Global<float> partials, u32 n_head, u32 n_segments,
                                          float scale) {
    const u32 kv_head = blockIdx.x, segment = blockIdx.y, token = blockIdx.z;
    const u32 head_dim = index.head_dim;
    const u32 heads_per_kv = n_head / index.n_kv_head;

    // The fewest lanes, a power of two, that hold a head form a team; others of it may idle.
    u32 team_lanes = 1;
    while (team_lanes * CHUNK < head_dim) {
        team_lanes *= 2;
    }
    const u32 team = threadIdx.x / team_lanes, n_teams = WARPS * 32 / team_lanes;
    const u32 dim = lane_id() % team_lanes * CHUNK;
    const u32 n_dims = dim < head_dim ? min(head_dim - dim, CHUNK) : 0;
    const bool vectors = head_dim % CHUNK == 0;

    SHARED(float, joined, WARPS * HEADS * (2 + MAX_HEAD_DIM));

    for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
        const u32 n_here = min(heads_per_kv - first_head, HEADS);
        const u64 query = u64(token) * n_head + kv_head * heads_per_kv + first_head;
        float queries[HEADS][CHUNK];
        Running running[HEADS];
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            running[h] = {-infinity(), 0.0f, {}};
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) {
                const bool used = h < n_here && i < n_dims;
                queries[h][i] = used ? float(q[(query + h) * head_dim + dim + i]) : 0.0f;
            }
        }

        // Whole blocks of threads go round: teams shuffle.
        for (u32 tile = span.first; tile < span.end; tile += n_teams * Chunk::TILE) {
            Chunk keys[Chunk::TILE] = {}, values[Chunk::TILE] = {};
            bool attends[Chunk::TILE];
#pragma unroll
            for (u32 t = 0; t < Chunk::TILE; t++) {
                const u32 slot = tile + t * n_teams + team;
                attends[t] = span.attends(slot);
                if (attends[t] && n_dims > 0) {
                    const Global<const u8> key =
                        kv + (index.key(slot, kv_head) + dim) * Chunk::ELEM_BYTES;
                    const Global<const u8> value =
                        kv + (index.value(slot, kv_head) + dim) * Chunk::ELEM_BYTES;
                    keys[t] = vectors ? Chunk::load_vector(key) : Chunk::load_elements(key, n_dims);
                    values[t] =
                        vectors ? Chunk::load_vector(value) : Chunk::load_elements(value, n_dims);
                }
            }
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                if (h >= n_here) {
                    break;
                }
                float scores[Chunk::TILE], best = running[h].max;
#pragma unroll
                for (u32 t = 0; t < Chunk::TILE; t++) {
                    float key[CHUNK], dot = 0.0f;
                    keys[t].widen(key);
#pragma unroll
                    for (u32 i = 0; i < CHUNK; i++) {
                        dot += queries[h][i] * key[i];
                    }
                    for (u32 offset = team_lanes / 2; offset > 0; offset /= 2) {
                        dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                    }
                    scores[t] = attends[t] ? dot * scale : -infinity();
                    best = fmaxf(best, scores[t]);
                }
                running[h].rescale(best);
#pragma unroll
                for (u32 t = 0; t < Chunk::TILE; t++) {
                    if (attends[t]) {
                        const float weight = expf(scores[t] - best);
                        float value[CHUNK];
                        values[t].widen(value);
                        running[h].sum += weight;
#pragma unroll
                        for (u32 i = 0; i < CHUNK; i++) {
                            running[h].values[i] += weight * value[i];
                        }
                    }
                }
            }
        }

#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (h >= n_here) {
                break;
            }
            for (u32 offset = team_lanes; offset < 32; offset *= 2) {
                running[h].join(running[h].of_lane_xor(offset));
            }
            const u32 at = (warp_id() * HEADS + h) * (2 + MAX_HEAD_DIM);
            if (lane_id() == 0) {
                joined[at] = running[h].max;
                joined[at + 1] = running[h].sum;
            }
            if (lane_id() < team_lanes) {
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    if (i < n_dims) {
                        joined[at + 2 + dim + i] = running[h].values[i];
                    }
                }
            }
        }
        __syncthreads();
        for (u32 h = 0; h < n_here; h++) {
            const u32 stride = HEADS * (2 + MAX_HEAD_DIM), at = h * (2 + MAX_HEAD_DIM);
            float max = -infinity(), factors[WARPS];
            for (u32 w = 0; w < WARPS; w++) {
                max = fmaxf(max, joined[at + w * stride]);
            }
            for (u32 w = 0; w < WARPS; w++) {
                const float of_warp = joined[at + w * stride];
                factors[w] = of_warp == -infinity() ? 0.0f : expf(of_warp - max);
            }
            const u64 record = ((query + h) * n_segments + segment) * (2 + head_dim);
            for (u32 i = threadIdx.x; i < 1 + head_dim; i += WARPS * 32) {
                float total = 0.0f;
                for (u32 w = 0; w < WARPS; w++) {
                    total += factors[w] * joined[at + w * stride + 1 + i];
                }
                partials[record + 1 + i] = total;
            }
            if (threadIdx.x == 0) {
                partials[record] = max;
            }
        }
        // The next heads' sums go to the same place.
        __syncthreads();
    }
}

#define ATTENTION(NAME, CHUNK_TYPE)                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(                                \
        Global<const float> q, Global<const u8> kv, Global<const u32> block_table,                \
        Global<const u32> tokens, Global<float> partials, u32 n_tokens, u32 n_head,               \
        u32 n_kv_head, u32 head_dim, u32 block_size, u32 n_blocks, u32 max_context_tokens,        \
        u32 n_segments, u32 segment_min, u32 window, u32 kv_elem_bytes, float scale) {            \
        begin();                                                                                  \
        const CacheIndex index = {block_table, n_kv_head, block_size, head_dim};                  \
        const Span span = span_of(tokens + blockIdx.z * TOKEN_WORDS, blockIdx.y, n_segments,      \
                                  segment_min, block_size, max_context_tokens, window);           \
        attention<CHUNK_TYPE>(q, kv, index, span, partials, n_head, n_segments, scale);           \
    }

ATTENTION(attention_f32, F32Chunk)
ATTENTION(attention_f16, F16Chunk)
