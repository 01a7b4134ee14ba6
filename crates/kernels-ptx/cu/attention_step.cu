// Attention of one token, from the products of q, k and v to the joined result: turns q and k,
// appends k and v to the cache, attends to the live slots a segment a block, and joins the segments
// in the last block of each key head that is done.
//
// Turning and appending are those of rope_append.cu, the segments and the attention those of
// attention.cu, joining that of attention_combine.cu. The token's own key and value are taken from
// where they are computed, as the cache holds them; only the block whose segment has their slot
// needs them. What the cache held before, the first tile of every team, is fetched before the
// inputs are waited for.
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
// Geometry: grid (n_kv_head, n_segments), block 128. Many registers, few threads: a block fits an SM
// beside one of decode_gemv.cuh.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "attention.cuh"
#include "rope.cuh"

constexpr u32 WARPS = 4;

// The token itself: key and value from shared memory, for one team of the block.
struct NewestTile {
    static constexpr u32 TILE = 1;
    Global<const float> row;  // key, then value
    Team team;
    bool attends[1];

    __device__ __forceinline__ void key(u32, float out[CHUNK]) const {
        part(row, out);
    }
    __device__ __forceinline__ void value(u32, float out[CHUNK]) const {
        part(row + MAX_HEAD_DIM, out);
    }
    __device__ __forceinline__ void part(Global<const float> from, float out[CHUNK]) const {
        for (u32 i = 0; i < CHUNK; i++) {
            out[i] = i < team.n_dims ? float(from[team.dim + i]) : 0.0f;
        }
    }
};

// Joins the segments of a head, whose records begin at `partials`; a warp's work.
__device__ __forceinline__ void join_segments(Global<const float> partials, u32 n_used,
                                              u32 head_dim, Global<float> out) {
    const u32 record = 2 + head_dim;
    float max = -infinity();
    for (u32 g = lane_id(); g < n_used; g += 32) {
        max = fmaxf(max, load_published<float>(partials + u64(g) * record));
    }
    for (u32 offset = 16; offset > 0; offset /= 2) {
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, offset));
    }
    float sum = 0.0f, values[MAX_HEAD_DIM / 32] = {};
#pragma unroll 8
    for (u32 g = 0; g < n_used; g++) {
        const Global<const float> segment = partials + u64(g) * record;
        const float segment_sum = load_published<float>(segment + 1);
        const float weight = segment_sum > 0.0f ? expf(load_published<float>(segment) - max) : 0.0f;
        sum += weight * segment_sum;
#pragma unroll
        for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
            const u32 dim = i * 32 + lane_id();
            if (dim < head_dim) {
                values[i] += weight * load_published<float>(segment + 2 + dim);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
        const u32 dim = i * 32 + lane_id();
        if (dim < head_dim) {
            out[dim] = values[i] / sum;
        }
    }
}

struct Norms {
    Global<const float> q, k;
};

