// RMS norm, and SwiGLU of two matrices times the result as q8.
//
//   u = x * norm / sqrt(mean(x^2) + eps), quantised
//   out = silu(gate * u) * (up * u), silu(z) = z / (1 + e^-z)
//
// gate, up   packed [n_out, n_in], of the same type, one that comes in groups
// x          [n_in], n_in a multiple of 32
// norm       [n_in]
// out        [n_out]
//
// Geometry: decode_gemv.cuh.
#include "decode_gemv.cuh"

struct SwigluOutput {
    static constexpr u32 MATRICES = 2;
    struct Early {};
    Global<float> out;

    __device__ __forceinline__ Early early(u32) const {
        return {};
    }
    __device__ __forceinline__ void put(u32 row, const float sums[2], Early) const {
        const float gate = sums[0], up = sums[1];
        out[row] = gate / (1.0f + expf(-gate)) * up;
    }
};

extern "C" __global__ void __launch_bounds__(GEMV_WARPS * 32, 2)
    gemv_norm_swiglu(Global<const u8> gate, Global<const u8> up, Global<const float> x,
                     Global<const float> norm, Global<float> out, u32 ggml_type, u32 n_out,
                     u32 n_in, u32 ring_bytes, float eps) {
    NormInput input = {x, norm, eps};
    SwigluOutput output = {out};
    decode_gemv({gate, up}, ggml_type, n_out, n_in, ring_bytes, blockIdx.x, gridDim.x, input, output);
}
