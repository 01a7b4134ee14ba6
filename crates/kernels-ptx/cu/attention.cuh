// What both attentions are made of: teams of lanes that go over the slots of a span, a running
// softmax each, and how teams and warps are joined. Their files say what goes before and behind.
//
// A slot's key and value are read once for up to HEADS query heads. The lanes that share a slot, a
// team, hold CHUNK elements of the head each; every team has a tile of slots in flight.
#pragma once

#include "common.cuh"

constexpr u32 HEADS = 4, CHUNK = 8, MAX_HEAD_DIM = 256, NO_SLOT = 0xffffffff;

// Where a thread stands: the fewest lanes, a power of two, that hold a head form a team; others of
// it may idle.
struct Team {
    u32 lanes, index, count;
    u32 dim, n_dims;  // elements of the head that are this lane's
    bool vectors;     // whether they can be read in one access

    __device__ __forceinline__ Team(u32 head_dim) : lanes(1) {
        while (lanes * CHUNK < head_dim) {
            lanes *= 2;
        }
        index = threadIdx.x / lanes;
        count = blockDim.x / lanes;
        dim = lane_id() % lanes * CHUNK;
        n_dims = dim < head_dim ? min(head_dim - dim, CHUNK) : 0;
        vectors = head_dim % CHUNK == 0;
    }
};

// Reads what the kernels of the step before this one do not write, if it may be before they are
// waited for.
template <bool EARLY, class V>
__device__ __forceinline__ V fetch(Global<const u8> from) {
    if constexpr (EARLY) {
        return load_constant<V>(from);
    } else {
        return load<V>(from);
    }
}

// CHUNK elements of a cached row, as they lie in memory.
struct F16Chunk {
    static constexpr u32 TILE = 4, ELEM_BYTES = 2;
    u32 pairs[4] = {};

    template <bool EARLY>
    __device__ __forceinline__ void load(Global<const u8> from, const Team& team) {
        if (team.vectors) {
            const uint4 quad = fetch<EARLY, uint4>(from);
            pairs[0] = quad.x, pairs[1] = quad.y, pairs[2] = quad.z, pairs[3] = quad.w;
            return;
        }
        for (u32 i = 0; i < CHUNK; i++) {
            if (i < team.n_dims) {
                pairs[i / 2] |= u32(fetch<EARLY, u16>(from + i * 2)) << (i % 2 * 16);
            }
        }
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = half_to_float(u16(pairs[i / 2] >> (i % 2 * 16) & 0xffff));
        }
    }
};

struct F32Chunk {
    static constexpr u32 TILE = 2, ELEM_BYTES = 4;
    u32 bits[CHUNK] = {};

    template <bool EARLY>
    __device__ __forceinline__ void load(Global<const u8> from, const Team& team) {
        for (u32 i = 0; i < CHUNK; i += 4) {
            if (team.vectors) {
                const uint4 quad = fetch<EARLY, uint4>(from + i * 4);
                bits[i] = quad.x, bits[i + 1] = quad.y, bits[i + 2] = quad.z, bits[i + 3] = quad.w;
                continue;
            }
            for (u32 j = i; j < i + 4; j++) {
                if (j < team.n_dims) {
                    bits[j] = fetch<EARLY, u32>(from + j * 4);
                }
            }
        }
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = __uint_as_float(bits[i]);
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
    u32 n_used;  // segments with slots, this one's number if there is but one

    __device__ __forceinline__ bool attends(u32 slot) const {
        const u32 age = ring_slot >= slot ? ring_slot - slot
                                          : ring_slot + (max_context_tokens - slot);
        return slot < end && (window == 0 || age < window);
    }
};

// How the live slots of a sequence are cut into segments.
struct Segments {
    u32 count, min_tokens, block_size, max_context_tokens, window;

    __device__ __forceinline__ Span span(u32 position, u32 ring_slot, u32 segment) const {
        const u32 n_live = min(u64(position) + 1, u64(max_context_tokens));
        const u32 rounded = div_ceil(div_ceil(n_live, count), block_size) * block_size;
        const u32 per_segment = max(rounded, min_tokens);
        const u32 first = min(u64(segment) * per_segment, u64(n_live));
        const u32 end = min(u64(first) + per_segment, u64(n_live));
        return {first, end, ring_slot, max_context_tokens, window, div_ceil(n_live, per_segment)};
    }
};

// Keys and values of one slot of every `count` of TILE * count that start at `first`.
template <class Chunk>
struct CachedTile {
    static constexpr u32 TILE = Chunk::TILE;
    Chunk keys[TILE], values[TILE];
    bool attends[TILE];

