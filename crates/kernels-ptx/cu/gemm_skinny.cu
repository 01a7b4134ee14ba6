// Matrices x few f16 vectors on tensor cores, for up to three matrices that share their input: a
// batch of sequences. Weights are read once and become f16 in registers.
//
//   y = x_scale * [w0; w1; w2] * x + bias, sums in f32
//   form 0   out = y
//   form 1   out = residual + y
//   form 2   out = silu(y of w0) * (y of w1) / 16 as f16, silu(z) = z / (1 + e^-z)
//   form 3   the same with gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3)))
//
// w0, w1, w2   packed [n_out, n_in], any type; w1 and w2 may be null with n_out 0
// x            f16 [n_tokens][n_in] in fragment order
// bias         [n_out0 + n_out1 + n_out2] or null
// residual     [n_tokens][rows], of form 1
// out          f32 [n_tokens][rows], or f16 [n_tokens][n_out0] in fragment order
//
// Geometry: a block per R tiles of tile_rows rows, 16 or 24; forms 2 and 3: of w0 and the same of
// w1, one beside the other. The block's warps (y) have a tile each, or several (x) share a tile's
// columns. A lane has group l % 4 of row l / 4 of eight rows, which is what the matrix instruction
// wants with its columns in another order. gemm_skinny_8 is for up to 8 tokens, gemm_skinny_32 for up
// to 32. Shared memory: a sum per warp, row and token.
// Alignment: matrices and x 16 bytes.
#include "tensor.cuh"

// Warps' sums, f32 [warp][token][row].
struct Sums {
    Global<u8> sums;
    u32 n_columns, stride;

    __device__ __forceinline__ Global<u8> at(u32 warp, u32 column, u32 row) const {
        return sums + ((warp * n_columns + column) * stride + row) * 4;
    }
};

// One warp's share of the products of ROW_TILES * 8 rows with TILES * 8 tokens.
template <u32 TILES, u32 ROW_TILES>
struct SkinnyTile {
    static constexpr u32 ROWS = 8 * ROW_TILES;

    Global<const u16> x;
    u32 first_row, n_out, n_in, k_warp, k_warps;
    // Of 16 tokens each. Or of 8, which have their even elements where the instruction has the first 8
    // of 16 tokens and their odd ones where it has the others: then of sums[0] the first half counts,
    // where even ones were multiplied by even weights, and of sums[1] the second.
    float sums[2][ROW_TILES][4];

