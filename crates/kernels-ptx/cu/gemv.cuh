// What the two GEMV operations share: up to three matrices with one input, rows shared among
// warps, epilogues. Their files say how a row's sum is made.
#pragma once

#include "matrix.cuh"

constexpr u32 GEMV_THREADS = 128;

// Groups of 32 weights that a lane has in flight.
constexpr u32 GEMV_UNROLL = 4;

enum class Epilogue { Store, Add, Swiglu, Geglu };

// Whether the epilogue makes one number of the rows of two matrices.
constexpr __device__ bool joins(Epilogue epilogue) {
    return epilogue == Epilogue::Swiglu || epilogue == Epilogue::Geglu;
}

// By the hyperbolic tangent; 0.7978846 is the root of 2 / pi.
__device__ __forceinline__ float gelu(float z) {
    return 0.5f * z * (1.0f + tanhf(0.7978846f * (z + 0.044715f * z * z * z)));
}

// The matrices of a launch; their rows follow each other.
struct Matrices {
    Global<const u8> w0, w1, w2;
    u32 type0, type1, type2;
    u32 n_out0, n_out1, n_out2;
    u32 n_in;

    // The matrix that row `row` of the whole lies in.
    struct Part {
        Global<const u8> base;
        u32 type, n_out;
        u32 row;  // of that matrix
    };

    __device__ __forceinline__ Part part_of(u32 row) const {
        if (row < n_out0) {
            return {w0, type0, n_out0, row};
        }
        if (row < n_out0 + n_out1) {
            return {w1, type1, n_out1, row - n_out0};
        }
        return {w2, type2, n_out2, row - n_out0 - n_out1};
    }
};

// What is done with the sums, and where the results go.
struct Outputs {
    Global<const float> bias, residual;
    Global<float> out;
    u32 n_rows, n_tokens;
};

// Runs over this warp's rows. Dot is the operation: a visitor of matrices, made with
// (input, n_in, row, token, first), which leaves this lane's part of the row's sum in `sum`. The
// first one has to begin() between loading weights and reading activations.
template <Epilogue EPILOGUE, class Dot, class Input>
__device__ __forceinline__ void gemv(const Matrices& matrices, const Input& input,
                                     const Outputs& outputs) {
    const u32 n_rows = outputs.n_rows;
    const u32 warp = blockIdx.x * (GEMV_THREADS / 32) + warp_id();
    const u32 n_warps = gridDim.x * (GEMV_THREADS / 32);
    bool first = true;
    for (u32 row = warp; row < n_rows; row += n_warps) {
        for (u32 token = 0; token < outputs.n_tokens; token++) {
            float results[2];
            for (u32 part = 0; part < (joins(EPILOGUE) ? 2 : 1); part++) {
                const u32 matrix_row = row + part * n_rows;
                const Matrices::Part place = matrices.part_of(matrix_row);
                Dot dot(input, matrices.n_in, place.row, token, first);
                visit_matrix(place.base, place.type, place.n_out, matrices.n_in, dot);
                results[part] = warp_sum(dot.sum);
                first = false;
                if (outputs.bias) {
                    results[part] += outputs.bias[matrix_row];
                }
            }
            float result = results[0];
            const u64 at = u64(token) * n_rows + row;
            if (EPILOGUE == Epilogue::Swiglu) {
                result = result / (1.0f + expf(-result)) * results[1];
            }
            if (EPILOGUE == Epilogue::Geglu) {
                result = gelu(result) * results[1];
            }
            if (EPILOGUE == Epilogue::Add) {
                result += outputs.residual[at];
            }
            if (lane_id() == 0) {
                outputs.out[at] = result;
            }
        }
    }
    if (first) {
        begin();
    }
}
