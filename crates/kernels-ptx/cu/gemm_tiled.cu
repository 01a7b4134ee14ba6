// Matrices x many f16 vectors on tensor cores, for up to three matrices that share their input: a
// chunk of a prompt. Each block unpacks its weights to f16 in shared memory, once for its 128 tokens.
//
//   y = x_scale * [w0; w1; w2] * x + bias, sums in f32
//   form 0   out = y
//   form 1   out = residual + y
//   form 2   out = silu(y of w0) * (y of w1) / 16 as f16, silu(z) = z / (1 + e^-z)
//   form 3   the same with gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3)))
//
// w0, w1, w2   packed [n_out, n_in], any type; w1 and w2 may be null with n_out 0
// x            f16 [n_tokens][n_in] in row order
// bias         [n_out0 + n_out1 + n_out2] or null
// residual     [n_tokens][rows], of form 1
// out          f32 [n_tokens][rows], or f16 [n_tokens][n_out0] in row order
//
// Geometry: grid (tiles of 128 tokens, tiles of 128 rows; forms 2 and 3: of 64 rows of w0 and of w1), 256
// threads: 2 x 4 warps with 64 rows and 32 tokens each. Shared memory: two stages of 128 x 64 weights,
// three of 128 x 64 activations; 16 bytes of a line lie at their number xor the line's.
// Alignment: matrices and x 16 bytes.
#include "tensor.cuh"

constexpr u32 TILE = 128, STEP = 64, THREADS = 256, STAGES = 3;
constexpr u32 STAGE_BYTES = TILE * STEP * 2;

// Two blocks an SM, but where their registers do not suffice.
#if __CUDA_ARCH__ >= 900
#define BLOCKS_PER_SM 2
#else
#define BLOCKS_PER_SM 1
#endif

// A stage in shared memory: lines of 64 f16.
struct Stage {
    Global<u16> base;

    __device__ __forceinline__ Global<u16> eight(u32 line, u32 index) const {
        return base + line * STEP + (index ^ line % 8) * 8;
    }
};

struct Stages {
    Global<u8> shared;

    __device__ __forceinline__ Stage weights(u32 step) const {
        return {as_halves(shared + step % 2 * STAGE_BYTES)};
    }
    __device__ __forceinline__ Stage inputs(u32 step) const {
        return {as_halves(shared + (2 + step % STAGES) * STAGE_BYTES)};
    }
};

// Sums in shared memory, [token][row], tokens apart so that banks are.
struct Sums {
    Global<u8> shared;

    __device__ __forceinline__ Global<u8> at(u32 token, u32 row) const {
        return shared + (token * (TILE + 4) + row) * 4;
    }
};

// A thread's group of the block's weights: of 64 columns of a row, one half.
struct Unpacker {
    u32 row, n_in, line, half;

    template <class Type>
    __device__ __forceinline__ void fetch(const Type& matrix, u32 step,
                                          typename Type::Packed& packed) const {
        const u32 n_groups = n_in / GROUP, group = step * 2 + half;
        packed = {};
        if (group < n_groups) {
            packed = matrix.load(row * n_groups + group);
        }
    }

    template <class Type>
    __device__ __forceinline__ void unpack(const typename Type::Packed& packed, u32 step,
                                           const Stage& to) const {
        const HalfGroup<Type> weights(packed, step * 2 + half);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const uint4 eight = {weights.weights(2 * i, 0), weights.weights(2 * i, 1),
                                 weights.weights(2 * i + 1, 0), weights.weights(2 * i + 1, 1)};
            store(to.eight(line, half * 4 + i), eight);
        }
    }

    // Weights that come one by one.
    template <class Type>
    __device__ __forceinline__ void unpack_floats(const Type& matrix, u32 step,
                                                  const Stage& to) const {
        auto weight = [&](u32 k) {
            return k < n_in ? matrix.weight(u64(row) * n_in + k) : 0.0f;
        };
        auto pair = [&](u32 k) { return half2_of(weight(k), weight(k + 2)); };
#pragma unroll 1
        for (u32 i = 0; i < 4; i++) {
            const u32 k = step * STEP + half * GROUP + i * 8;
            store(to.eight(line, half * 4 + i),
                  uint4{pair(k), pair(k + 1), pair(k + 4), pair(k + 5)});
        }
    }
};

// Sums of a warp: 4 x 4 tiles of 16 rows and 8 tokens.
struct TiledProduct {
    Stages stages;
    Unpacker unpacker;
    Global<const u16> x;
    u32 n_tokens, first_token, padded;
    float sums[4][4][4];

