// Attention over one layer of the paged KV cache, each segment of the live tokens by itself.
//
// For a token at absolute_position p in slot s of a ring of max_context_tokens slots,
// n_live = min(p + 1, max_context_tokens) slots hold tokens, and slot j holds the token of age
// (s - j) mod max_context_tokens. With a window, ages of `window` and more are not attended to.
// Segment g covers slots g * S .. min((g + 1) * S, n_live), S = max(segment_min,
// ceil(n_live / n_segments) rounded up to block_size). Per query head, over a segment's slots j,
//
//   score_j = scale * q . k_j
//   partials = [max = max score_j, sum = sum e^(score_j - max), values = sum e^(score_j - max) v_j]
//
// and an empty segment is [-infinity, 0, 0 ...].
//
// q             [n_tokens][n_head][head_dim], head_dim at most 256
// kv            [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16
// sequences     [n_tokens], which beyond the last count as the last
// block_table   [n_logical] every table_stride, for each of n_sequences
// tokens        [n_tokens][3]
// partials      [n_tokens][n_head][n_segments][max, sum, head_dim values]
//
// Geometry: grid (n_kv_head, n_segments, n_tokens), block 128.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "attention.cuh"
#include "tables.cuh"

constexpr u32 WARPS = 4;

template <class Chunk>
__device__ __forceinline__ void attention(Global<const float> q, Global<const u8> kv,
                                          const CacheIndex& index, const Span& span,
                                          Global<float> partials, u32 n_head, u32 n_segments,
                                          float scale) {
    const u32 kv_head = blockIdx.x, segment = blockIdx.y, token = blockIdx.z;
    const u32 head_dim = index.head_dim, heads_per_kv = n_head / index.n_kv_head;
    const Team team(head_dim);
    SHARED(float, records, WARPS * HEADS * Joined<WARPS>::RECORD);
    const Joined<WARPS> joined = {records};

    for (u32 first_head = 0; first_head < heads_per_kv; first_head += HEADS) {
        const u64 query = u64(token) * n_head + kv_head * heads_per_kv + first_head;
        Heads heads(q + query * head_dim, min(heads_per_kv - first_head, HEADS), team, head_dim);
        // Whole blocks of threads go round: teams shuffle.
        for (u32 first = span.first; first < span.end; first += team.count * Chunk::TILE) {
            CachedTile<Chunk> tile;
            tile.template load<false>(kv, index, span, team, kv_head, first, NO_SLOT);
            heads.attend(tile, team, scale);
        }
        joined.put(heads, team);
        __syncthreads();
        for (u32 h = 0; h < heads.count; h++) {
            const auto factors = joined.factors(h);
            const u64 record = ((query + h) * n_segments + segment) * (2 + head_dim);
            for (u32 i = threadIdx.x; i < 1 + head_dim; i += WARPS * 32) {
                partials[record + 1 + i] = joined.total(factors, h, i);
            }
            if (threadIdx.x == 0) {
                partials[record] = factors.max;
            }
        }
        // The next heads' sums go to the same place.
        __syncthreads();
    }
}

#define ATTENTION(NAME, CHUNK_TYPE)                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) NAME(                             \
        Global<const float> q, Global<const u8> kv, Global<const u32> sequences,                  \
        Global<const u32> block_table, Global<const u32> tokens, Global<float> partials,          \
        u32 n_tokens, u32 n_head, u32 n_kv_head, u32 head_dim, u32 block_size, u32 n_blocks,      \
        u32 n_sequences, u32 table_stride, u32 n_logical, u32 max_context_tokens, u32 n_segments, \
        u32 segment_min, u32 window, u32 kv_elem_bytes, float scale) {                            \
        begin();                                                                                  \
        const Tables tables = {block_table, sequences, n_sequences, table_stride};                \
        const CacheIndex index = {tables.of_row(blockIdx.z), n_kv_head, block_size, head_dim};    \
        const Segments segments = {n_segments, segment_min, block_size, max_context_tokens,       \
                                   window};                                                       \
        const Global<const u32> params = tokens + blockIdx.z * TOKEN_WORDS;                       \
        const Span span = segments.span(params[POSITION], params[RING_SLOT], blockIdx.y);         \
        attention<CHUNK_TYPE>(q, kv, index, span, partials, n_head, n_segments, scale);           \
    }

ATTENTION(attention_f32, F32Chunk)
ATTENTION(attention_f16, F16Chunk)
