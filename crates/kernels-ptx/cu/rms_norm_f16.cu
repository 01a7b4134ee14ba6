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
    begin();
    const HalfRows rows = {n_tokens, n, order != 0};
    x = x + u64(blockIdx.x) * n;
    float inverse = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (u32 k = threadIdx.x * 4; k < n; k += blockDim.x * 4) {
            const float4 quad = load<float4>(x + k);
            sum += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
        }
        inverse = inverse_rms(block_sum(sum), n, eps);
    }
    for (u32 k = threadIdx.x * 8; k < n; k += blockDim.x * 8) {
        u32 pairs[4];
        for (u32 i = 0; i < 2; i++) {
            float4 quad = load<float4>(x + k + i * 4);
            if (weight) {
                const float4 w = load<float4>(weight + k + i * 4);
                quad = {quad.x * inverse * w.x, quad.y * inverse * w.y, quad.z * inverse * w.z,
                        quad.w * inverse * w.w};
            }
            pairs[2 * i] = finite_pair(quad.x, quad.y);
            pairs[2 * i + 1] = finite_pair(quad.z, quad.w);
        }
        store(y + rows.eight(blockIdx.x, k), uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}
