// Matrix x one vector, with what makes the vector before it and what is done with the sums behind
// it in the same kernel. The files that include this say which.
//
// The vector is cut into slices of 32 groups of 32 elements, a group a lane. Warp threadIdx.x / 32
// of a team takes that slice and, where there are more slices than warps, every blockDim.x / 32-th
// after it; team threadIdx.y takes every blockDim.y-th of the block's rows, a batch of them at a
// time. So a lane reads its activations once per batch, and a row's sum is made of one part per
// warp of a team. The block meets once per batch, a thread per result adds the parts, and two sets
// of parts take turns so that once is enough.
//
// A batch of weights is in flight in every lane from before the inputs are waited for until the
// block's last rows. The grid fits the device at once, and twice: while a kernel runs, the next
// one's blocks move in beside it and fetch.
//
// Geometry: block (32 * slice warps, teams), at most GEMV_WARPS warps; dynamic shared memory of 40
// bytes for each group of all slices, their number rounded up to one of slice warps.
// Alignment: matrices, the vector and norm weights 16 bytes.
#pragma once

#include "q8_dot.cuh"

constexpr u32 GEMV_WARPS = 10, SLICE_GROUPS = 32;

__device__ __forceinline__ u32 block_thread() {
    return threadIdx.y * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ u32 block_threads() {
    return blockDim.x * blockDim.y;
}

// A lane's activations of a slice.
struct Q8Slice {
    u32 words[8];
    Q8Group group;
    i32 half_sums[2];
};

struct __align__(8) Pair {
    float first, second;
};

// The q8 vector in shared memory: first halves of all groups, second halves, scales with sums.
// Whole slices, the last of which end in groups of nothing.
struct Staged {
    Global<u8> bytes;
    u32 n_groups;

    __device__ __forceinline__ Global<u8> half(u32 which, u32 group) const {
        return bytes + (which * n_groups + group) * 16;
    }
    __device__ __forceinline__ Global<u8> group(u32 group) const {
        return bytes + n_groups * GROUP + group * u32(sizeof(Q8Group));
    }
    __device__ __forceinline__ Q8Slice load_slice(u32 slice) const {
        const u32 here = slice * SLICE_GROUPS + lane_id();
        const uint4 low = load<uint4>(half(0, here)), high = load<uint4>(half(1, here));
        Q8Slice x = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w},
                     load<Q8Group>(group(here)),
                     {0, 0}};
        for (u32 i = 0; i < 8; i++) {
            x.half_sums[i / 4] = sum_of_bytes(x.words[i], x.half_sums[i / 4]);
        }
        return x;
    }
};

// ---- inputs: where the vector comes from, UNROLL groups of each warp's at a time ----

// x as it is.
struct PlainInput {
    static constexpr u32 UNROLL = 4;
    Global<const float> x;

    using Raw = float4;

    __device__ __forceinline__ void prefetch(u32) const {}
    __device__ __forceinline__ Raw fetch(u32 i) const {
        return load<float4>(x + i * 4);
    }
    __device__ __forceinline__ float4 quad(const Raw& raw) const {
        return raw;
    }
    __device__ __forceinline__ void before_barrier() const {}
    __device__ __forceinline__ float factor(u32) const {
        return 1.0f;
    }
};

// RMS norm of x: x * weight is quantised, and 1 / sqrt(mean(x^2) + eps) is a factor of the sums.
struct NormInput {
    static constexpr u32 UNROLL = 2;
    Global<const float> x, weight;
    float eps;
    float squares = 0.0f;
    struct Raw {
        float4 x, weight;
    };

    __device__ __forceinline__ void prefetch(u32 n_in) const {
        for (u32 i = block_thread() * 32; i < n_in; i += block_threads() * 32) {
            prefetch_constant(weight + i);
        }
    }
    __device__ __forceinline__ Raw fetch(u32 i) const {
        return {load<float4>(x + i * 4), load<float4>(weight + i * 4)};
    }
    __device__ __forceinline__ float4 quad(const Raw& raw) {
        const float4 quad = raw.x, w = raw.weight;
        squares += quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
        return {quad.x * w.x, quad.y * w.y, quad.z * w.z, quad.w * w.w};
    }
    __device__ __forceinline__ Global<float> squares_of_warps() const {
        SHARED(float, of_warps, GEMV_WARPS);
        return of_warps;
    }
    __device__ __forceinline__ void before_barrier() const {
        const float of_warp = warp_sum(squares);
        if (lane_id() == 0) {
            squares_of_warps()[block_thread() / 32] = of_warp;
        }
    }
    __device__ __forceinline__ float factor(u32 n_in) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < GEMV_WARPS; i++) {
            sum += i < block_threads() / 32 ? float(squares_of_warps()[i]) : 0.0f;
        }
        return inverse_rms(sum, n_in, eps);
    }
};

