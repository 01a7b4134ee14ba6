// RMS norm, the logits of its result in q8, the likeliest token, and the input of the next step.
//
//   u = x * norm / sqrt(mean(x^2) + eps), quantised;  logits = w * u;  token = argmax logits
//
// Equal logits: the lower id. NaN counts as -infinity.
//
// w            packed [n_vocab, n_in], of a type that comes in groups
// x            [n_in], n_in a multiple of 32
// norm         [n_in]
// logits       [n_vocab]
// best         [1], 0 before and after
// arrivals     [1], 0 before and after
// token        [1]
// tokens       [3]
// step_count   [1]
//
// Geometry: decode_gemv.cuh; the last block that is done chooses.
// Alignment: best 8 bytes.
#include "choose.cuh"
#include "decode_gemv.cuh"

// Remembers the best of what it writes.
struct LogitsOutput {
    static constexpr u32 MATRICES = 1;
    struct Early {};
    Global<float> logits;
    u64 key = 0;

    __device__ __forceinline__ Early early(u32) const {
        return {};
    }
    __device__ __forceinline__ void put(u32 row, const float sums[1], Early) {
        logits[row] = sums[0];
        key = max(key, candidate_key(sums[0], row));
    }
};

extern "C" __global__ void __launch_bounds__(GEMV_WARPS * 32, 2)
    head(Global<const u8> w, Global<const float> x, Global<const float> norm, Global<float> logits,
         Global<u64> best, Global<u32> arrivals, Global<u32> token, Global<u32> tokens,
         Global<u32> step_count, u32 ggml_type, u32 n_vocab, u32 n_in, u32 ring_bytes,
         u32 max_context_tokens, float eps) {
    NormInput input = {x, norm, eps};
    LogitsOutput output = {logits};
    decode_gemv({w}, ggml_type, n_vocab, n_in, ring_bytes, blockIdx.x, gridDim.x, input, output);
    choose_best<GEMV_WARPS>(output.key, threadIdx.x, blockDim.x / 32, best, arrivals,
                            NextStep{token, tokens, step_count, max_context_tokens});
}
