// The likeliest token, and the input of the next step from it. Equal logits: the lower id. NaN
// counts as -infinity.
//
// logits       [n_vocab]
// best         [1], 0 before and after
// arrivals     [1], 0 before and after
// token        [1]
// tokens       [3]
// step_count   [1]
//
// Geometry: blocks of 256 threads that share the logits; the last one that is done chooses.
// Alignment: best 8 bytes.
#include "choose.cuh"

extern "C" __global__ void __launch_bounds__(256)
    argmax(Global<const float> logits, Global<u64> best, Global<u32> arrivals, Global<u32> token,
           Global<u32> tokens, Global<u32> step_count, u32 n_vocab, u32 max_context_tokens) {
    begin();
    u64 key = 0;
#pragma unroll 4
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < n_vocab; i += gridDim.x * 256) {
        key = max(key, candidate_key(logits[i], i));
    }
    choose_best<8>(key, threadIdx.x, 8, best, arrivals,
                   NextStep{token, tokens, step_count, max_context_tokens});
}
