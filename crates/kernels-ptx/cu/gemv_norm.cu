// RMS norm, and up to three matrices times the result as q8.
//
//   u = x * norm, quantised;  out = [w0; w1; w2] * u / sqrt(mean(x^2) + eps) + bias
//
// x            [n_in], n_in a multiple of 32
// norm         [n_in]
// w0, w1, w2   packed [n_out, n_in], of types that come in groups; w1 and w2 may be null with n_out 0
// bias         [n_out0 + n_out1 + n_out2] or null
// out          [n_out0 + n_out1 + n_out2]
//
// Geometry: decode_gemv.cuh; blocks0 blocks share the rows of w0, the next blocks1 those of w1, the
// rest those of w2.
#include "decode_gemv.cuh"

extern "C" __global__ void __launch_bounds__(GEMV_WARPS * 32, 2)
    gemv_norm(Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const float> x,
              Global<const float> norm, Global<const float> bias, Global<float> out, u32 type0,
              u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2, u32 blocks0, u32 blocks1,
              u32 blocks2, u32 n_in, u32 ring_bytes, float eps) {
    Global<const u8> base = w0;
    u32 type = type0, n_out = n_out0, n_blocks = blocks0, block = blockIdx.x, first = 0;
    if (blockIdx.x >= blocks0 + blocks1) {
        base = w2, type = type2, n_out = n_out2, n_blocks = blocks2;
        block = blockIdx.x - blocks0 - blocks1, first = n_out0 + n_out1;
    } else if (blockIdx.x >= blocks0) {
        base = w1, type = type1, n_out = n_out1, n_blocks = blocks1;
        block = blockIdx.x - blocks0, first = n_out0;
    }
    NormInput input = {x, norm, eps};
    StoreOutput output = {bias, out + first};
    if (bias) {
        output.bias = bias + first;
    }
    decode_gemv({base}, type, n_out, n_in, ring_bytes, block, n_blocks, input, output);
}
