// The best candidate of each slice of the vocabulary; slice i starts at
// i * ceil(n_vocab / n_slices). An empty slice gives -infinity with index 2^32 - 1. Equal logits:
// the lower id. NaN counts as -infinity.
//
// logits   [n_vocab]
// best     [n_slices]
//
// Geometry: a block of 256 threads per slice.
// Alignment: best 8 bytes.
#include "argmax.cuh"

extern "C" __global__ void __launch_bounds__(256)
    argmax_slices(Global<const float> logits, Global<Candidate> best, u32 n_vocab, u32 n_slices) {
    begin();
    const u32 per_slice = div_ceil(n_vocab, n_slices);
    const u32 first = min(u64(blockIdx.x) * per_slice, u64(n_vocab));
    const u32 end = min(u64(first) + per_slice, u64(n_vocab));
    u64 key = candidate_key(-infinity(), 0xffffffff);
#pragma unroll 4
    for (u32 i = first + threadIdx.x; i < end; i += 256) {
        key = max(key, candidate_key(logits[i], i));
    }
    SHARED(u64, partial, 8);
    key = warp_max(key);
    if (lane_id() == 0) {
        partial[warp_id()] = key;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 i = 1; i < 8; i++) {
            key = max(key, u64(partial[i]));
        }
        store(best + blockIdx.x, from_candidate_key(key));
    }
}
