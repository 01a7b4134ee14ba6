// What both attentions are made of: teams of lanes that go over the slots of a span, a running
// softmax each, and how teams and warps are joined. Their files say what goes before and behind.
//
// A slot's key and value are read once for up to HEADS query heads. The lanes that share a slot, a
// team, hold CHUNK elements of the head each; a team has a tile of slots in flight. The scores of
// a tile are summed over the team so that they end up spread over its lanes, each of which takes
// care of its own: one exponential a score.
#pragma once

#include "common.cuh"

constexpr u32 HEADS = 4, CHUNK = 8, MAX_HEAD_DIM = 256, NO_SLOT = 0xffffffff;
constexpr u32 ATTENTION_WARPS = 6;

// Calls run.template with<LANES, VECTORS>() for the fewest lanes that hold a head; VECTORS if a
// chunk can be read in one access. What is not for speed, f32 and odd heads, has 32 lanes always:
// every number of them is a kernel of its own to compile.
template <bool FAST, class Run>
__device__ __forceinline__ void with_team(u32 head_dim, const Run& run) {
    if (head_dim % CHUNK != 0) {
        run.template with<32, false>();
        return;
    }
    if constexpr (FAST) {
        if (head_dim <= 8 * CHUNK) {
            run.template with<8, true>();
            return;
        }
        if (head_dim <= 16 * CHUNK) {
            run.template with<16, true>();
            return;
        }
    }
    run.template with<32, true>();
}

// Where a thread stands in teams of LANES; lanes behind the head's end idle.
struct Place {
    u32 team, n_teams;
    u32 dim, n_dims;  // elements of the head that are this lane's

    __device__ __forceinline__ Place(u32 lanes, u32 head_dim)
        : team(threadIdx.x / lanes),
          n_teams(blockDim.x / lanes),
          dim(lane_id() % lanes * CHUNK),
          n_dims(dim < head_dim ? min(head_dim - dim, CHUNK) : 0) {}
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
    static constexpr u32 TILE = 2, ELEM_BYTES = 2;
    static constexpr bool SCALED = false;
    u32 pairs[4] = {};

    template <bool EARLY, bool VECTORS>
    __device__ __forceinline__ void load(Global<const u8> from, const Place& place) {
        if constexpr (VECTORS) {
            const uint4 quad = fetch<EARLY, uint4>(from);
            pairs[0] = quad.x, pairs[1] = quad.y, pairs[2] = quad.z, pairs[3] = quad.w;
        } else {
            for (u32 i = 0; i < CHUNK; i++) {
                if (i < place.n_dims) {
                    pairs[i / 2] |= u32(fetch<EARLY, u16>(from + i * 2)) << (i % 2 * 16);
                }
            }
        }
    }
    // Of values that halves hold exactly.
    __device__ __forceinline__ void set(const float in[CHUNK]) {
        for (u32 i = 0; i < CHUNK; i += 2) {
            pairs[i / 2] = float_to_half(in[i]) | u32(float_to_half(in[i + 1])) << 16;
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
    static constexpr bool SCALED = false;
    u32 bits[CHUNK] = {};

    template <bool EARLY, bool VECTORS>
    __device__ __forceinline__ void load(Global<const u8> from, const Place& place) {
        if constexpr (VECTORS) {
            for (u32 i = 0; i < CHUNK; i += 4) {
                const uint4 quad = fetch<EARLY, uint4>(from + i * 4);
                bits[i] = quad.x, bits[i + 1] = quad.y, bits[i + 2] = quad.z, bits[i + 3] = quad.w;
            }
        } else {
            for (u32 i = 0; i < CHUNK; i++) {
                if (i < place.n_dims) {
                    bits[i] = fetch<EARLY, u32>(from + i * 4);
                }
            }
        }
    }
    __device__ __forceinline__ void set(const float in[CHUNK]) {
        for (u32 i = 0; i < CHUNK; i++) {
            bits[i] = __float_as_uint(in[i]);
        }
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = __uint_as_float(bits[i]);
        }
    }
};

struct Q8Chunk {
    static constexpr u32 TILE = 2, ELEM_BYTES = 1;
    static constexpr bool SCALED = true;
    u32 words[2] = {};
    float scale = 0.0f;  // of the row; fetched by itself

