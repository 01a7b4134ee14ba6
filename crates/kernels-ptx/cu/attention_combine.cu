// Joins the segments of an attention: with m = the largest max of the segments,
// out = sum of e^(max_g - m) * values_g / sum of e^(max_g - m) * sum_g. Empty segments (sum 0)
// count for nothing.
//
// partials   [n_tokens][n_head][n_segments][max, sum, head_dim values], head_dim at most 256
// out        [n_tokens][n_head][head_dim]
//
// Geometry: grid (n_head, n_tokens), block 256: each warp joins every eighth segment, a lane
// every 32nd element of the head.
// Alignment: of the elements.
#include "common.cuh"

constexpr u32 WARPS = 8, MAX_HEAD_DIM = 256;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_combine(Global<const float> partials, Global<float> out, u32 n_tokens, u32 n_head,
                      u32 head_dim, u32 n_segments) {
    begin();
    const u64 head = u64(blockIdx.y) * n_head + blockIdx.x;
    const u32 record = 2 + head_dim;
    partials = partials + head * n_segments * record;

    float max = -infinity();
    for (u32 g = lane_id(); g < n_segments; g += 32) {
        if (partials[u64(g) * record + 1] > 0.0f) {
            max = fmaxf(max, partials[u64(g) * record]);
        }
    }
    for (u32 offset = 16; offset > 0; offset /= 2) {
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, offset));
    }

    float sum = 0.0f, values[MAX_HEAD_DIM / 32] = {};
#pragma unroll 2
    for (u32 g = warp_id(); g < n_segments; g += WARPS) {
        const Global<const float> segment = partials + u64(g) * record;
        const float segment_sum = segment[1];
        const float weight = segment_sum > 0.0f ? expf(segment[0] - max) : 0.0f;
        sum += weight * segment_sum;
#pragma unroll
        for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
            const u32 dim = i * 32 + lane_id();
            if (dim < head_dim) {
                values[i] += weight * segment[2 + dim];
            }
        }
    }

    SHARED(float, sums, WARPS);
    SHARED(float, joined, WARPS * MAX_HEAD_DIM);
    if (lane_id() == 0) {
        sums[warp_id()] = sum;
    }
#pragma unroll
    for (u32 i = 0; i < MAX_HEAD_DIM / 32; i++) {
        joined[warp_id() * MAX_HEAD_DIM + i * 32 + lane_id()] = values[i];
    }
    __syncthreads();
    if (threadIdx.x < head_dim) {
        float total = 0.0f, value = 0.0f;
        for (u32 w = 0; w < WARPS; w++) {
            total += sums[w];
            value += joined[w * MAX_HEAD_DIM + threadIdx.x];
        }
        out[head * head_dim + threadIdx.x] = value / total;
    }
}
