// What does not change from layer to layer of a persistent step: how pairs are turned at the new
// token's position, and which heads and tokens a block attends to.
#pragma once

#include "persistent_table.cuh"

constexpr u32 CONSUMER_WARPS = 12, CONSUMERS = CONSUMER_WARPS * 32;
// Query heads and elements of a head that a warp attends with at a time.
constexpr u32 WARP_HEADS = 8, WARP_DIMS = 128;
// Most results of a head that the warps of a block leave for joining.
constexpr u32 JOINED_HEADS = 48;

struct Turn {
    float cosine, sine;
};

// As ops/rope_append.rs: the product reduced to one turn in f64.
__device__ __forceinline__ Turn turn(u32 position, double inverse_frequency, float magnitude) {
    const double half_turns = double(position) * inverse_frequency * 0.31830988618379067154;
    const float angle = float(half_turns - 2.0 * rint(half_turns * 0.5));
    Turn turn;
    sincospif(angle, &turn.sine, &turn.cosine);
    turn.cosine *= magnitude;
    turn.sine *= magnitude;
    return turn;
}

// What a block attends to in this step, the same in every layer.
struct Item {
    bool mine, newest;     // whether there is anything; whether the newest token is in it
    u32 kv_head, segment, segments;
    u32 first, end;        // cached slots
    u32 newest_slot;       // in [first, end) when the ring has come round: then stale, not attended
    u32 units;
    u32 ring_slot, max_context_tokens;
    // Query heads of the key head. They and their elements are cut into parts, each of which
    // `workers` warps attend with: those that have a unit, or behind the last the newest token.
    u32 group, dim_parts, parts, workers;
    u32 newest_block;      // logical

    __device__ __forceinline__ Item(const Header& h, u32 cta, u32 position, u32 slot) {
        const u32 n_live = min(u64(position) + 1, u64(h.max_context_tokens));
        const u32 share = max(div_ceil(n_live, h.segments), h.segment_min);
        const u32 per_segment = div_ceil(share, h.block_size) * h.block_size;
        segments = div_ceil(n_live, per_segment);
        kv_head = cta / h.segments;
        segment = cta % h.segments;
        mine = kv_head < h.n_kv_head && segment < segments;
        first = segment * per_segment;
        end = min(first + per_segment, n_live);
        ring_slot = slot;
        max_context_tokens = h.max_context_tokens;
        newest_slot = min(slot, n_live - 1);
        newest = mine && newest_slot >= first && newest_slot < end;
        if (newest && newest_slot + 1 == end) {
            end--;
        }
        units = mine ? div_ceil(end - first, h.unit_tokens) : 0;
        group = h.n_head / h.n_kv_head;
        newest_block = newest_slot / h.block_size;
        dim_parts = div_ceil(h.head_dim, WARP_DIMS);
        parts = div_ceil(group, WARP_HEADS) * dim_parts;
        workers = min(min(CONSUMER_WARPS / parts, JOINED_HEADS / group), units + newest);
    }

    __device__ __forceinline__ bool attends(u32 slot, u32 window) const {
        const u32 age = ring_slot >= slot ? ring_slot - slot
                                          : ring_slot + (max_context_tokens - slot);
        return slot < end && slot != newest_slot && (window == 0 || age < window);
    }
};
