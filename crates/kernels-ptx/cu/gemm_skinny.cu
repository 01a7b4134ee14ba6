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
// Geometry: a block per R tiles of rows, R of the block's warps (y) side by side, the others (x)
// sharing the columns, 128 at a time; forms 2 and 3: a tile of w0's rows and the same of w1's. A lane has
// group l % 4 of rows l / 4, + 8 and so on, which is what the matrix instruction wants with its
// columns in another order. gemm_skinny_8 is for up to 8 tokens, with tiles of 16 rows;
// gemm_skinny_32 for up to 32, with tiles of 32 rows, so that inputs are read half as often. Shared
// memory: a sum per warp, row and token.
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

// The elements of the output that a thread writes, of a block with `rows` rows.
struct Elements {
    u32 first_row, rows, n_there;  // rows of them that the matrix has
    u32 n_rows, n_tokens;          // of the output

    __device__ __forceinline__ u32 index(u32 i) const {
        const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
        return i * (blockDim.x * blockDim.y) + thread;
    }
    __device__ __forceinline__ u32 row(u32 i) const {
        return index(i) % rows;
    }
    __device__ __forceinline__ u32 token(u32 i) const {
        return index(i) / rows;
    }
    __device__ __forceinline__ bool there(u32 i) const {
        return row(i) < n_there && token(i) < n_tokens;
    }
    __device__ __forceinline__ u64 at(u32 i) const {
        return u64(token(i)) * n_rows + first_row + row(i);
    }
};

// One warp's share of the products of PAIRS * 16 rows with TILES * 8 tokens.
template <u32 TILES, u32 PAIRS, u32 THREADS>
struct SkinnyTile {
    static constexpr u32 ROWS = 16 * PAIRS;
    // Elements of the output for each thread of the largest block.
    static constexpr u32 ELEMENTS = (2 * ROWS * TILES * 8 + THREADS - 1) / THREADS;

    Global<const u16> x;
    u32 first_row, n_out, n_in, k_warp, k_warps;
    Elements elements;
    Global<const float> residual;
    float sums[PAIRS][TILES][4], residuals[ELEMENTS];

    template <class Type>
    __device__ __forceinline__ void visit(const Type& matrix) {
#pragma unroll
        for (u32 m = 0; m < PAIRS; m++) {
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    sums[m][n][i] = 0.0f;
                }
            }
        }
        if constexpr (Type::GROUPED) {
            groups(matrix);
        } else {
            floats(matrix);
        }
    }

    __device__ __forceinline__ u32 row(u32 i) const {
        // A row beyond the last is computed and not stored.
        return min(first_row + lane_id() / 4 + 8 * i, n_out - 1);
    }

    // Waits for the inputs, and fetches what is needed last.
    __device__ __forceinline__ void begin_tile() {
        begin();
#pragma unroll
        for (u32 i = 0; i < ELEMENTS; i++) {
            residuals[i] = 0.0f;
            if (residual && elements.there(i)) {
                residuals[i] = residual[elements.at(i)];
            }
        }
    }

    // The lane's groups of 128 columns.
    template <class Type>
    __device__ __forceinline__ void fetch(const Type& matrix, u32 block,
                                          typename Type::Packed packed[2 * PAIRS]) const {
        const u32 n_groups = n_in / GROUP, group = block * 4 + lane_id() % 4;
#pragma unroll
        for (u32 i = 0; i < 2 * PAIRS; i++) {
            packed[i] = {};
            if (group < n_groups) {
                packed[i] = matrix.load(row(i) * n_groups + group);
            }
        }
    }

    template <class Type>
    __device__ __forceinline__ void groups(const Type& matrix) {
        const u32 n_blocks = div_ceil(n_in, HalfRows::COLUMNS);
        typename Type::Packed packed[2 * PAIRS];
        if (k_warp < n_blocks) {
            fetch(matrix, k_warp, packed);
        }
        begin_tile();
        for (u32 block = k_warp; block < n_blocks; block += k_warps) {
            const u32 group = block * 4 + lane_id() % 4;
            HalfGroup weights[2 * PAIRS];
#pragma unroll
            for (u32 i = 0; i < 2 * PAIRS; i++) {
                weights[i] = half_group<Type>(Type::decode(packed[i], group));
            }
            if (block + k_warps < n_blocks) {
                fetch(matrix, block + k_warps, packed);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                multiply_eight(block, i, [&](u32 row, u32 s, u32 out[2]) {
                    four_halves<Type>(weights[row], 2 * i + s, out);
                });
            }
        }
    }

    // Weights that come one by one: as groups of 32 of f16.
    template <class Type>
    __device__ __forceinline__ void floats(const Type& matrix) {
        begin_tile();
        const u32 n_blocks = div_ceil(n_in, HalfRows::COLUMNS);
        auto pair = [&](u32 i, u32 k) {
            const u64 at = u64(row(i)) * n_in + k;
            return half2_of(k < n_in ? matrix.weight(at) : 0.0f,
                            k + 1 < n_in ? matrix.weight(at + 1) : 0.0f);
        };
#pragma unroll 1
        for (u32 block = k_warp; block < n_blocks; block += k_warps) {
            const u32 column = block * HalfRows::COLUMNS + lane_id() % 4 * GROUP;
#pragma unroll 1
            for (u32 i = 0; i < 4; i++) {
                multiply_eight(block, i, [&](u32 row, u32 s, u32 out[2]) {
                    for (u32 j = 0; j < 2; j++) {
                        out[j] = pair(row, column + i * 8 + s * 4 + j * 2);
                    }
                });
            }
        }
    }

    // Adds the products of 32 columns, eight of each lane's; weights(row, s, out) gives the first or
    // second four of the lane's row of that number.
    template <class Weights>
    __device__ __forceinline__ void multiply_eight(u32 block, u32 i, const Weights& weights) {
        const Global<const u16> tiles = x + (u64(block) * TILES * 4 + i) * 256 + lane_id() * 8;
        uint4 inputs[TILES];
        if constexpr (TILES > 1) {
            __syncwarp();  // Else inputs are read long before their use, and registers run out.
        }
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            inputs[n] = load<uint4>(tiles + n * 1024);
        }
