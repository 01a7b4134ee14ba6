// The likeliest token of each output, and the input of the next step from it. Equal logits: the
// lower id. NaN counts as -infinity. Of an output without a row nothing is written.
//
// logits       [n_outputs][n_vocab]
// outputs      [n_outputs], the row of each; one that is no row: none
// best         [n_outputs], 0 before and after
// arrivals     [n_outputs], 0 before and after
// token        [n_outputs]
// tokens       [n_tokens][3]
// step_count   [n_outputs]
//
// Geometry: grid (blocks of 256 threads that share an output's logits, n_outputs); the last one
// that is done chooses.
// Alignment: best 8 bytes.
#include "choose.cuh"

extern "C" __global__ void __launch_bounds__(256)
    argmax(Global<const float> logits, Global<const u32> outputs, Global<u64> best,
           Global<u32> arrivals, Global<u32> token, Global<u32> tokens, Global<u32> step_count,
           u32 n_vocab, u32 n_tokens, u32 n_outputs, u32 max_context_tokens) {
    begin();
    const u32 output = blockIdx.y, row = outputs[output];
    if (row >= n_tokens) {
        return;
    }
    logits = logits + u64(output) * n_vocab;
    u64 key = 0;
#pragma unroll 4
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < n_vocab; i += gridDim.x * 256) {
        key = max(key, candidate_key(logits[i], i));
    }
    choose_best<8>(key, threadIdx.x, 8, best + output, arrivals + output,
                   NextStep{token + output, tokens + row * TOKEN_WORDS, step_count + output,
                            max_context_tokens});
}
