// RMS norm whose result is quantised to q8, per token: u = x * weight is quantised, and
// 1 / sqrt(mean(x^2) + eps) enters the group scales only, so that the integers do not depend on
// the order in which the squares are summed.
//
// x        [n_tokens][n], n a multiple of 32
// weight   [n]
// quants   [n_tokens][n]
// groups   [n_tokens][n / 32]
//
// Geometry: a block per token, a thread per four elements, at most 1024 threads.
// Alignment: x and weight 16 bytes, groups 8, quants 4.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_q8(Global<const float> x, Global<const float> weight, Global<i8> quants,
                Global<Q8Group> groups, u32 n_tokens, u32 n, float eps) {
    begin();
    const u32 token = blockIdx.x;
    x = x + u64(token) * n;
    quants = quants + u64(token) * n;
    groups = groups + u64(token) * (n / 32);
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n / 4; i += blockDim.x) {
        const float4 quad = load<float4>(x + i * 4);
        sum += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
    }
    const float inverse = inverse_rms(block_sum(sum), n, eps);
    // Whole warps go round: eight lanes share a group.
    for (u32 start = warp_id() * 32; start < n / 4; start += blockDim.x) {
        const u32 i = start + lane_id();
        float4 u = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i < n / 4) {
            const float4 quad = load<float4>(x + i * 4), w = load<float4>(weight + i * 4);
            u = {quad.x * w.x, quad.y * w.y, quad.z * w.z, quad.w * w.w};
        }
        const Q8Quad quad = quantize_quad(u);
        if (i < n / 4) {
            store(quants + i * 4, quad.quants);
            if (i % 8 == 0) {
                store(groups + i / 8, q8_group(quad.scale * inverse, quad.sum));
            }
        }
    }
}
