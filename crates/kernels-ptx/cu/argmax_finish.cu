// The token of the best slice.
//
// best    [n_slices]
// token   [1]
//
// Geometry: one warp.
// Alignment: best 8 bytes.
#include "argmax.cuh"

extern "C" __global__ void __launch_bounds__(32)
    argmax_finish(Global<const Candidate> best, Global<u32> token, u32 n_slices) {
    begin();
    u64 key = 0;
    for (u32 i = lane_id(); i < n_slices; i += 32) {
        const Candidate candidate = load<Candidate>(best + i);
        key = max(key, candidate_key(candidate.value, candidate.index));
    }
    key = warp_max(key);
    if (lane_id() == 0) {
        token[0] = n_slices == 0 ? 0 : from_candidate_key(key).index;
    }
}