    template <bool EARLY, bool VECTORS>
    __device__ __forceinline__ void load(Global<const u8> from, const Place& place) {
        if constexpr (VECTORS) {
            const uint2 pair = fetch<EARLY, uint2>(from);
            words[0] = pair.x, words[1] = pair.y;
        } else {
            for (u32 i = 0; i < CHUNK; i++) {
                if (i < place.n_dims) {
                    words[i / 4] |= u32(fetch<EARLY, u8>(from + i)) << (i % 4 * 8);
                }
            }
        }
    }
    __device__ __forceinline__ void widen(float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = scale * float(i8(words[i / 4] >> (i % 4 * 8) & 0xff));
        }
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

// One key head's part of a layer of the paged cache, see CacheIndex. Places in it are counted in
// units, so that 32 bits hold them.
struct HeadCache {
    Global<const u8> kv, scales;
    Global<const u32> block_table;
    u32 block_size, reciprocal;  // the latter 2^32 / block_size, rounded up
    u32 row, to_values, block, unit_bytes;  // units of a slot's key, from keys to values, of a block
    u32 to_value_scales, block_bytes;       // of scales: from those of keys to those of values

    template <class Chunk>
    __device__ __forceinline__ static HeadCache of(Global<const u8> kv, const CacheIndex& index,
                                                   u32 head, u32 unit_bytes) {
        HeadCache cache;
        cache.block_table = index.block_table;
        cache.block_size = index.block_size;
        cache.reciprocal = 0xffffffff / index.block_size + 1;
        cache.unit_bytes = unit_bytes;
        cache.row = index.head_dim * Chunk::ELEM_BYTES / unit_bytes;
        cache.to_values = index.n_kv_head * index.block_size * cache.row;
        cache.block = 2 * cache.to_values;
        cache.kv = kv + u64(head) * index.block_size * cache.row * unit_bytes;
        cache.to_value_scales = cache.block_bytes = 0;
        if constexpr (Chunk::SCALED) {
            const Q8Block of_all(index);
            cache.block_bytes = of_all.bytes;
            cache.block = of_all.bytes / unit_bytes;
            cache.scales = kv + (of_all.scales_at + head * index.block_size * 4);
            cache.to_value_scales = index.n_kv_head * index.block_size * 4;
        }
        return cache;
    }

    struct Slot {
        u32 block, token;
    };
    __device__ __forceinline__ Slot find(u32 slot) const {
        // Exact while slot * block_size is below 2^32.
        const u32 logical = block_size == 1 ? slot : __umulhi(slot, reciprocal);
        return {load_constant<u32>(block_table + logical), slot - logical * block_size};
    }
    __device__ __forceinline__ u32 key(const Slot& slot) const {
        return slot.block * block + slot.token * row;
    }
    __device__ __forceinline__ Global<const u8> at(u32 place) const {
        return kv + u64(place) * unit_bytes;
    }
    __device__ __forceinline__ Global<const u8> key_scale(const Slot& slot) const {
        return scales + (u64(slot.block) * block_bytes + slot.token * 4);
    }
};

// Keys and values of one slot of every n_teams of TILE * n_teams.
template <class Chunk, bool VECTORS>
struct CachedTile {
    static constexpr u32 TILE = VECTORS ? Chunk::TILE : 1;
    // What is read at a time.
    static constexpr u32 UNIT_BYTES = !VECTORS ? Chunk::ELEM_BYTES : Chunk::SCALED ? CHUNK : 16;
    Chunk keys[TILE], values[TILE];
    u32 at[TILE];
    HeadCache::Slot slots[Chunk::SCALED ? TILE : 1];
    u32 attends;  // bit t: slot t is attended to
    u32 cached;   // bit t: and is read from the cache

    // Of the tile that starts at `first`; slot `except` is not read.
    __device__ __forceinline__ void find(const HeadCache& cache, const Span& span,
                                         const Place& place, u32 first, u32 except) {
        attends = cached = 0;
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            const u32 slot = first + t * place.n_teams + place.team;
            const bool is = span.attends(slot);
            attends |= u32(is) << t;
            if (is && slot != except && place.n_dims > 0) {
                cached |= 1 << t;
                const HeadCache::Slot found = cache.find(slot);
                at[t] = cache.key(found) + place.dim * Chunk::ELEM_BYTES / UNIT_BYTES;
                if constexpr (Chunk::SCALED) {
                    slots[t] = found;
                }
            }
        }
    }
    // Puts a key and a value in the place of slot `at` of the whole tile.
    __device__ __forceinline__ void set(u32 at, const Place& place, Global<const float> key,
                                        Global<const float> value) {
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            if (at == t * place.n_teams + place.team) {
                float of_key[CHUNK] = {}, of_value[CHUNK] = {};
                for (u32 i = 0; i < CHUNK; i++) {
                    if (i < place.n_dims) {
                        of_key[i] = key[place.dim + i];
                        of_value[i] = value[place.dim + i];
                    }
                }
                keys[t].set(of_key);
                values[t].set(of_value);
            }
        }
    }
    // EARLY: while kernels before this one may run.
    template <bool EARLY>
    __device__ __forceinline__ void load_keys(const HeadCache& cache, const Place& place) {
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            keys[t] = Chunk();
            if (cached >> t & 1) {
                keys[t].template load<EARLY, VECTORS>(cache.at(at[t]), place);
                if constexpr (Chunk::SCALED) {
                    keys[t].scale = fetch<EARLY, float>(cache.key_scale(slots[t]));
                }
            }
        }
    }
    template <bool EARLY>
    __device__ __forceinline__ void load_values(const HeadCache& cache, const Place& place) {
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            values[t] = Chunk();
            if (cached >> t & 1) {
                values[t].template load<EARLY, VECTORS>(cache.at(at[t] + cache.to_values), place);
                if constexpr (Chunk::SCALED) {
                    values[t].scale =
                        fetch<EARLY, float>(cache.key_scale(slots[t]) + cache.to_value_scales);
                }
            }
        }
    }
};

