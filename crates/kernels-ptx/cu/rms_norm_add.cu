// y = residual + x / sqrt(mean(x^2) + eps) * weight, per token.
//
// x        [n_tokens][n]
// weight   [n]
// residual [n_tokens][n]
// y        [n_tokens][n]
//
// Geometry: a block per token, a thread per four elements, at most 1024 threads.
// Alignment: of the elements; where n is a multiple of 4, 16 bytes.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_add(Global<const float> x, Global<const float> weight, Global<const float> residual,
                 Global<float> y, u32 n_tokens, u32 n, float eps) {
    begin();
    x = x + u64(blockIdx.x) * n;
    residual = residual + u64(blockIdx.x) * n;
    y = y + u64(blockIdx.x) * n;
    // In quads as far as rows consist of them, else element by element.
    const u32 n_quads = n % 4 == 0 ? n / 4 : 0;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n_quads; i += blockDim.x) {
        const float4 quad = load<float4>(x + i * 4);
        sum += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
    }
    for (u32 i = n_quads * 4 + threadIdx.x; i < n; i += blockDim.x) {
        sum += x[i] * x[i];
    }
    const float inverse = inverse_rms(block_sum(sum), n, eps);
    for (u32 i = threadIdx.x; i < n_quads; i += blockDim.x) {
        const float4 quad = load<float4>(x + i * 4), w = load<float4>(weight + i * 4);
        const float4 r = load<float4>(residual + i * 4);
        store(y + i * 4, float4{r.x + quad.x * inverse * w.x, r.y + quad.y * inverse * w.y,
                                r.z + quad.z * inverse * w.z, r.w + quad.w * inverse * w.w});
    }
    for (u32 i = n_quads * 4 + threadIdx.x; i < n; i += blockDim.x) {
        y[i] = residual[i] + x[i] * inverse * weight[i];
    }
}
