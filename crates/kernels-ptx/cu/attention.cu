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
// kv            [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16; or in q8, i8 with
//               scales, see Q8Block
// sequences     [n_tokens], which beyond the last count as the last
// block_table   [n_logical] every table_stride, for each of n_sequences
// tokens        [n_tokens][3]
// partials      [n_tokens][n_head][n_segments][max, sum, head_dim values]
//
// Geometry: grid (n_kv_head, n_segments, n_tokens), block 192; dynamic shared memory of
// the warps' records, see attention.cuh.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "attention_cached.cuh"
#include "tables.cuh"

struct Records {
    Global<float> partials;  // of the token
    u32 n_segments, head_dim, segment;

    __device__ __forceinline__ void put(u32 head, u32 dim, float value,
                                        const SegmentTotal& total) const {
        put_record(partials + (u64(head) * n_segments + segment) * (2 + head_dim), dim, value, total);
    }
};

#define ATTENTION(NAME, CHUNK_TYPE)                                                               \
    extern "C" __global__ void __launch_bounds__(ATTENTION_WARPS * 32, 2) NAME(                   \
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
        const u64 head = u64(blockIdx.z) * n_head;                                                \
        const Records records = {partials + head * n_segments * (2 + head_dim), n_segments,       \
                                 head_dim, blockIdx.y};                                           \
        with_team<CHUNK_TYPE::ELEM_BYTES <= 2>(                                                   \
            head_dim, CachedAttention<CHUNK_TYPE, Records>{q + head * head_dim, kv, index, span,  \
                                                           n_head, scale, records});              \
    }

ATTENTION(attention_f32, F32Chunk)
ATTENTION(attention_f16, F16Chunk)
ATTENTION(attention_q8, Q8Chunk)