    template <class Type>
    __device__ __forceinline__ void visit(const Type& matrix) {
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
#pragma unroll
            for (u32 r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    sums[m][r][i] = 0.0f;
                }
            }
        }
        if constexpr (Type::GROUPED) {
            groups(matrix);
        } else {
            floats(matrix);
        }
    }

    __device__ __forceinline__ u32 row(u32 r) const {
        // A row beyond the last is computed and not stored.
        return min(first_row + r * 8 + lane_id() / 4, n_out - 1);
    }

    // The lane's groups of 128 columns.
    template <class Type>
    __device__ __forceinline__ void fetch(const Type& matrix, u32 block,
                                          typename Type::Packed packed[ROW_TILES]) const {
        const u32 n_groups = n_in / GROUP, group = block * 4 + lane_id() % 4;
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) {
            packed[r] = {};
            if (group < n_groups) {
                packed[r] = matrix.load(row(r) * n_groups + group);
            }
        }
    }

    template <class Type>
    __device__ __forceinline__ void multiply(const HalfGroup<Type> weights[ROW_TILES], u32 block) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            multiply_eight(block, i, [&](u32 r, u32 four, u32 odd) {
                return weights[r].weights(2 * i + four, odd);
            });
        }
    }

    template <class Type>
    __device__ __forceinline__ void groups(const Type& matrix) {
        // While a block of columns is multiplied, another is fetched: the next but one where there are
        // registers for two, or the next, which costs a copy of what is multiplied.
        constexpr bool TWO = Type::QUANTS != Quants::BYTES && ROW_TILES == 2;
        constexpr u32 BLOCKS = TWO ? 2 : 1;
        const u32 n_blocks = div_ceil(n_in, HalfRows::COLUMNS);
        typename Type::Packed packed[BLOCKS][ROW_TILES];
#pragma unroll
        for (u32 c = 0; c < BLOCKS; c++) {
            fetch(matrix, k_warp * BLOCKS + c, packed[c]);
        }
        begin();
#pragma unroll 1
        for (u32 block = k_warp * BLOCKS; block < n_blocks; block += BLOCKS * k_warps) {
#pragma unroll
            for (u32 c = 0; c < BLOCKS; c++) {
                const u32 now = block + c, then = now + BLOCKS * k_warps;
                HalfGroup<Type> weights[ROW_TILES];
#pragma unroll
                for (u32 r = 0; r < ROW_TILES; r++) {
                    weights[r] = HalfGroup<Type>(packed[c][r], now * 4 + lane_id() % 4);
                }
                if (!TWO) {
                    fetch(matrix, then, packed[c]);
                }
                // A block beyond the last has weights of 0.
                multiply(weights, min(now, n_blocks - 1));
                if (TWO) {
                    fetch(matrix, then, packed[c]);
                }
            }
        }
    }

    // Weights that come one by one: as groups of 32 of f16.
    template <class Type>
    __device__ __forceinline__ void floats(const Type& matrix) {
        begin();
        const u32 n_blocks = div_ceil(n_in, HalfRows::COLUMNS);
        auto weight = [&](u32 r, u32 k) {
            return k < n_in ? matrix.weight(u64(row(r)) * n_in + k) : 0.0f;
        };
#pragma unroll 1
        for (u32 block = k_warp; block < n_blocks; block += k_warps) {
            const u32 column = block * HalfRows::COLUMNS + lane_id() % 4 * GROUP;
#pragma unroll 1
            for (u32 i = 0; i < 4; i++) {
                multiply_eight(block, i, [&](u32 r, u32 four, u32 odd) {
                    const u32 k = column + i * 8 + four * 4 + odd;
                    return half2_of(weight(r, k), weight(r, k + 2));
                });
            }
        }
    }

    // Adds the products of 32 columns, eight of each lane's; weights(r, four, odd) gives the even or
    // odd ones of the first or second four of the lane's row of tile r.
    template <class Weights>
    __device__ __forceinline__ void multiply_eight(u32 block, u32 i, const Weights& weights) {
        // A load has 8 tokens' even and odd elements, or 16 tokens' even or odd ones.
        constexpr u32 LOADS = TILES == 1 ? 1 : 4;
        const Global<const u16> from = x + (u64(block) * TILES * 1024 + lane_id() * 8);
        uint4 inputs[LOADS];
        if constexpr (TILES > 1) {
            __syncwarp();  // Else inputs are read long before their use, and registers run out.
        }
#pragma unroll
        for (u32 n = 0; n < LOADS; n++) {
            inputs[n] = load<uint4>(from + (TILES == 1 ? i : (n / 2 * 4 + i) * 2 + n % 2) * 256);
        }
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
#pragma unroll
            for (u32 r = 0; r < ROW_TILES; r++) {
                const u32 b[2] = {weights(r, 0, odd), weights(r, 1, odd)};
#pragma unroll
                for (u32 m = 0; m < LOADS; m += 2) {
                    const uint4 input = inputs[TILES == 1 ? 0 : m + odd];
                    const u32 a[4] = {input.x, input.y, input.z, input.w};
                    multiply_tiles(sums[TILES == 1 ? odd : m / 2][r], a, b);
                }
            }
        }
    }

    __device__ __forceinline__ void put(const Sums& out, u32 warp) const {
        const u32 token = lane_id() / 4, row = lane_id() % 4 * 2;
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 column = r * 8 + row + i;
                if constexpr (TILES == 1) {
                    store(out.at(warp, token, column), sums[0][r][i] + sums[1][r][2 + i]);
                } else {
#pragma unroll
                    for (u32 n = 0; n < 4; n++) {
                        store(out.at(warp, n * 8 + token, column),
                              sums[n / 2][r][n % 2 * 2 + i]);
                    }
                }
            }
        }
    }
};

