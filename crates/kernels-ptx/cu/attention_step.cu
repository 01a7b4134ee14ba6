// Attention of one token, from the products of q, k and v to the joined result: turns q and k,
// appends k and v to the cache, attends to the live slots a segment a block, and joins the segments
// in the last block of each key head that is done.
//
// Turning and appending are those of rope_append.cu, the segments and the attention those of
// attention.cu, joining that of attention_combine.cu. The token's own key and value are taken from
// where they are computed, as the cache holds them; only the block whose segment has their slot
// needs them. Before the inputs are waited for, sines and cosines are made and what the cache held
// before, the first tile of every team, is fetched.
//
// qkv                   [q heads, k heads, v heads][head_dim], head_dim at most 256
// q_norm, k_norm        [head_dim] or null
// inverse_frequencies   [n_pairs]
// tokens                [3]; written by nobody while a step runs, but for its last kernel
// block_table           [n_blocks]
// kv                    [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16
// partials              [n_head][n_segments][max, sum, head_dim values]: of the segments in use, if
//                       there are several
// arrivals              [n_kv_head], 0 before and after
// out                   [n_head][head_dim]
//
// Geometry: grid (n_kv_head, n_segments), block 192; dynamic shared memory of Shared<LANES>::FLOATS,
// LANES as with_team says. At most Joined<8>::FLOATS / HEADS segments.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "attention.cuh"
#include "rope.cuh"

constexpr u32 WARPS = ATTENTION_WARPS, THREADS = WARPS * 32;

// Shared memory of a block, floats.
template <u32 LANES>
struct Shared {
    static constexpr u32 HEAD = LANES * CHUNK;
    static constexpr u32 FLOATS = Joined<LANES>::FLOATS + (HEADS + 3) * HEAD + 2 * HEADS;
    Global<float> records;  // of the warps; in the end the segments' weights

    __device__ __forceinline__ Global<float> query(u32 h) const {
        return records + Joined<LANES>::FLOATS + h * HEAD;
    }
    // Of the token itself: its key, then its value.
    __device__ __forceinline__ Global<float> newest(u32 which) const {
        return query(HEADS + which);
    }
    __device__ __forceinline__ Turns turns() const {
        return {query(HEADS + 2)};
    }
    // Maximum and sum of the block's segment.
    __device__ __forceinline__ Global<float> total(u32 h) const {
        return query(HEADS + 3) + 2 * h;
    }
};

// How much each segment of a head counts: [n_used], from their records that begin at `partials`; a
// warp's work.
__device__ __forceinline__ void weigh_segments(Global<const float> partials, u32 n_used,
                                               u32 record_floats, Global<float> weights) {
    // Of a lane's segments.
    float max = -infinity(), sum = 0.0f;
    for (u32 g = lane_id(); g < n_used; g += 32) {
        const Global<const float> record = partials + u64(g) * record_floats;
        const float segment_max = load_published<float>(record);
        const float segment_sum = load_published<float>(record + 1);
        weights[g] = segment_max;
        if (segment_max > max) {
            sum *= expf(max - segment_max);
            max = segment_max;
        }
        sum += segment_sum > 0.0f ? segment_sum * expf(segment_max - max) : 0.0f;
    }
    float best = max;
    for (u32 offset = 16; offset > 0; offset /= 2) {
        best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, offset));
    }
    const float total = warp_sum(max == -infinity() ? 0.0f : sum * expf(max - best));
    for (u32 g = lane_id(); g < n_used; g += 32) {
        weights[g] = expf(weights[g] - best) / total;
    }
}

struct Norms {
    Global<const float> q, k;
};

template <class Chunk, class Elem>
struct AttentionStep {
    Global<const float> qkv;
    Norms norms;
    Rope rope;
    Global<const u32> tokens;
    CacheIndex index;
    Segments segments;
    Global<u8> kv;
    Global<float> partials;
    Global<u32> arrivals;
    Global<float> out;
    u32 n_head;
    float scale;