// Waits for the input and quantises it; the whole block does. Four lanes share a group: lane i of
// them has elements 4 i .. 4 i + 4 of either half.
template <class Input>
__device__ __forceinline__ void stage(Input& input, const Staged& staged, u32 n_in) {
    // Groups that a lane has in flight.
    constexpr u32 UNROLL = Input::UNROLL;
    begin();
    const u32 n_groups = n_in / GROUP, stride = block_threads() / 4, i = lane_id() % 4;
    // Whole warps go round.
    for (u32 first = block_thread() / 4; first < staged.n_groups + lane_id() / 4;
         first += stride * UNROLL) {
        typename Input::Raw raw[UNROLL][2] = {};
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 group = first + u * stride;
            if (group < n_groups) {
                raw[u][0] = input.fetch(group * 8 + i);
                raw[u][1] = input.fetch(group * 8 + 4 + i);
            }
        }
        // Without branches, so that the groups' latencies overlap.
        u32 quants[UNROLL][2];
        Q8Group q8[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const float4 low = input.quad(raw[u][0]), high = input.quad(raw[u][1]);
            u32 amax_bits = max(largest_magnitude(low), largest_magnitude(high));
            for (u32 offset = 2; offset > 0; offset /= 2) {
                amax_bits = max(amax_bits, __shfl_xor_sync(ALL_LANES, amax_bits, offset));
            }
            const Q8Range range(amax_bits);
            quants[u][0] = range.quantize(low);
            quants[u][1] = range.quantize(high);
            i32 sum = sum_of_bytes(quants[u][0], sum_of_bytes(quants[u][1], 0));
            for (u32 offset = 2; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(ALL_LANES, sum, offset);
            }
            q8[u] = q8_group(range.scale, sum);
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 group = first + u * stride;
            if (group < staged.n_groups) {
                store(staged.half(0, group) + i * 4, quants[u][0]);
                store(staged.half(1, group) + i * 4, quants[u][1]);
                if (i == 0) {
                    store(staged.group(group), q8[u]);
                }
            }
        }
    }
    input.before_barrier();
    __syncthreads();
}

// ---- batches: how the weights of a few rows are fetched and multiplied ----

// Where a warp's batch lies. Its row i is a row of matrix i % MATRICES.
template <u32 MATRICES>
struct Place {
    u32 first, step, end;  // rows
    u32 slice;

    __device__ __forceinline__ u32 row(u32 i) const {
        return first + i / MATRICES * step;
    }
    __device__ __forceinline__ bool has(u32 i) const {
        return row(i) < end;
    }
    __device__ __forceinline__ u32 group() const {
        return slice * SLICE_GROUPS + lane_id();
    }
};

// Of a batch lane 4 i + j fetches and decodes what the groups of super-block j of the slice have in
// common in row i. Then all lanes find it in shared memory.
constexpr u32 SLICE_BLOCKS = SLICE_GROUPS / 8;

// The general one; types that many models have get their own.
template <class Type, u32 MATRICES>
struct Batch {
    static constexpr u32 ROWS = 4, COMMON_BYTES = 16;
    Type matrices[MATRICES];
    u32 n_groups;
    typename Type::Packed packed[ROWS] = {};

    __device__ __forceinline__ Batch(const Global<const u8> bases[MATRICES], u32 n_out, u32 n_in)
        : n_groups(n_in / GROUP) {
        for (u32 m = 0; m < MATRICES; m++) {
            matrices[m].place(Planes(bases[m], n_out, n_in / Type::BLOCK));
        }
    }
    __device__ __forceinline__ void fetch_common(const Place<MATRICES>&) {}
    __device__ __forceinline__ void share_common(Global<u8>) const {}
    __device__ __forceinline__ void fetch_row(u32 i, const Place<MATRICES>& place) {
        if (place.has(i) && place.group() < n_groups) {
            packed[i] = matrices[i % MATRICES].load(u64(place.row(i)) * n_groups + place.group());
        }
    }
    __device__ __forceinline__ float dot(u32 i, Global<const u8>, const Q8Slice& x) const {
        return group_dot<Type>(Type::decode(packed[i], lane_id()), x.words, x.group);
    }
};

