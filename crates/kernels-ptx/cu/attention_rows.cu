// Attention of rows, each of any sequence, over one layer of the paged KV cache in f16; the result as
// f16. What attention.cu and attention_combine.cu compute one after the other: see there.
//
// A row's live slots are cut into segments, a block each; the last block that is done with a key head
// of a row joins them.
//
// q             [n_tokens][n_head][head_dim], head_dim at most 256
// kv            [n_blocks][K, V][n_kv_head][block_size][head_dim] of f16
// sequences     [n_tokens], which beyond the last count as the last
// block_table   [n_logical] every table_stride, for each of n_sequences
// tokens        [n_tokens][3]
// partials      [n_tokens][n_head][n_segments][max, sum, head_dim values]: as far as a row has more
//               than one segment
// arrivals      [n_tokens][n_kv_head], 0 before and after
// out           f16 [n_tokens][n_head * head_dim], in row order (0) or fragment order (1)
//
// Geometry: grid (n_kv_head, n_segments, n_tokens), block 192; dynamic shared memory as for attention.
// Alignment: of the elements; kv 16 bytes where head_dim is a multiple of 8.
#include "attention_cached.cuh"
#include "tables.cuh"
#include "tensor.cuh"

// The result of a row with one segment, or a record of what it is made of.
struct RowOutput {
    Global<float> records;  // of the row
    Global<u16> out;
    HalfRows rows;
    u32 row, n_segments, n_used, segment, head_dim;

    __device__ __forceinline__ void put(u32 head, u32 dim, float value,
                                        const SegmentTotal& total) const {
        if (n_used == 1) {
            put_result(head, dim, value / total.sum);
        } else {
            put_record(of_head(head) + segment * (2 + head_dim), dim, value, total);
        }
    }
    __device__ __forceinline__ void put_result(u32 head, u32 dim, float value) const {
        out[rows.at(row, head * head_dim + dim)] = float_to_finite_half(value);
    }
    // [segment][max, sum, values]
    __device__ __forceinline__ Global<float> of_head(u32 head) const {
        return records + u64(head) * n_segments * (2 + head_dim);
    }
};

// Joins the segments of a head, whose records begin at `partials`; a warp's work. put(i, value) gets
// each element of the head.
template <class Put>
__device__ __forceinline__ void join_segments(Global<const float> partials, u32 n_used, u32 head_dim,
                                              const Put& put) {
    const u32 record = 2 + head_dim;
    float max = -infinity();
    for (u32 g = lane_id(); g < n_used; g += 32) {
        max = fmaxf(max, load_published<float>(partials + u64(g) * record));
    }
    for (u32 offset = 16; offset > 0; offset /= 2) {
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, offset));
    }
    float sum = 0.0f, values[MAX_HEAD_DIM / 32] = {};
#pragma unroll 4
    for (u32 g = 0; g < n_used; g++) {
        const Global<const float> segment = partials + u64(g) * record;
        const float segment_sum = load_published<float>(segment + 1);
        const float weight = segment_sum > 0.0f ? expf(load_published<float>(segment) - max) : 0.0f;
        sum += weight * segment_sum;
#pragma unroll
        for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
            const u32 dim = i * 32 + lane_id();
            if (dim < head_dim) {
                values[i] += weight * load_published<float>(segment + 2 + dim);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
        const u32 dim = i * 32 + lane_id();
        if (dim < head_dim) {
            put(dim, values[i] / sum);
        }
    }
}

// One block an SM at least: left to itself the compiler takes fewer registers and spills for sm_80.
extern "C" __global__ void __launch_bounds__(ATTENTION_WARPS * 32, 2)
    attention_rows(Global<const float> q, Global<const u8> kv, Global<const u32> sequences,
                   Global<const u32> block_table, Global<const u32> tokens, Global<float> partials,
                   Global<u32> arrivals, Global<u16> out, u32 n_tokens, u32 n_head, u32 n_kv_head,
                   u32 head_dim, u32 block_size, u32 n_blocks, u32 n_sequences, u32 table_stride,
                   u32 n_logical, u32 max_context_tokens, u32 n_segments, u32 segment_min,
                   u32 window, u32 order, float scale) {
    // What is known before the step begins is fetched before its kernels are waited for.
    const u32 kv_head = blockIdx.x, segment = blockIdx.y, token = blockIdx.z;
    const u32 heads_per_kv = n_head / n_kv_head;
    const Segments segments = {n_segments, segment_min, block_size, max_context_tokens, window};
    const Global<const u32> params = tokens + token * TOKEN_WORDS;
    const Span span = segments.span(load_constant<u32>(params + POSITION),
                                    load_constant<u32>(params + RING_SLOT), segment);
    const Tables tables = {block_table, sequences, n_sequences, table_stride};
    const CacheIndex index = {tables.of_row(token), n_kv_head, block_size, head_dim};
    if (segment < span.n_used) {
        prefetch_constant(index.block_table + span.first / block_size);
    }
    begin();
    if (segment >= span.n_used) {
        return;
    }
    const HalfRows rows = {n_tokens, n_head * head_dim, order != 0};
    const u64 head = u64(token) * n_head;
    const RowOutput output = {partials + head * n_segments * (2 + head_dim),
                              out,
                              rows,
                              token,
                              n_segments,
                              span.n_used,
                              segment,
                              head_dim};
    with_team<true>(head_dim, CachedAttention<F16Chunk, RowOutput>{q + head * head_dim, kv, index,
                                                                   span, n_head, scale, output});

    if (span.n_used > 1 && last_to_arrive(arrivals + (token * n_kv_head + kv_head), span.n_used)) {
        for (u32 h = warp_id(); h < heads_per_kv; h += ATTENTION_WARPS) {
            const u32 head = kv_head * heads_per_kv + h;
            join_segments(output.of_head(head), span.n_used, head_dim,
                          [&](u32 dim, float value) { output.put_result(head, dim, value); });
        }
    }
}