template <u32 TILES, u32 ROW_TILES>
__device__ __forceinline__ void gemm_skinny(const GemmArgs& args, Global<const u16> x,
                                            float x_scale) {
    using Tile = SkinnyTile<TILES, ROW_TILES>;
    DYNAMIC_SHARED(shared);
    const u32 k_warps = blockDim.x / 32, side = threadIdx.y;
    const bool middle = args.form >= GATED;
    // Tiles side by side: of one matrix, or each of two matrices, one beside the other.
    const u32 matrices = middle ? 2 : 1, rows = Tile::ROWS * (blockDim.y / matrices);
    const TilePlace place(args, blockIdx.x, rows);
    const u32 part = middle ? side % 2 : place.part;
    const u32 first_row = place.row + side / matrices * Tile::ROWS;

    Tile tile = {x, first_row, args.n_out(part), args.n_in, warp_id(), k_warps, {}};
    visit_matrix(args.matrix(part), args.type(part), args.n_out(part), args.n_in, tile);

    const Sums sums = {shared, TILES * 8, Tile::ROWS + 1};
    tile.put(sums, side * k_warps + warp_id());
    __syncthreads();

    auto total = [&](u32 of_side, u32 column, u32 row) {
        float sum = 0.0f;
#pragma unroll 4
        for (u32 k = 0; k < k_warps; k++) {
            sum += load<float>(sums.at(of_side * k_warps + k, column, row));
        }
        return sum * x_scale;
    };
    const HalfRows order = {args.n_tokens, args.n_out0, true};
    const u32 n_there = min(rows, args.n_out(place.part) - place.row), n_rows = args.n_rows();
    const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (u32 i = thread; i < rows * args.n_tokens; i += blockDim.x * blockDim.y) {
        const u32 r = i % rows, token = i / rows, row = place.before + place.row + r;
        const u32 of = r / Tile::ROWS * matrices, in_tile = r % Tile::ROWS;
        if (r >= n_there) {
            continue;
        }
        if (middle) {
            const float gate = args.biased(total(of, token, in_tile), row);
            const float up = args.biased(total(of + 1, token, in_tile), args.n_out0 + row);
            store(args.out + order.at(token, row) * 2, gated_half(args.form, gate, up));
        } else {
            const u64 at = u64(token) * n_rows + row;
            const float residual = args.form == ADD ? args.residual[at] : 0.0f;
            const float sum = args.biased(total(of, token, in_tile), row);
            store(args.out + at * 4, sum + residual);
        }
    }
}

// 16 warps have 128 registers each, with which some types spill before sm_90.
#if __CUDA_ARCH__ >= 900
#define MOST_WARPS 16
#else
#define MOST_WARPS 8
#endif

#define GEMM_SKINNY(NAME, TILES)                                                                  \
    extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 1) NAME(                        \
        Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const u16> x,       \
        Global<const float> bias, Global<const float> residual, Global<u8> out, u32 type0,        \
        u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2, u32 n_in, u32 n_tokens,         \
        u32 form, u32 tile_rows, float x_scale) {                                                 \
        const GemmArgs args = {w0, w1, w2, bias, residual, out, type0, type1, type2,              \
                               n_out0, n_out1, n_out2, n_in, n_tokens, form};                     \
        if (tile_rows == 16) {                                                                    \
            gemm_skinny<TILES, 2>(args, x, x_scale);                                              \
        } else {                                                                                  \
            gemm_skinny<TILES, 3>(args, x, x_scale);                                              \
        }                                                                                         \
    }

GEMM_SKINNY(gemm_skinny_8, 1)
GEMM_SKINNY(gemm_skinny_32, 4)
