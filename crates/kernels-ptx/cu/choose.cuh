// The end of a step: the likeliest token, and the chosen one as the input of the next step.
#pragma once

#include "common.cuh"

// The order of candidates as integers: the larger logit, then the lower id, is the larger key. No
// key is 0.
__device__ __forceinline__ u64 candidate_key(float value, u32 index) {
    // Adding +0 makes equal zeros of -0 and +0.
    return u64(ordered_bits(value + 0.0f)) << 32 | ~index;
}

// Where the chosen token goes. Position and slot move on by one, the slot around the ring.
struct NextStep {
    Global<u32> token, tokens, step_count;
    u32 max_context_tokens;

    __device__ __forceinline__ void begin_with(u32 chosen) const {
        token[0] = chosen;
        tokens[POSITION] = tokens[POSITION] + 1;
        tokens[RING_SLOT] = (tokens[RING_SLOT] + 1) % max_context_tokens;
        tokens[TOKEN_ID] = chosen;
        step_count[0] = step_count[0] + 1;
    }
};

// Every block's threads bring the best key that they know; the last block chooses the best of all.
// `best` and `arrivals` are 0 before and after.
template <u32 MAX_WARPS>
__device__ __forceinline__ void choose_best(u64 key, u32 thread, u32 n_warps, Global<u64> best,
                                            Global<u32> arrivals, const NextStep& next) {
    SHARED(u64, of_warps, MAX_WARPS);
    key = warp_max(key);
    if (thread % 32 == 0) {
        of_warps[thread / 32] = key;
    }
    __syncthreads();
    if (thread == 0) {
        for (u32 i = 1; i < n_warps; i++) {
            key = max(key, u64(of_warps[i]));
        }
        atomicMax(best, key);
    }
    if (last_to_arrive(arrivals, gridDim.x) && thread == 0) {
        next.begin_with(~u32(atomicExch(best, u64(0))));
    }
}