    template <u32 LANES, bool VECTORS>
    __device__ __forceinline__ void with() const {
        using Tile = CachedTile<Chunk, VECTORS>;
        const u32 kv_head = blockIdx.x, segment = blockIdx.y;
        const u32 head_dim = index.head_dim, heads_per_kv = n_head / index.n_kv_head;
        const u32 position = load_constant<u32>(tokens + POSITION);
        const u32 ring_slot = load_constant<u32>(tokens + RING_SLOT);
        const Span span = segments.span(position, ring_slot, segment);
        if (segment >= span.n_used) {
            begin();
            return;
        }
        DYNAMIC_SHARED(dynamic);
        const Shared<LANES> shared = {view_as<float>(dynamic)};
        const Joined<LANES> joined = {shared.records};
        const Place place(LANES, head_dim);
        const auto cache = HeadCache::of<Chunk>(kv, index, kv_head, Tile::UNIT_BYTES);
        Tile tile;
        tile.find(cache, span, place, span.first, ring_slot);
        tile.template load_keys<true>(cache, place);
        tile.template load_values<true>(cache, place);
        const Turns turns = shared.turns();
        for (u32 i = threadIdx.x; i < rope.n_pairs; i += THREADS) {
            turns.set(i, rope.turn_of(position, i));
        }
        __syncthreads();
        begin();

        const bool has_newest = ring_slot >= span.first && ring_slot < span.end;
        // The heads of every round go to the same places: who reads them last has not met the others
        // at the next barrier yet.
        for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
            const u32 n_heads = min(heads_per_kv - first_head, HEADS);
            const u32 query = kv_head * heads_per_kv + first_head;
            // A warp a head; the token's own key and value after the first queries.
            const u32 n_rows = n_heads + (first_head == 0 && has_newest ? 2 : 0);
            for (u32 row = warp_id(); row < n_rows; row += WARPS) {
                if (row < n_heads) {
                    const Global<float> to = shared.query(row);
                    rope.turn_head(qkv + (query + row) * head_dim, norms.q, head_dim, turns,
                                   [&](u32 i, float value) { to[i] = value; });
                } else {
                    append(row > n_heads, kv_head, ring_slot, turns, shared.newest(row > n_heads));
                }
            }
            __syncthreads();

            Heads<LANES, Tile::TILE> heads(shared.query(0), n_heads, place, Shared<LANES>::HEAD);
            // Whole blocks of threads go round: teams shuffle.
            const u32 step = place.n_teams * Tile::TILE;
            for (u32 first = span.first; first < span.end; first += step) {
                if (has_newest && ring_slot - first < step) {
                    tile.set(ring_slot - first, place, shared.newest(0), shared.newest(1));
                }
                // Behind the last tile the first one again, if there are more heads.
                const bool more = first + step < span.end;
                const bool refill = more || first_head + HEADS < heads_per_kv;
                heads.attend(
                    tile, scale,
                    [&] {
                        if (refill) {
                            const u32 next = more ? first + step : span.first;
                            tile.find(cache, span, place, next, ring_slot);
                            tile.template load_keys<true>(cache, place);
                        }
                    },
                    [&] {
                        if (refill) {
                            tile.template load_values<true>(cache, place);
                        }
                    });
            }
            joined.put(heads, place);
            __syncthreads();
            if (warp_id() < n_heads) {
                joined.weigh(warp_id(), shared.total(warp_id()));
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < n_heads * head_dim; i += THREADS) {
                const u32 h = i / head_dim, dim = i % head_dim;
                const float value = joined.value(h, dim), sum = shared.total(h)[1];
                if (span.n_used == 1) {
                    out[query * head_dim + i] = value / sum;
                    continue;
                }
                const Global<float> record = record_of(query + h) + segment * (2 + head_dim);
                record[2 + dim] = value;
                if (dim == 0) {
                    record[0] = shared.total(h)[0];
                    record[1] = sum;
                }
            }
        }
        if (span.n_used > 1 && last_to_arrive(arrivals + kv_head, span.n_used)) {
            join_segments(shared.records, kv_head, span.n_used);
        }
    }

    __device__ __forceinline__ void append(bool is_value, u32 kv_head, u32 slot, const Turns& turns,
                                           Global<float> to) const {
        const u32 head_dim = index.head_dim;
        const Global<const float> x =
            qkv + (n_head + is_value * index.n_kv_head + kv_head) * head_dim;
        const Global<u8> cached = kv + index.at(slot, is_value, kv_head) * sizeof(Elem);
        auto put = [&](u32 i, float value) { to[i] = store_cached<Elem>(cached, i, value); };
        if (is_value) {
            rope.copy_head(x, head_dim, put);
        } else {
            rope.turn_head(x, norms.k, head_dim, turns, put);
        }
    }

    // [segment][max, sum, values] of a head.
    __device__ __forceinline__ Global<float> record_of(u32 head) const {
        return partials + u64(head) * segments.count * (2 + index.head_dim);
    }

    // Joins the segments of a key head's query heads; the whole block does.
    __device__ __forceinline__ void join_segments(Global<float> weights, u32 kv_head,
                                                  u32 n_used) const {
        const u32 heads_per_kv = n_head / index.n_kv_head;
        for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
            const u32 n_heads = min(heads_per_kv - first_head, HEADS);
            const u32 query = kv_head * heads_per_kv + first_head;
            if (first_head > 0) {
                __syncthreads();
            }
            // Two elements in one access where they lie so.
            if (index.head_dim % 2 == 0) {
                join_heads<uint2>(weights, query, n_heads, n_used);
            } else {
                join_heads<u32>(weights, query, n_heads, n_used);
            }
        }
    }

    // A thread takes the elements that one access to a record brings. The first segments' values are
    // on their way while the weights are made.
    template <class Access>
    __device__ __forceinline__ void join_heads(Global<float> weights, u32 query, u32 n_heads,
                                               u32 n_used) const {
        constexpr u32 AT_ONCE = sizeof(Access) / 4, AHEAD = 16;
        const u32 head_dim = index.head_dim, n_elements = n_heads * head_dim;
        u32 i = threadIdx.x * AT_ONCE;
        Access ahead[AHEAD] = {};
        if (i < n_elements) {
            const Global<const float> values = values_of(query, i);
#pragma unroll
            for (u32 g = 0; g < AHEAD; g++) {
                if (g < n_used) {
                    ahead[g] = load_published<Access>(values + u64(g) * (2 + head_dim));
                }
            }
        }
        if (warp_id() < n_heads) {
            weigh_segments(record_of(query + warp_id()), n_used, 2 + head_dim,
                           weights + warp_id() * n_used);
        }
        __syncthreads();
        for (bool first = true; i < n_elements; i += THREADS * AT_ONCE, first = false) {
            const Global<const float> values = values_of(query, i);
            const Global<const float> of_head = weights + i / head_dim * n_used;
            float sums[2] = {};
            if (first) {
#pragma unroll
                for (u32 g = 0; g < AHEAD; g++) {
                    if (g < n_used) {
                        add(sums, of_head[g], ahead[g]);
                    }
                }
            }
#pragma unroll 8
            for (u32 g = first ? AHEAD : 0; g < n_used; g++) {
                add(sums, of_head[g], load_published<Access>(values + u64(g) * (2 + head_dim)));
            }
            for (u32 k = 0; k < AT_ONCE; k++) {
                out[query * head_dim + i + k] = sums[k];
            }
        }
    }

    // Element i of a group of heads in the first segment's record.
    __device__ __forceinline__ Global<const float> values_of(u32 query, u32 i) const {
        return record_of(query + i / index.head_dim) + 2 + i % index.head_dim;
    }
    __device__ __forceinline__ static void add(float (&sums)[2], float weight, const uint2& values) {
        sums[0] += weight * __uint_as_float(values.x);
        sums[1] += weight * __uint_as_float(values.y);
    }
    __device__ __forceinline__ static void add(float (&sums)[2], float weight, u32 value) {
        sums[0] += weight * __uint_as_float(value);
    }
};

