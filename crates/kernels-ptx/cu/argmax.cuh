// The order of candidates as integers: the larger logit, then the lower id, is the larger key.
#pragma once

#include "common.cuh"

__device__ __forceinline__ u64 candidate_key(float value, u32 index) {
    // Adding +0 makes equal zeros of -0 and +0.
    return u64(ordered_bits(value + 0.0f)) << 32 | ~index;
}

__device__ __forceinline__ Candidate from_candidate_key(u64 key) {
    return {from_ordered_bits(u32(key >> 32)), ~u32(key)};
}