// Sums of each of N values over a team. A lane gets PER of them: those from lane / STEP * PER on.
template <u32 LANES, u32 N>
struct Spread {
    static constexpr u32 OWNERS = N < LANES ? N : LANES, PER = N / OWNERS, STEP = LANES / OWNERS;

    __device__ __forceinline__ static u32 first() {
        return lane_id() % LANES / STEP * PER;
    }
    // The lane that value `index` is at, as number PER.
    __device__ __forceinline__ static u32 owner(u32 index) {
        return (lane_id() & ~(LANES - 1)) + index / PER * STEP;
    }
    __device__ __forceinline__ static void sum(float (&values)[N]) {
        u32 n = N;
#pragma unroll
        for (u32 offset = LANES / 2; offset > 0; offset /= 2) {
            if (n == PER) {
#pragma unroll
                for (u32 i = 0; i < PER; i++) {
                    values[i] += __shfl_xor_sync(ALL_LANES, values[i], offset);
                }
                continue;
            }
            n /= 2;
            const bool upper = lane_id() & offset;
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) {
                if (i < n) {
                    const float given = upper ? values[i] : values[i + n];
                    const float kept = upper ? values[i + n] : values[i];
                    values[i] = kept + __shfl_xor_sync(ALL_LANES, given, offset);
                }
            }
        }
    }
};

// Up to HEADS query heads and the softmax-weighted sums so far of a team, CHUNK values a lane.
// Maximum and sum of weights are spread like the scores: a lane knows those of its scores' heads,
// the sum only of its own slots.
template <u32 LANES, u32 TILE>
struct Heads {
    using Scores = Spread<LANES, TILE * HEADS>;  // score t * HEADS + h: of slot t and head h
    static constexpr u32 PER = Scores::PER;
    u32 count;
    float queries[HEADS][CHUNK];
    float max[PER], sum[PER];
    float values[HEADS][CHUNK];

    __device__ __forceinline__ Heads(Global<const float> q, u32 count, const Place& place,
                                     u32 head_stride)
        : count(count) {
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) {
                const bool used = h < count && i < place.n_dims;
                queries[h][i] = used ? float(q[h * head_stride + place.dim + i]) : 0.0f;
                values[h][i] = 0.0f;
            }
        }
#pragma unroll
        for (u32 i = 0; i < PER; i++) {
            max[i] = -infinity();
            sum[i] = 0.0f;
        }
    }

    // Value `index` of a spread array, in all lanes.
    __device__ __forceinline__ static float of(const float (&spread)[PER], u32 index) {
        return __shfl_sync(ALL_LANES, spread[index % PER], Scores::owner(index));
    }

    // Attends to the slots of a tile and refills it in between; all teams call it.
    template <class Tile, class Keys, class Values>
    __device__ __forceinline__ void attend(Tile& tile, float scale, const Keys& next_keys,
                                           const Values& next_values) {
        float scores[TILE * HEADS];
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            float key[CHUNK];
            tile.keys[t].widen(key);
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                float dot = 0.0f;
                if (h < count) {
#pragma unroll
                    for (u32 i = 0; i < CHUNK; i++) {
                        dot += queries[h][i] * key[i];
                    }
                }
                scores[t * HEADS + h] = dot;
            }
        }
        // All of a lane's scores are of one slot.
        const bool attends = tile.attends >> (Scores::first() / HEADS) & 1;
        next_keys();
        Scores::sum(scores);
        float weights[PER];
        bool rises = false;
#pragma unroll
        for (u32 i = 0; i < PER; i++) {
            weights[i] = attends ? scores[i] * scale : -infinity();
            rises |= weights[i] > max[i];
        }
        if (__any_sync(ALL_LANES, rises)) {
            raise(weights);
        }