#define ATTENTION_STEP(NAME, CHUNK_TYPE, ELEM)                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(                                \
        Global<const float> qkv, Global<const float> q_norm, Global<const float> k_norm,          \
        Global<const double> inverse_frequencies, Global<const u32> tokens,                       \
        Global<const u32> block_table, Global<u8> kv, Global<float> partials,                     \
        Global<u32> arrivals, Global<float> out, u32 n_head, u32 n_kv_head, u32 head_dim,         \
        u32 n_pairs, u32 pairing, u32 block_size, u32 n_blocks, u32 max_context_tokens,           \
        u32 n_segments, u32 segment_min, u32 window, u32 kv_elem_bytes, float norm_eps,           \
        float magnitude, float scale) {                                                           \
        const Rope rope = {inverse_frequencies, n_pairs, pairing, norm_eps, magnitude};           \
        const CacheIndex index = {block_table, n_kv_head, block_size, head_dim};                  \
        const Segments segments = {n_segments, segment_min, block_size, max_context_tokens,       \
                                   window};                                                       \
        with_team<sizeof(ELEM) == 2>(                                                             \
            head_dim, AttentionStep<CHUNK_TYPE, ELEM>{qkv, Norms{q_norm, k_norm}, rope, tokens,   \
                                                      index, segments, kv, partials, arrivals,    \
                                                      out, n_head, scale});                       \
    }

ATTENTION_STEP(attention_step_f32, F32Chunk, float)
ATTENTION_STEP(attention_step_f16, F16Chunk, u16)
