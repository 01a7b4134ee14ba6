// Matrix x q8 activations, for up to three matrices that share their input.
//
//   y = [w0; w1; w2] * x + bias
//   gemv_q8_store    out = y
//   gemv_q8_add      out = residual + y
//   gemv_q8_swiglu   out = silu(y of w0) * (y of w1), silu(z) = z / (1 + e^-z)
//   gemv_q8_geglu    out = gelu(y of w0) * (y of w1), gelu as in gemv.cuh
//
// A group of 32 adds d * scale_x * (scales . integer dot products) + offset * scaled_sum_x; the
// integers are exact.
//
// w0, w1, w2   packed [n_out, n_in], any type; w1 and w2 may be null with n_out 0
// quants       [n_tokens][n_in], n_in a multiple of 32
// groups       [n_tokens][n_in / 32]
// bias         [n_out0 + n_out1 + n_out2] or null
// residual     [n_tokens][n_rows], of the add form
// out          [n_tokens][n_rows]; n_rows is all rows, or those of w0 for the last two
//
// Geometry: blocks of 128 threads, a warp per row, striding. A lane takes every 32nd group, four
// in flight; the first row's are fetched before the inputs are waited for.
// Alignment: matrices and quants 16 bytes, groups 8.
#include "gemv.cuh"
#include "q8_dot.cuh"

struct Q8Input {
    Global<const i8> quants;
    Global<const Q8Group> groups;
};

template <class Type>
__device__ __forceinline__ float group_dot(const Group& weights, const Q8Input& x, u32 group) {
    const uint4 low = load<uint4>(x.quants + group * GROUP);
    const uint4 high = load<uint4>(x.quants + group * GROUP + 16);
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    return group_dot<Type>(weights, words, load<Q8Group>(x.groups + group));
}

// This lane's part of a row's sum.
struct Q8Dot {
    Q8Input x;
    u32 n_in, row;
    bool first;
    float sum = __uint_as_float(0x7fc00000);

    __device__ __forceinline__ Q8Dot(const Q8Input& input, u32 n_in, u32 row, u32 token, bool first)
        : x{input.quants + u64(token) * n_in, input.groups + u64(token) * (n_in / GROUP)},
          n_in(n_in), row(row), first(first) {}

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
        for (u32 start = lane_id(); start < n_groups + lane_id(); start += 32 * GEMV_UNROLL) {
            typename Type::Packed packed[GEMV_UNROLL] = {};
#pragma unroll
            for (u32 i = 0; i < GEMV_UNROLL; i++) {
                if (start + i * 32 < n_groups) {
                    packed[i] = matrix.load(row_group + start + i * 32);
                }
            }
            if (first && start == lane_id()) {
                begin();
            }
#pragma unroll
            for (u32 i = 0; i < GEMV_UNROLL; i++) {
                const u32 group = start + i * 32;
                if (group < n_groups) {
                    sum += group_dot<Type>(Type::decode(packed[i], group), x, group);
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
            const float weight = matrix.weight(u64(row) * n_in + i);
            sum += load<Q8Group>(x.groups + i / GROUP).scale * (weight * float(x.quants[i]));
        }
    }
};

#define GEMV_Q8(NAME, EPILOGUE)                                                                   \
    extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 4) NAME(                           \
        Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const i8> quants,   \
        Global<const Q8Group> groups, Global<const float> bias, Global<const float> residual,     \
        Global<float> out, u32 type0, u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2,   \
        u32 n_rows, u32 n_in, u32 n_tokens) {                                                     \
        const Matrices matrices = {w0, w1, w2, type0, type1, type2, n_out0, n_out1, n_out2, n_in};\
        gemv<EPILOGUE, Q8Dot>(matrices, Q8Input{quants, groups},                                  \
                              Outputs{bias, residual, out, n_rows, n_tokens});                    \
    }

GEMV_Q8(gemv_q8_store, Epilogue::Store)
GEMV_Q8(gemv_q8_add, Epilogue::Add)
GEMV_Q8(gemv_q8_swiglu, Epilogue::Swiglu)
GEMV_Q8(gemv_q8_geglu, Epilogue::Geglu)
