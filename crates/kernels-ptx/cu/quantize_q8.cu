// f32 activations to q8: i8 with one f32 scale per 32, see quantize_quad.
//
// x        [n_tokens][n], n a multiple of 32
// quants   [n_tokens][n]
// groups   [n_tokens][n / 32]
//
// Geometry: a thread per four elements: grid (ceil(n / 1024), n_tokens), block 256.
// Alignment: x 16 bytes, groups 8, quants 4.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    quantize_q8(Global<const float> x, Global<i8> quants, Global<Q8Group> groups, u32 n_tokens,
                u32 n) {
    begin();
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    const u64 row = u64(blockIdx.y) * n;
    const bool inside = i < n / 4;
    const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    const Q8Quad quad = quantize_quad(inside ? load<float4>(x + row + i * 4) : zero);
    if (inside) {
        store(quants + row + i * 4, quad.quants);
        if (i % 8 == 0) {
            store(groups + row / 32 + i / 8, q8_group(quad.scale, quad.sum));
        }
    }
}
