// A matrix times a vector that is quantised to q8 first, added to a residual.
//
//   out = residual + w * x
//
// w          packed [n_out, n_in], of a type that comes in groups
// x          [n_in], n_in a multiple of 32
// residual   [n_out]
// out        [n_out]
//
// Geometry: decode_gemv.cuh.
#include "decode_gemv.cuh"

struct ResidualOutput {
    static constexpr u32 MATRICES = 1;
    using Early = float;
    Global<const float> residual;
    Global<float> out;

    __device__ __forceinline__ float early(u32 row) const {
        return residual[row];
    }
    __device__ __forceinline__ void put(u32 row, const float sums[1], float residual) const {
        out[row] = residual + sums[0];
    }
};

extern "C" __global__ void __launch_bounds__(GEMV_WARPS * 32, 2)
    gemv_residual(Global<const u8> w, Global<const float> x, Global<const float> residual,
                  Global<float> out, u32 ggml_type, u32 n_out, u32 n_in, u32 ring_bytes) {
    PlainInput input = {x};
    ResidualOutput output = {residual, out};
    decode_gemv({w}, ggml_type, n_out, n_in, ring_bytes, blockIdx.x, gridDim.x, input, output);
}