#pragma unroll
        for (u32 s = 0; s < 2; s++) {
#pragma unroll
            for (u32 m = 0; m < PAIRS; m++) {
                u32 first[2], second[2];
                weights(2 * m, s, first);
                weights(2 * m + 1, s, second);
                const u32 a[4] = {first[0], second[0], first[1], second[1]};
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    const u32 b[2] = {s == 0 ? inputs[n].x : inputs[n].z,
                                      s == 0 ? inputs[n].y : inputs[n].w};
                    multiply_tiles(sums[m][n], a, b);
                }
            }
        }
    }

    __device__ __forceinline__ void put(const Sums& out, u32 warp) const {
        const u32 row = lane_id() / 4, column = lane_id() % 4 * 2;
#pragma unroll
        for (u32 m = 0; m < PAIRS; m++) {
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    store(out.at(warp, n * 8 + column + i % 2, m * 16 + i / 2 * 8 + row),
                          sums[m][n][i]);
                }
            }
        }
    }
};

template <u32 TILES, u32 PAIRS, u32 THREADS>
__device__ __forceinline__ void gemm_skinny(const GemmArgs& args, Global<const u16> x,
                                            float x_scale) {
    using Tile = SkinnyTile<TILES, PAIRS, THREADS>;
    DYNAMIC_SHARED(shared);
    const u32 k_warps = blockDim.x / 32, side = threadIdx.y, sides = blockDim.y;
    const bool middle = args.form >= GATED;
    // Side by side: rows of one matrix, or the same rows of two.
    const u32 rows = middle ? Tile::ROWS : Tile::ROWS * sides;
    const TilePlace place(args, blockIdx.x, rows);
    const u32 part = middle ? side : place.part;
    const u32 first_row = place.row + (middle ? 0 : side * Tile::ROWS);
    const Elements elements = {place.before + place.row, rows, args.n_out(place.part) - place.row,
                               args.n_rows(), args.n_tokens};

    Tile tile = {x,       first_row, args.n_out(part), args.n_in, warp_id(),
                 k_warps, elements,  args.form == ADD ? args.residual : nullptr, {}, {}};
    visit_matrix(args.matrix(part), args.type(part), args.n_out(part), args.n_in, tile);

    const Sums sums = {shared, TILES * 8, Tile::ROWS + 1};
    tile.put(sums, side * k_warps + warp_id());
    __syncthreads();

    auto total = [&](u32 of_side, u32 column, u32 row) {
        float sum = 0.0f;
        for (u32 k = 0; k < k_warps; k++) {
            sum += load<float>(sums.at(of_side * k_warps + k, column, row));
        }
        return sum * x_scale;
    };
    const HalfRows order = {args.n_tokens, args.n_out0, true};
#pragma unroll
    for (u32 i = 0; i < Tile::ELEMENTS; i++) {
        if (!elements.there(i)) {
            continue;
        }
        const u32 r = elements.row(i), token = elements.token(i), row = elements.first_row + r;
        if (middle) {
            const float gate = args.biased(total(0, token, r), row);
            const float up = args.biased(total(1, token, r), args.n_out0 + row);
            store(args.out + order.at(token, row) * 2, gated_half(args.form, gate, up));
        } else {
            const float sum = args.biased(total(r / Tile::ROWS, token, r % Tile::ROWS), row);
            store(args.out + elements.at(i) * 4, sum + tile.residuals[i]);
        }
    }
}

#define GEMM_SKINNY(NAME, TILES, PAIRS, THREADS, BLOCKS)                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                           \
        Global<const u8> w0, Global<const u8> w1, Global<const u8> w2, Global<const u16> x,       \
        Global<const float> bias, Global<const float> residual, Global<u8> out, u32 type0,        \
        u32 type1, u32 type2, u32 n_out0, u32 n_out1, u32 n_out2, u32 n_in, u32 n_tokens,         \
        u32 form, float x_scale) {                                                                \
        const GemmArgs args = {w0, w1, w2, bias, residual, out, type0, type1, type2,              \
                               n_out0, n_out1, n_out2, n_in, n_tokens, form};                     \
        gemm_skinny<TILES, PAIRS, THREADS>(args, x, x_scale);                                     \
    }

GEMM_SKINNY(gemm_skinny_8, 1, 1, 256, 3)
GEMM_SKINNY(gemm_skinny_32, 4, 2, 256, 1)