    template <class Type>
    __device__ __forceinline__ void visit(const Type& matrix) {
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    sums[m][n][i] = 0.0f;
                }
            }
        }
        const u32 n_steps = div_ceil(unpacker.n_in, STEP);
        if constexpr (Type::GROUPED) {
            typename Type::Packed packed;
            unpacker.fetch(matrix, 0, packed);
            begin();
            copy_inputs(0, n_steps);
            copy_inputs(1, n_steps);
            unpacker.template unpack<Type>(packed, 0, stages.weights(0));
            unpacker.fetch(matrix, 1, packed);
#pragma unroll 1
            for (u32 step = 0; step < n_steps; step++) {
                // The inputs of this step are there, and nobody reads those of the last one.
                wait_for_copies(1);
                __syncthreads();
                copy_inputs(step + 2, n_steps);
                if (step + 1 < n_steps) {
                    unpacker.template unpack<Type>(packed, step + 1, stages.weights(step + 1));
                    unpacker.fetch(matrix, step + 2, packed);
                }
                multiply(step);
            }
        } else {
            begin();
            copy_inputs(0, n_steps);
            copy_inputs(1, n_steps);
            unpacker.unpack_floats(matrix, 0, stages.weights(0));
#pragma unroll 1
            for (u32 step = 0; step < n_steps; step++) {
                wait_for_copies(1);
                __syncthreads();
                copy_inputs(step + 2, n_steps);
                if (step + 1 < n_steps) {
                    unpacker.unpack_floats(matrix, step + 1, stages.weights(step + 1));
                }
                multiply(step);
            }
        }
    }

    // Begins to copy 64 columns of the block's tokens; a group of copies even if there are none.
    __device__ __forceinline__ void copy_inputs(u32 step, u32 n_steps) const {
        if (step < n_steps) {
            const u32 line = threadIdx.x / 8, piece = threadIdx.x % 8;
            const Global<u16> to = stages.inputs(step).eight(line, piece);
            const Global<const u16> from = x + (step * STEP + piece * 8);
#pragma unroll
            for (u32 i = 0; i < TILE * 8 / THREADS; i++) {
                // A token beyond the last is computed and not stored.
                const u32 token = min(first_token + line + i * (THREADS / 8), n_tokens - 1);
                copy_async(to + i * (THREADS / 8) * STEP, from + token * padded, 16);
            }
        }
        close_copies();
    }

    __device__ __forceinline__ void put(const Sums& to) const {
        const u32 row = warp_id() / 4 * 64 + lane_id() / 4;
        const u32 token = warp_id() % 4 * 32 + lane_id() % 4 * 2;
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    store(to.at(token + n * 8 + i % 2, row + m * 16 + i / 2 * 8), sums[m][n][i]);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply(u32 step) {
        const Stage weights = stages.weights(step), inputs = stages.inputs(step);
        const u32 first_row = warp_id() / 4 * 64, first_column = warp_id() % 4 * 32;
        const u32 lane = lane_id();
#pragma unroll
        for (u32 k = 0; k < STEP / 16; k++) {
            u32 b[2][4];
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                // Matrices: tokens 0-7 and columns 0-7, columns 8-15; tokens 8-15 the same.
                const u32 line = first_column + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[n], inputs.eight(line, k * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                u32 a[4];
                const u32 line = first_row + m * 16 + lane % 16;
                load_matrices(a, weights.eight(line, k * 2 + lane / 16));
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
                    multiply_tiles(sums[m][n], a, b[n / 2] + n % 2 * 2);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm_tiled(Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const u16> x,
               Global<const float> bias, Global<const float> residual, Global<u8> out, u32 type0,
               u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2, u32 n_in, u32 n_tokens,
               u32 form, float x_scale) {
    const GemmArgs args = {w0,    w1,     w2,     bias,   residual, out,      type0, type1,
                           type2, n_out0, n_out1, n_out2, n_in,     n_tokens, form};
    DYNAMIC_SHARED(shared);
    const bool middle = form >= GATED;
    const TilePlace place(args, blockIdx.y, middle ? TILE / 2 : TILE);
    // Lines 0 .. 31 and 64 .. 95 are the gate's, so that a thread has both rows of a pair.
    const u32 line = threadIdx.x / 2;
    const u32 part = middle ? line / 32 % 2 : place.part;
    const u32 row = place.row + (middle ? line / 64 * 32 + line % 32 : line);
    const u32 first_token = blockIdx.x * TILE;
    const HalfRows order = {n_tokens, n_in, false};
    // A row beyond the last is computed and not stored.
    const Unpacker unpacker = {min(row, args.n_out(part) - 1), n_in, line, threadIdx.x % 2};
    TiledProduct product = {{shared}, unpacker, x, n_tokens, first_token, order.padded(), {}};
    // Threads of a warp have 16 lines, and a type.
    visit_matrix(args.matrix(part), args.type(part), args.n_out(part), n_in, product);

    // Through shared memory, so that what becomes of a sum is compiled once.
    wait_for_copies(0);
    __syncthreads();
    const Sums sums = {shared};
    product.put(sums);
    __syncthreads();
    const HalfRows out_order = {n_tokens, n_out0, false};
    const u32 rows = middle ? TILE / 2 : TILE, n_rows = args.n_rows();
    const u32 r = threadIdx.x % rows, at = place.row + r, n_there = min(TILE, n_tokens - first_token);
    if (at >= args.n_out(place.part)) {
        return;
    }
#pragma unroll 4
    for (u32 i = threadIdx.x / rows; i < n_there; i += THREADS / rows) {
        const u32 token = first_token + i;
        if (middle) {
            const Global<const u8> gate_at = sums.at(i, r / 32 * 64 + r % 32);
            const float gate = args.biased(load<float>(gate_at) * x_scale, at);
            const float up = args.biased(load<float>(gate_at + 32 * 4) * x_scale, n_out0 + at);
            store(out + out_order.at(token, at) * 2, gated_half(form, gate, up));
        } else {
            const u64 to = u64(token) * n_rows + place.before + at;
            const float residual = form == ADD ? args.residual[to] : 0.0f;
            const float sum = load<float>(sums.at(i, r)) * x_scale;
            store(out + to * 4, args.biased(sum, place.before + at) + residual);
        }
    }
}