#pragma unroll
        for (u32 i = 0; i < PER; i++) {
            weights[i] = attends ? expf(weights[i] - max[i]) : 0.0f;
            sum[i] += weights[i];
        }
#pragma unroll
        for (u32 t = 0; t < TILE; t++) {
            float value[CHUNK];
            tile.values[t].widen(value);
#pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                const float weight = of(weights, t * HEADS + h);
                if (h < count) {
#pragma unroll
                    for (u32 i = 0; i < CHUNK; i++) {
                        values[h][i] += weight * value[i];
                    }
                }
            }
        }
        next_values();
    }

    // Brings everything to the maxima with new scores.
    __device__ __forceinline__ void raise(const float (&scores)[PER]) {
        float factors[PER];
#pragma unroll
        for (u32 i = 0; i < PER; i++) {
            float best = scores[i];
            for (u32 offset = LANES / 2; offset >= LANES / TILE; offset /= 2) {
                best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, offset));
            }
            rescale(i, fmaxf(max[i], best), factors);
        }
        scale_values(factors);
    }
    // To a maximum that is not smaller. Nothing summed yet: -infinity - -infinity would be NaN.
    __device__ __forceinline__ void rescale(u32 i, float new_max, float (&factors)[PER]) {
        factors[i] = max[i] == -infinity() ? 0.0f : expf(max[i] - new_max);
        sum[i] *= factors[i];
        max[i] = new_max;
    }
    __device__ __forceinline__ void scale_values(const float (&factors)[PER]) {
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            const float factor = of(factors, h);
#pragma unroll
            for (u32 i = 0; i < CHUNK; i++) {
                values[h][i] *= factor;
            }
        }
    }

    // Joins the teams of a warp, in every team.
    __device__ __forceinline__ void join_teams() {
        float factors[PER];
#pragma unroll
        for (u32 i = 0; i < PER; i++) {
            float best = max[i];
            for (u32 offset = 16; offset >= LANES; offset /= 2) {
                best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, offset));
            }
            rescale(i, best, factors);
            for (u32 offset = 16; offset >= LANES / TILE; offset /= 2) {
                sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], offset);
            }
        }
        scale_values(factors);
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (h < count) {
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    for (u32 offset = 16; offset >= LANES; offset /= 2) {
                        values[h][i] += __shfl_xor_sync(ALL_LANES, values[h][i], offset);
                    }
                }
            }
        }
    }
};

// What each warp knows, joined: [warp][head][max, sum, values].
template <u32 LANES>
struct Joined {
    static constexpr u32 RECORD = 2 + LANES * CHUNK;
    static constexpr u32 FLOATS = ATTENTION_WARPS * HEADS * RECORD;
    Global<float> records;

    __device__ __forceinline__ Global<float> record(u32 warp, u32 h) const {
        return records + (warp * HEADS + h) * RECORD;
    }

    // A barrier has to follow.
    template <u32 TILE>
    __device__ __forceinline__ void put(Heads<LANES, TILE>& heads, const Place& place) const {
        heads.join_teams();
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            const float max = heads.of(heads.max, h), sum = heads.of(heads.sum, h);
            const Global<float> to = record(warp_id(), h);
            if (lane_id() == 0) {
                to[0] = max;
                to[1] = sum;
            }
            if (lane_id() < LANES && h < heads.count) {
#pragma unroll
                for (u32 i = 0; i < CHUNK; i++) {
                    if (i < place.n_dims) {
                        to[2 + place.dim + i] = heads.values[h][i];
                    }
                }
            }
        }
    }

    // Behind put and a barrier, a warp's work: brings the warps' records of a head to their common
    // maximum. Their maxima become factors; the maximum and the sum of all come to `total`. A
    // barrier has to follow.
    __device__ __forceinline__ void weigh(u32 h, Global<float> total) const {
        const bool has = lane_id() < ATTENTION_WARPS;
        const Global<float> mine = record(has ? lane_id() : 0, h);
        const float max = has ? float(mine[0]) : -infinity();
        float best = max;
        for (u32 offset = 16; offset > 0; offset /= 2) {
            best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, offset));
        }
        const float factor = max == -infinity() ? 0.0f : expf(max - best);
        const float sum = warp_sum(has ? factor * mine[1] : 0.0f);
        if (has) {
            mine[0] = factor;
        }
        if (lane_id() == 0) {
            total[0] = best;
            total[1] = sum;
        }
    }
    // Value `dim` of all warps, behind weigh.
    __device__ __forceinline__ float value(u32 h, u32 dim) const {
        float value = 0.0f;
#pragma unroll
        for (u32 w = 0; w < ATTENTION_WARPS; w++) {
            value += record(w, h)[0] * record(w, h)[2 + dim];
        }
        return value;
    }
};