template <u32 MATRICES>
struct Batch<Q4_K, MATRICES> {
    static constexpr u32 ROWS = 8;
    // [row][super-block][8 scales, 8 mins, d, -dmin]
    static constexpr u32 BLOCK_BYTES = 24, ROW_BYTES = SLICE_BLOCKS * BLOCK_BYTES;
    static constexpr u32 COMMON_BYTES = ROWS * ROW_BYTES;
    Global<const u8> quants[MATRICES], scales, d;  // the last two of the matrix of row lane / 4
    u32 n_groups;
    uint4 packed[ROWS] = {};
    KScales packed_scales = {};
    u32 packed_d = 0;

    __device__ __forceinline__ Batch(const Global<const u8> bases[MATRICES], u32 n_out, u32 n_in)
        : n_groups(n_in / GROUP) {
        for (u32 m = 0; m < MATRICES; m++) {
            Q4_K matrix;
            matrix.place(Planes(bases[m], n_out, n_in / Q4_K::BLOCK));
            quants[m] = matrix.quants;
            if (lane_id() / SLICE_BLOCKS % MATRICES == m) {
                scales = matrix.scales;
                d = matrix.d;
            }
        }
    }
    __device__ __forceinline__ void fetch_common(const Place<MATRICES>& place) {
        const u32 i = lane_id() / SLICE_BLOCKS;
        const u32 block = place.slice * SLICE_BLOCKS + lane_id() % SLICE_BLOCKS;
        const bool has = place.has(i) && block < n_groups / 8;
        const u32 at = place.row(i) * (n_groups / 8) + block;
        for (u32 word = 0; word < 3; word++) {
            load_constant_if(has, scales + u64(at) * 12 + word * 4, packed_scales.words[word]);
        }
        load_constant_if(has, d + u64(at) * 4, packed_d);
    }
    __device__ __forceinline__ void share_common(Global<u8> common) const {
        const u32 a = packed_scales.words[0], b = packed_scales.words[1];
        const u32 c = packed_scales.words[2];
        const Global<u8> to = common + lane_id() * BLOCK_BYTES;
        store(to, uint2{a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)});
        store(to + 8, uint2{b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)});
        store(to + 16, Pair{low_half(packed_d), -high_half(packed_d)});
    }
    __device__ __forceinline__ void fetch_row(u32 i, const Place<MATRICES>& place) {
        const u64 at = u64(place.row(i)) * (n_groups * 16) + place.group() * 16;
        load_constant_if(place.has(i) && place.group() < n_groups, quants[i % MATRICES] + at,
                         packed[i]);
    }
    __device__ __forceinline__ float dot(u32 i, Global<const u8> common, const Q8Slice& x) const {
        const Global<const u8> of_block = common + lane_id() / 8 * BLOCK_BYTES + i * ROW_BYTES;
        const i32 scale = of_block[lane_id() % 8], min = of_block[lane_id() % 8 + 8];
        const Pair d = load<Pair>(of_block + 16);
        const u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
        i32 low = 0, high = 0;
        for (u32 w = 0; w < 4; w++) {
            low = dot_unsigned(words[w] & 0x0f0f0f0f, x.words[w], low);
            high = dot_unsigned(words[w] & 0xf0f0f0f0, x.words[4 + w], high);
        }
        // 16 times the dot product, a number that f32 holds exactly nevertheless.
        const float product = float((low * 16 + high) * scale) * (x.group.scale * 0.0625f);
        return d.first * product + d.second * (float(min) * x.group.scaled_sum);
    }
};

template <u32 MATRICES>
struct Batch<Q6_K, MATRICES> {
    static constexpr u32 ROWS = 4;
    // [row][super-block][d]
    static constexpr u32 COMMON_BYTES = ROWS * SLICE_BLOCKS * 4;
    struct Packed {
        uint4 low;
        uint2 high;
        u16 scales;
    };
    Global<const u8> low[MATRICES], high[MATRICES], scales[MATRICES], d;
    u32 n_groups;
    Packed packed[ROWS] = {};
    u16 packed_d = 0;