template <class Chunk, class Elem>
__device__ __forceinline__ void attention_step(Global<const float> qkv, const Norms& norms,
                                               const Rope& rope, Global<const u32> tokens,
                                               const CacheIndex& index, const Segments& segments,
                                               Global<u8> kv, Global<float> partials,
                                               Global<u32> arrivals, Global<float> out, u32 n_head,
                                               float scale) {
    const u32 kv_head = blockIdx.x, segment = blockIdx.y;
    const u32 head_dim = index.head_dim, heads_per_kv = n_head / index.n_kv_head;
    const u32 position = load_constant<u32>(tokens + POSITION);
    const u32 ring_slot = load_constant<u32>(tokens + RING_SLOT);
    const Span span = segments.span(position, ring_slot, segment);
    if (segment >= span.n_used) {
        begin();
        return;
    }
    const bool has_newest = ring_slot >= span.first && ring_slot < span.end;
    const Team team(head_dim);
    CachedTile<Chunk> tile;
    tile.template load<true>(kv, index, span, team, kv_head, span.first, ring_slot);
    begin();

    SHARED(float, records, WARPS * HEADS * Joined<WARPS>::RECORD);
    SHARED(float, turned, (HEADS + 2) * MAX_HEAD_DIM);  // queries, then the newest key and value
    const Joined<WARPS> joined = {records};
    const Global<float> newest = turned + HEADS * MAX_HEAD_DIM;
    // The heads of every round go to the same places: who reads them last has not met the others at
    // the next barrier yet.
    for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
        const u32 n_heads = min(heads_per_kv - first_head, HEADS);
        const u32 query = kv_head * heads_per_kv + first_head;
        // A warp a head; the token's own key and value after the first queries.
        const u32 n_rows = n_heads + (first_head == 0 && has_newest ? 2 : 0);
        for (u32 row = warp_id(); row < n_rows; row += WARPS) {
            if (row < n_heads) {
                const Global<float> to = turned + row * MAX_HEAD_DIM;
                rope.turn_head(qkv + (query + row) * head_dim, norms.q, head_dim, position,
                               [&](u32 i, float value) { to[i] = value; });
                continue;
            }
            const bool is_v = row > n_heads;
            const Global<const float> x =
                qkv + (n_head + is_v * index.n_kv_head + kv_head) * head_dim;
            const Global<u8> cached = kv + index.at(ring_slot, is_v, kv_head) * sizeof(Elem);
            const Global<float> to = newest + is_v * MAX_HEAD_DIM;
            auto append = [&](u32 i, float value) { to[i] = store_cached<Elem>(cached, i, value); };
            if (is_v) {
                rope.copy_head(x, head_dim, append);
            } else {
                rope.turn_head(x, norms.k, head_dim, position, append);
            }
        }
        __syncthreads();

        Heads heads(turned, n_heads, team, MAX_HEAD_DIM);
        // Whole blocks of threads go round: teams shuffle.
        const u32 step = team.count * Chunk::TILE;
        for (u32 first = span.first; first < span.end; first += step) {
            const CachedTile<Chunk> here = tile;
            // Behind the last tile the first one again, if there are more heads.
            const bool more = first + step < span.end;
            if (more || first_head + HEADS < heads_per_kv) {
                const u32 next = more ? first + step : span.first;
                tile.template load<true>(kv, index, span, team, kv_head, next, ring_slot);
            }
            heads.attend(here, team, scale);
        }
        if (has_newest) {
            heads.attend(NewestTile{newest, team, {team.index == 0}}, team, scale);
        }
        joined.put(heads, team);
        __syncthreads();
        for (u32 h = 0; h < n_heads; h++) {
            const auto factors = joined.factors(h);
            const u64 record = (u64(query + h) * segments.count + segment) * (2 + head_dim);
            for (u32 i = threadIdx.x; i < head_dim; i += WARPS * 32) {
                const float value = joined.total(factors, h, 1 + i);
                if (span.n_used == 1) {
                    out[(query + h) * head_dim + i] = value / joined.total(factors, h, 0);
                } else {
                    partials[record + 2 + i] = value;
                }
            }
            if (threadIdx.x == 0 && span.n_used > 1) {
                partials[record] = factors.max;
                partials[record + 1] = joined.total(factors, h, 0);
            }
        }
    }

    if (span.n_used > 1 && last_to_arrive(arrivals + kv_head, span.n_used)) {
        for (u32 h = warp_id(); h < heads_per_kv; h += WARPS) {
            const u64 head = kv_head * heads_per_kv + h;
            join_segments(partials + head * segments.count * (2 + head_dim), span.n_used, head_dim,
                          out + head * head_dim);
        }
    }
}

#define ATTENTION_STEP(NAME, CHUNK_TYPE, ELEM)                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(                                \
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
        attention_step<CHUNK_TYPE, ELEM>(qkv, Norms{q_norm, k_norm}, rope, tokens, index,         \
                                         segments, kv, partials, arrivals, out, n_head, scale);   \
    }

ATTENTION_STEP(attention_step_f32, F32Chunk, float)
ATTENTION_STEP(attention_step_f16, F16Chunk, u16)
