// Matrix x f32 activations over dequantised weights: the exact numerics. Forms as in gemv_q8.cu.
//
// w0, w1, w2   packed [n_out, n_in], any type; w1 and w2 may be null with n_out 0
// x            [n_tokens][n_in]
// bias         [n_out0 + n_out1 + n_out2] or null
// residual     [n_tokens][n_rows], of the add form
// out          [n_tokens][n_rows]; n_rows is all rows, or those of w0 for the SwiGLU form
//
// Geometry: blocks of 128 threads, a warp per row, striding.
// Alignment: matrices 16 bytes, x 16 bytes.
#include "gemv.cuh"

// This lane's part of a row's sum.
struct F32Dot {
    Global<const float> x;
    u32 n_in, row;
    bool first;
    float sum = __uint_as_float(0x7fc00000);

    __device__ __forceinline__ F32Dot(Global<const float> input, u32 n_in, u32 row, u32 token,
                                      bool first)
        : x(input + u64(token) * n_in), n_in(n_in), row(row), first(first) {}

    template <class Type>
    __device__ __forceinline__ void visit(const Type& matrix) {
        if constexpr (Type::GROUPED) {
            visit_groups(matrix);
        } else {
            visit_floats(matrix);
        }
    }

    template <class Type>
    __device__ __forceinline__ void visit_groups(const Type& matrix) {
        const u32 n_groups = n_in / GROUP;
        const u64 row_group = u64(row) * n_groups;
        sum = 0.0f;
        for (u32 group = lane_id(); group < n_groups + lane_id(); group += 32) {
            typename Type::Packed packed = {};
            if (group < n_groups) {
                packed = matrix.load(row_group + group);
            }
            if (first && group == lane_id()) {
                begin();
            }
            if (group < n_groups) {
                float weights[GROUP];
                dequantize<Type>(Type::decode(packed, group), weights);
                for (u32 i = 0; i < GROUP; i += 4) {
                    const float4 quad = load<float4>(x + group * GROUP + i);
                    sum += weights[i] * quad.x + weights[i + 1] * quad.y;
                    sum += weights[i + 2] * quad.z + weights[i + 3] * quad.w;
                }
            }
        }
    }

    template <class Type>
    __device__ __forceinline__ void visit_floats(const Type& matrix) {
        if (first) {
            begin();
        }
        sum = 0.0f;
#pragma unroll 4
        for (u32 i = lane_id(); i < n_in; i += 32) {
            sum += matrix.weight(u64(row) * n_in + i) * x[i];
        }
    }
};

#define GEMV_F32(NAME, EPILOGUE)                                                                  \
    extern "C" __global__ void __launch_bounds__(GEMV_THREADS) NAME(                              \
        Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const float> x,     \
        Global<const float> bias, Global<const float> residual, Global<float> out, u32 type0,     \
        u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2, u32 n_rows, u32 n_in,           \
        u32 n_tokens) {                                                                           \
        const Matrices matrices = {w0, w1, w2, type0, type1, type2, n_out0, n_out1, n_out2, n_in};\
        gemv<EPILOGUE, F32Dot>(matrices, x, Outputs{bias, residual, out, n_rows, n_tokens});      \
    }

GEMV_F32(gemv_f32_store, Epilogue::Store)
GEMV_F32(gemv_f32_add, Epilogue::Add)
GEMV_F32(gemv_f32_swiglu, Epilogue::Swiglu)
GEMV_F32(gemv_f32_geglu, Epilogue::Geglu)
