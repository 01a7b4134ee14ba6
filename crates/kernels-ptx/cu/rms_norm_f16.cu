// y = x / sqrt(mean(x^2) + eps) * weight, per token, as f16; what f16 cannot hold becomes its largest
// number. Without a weight y = x.
//
// x        [n_tokens][n], n a multiple of 8
// weight   [n] or null
// y        f16 [n_tokens][n], in row order (0) or fragment order (1)
//
// Geometry: a block per token, a thread per eight elements, at most 1024 threads.
// Alignment: 16 bytes.
#include "tensor.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_f16(Global<const float> x, Global<const float> weight, Global<u16> y, u32 n_tokens,
                 u32 n, u32 order, float eps) {
    const HalfRows rows = {n_tokens, n, order != 0};
    // The weights of a thread's first eight do not wait for the step.
    const u32 first = threadIdx.x * 8;
    uint4 ahead[2] = {};
    if (weight && first < n) {
        ahead[0] = load_constant<uint4>(weight + first);
        ahead[1] = load_constant<uint4>(weight + first + 4);
    }
    begin();
    x = x + u64(blockIdx.x) * n;
    float4 mine[2] = {};
    float sum = 0.0f, inverse = 1.0f;
    for (u32 k = first; k < n; k += blockDim.x * 8) {
        for (u32 i = 0; i < 2; i++) {
            const float4 quad = load<float4>(x + k + i * 4);
            sum += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
            mine[i] = k == first ? quad : mine[i];
        }
    }
    if (weight) {
        inverse = inverse_rms(block_sum(sum), n, eps);
    }
    for (u32 k = first; k < n; k += blockDim.x * 8) {
        u32 pairs[4];
        for (u32 i = 0; i < 2; i++) {
            float4 quad = k == first ? mine[i] : load<float4>(x + k + i * 4);
            if (weight) {
                const uint4 w = k == first ? ahead[i] : load<uint4>(weight + k + i * 4);
                quad = {quad.x * inverse * __uint_as_float(w.x), quad.y * inverse * __uint_as_float(w.y),
                        quad.z * inverse * __uint_as_float(w.z), quad.w * inverse * __uint_as_float(w.w)};
            }
            pairs[2 * i] = finite_pair(quad.x, quad.z);
            pairs[2 * i + 1] = finite_pair(quad.y, quad.w);
        }
        rows.store_eight(y, blockIdx.x, k, pairs);
    }
}
