// What the warps of a block of the persistent step have in common.
#pragma once

#include "persistent_attention.cuh"

constexpr u32 PRODUCER = CONSUMER_WARPS, SUMMER = CONSUMER_WARPS + 1;
constexpr u32 THREADS = (CONSUMER_WARPS + 2) * 32;

// Of the warps that compute and the one that sums.
__device__ __forceinline__ void sync_with_summer() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

// Small things in shared memory.
struct Misc {
    float inverse_rms;
    u32 limit;    // copies in flight
    u32 gave_up;  // see Peers
    u32 token_id;
    u64 best[CONSUMER_WARPS];
    Item item;
};
static_assert(sizeof(Misc) <= 256, "as in the schedule");

struct Block {
    u8* shared;
    const Header& h;
    const Op* ops;
    Misc& misc;
    const u8* weights;
    const Ring& ring;
    Peers peers;
    const Item& item;
    u32 epoch, phase;

    __device__ __forceinline__ const float* floats(u32 place) const {
        return reinterpret_cast<const float*>(weights + u64(place) * 16);
    }
    // Nothing to do for this block; but the embedding row is also its residual.
    __device__ __forceinline__ bool skips(const Op& op) const {
        return op.n_units == 0 && op.input != NONE;
    }
};
