// Attention of one token to a segment whose slots all lie in the cache.
#pragma once

#include "attention.cuh"

// What a segment's weights add up to, relative to the largest score.
struct SegmentTotal {
    float max, sum;
};

// The queries of key head blockIdx.x. Output says
//
//   void put(head, dim, value, total)   of a query head: the weighted sum of the values' element `dim`
template <class Chunk, class Output>
struct CachedAttention {
    Global<const float> q;  // [n_head][head_dim] of the token
    Global<const u8> kv;
    CacheIndex index;
    Span span;
    u32 n_head;
    float scale;
    Output output;

    // Bytes of dynamic shared memory: of Joined<LANES>::FLOATS, and of a total for each of HEADS.
    template <u32 LANES, bool VECTORS>
    __device__ __forceinline__ void with() const {
        using Tile = CachedTile<Chunk, VECTORS>;
        const u32 kv_head = blockIdx.x, head_dim = index.head_dim;
        const u32 heads_per_kv = n_head / index.n_kv_head;
        const Place place(LANES, head_dim);
        const auto cache = HeadCache::of<Chunk>(kv, index, kv_head, Tile::UNIT_BYTES);
        DYNAMIC_SHARED(dynamic);
        const Joined<LANES> joined = {view_as<float>(dynamic)};
        const Global<float> totals = joined.records + Joined<LANES>::FLOATS;
        const u32 step = place.n_teams * Tile::TILE;

        for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
            const u32 query = kv_head * heads_per_kv + first_head;
            const u32 n_heads = min(heads_per_kv - first_head, HEADS);
            Heads<LANES, Tile::TILE> heads(q + query * head_dim, n_heads, place, head_dim);
            Tile tile;
            tile.find(cache, span, place, span.first, NO_SLOT);
            tile.template load_keys<false>(cache, place);
            tile.template load_values<false>(cache, place);
            // Whole blocks of threads go round: teams shuffle.
            for (u32 first = span.first; first < span.end; first += step) {
                heads.attend(
                    tile, scale,
                    [&] {
                        tile.find(cache, span, place, first + step, NO_SLOT);
                        tile.template load_keys<false>(cache, place);
                    },
                    [&] { tile.template load_values<false>(cache, place); });
            }
            joined.put(heads, place);
            __syncthreads();
            if (warp_id() < n_heads) {
                joined.weigh(warp_id(), totals + 2 * warp_id());
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < n_heads * head_dim; i += ATTENTION_WARPS * 32) {
                const u32 h = i / head_dim, dim = i % head_dim;
                const SegmentTotal total = {totals[2 * h], totals[2 * h + 1]};
                output.put(query + h, dim, joined.value(h, dim), total);
            }
            // The next heads' sums go to the same place.
            __syncthreads();
        }
    }
};

// Writes an element of a segment's record [max, sum, head_dim values].
__device__ __forceinline__ void put_record(Global<float> record, u32 dim, float value,
                                           const SegmentTotal& total) {
    record[2 + dim] = value;
    if (dim == 0) {
        record[0] = total.max;
        record[1] = total.sum;
    }
}