    __device__ __forceinline__ Batch(const Global<const u8> bases[MATRICES], u32 n_out, u32 n_in)
        : n_groups(n_in / GROUP) {
        for (u32 m = 0; m < MATRICES; m++) {
            Q6_K matrix;
            matrix.place(Planes(bases[m], n_out, n_in / Q6_K::BLOCK));
            low[m] = matrix.low;
            high[m] = matrix.high;
            scales[m] = matrix.scales;
            if (lane_id() / SLICE_BLOCKS % MATRICES == m) {
                d = matrix.d;
            }
        }
    }
    __device__ __forceinline__ void fetch_common(const Place<MATRICES>& place) {
        const u32 i = lane_id() / SLICE_BLOCKS;
        const u32 block = place.slice * SLICE_BLOCKS + lane_id() % SLICE_BLOCKS;
        const bool has = i < ROWS && place.has(i) && block < n_groups / 8;
        const u32 at = place.row(i) * (n_groups / 8) + block;
        load_constant_if(has, d + u64(at) * 2, packed_d);
    }
    __device__ __forceinline__ void share_common(Global<u8> common) const {
        if (lane_id() < ROWS * SLICE_BLOCKS) {
            store(common + lane_id() * 4, half_to_float(packed_d));
        }
    }
    __device__ __forceinline__ void fetch_row(u32 i, const Place<MATRICES>& place) {
        const bool has = place.has(i) && place.group() < n_groups;
        const u64 at = u64(place.row(i) * n_groups + place.group());
        load_constant_if(has, low[i % MATRICES] + at * 16, packed[i].low);
        load_constant_if(has, high[i % MATRICES] + at * 8, packed[i].high);
        load_constant_if(has, scales[i % MATRICES] + at * 2, packed[i].scales);
    }
    __device__ __forceinline__ float dot(u32 i, Global<const u8> common, const Q8Slice& x) const {
        const float d = load<float>(common + lane_id() / 8 * 4 + i * SLICE_BLOCKS * 4);
        const Packed& p = packed[i];
        const u32 words[4] = {p.low.x, p.low.y, p.low.z, p.low.w};
        // Quants from 0 to 63: 32 times the sum of the activations is too much.
        i32 dots[2] = {-32 * x.half_sums[0], -32 * x.half_sums[1]};
        for (u32 w = 0; w < 8; w++) {
            const u32 nibbles = words[w % 4] >> (w / 4 * 4) & 0x0f0f0f0f;
            // Byte i holds the high bits of weights i, 8 + i, 16 + i, 24 + i.
            const u32 bits = w % 2 == 0 ? p.high.x : p.high.y, pair = w / 2;
            const u32 moved = pair < 2 ? bits << (4 - 2 * pair) : bits >> (2 * pair - 4);
            dots[w / 4] = dot_unsigned(nibbles | (moved & 0x30303030), x.words[w], dots[w / 4]);
        }
        const i32 scaled = i8(p.scales & 0xff) * dots[0] + i8(p.scales >> 8) * dots[1];
        return d * (x.group.scale * float(scaled));
    }
};

// The rows of a matrix that a block works on.
struct Share {
    u32 first, n_rows;

    __device__ __forceinline__ Share(u32 n_out, u32 block, u32 n_blocks) {
        const u32 each = n_out / n_blocks, rest = n_out % n_blocks;
        first = block * each + min(block, rest);
        n_rows = each + (block < rest);
    }
};

// Sums of four rows over the lanes; lane i gets that of row i / 8.
__device__ __forceinline__ float sum_of_rows(const float rows[4]) {
    const bool upper = lane_id() & 16, odd = lane_id() & 8;
    float a = upper ? rows[2] : rows[0], b = upper ? rows[3] : rows[1];
    a += __shfl_xor_sync(ALL_LANES, upper ? rows[0] : rows[2], 16);
    b += __shfl_xor_sync(ALL_LANES, upper ? rows[1] : rows[3], 16);
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(ALL_LANES, odd ? a : b, 8);
    for (u32 offset = 4; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    }
    return sum;
}

