// Row gather from the embedding matrix: x[t] = scale * row token_id[t], dequantised.
//
// table    packed [n_vocab, n_embd], any type
// tokens   [n_tokens][3]; an id beyond the vocabulary reads the last row
// x        [n_tokens][n_embd]
//
// Geometry: a warp per 32 groups of 32 elements and token, a lane a group:
// grid (ceil(n_embd / 1024), n_tokens), block 32.
// Alignment: table and x 16 bytes.
#include "matrix.cuh"

// One lane's group of a row; of a matrix of floats, every 32nd element.
struct RowWriter {
    Global<float> out;
    u32 row, n_embd;
    float scale;

    template <class Type>
    __device__ __forceinline__ void visit(const Type& matrix) {
        if constexpr (Type::GROUPED) {
            const u32 group = blockIdx.x * 32 + lane_id();
            if (group < n_embd / GROUP) {
                float weights[GROUP];
                const u64 at = u64(row) * (n_embd / GROUP) + group;
                dequantize<Type>(Type::decode(matrix.load(at), at), weights);
                for (u32 i = 0; i < GROUP; i += 4) {
                    const float4 quad = {weights[i] * scale, weights[i + 1] * scale,
                                         weights[i + 2] * scale, weights[i + 3] * scale};
                    store(out + group * GROUP + i, quad);
                }
            }
        } else {
            const u32 first = blockIdx.x * 1024;
            for (u32 i = first + lane_id(); i < min(n_embd, first + 1024); i += 32) {
                out[i] = matrix.weight(u64(row) * n_embd + i) * scale;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32)
    embed(Global<const u8> table, Global<const u32> tokens, Global<float> x, u32 ggml_type,
          u32 n_tokens, u32 n_vocab, u32 n_embd, float scale) {
    begin();
    const u32 token = blockIdx.y;
    const u32 row = min(u32(tokens[token * TOKEN_WORDS + TOKEN_ID]), n_vocab - 1);
    RowWriter writer = {x + u64(token) * n_embd, row, n_embd, scale};
    visit_matrix(table, ggml_type, n_vocab, n_embd, writer);
}