    // EARLY: while kernels before this one may run.
    template <bool EARLY>
    __device__ __forceinline__ void load(Global<const u8> kv, const CacheIndex& index,
                                         const Span& span, const Team& team, u32 kv_head, u32 first,
                                         u32 except) {
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            const u32 slot = first + t * team.count + team.index;
            attends[t] = span.attends(slot) && slot != except;
            keys[t] = values[t] = Chunk();
            if (attends[t] && team.n_dims > 0) {
                keys[t].template load<EARLY>(
                    kv + (index.key(slot, kv_head) + team.dim) * Chunk::ELEM_BYTES, team);
                values[t].template load<EARLY>(
                    kv + (index.value(slot, kv_head) + team.dim) * Chunk::ELEM_BYTES, team);
            }
        }
    }
    __device__ __forceinline__ void key(u32 t, float out[CHUNK]) const {
        keys[t].widen(out);
    }
    __device__ __forceinline__ void value(u32 t, float out[CHUNK]) const {
        values[t].widen(out);
    }
};

// Up to HEADS query heads and what a team knows of each.
struct Heads {
    u32 count;
    float queries[HEADS][CHUNK];
    Running running[HEADS];

    __device__ __forceinline__ Heads(Global<const float> q, u32 count, const Team& team,
                                     u32 head_stride)
        : count(count) {
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            running[h] = {-infinity(), 0.0f, {}};
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) {
                const bool used = h < count && i < team.n_dims;
                queries[h][i] = used ? float(q[h * head_stride + team.dim + i]) : 0.0f;
            }
        }
    }

    // Attends to the slots of a tile, anything that has
    //
    //   TILE, attends[TILE], key(t, elements), value(t, elements)
    //
    // All teams call it: they shuffle.
    template <class Tile>
    __device__ __forceinline__ void attend(const Tile& tile, const Team& team, float scale) {
        constexpr u32 TILE = Tile::TILE;
        float weights[HEADS][TILE];
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            float key[CHUNK];
            tile.key(t, key);
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                if (h >= count) {
                    break;
                }
                float dot = 0.0f;
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    dot += queries[h][i] * key[i];
                }
                for (u32 offset = team.lanes / 2; offset > 0; offset /= 2) {
                    dot += __shfl_xor_sync(ALL_LANES, dot, offset);
                }
                weights[h][t] = tile.attends[t] ? dot * scale : -infinity();
            }
        }
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (h >= count) {
                break;
            }
            float best = running[h].max;
#pragma unroll
            for (u32 t = 0; t < TILE; t++) {
                best = fmaxf(best, weights[h][t]);
            }
            running[h].rescale(best);
#pragma unroll
            for (u32 t = 0; t < TILE; t++) {
                weights[h][t] = tile.attends[t] ? expf(weights[h][t] - best) : 0.0f;
                running[h].sum += weights[h][t];
            }
        }
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            float value[CHUNK];
            tile.value(t, value);
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                if (h >= count) {
                    break;
                }
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    running[h].values[i] += weights[h][t] * value[i];
                }
            }
        }
    }
};

// What each warp knows, joined: [warp][head][max, sum, values].
template <u32 WARPS>
struct Joined {
    static constexpr u32 RECORD = 2 + MAX_HEAD_DIM;
    Global<float> records;

    // Joins the teams of a warp. A barrier has to follow.
    __device__ __forceinline__ void put(Heads& heads, const Team& team) const {
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (h >= heads.count) {
                break;
            }
            Running& running = heads.running[h];
            for (u32 offset = team.lanes; offset < 32; offset *= 2) {
                running.join(running.of_lane_xor(offset));
            }
            const Global<float> record = records + (warp_id() * HEADS + h) * RECORD;
            if (lane_id() == 0) {
                record[0] = running.max;
                record[1] = running.sum;
            }
            if (lane_id() < team.lanes) {
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    if (i < team.n_dims) {
                        record[2 + team.dim + i] = running.values[i];
                    }
                }
            }
        }
    }

    // The factors that bring the warps' records of a head to their common maximum.
    struct Factors {
        float max, of_warp[WARPS];
    };
    __device__ __forceinline__ Factors factors(u32 h) const {
        Factors factors = {-infinity(), {}};
        for (u32 w = 0; w < WARPS; w++) {
            factors.max = fmaxf(factors.max, records[(w * HEADS + h) * RECORD]);
        }
        for (u32 w = 0; w < WARPS; w++) {
            const float max = records[(w * HEADS + h) * RECORD];
            factors.of_warp[w] = max == -infinity() ? 0.0f : expf(max - factors.max);
        }
        return factors;
    }
    // Element `i` of the joined record behind its maximum: the sum, then the values.
    __device__ __forceinline__ float total(const Factors& factors, u32 h, u32 i) const {
        float total = 0.0f;
        for (u32 w = 0; w < WARPS; w++) {
            total += factors.of_warp[w] * records[(w * HEADS + h) * RECORD + 1 + i];
        }
        return total;
    }
};