// Computes the block's share of n_out rows. Output says
//
//   MATRICES                   how many matrices have a row each in a result
//   Early early(row)           what a result needs besides sums, fetched before they are made
//   void put(row, sums, early)
template <class Type, class Input, class Output>
__device__ __forceinline__ void gemv_rows(const Global<const u8> bases[Output::MATRICES], u32 n_out,
                                          u32 n_in, const Share& share, Input& input,
                                          Output& output) {
    constexpr u32 MATRICES = Output::MATRICES;
    using WarpBatch = Batch<Type, MATRICES>;
    constexpr u32 ROWS = WarpBatch::ROWS;
    const u32 slice_warps = blockDim.x / 32, n_teams = blockDim.y;
    const u32 first_slice = threadIdx.x / 32;
    const u32 n_slices = div_ceil(n_in, slice_warps * SLICE_GROUPS * GROUP) * slice_warps;
    const u32 per_round = n_teams * (ROWS / MATRICES);  // results

    WarpBatch batch(bases, n_out, n_in);
    const u32 end = share.first + share.n_rows;
    Place<MATRICES> place = {share.first + threadIdx.y, n_teams, end, first_slice};
    batch.fetch_common(place);
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        batch.fetch_row(i, place);
    }
    input.prefetch(n_in);

    DYNAMIC_SHARED(staged_bytes);
    const Staged staged = {staged_bytes, n_slices * SLICE_GROUPS};
    stage(input, staged, n_in);
    const float factor = input.factor(n_in);

    SHARED(u8, common_of_warps, GEMV_WARPS * WarpBatch::COMMON_BYTES);
    const Global<u8> common = common_of_warps + block_thread() / 32 * WarpBatch::COMMON_BYTES;
    // [turn][matrix][row of the batch][team][warp of the team]
    SHARED(float, parts, 2 * GEMV_WARPS * ROWS);
    const u32 n_warps = n_teams * slice_warps;
    u32 turn = 0;
    for (u32 row = share.first; row < end; row += per_round) {
        const Global<float> part = parts + turn;
        const u32 result = row + block_thread();
        const bool has_result = block_thread() < per_round && result < end;
        typename Output::Early early = {};
        if (has_result) {
            early = output.early(result);
        }
        for (u32 slice = first_slice; slice < n_slices; slice += slice_warps) {
            const Q8Slice x = staged.load_slice(slice);
            __syncwarp();
            batch.share_common(common);
            __syncwarp();
            const bool next_slice = slice + slice_warps < n_slices;
            place.slice = next_slice ? slice + slice_warps : first_slice;
            place.first = (next_slice ? row : row + per_round) + threadIdx.y;
            batch.fetch_common(place);
#pragma unroll
            for (u32 first = 0; first < ROWS; first += 4) {
                float sums[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    sums[i] = batch.dot(first + i, common, x);
                    batch.fetch_row(first + i, place);
                }
                const float sum = sum_of_rows(sums);
                if (lane_id() % 8 == 0) {
                    const u32 i = lane_id() / 8;
                    const u32 of_batch = i % MATRICES * (ROWS / MATRICES) + (first + i) / MATRICES;
                    const u32 at = of_batch * n_warps + block_thread() / 32;
                    part[at] = slice == first_slice ? sum : part[at] + sum;
                }
            }
        }
        __syncthreads();
        if (has_result) {
            float sums[MATRICES];
#pragma unroll
            for (u32 m = 0; m < MATRICES; m++) {
                const u32 of_round = m * per_round + block_thread();
                sums[m] = 0.0f;
#pragma unroll
                for (u32 warp = 0; warp < GEMV_WARPS; warp++) {
                    if (warp < slice_warps) {
                        sums[m] += part[of_round * slice_warps + warp];
                    }
                }
                sums[m] *= factor;
            }
            output.put(result, sums, early);
        }
        turn ^= GEMV_WARPS * ROWS;
    }
}

// The same, of matrices of any type whose weights come in groups.
template <class Input, class Output>
__device__ __forceinline__ void decode_gemv(const Global<const u8> (&bases)[Output::MATRICES],
                                            u32 ggml_type, u32 n_out, u32 n_in, u32 block,
                                            u32 n_blocks, Input& input, Output& output) {
    const Share share(n_out, block, n_blocks);
    if (share.n_rows == 0) {
        begin();
        return;
    }
    switch (ggml_type) {
    case Q4_K::GGML_TYPE: return gemv_rows<Q4_K>(bases, n_out, n_in, share, input, output);
    case Q6_K::GGML_TYPE: return gemv_rows<Q6_K>(bases, n_out, n_in, share, input, output);
    case Q5_K::GGML_TYPE: return gemv_rows<Q5_K>(bases, n_out, n_in, share, input, output);
    case Q8_0::GGML_TYPE: return gemv_rows<Q8_0>(bases, n_out, n_in, share, input, output);
    case Q4_0::GGML_TYPE: return gemv_rows<Q4_0>(bases, n_out, n_in, share, input, output);
    case Q4_1::GGML_TYPE: return gemv_rows<Q4_1>(bases, n_out, n_in, share, input, output);
    case Q5_0::GGML_TYPE: return gemv_rows<Q5_0>(bases, n_out, n_in, share, input, output);
    case Q5_1::GGML_TYPE: return gemv_rows<Q5_1>(bases, n_out, n_in, share, input, output);
    }
}

// ---- outputs that several kernels have ----

// out = sum + bias
struct StoreOutput {
    static constexpr u32 MATRICES = 1;
    using Early = float;
    Global<const float> bias;  // or null
    Global<float> out;

    __device__ __forceinline__ float early(u32 row) const {
        return bias ? float(bias[row]) : 0.0f;
    }
    __device__ __forceinline__ void put(u32 row, const float sums[1], float bias) const {
        out[row] = sums[0] + bias;
    }
};
