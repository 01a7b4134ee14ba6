// Matrix x one vector, with what makes the vector before it and what is done with the sums behind
// it in the same kernel. The files that include this say which.
//
// A warp works on rows of its own, every warps-of-the-block-th of the block's share, in pieces of
// at most PIECE weights. The bytes of its next pieces, as many as its ring has room for, are on
// their way to shared memory from before the inputs are waited for until its last row: with
// programmatic launch most of what a short operation reads is there when its input is. The block
// meets once, when the input is quantised.
//
// A lane takes groups of 32 weights, every 32nd of the piece.
//
// Each instruction is fetched for the first time in nearly every launch, and a step has a hundred of
// them: loops are not unrolled, and what copies, and what multiplies, is there once.
//
// Geometry: whole warps, at most GEMV_WARPS; dynamic shared memory of STAGED_BYTES for each group
// of the input, then ring_bytes for each warp, a multiple of 16.
// Alignment: matrices, the vector and norm weights 16 bytes.
#pragma once

#include "q8_dot.cuh"

constexpr u32 GEMV_WARPS = 16, PIECE = 4096, MAX_STAGES = 8;

// Bytes of a group of the input in shared memory: quants, scale and scaled sum, sums of halves.
constexpr u32 STAGED_BYTES = GROUP + sizeof(Q8Group) + 4;

// A group of the input.
struct Activations {
    u32 words[8];
    Q8Group group;
    u32 half_sums;  // i16 each
};

// The q8 vector in shared memory: first halves of all groups, second halves, scales with sums, sums
// of halves.
struct Staged {
    Global<u8> bytes;
    u32 n_groups;

    __device__ __forceinline__ Global<u8> half(u32 which, u32 group) const {
        return bytes + (which * n_groups + group) * 16;
    }
    __device__ __forceinline__ Global<u8> group(u32 group) const {
        return bytes + n_groups * GROUP + group * u32(sizeof(Q8Group));
    }
    __device__ __forceinline__ Global<u8> half_sums(u32 group) const {
        return bytes + n_groups * u32(GROUP + sizeof(Q8Group)) + group * 4;
    }
    __device__ __forceinline__ Activations load_group(u32 index) const {
        const uint4 low = load<uint4>(half(0, index)), high = load<uint4>(half(1, index));
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w},
                load<Q8Group>(group(index)),
                load<u32>(half_sums(index))};
    }
};

// ---- inputs: where the vector comes from, UNROLL groups of each warp's at a time ----

// x as it is.
struct PlainInput {
    static constexpr u32 UNROLL = 2;
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
    static constexpr u32 UNROLL = 1;
    Global<const float> x, weight;
    float eps;
    float squares = 0.0f;
    struct Raw {
        float4 x, weight;
    };

    __device__ __forceinline__ void prefetch(u32 n_in) const {
        for (u32 i = threadIdx.x * 32; i < n_in; i += blockDim.x * 32) {
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
            squares_of_warps()[warp_id()] = of_warp;
        }
    }
    __device__ __forceinline__ float factor(u32 n_in) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < GEMV_WARPS; i++) {
            sum += i < blockDim.x / 32 ? float(squares_of_warps()[i]) : 0.0f;
        }
        return inverse_rms(sum, n_in, eps);
    }
};

// Waits for the input and quantises it; the whole block does. Four lanes share a group: lane i of
// them has elements 4 i .. 4 i + 4 of either half.
template <class Input>
__device__ __forceinline__ void stage(Input& input, const Staged& staged) {
    // Groups that a lane has in flight.
    constexpr u32 UNROLL = Input::UNROLL;
    begin();
    const u32 n_groups = staged.n_groups, stride = blockDim.x / 4, i = lane_id() % 4;
    // Whole warps go round.
#pragma unroll 1
    for (u32 first = threadIdx.x / 4; first < n_groups + lane_id() / 4; first += stride * UNROLL) {
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
        u32 half_sums[UNROLL];
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
            // Both sums at once: a carry from the lower does no harm to the total.
            i32 sums = sum_of_bytes(quants[u][0], 0) + sum_of_bytes(quants[u][1], 0) * 65536;
            for (u32 offset = 2; offset > 0; offset /= 2) {
                sums += __shfl_xor_sync(ALL_LANES, sums, offset);
            }
            const i32 first_half = i16(sums & 0xffff), second_half = (sums - first_half) / 65536;
            half_sums[u] = (u32(second_half) << 16) | (u32(first_half) & 0xffff);
            q8[u] = q8_group(range.scale, first_half + second_half);
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 group = first + u * stride;
            if (group < n_groups) {
                store(staged.half(0, group) + i * 4, quants[u][0]);
                store(staged.half(1, group) + i * 4, quants[u][1]);
                if (i == 0) {
                    store(staged.group(group), q8[u]);
                    store(staged.half_sums(group), half_sums[u]);
                }
            }
        }
    }
    input.before_barrier();
    __syncthreads();
}

// ---- pieces of rows, copied to shared memory ----

// A run of a matrix's blocks.
struct Run {
    u32 first, count;
};

// The copy of a plane's part begins where its first byte's 16 bytes do, so that 16 bytes can be
// copied at a time; room for `count` blocks wherever they lie.
__device__ __forceinline__ u32 window_bytes(u32 count, u32 block_bytes) {
    return (count * block_bytes + (block_bytes % 16 == 0 ? 0 : 30)) & ~15;
}

// Copies the bytes of a run, plane by plane, a warp's work; `capacity` is the longest run's count.
struct CopyRun {
    Planes planes;
    Run run;
    u32 capacity;
    Global<u8> to;

    __device__ __forceinline__ Global<const u8> next(u32 block_bytes) {
        const Global<const u8> plane = planes.next(block_bytes);
        const u64 begin = u64(run.first) * block_bytes;
        const u32 shift = block_bytes % 16 == 0 ? 0 : u32(begin) % 16;
        const Global<const u8> from = plane + (begin - shift);
        const u32 end = shift + run.count * block_bytes;
#pragma unroll 1
        for (u32 at = lane_id() * 16; at < end; at += 32 * 16) {
            copy_constant_async(to + at, from + at, block_bytes % 16 == 0 ? 16 : min(end - at, 16u));
        }
        to = to + window_bytes(capacity, block_bytes);
        return plane;
    }
};

// Finds the planes of a copied run.
struct CopiedRun {
    Run run;
    u32 capacity;
    Global<const u8> at;

    __device__ __forceinline__ Global<const u8> next(u32 block_bytes) {
        const u32 shift = block_bytes % 16 == 0 ? 0 : run.first * block_bytes % 16;
        const Global<const u8> plane = at + shift;
        at = at + window_bytes(capacity, block_bytes);
        return plane;
    }
};

// ---- what a lane does with a group; `at` counts from the beginning of the piece ----

template <class Type>
struct LaneDot {
    __device__ __forceinline__ float operator()(const Type& piece, u32 at,
                                                const Activations& x) const {
        return group_dot<Type>(Type::decode(piece.template load<InShared>(at), at), x.words,
                               x.group);
    }
};

template <>
struct LaneDot<Q4_K> {
    // Of a super-block's eight groups a lane always has the same one. The bytes that its scale and
    // min are made of, see KScales: the latter four take their high bits from the former's bytes.
    u32 byte, from_shared, shift, from_own;

    __device__ __forceinline__ LaneDot() : byte(lane_id() % 4) {
        const bool latter = lane_id() % 8 >= 4;
        from_shared = latter ? 0xc0 : 0x3f;
        shift = latter ? 2 : 0;
        from_own = latter ? 0x0f : 0;
    }
    __device__ __forceinline__ float operator()(const Q4_K& piece, u32 at,
                                                const Activations& x) const {
        const uint4 packed = load<uint4>(piece.quants + at * 16);
        const Global<const u8> scales = piece.scales + at / 8 * 12 + byte;
        const u32 a = scales[0], b = scales[4], c = scales[8];
        const u32 d = load<u32>(piece.d + at / 8 * 4);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        i32 low = 0, high = 0;
        for (u32 w = 0; w < 4; w++) {
            low = dot_unsigned(words[w] & 0x0f0f0f0f, x.words[w], low);
            high = dot_unsigned(words[w] & 0xf0f0f0f0, x.words[4 + w], high);
        }
        const i32 scale = (c & from_own) | (a & from_shared) >> shift;
        const i32 min = (c >> 4 & from_own) | (b & from_shared) >> shift;
        // 16 times the dot product, a number that f32 holds exactly nevertheless.
        const float product = float((low * 16 + high) * scale) * (x.group.scale * 0.0625f);
        return low_half(d) * product - high_half(d) * (float(min) * x.group.scaled_sum);
    }
};

template <>
struct LaneDot<Q6_K> {
    __device__ __forceinline__ float operator()(const Q6_K& piece, u32 at,
                                                const Activations& x) const {
        const Q6_K::Packed p = piece.load<InShared>(at);
        const u32 words[4] = {p.low.x, p.low.y, p.low.z, p.low.w};
        // Quants from 0 to 63: 32 times the sum of the activations is too much.
        i32 dots[2] = {-32 * i16(x.half_sums & 0xffff), -32 * i16(x.half_sums >> 16)};
        for (u32 w = 0; w < 8; w++) {
            const u32 nibbles = words[w % 4] >> (w / 4 * 4) & 0x0f0f0f0f;
            // Byte i holds the high bits of weights i, 8 + i, 16 + i, 24 + i.
            const u32 bits = w % 2 == 0 ? p.high.x : p.high.y, pair = w / 2;
            const u32 moved = pair < 2 ? bits << (4 - 2 * pair) : bits >> (2 * pair - 4);
            dots[w / 4] = dot_unsigned(nibbles | (moved & 0x30303030), x.words[w], dots[w / 4]);
        }
        const i32 scaled = i8(p.scales & 0xff) * dots[0] + i8(p.scales >> 8) * dots[1];
        return half_to_float(p.d) * (x.group.scale * float(scaled));
    }
};

// ---- rows ----

// The rows of a matrix that a block works on.
struct Share {
    u32 first, n_rows;

    __device__ __forceinline__ Share(u32 n_out, u32 block, u32 n_blocks) {
        const u32 each = n_out / n_blocks, rest = n_out % n_blocks;
        first = block * each + min(block, rest);
        n_rows = each + (block < rest);
    }
};

// Sums over the lanes, in every lane.
__device__ __forceinline__ void sum_over_lanes(float (&sums)[1]) {
    sums[0] = warp_sum(sums[0]);
}
__device__ __forceinline__ void sum_over_lanes(float (&sums)[2]) {
    const bool upper = lane_id() & 16;
    float sum = upper ? sums[1] : sums[0];
    sum += __shfl_xor_sync(ALL_LANES, upper ? sums[0] : sums[1], 16);
    for (u32 offset = 8; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    }
    const float other = __shfl_xor_sync(ALL_LANES, sum, 16);
    sums[0] = upper ? other : sum;
    sums[1] = upper ? sum : other;
}

// A row of a warp's and a piece of it.
struct Place {
    u32 row, piece;

    __device__ __forceinline__ void advance(u32 n_pieces) {
        if (++piece == n_pieces) {
            piece = 0;
            row += blockDim.x / 32;
        }
    }
};

// How rows are cut into pieces: so many blocks each, the last perhaps fewer.
struct Pieces {
    u32 blocks_per_row, blocks, count;

    template <class Type>
    __device__ __forceinline__ static Pieces of(u32 n_in) {
        const u32 blocks_per_row = n_in / Type::BLOCK;
        const u32 blocks = min(blocks_per_row, PIECE / Type::BLOCK);
        return {blocks_per_row, blocks, div_ceil(blocks_per_row, blocks)};
    }
    __device__ __forceinline__ Run run(const Place& place) const {
        const u32 first = place.piece * blocks;
        return {place.row * blocks_per_row + first, min(blocks, blocks_per_row - first)};
    }
};

// Adds up the windows of a piece.
struct Measure {
    u32& bytes;
    u32 capacity;

    __device__ __forceinline__ Global<const u8> next(u32 block_bytes) {
        bytes += window_bytes(capacity, block_bytes);
        return nullptr;
    }
};

// Computes the block's share of n_out rows. Output says
//
//   MATRICES                   how many matrices have a row each in a result
//   Early early(row)           what a result needs besides sums, fetched before they are made
//   void put(row, sums, early) called by one lane
template <class Type, class Input, class Output>
__device__ __forceinline__ void gemv_rows(const Global<const u8> bases[Output::MATRICES], u32 n_out,
                                          u32 n_in, u32 ring_bytes, const Share& share,
                                          Input& input, Output& output) {
    constexpr u32 MATRICES = Output::MATRICES;
    const Pieces pieces = Pieces::of<Type>(n_in);
    Type type;
    u32 piece_bytes = 0;
    type.place(Measure{piece_bytes, pieces.blocks});
    const u32 stage_bytes = piece_bytes * MATRICES;
    const u32 n_stages = min(ring_bytes / stage_bytes, MAX_STAGES);

    DYNAMIC_SHARED(dynamic);
    const Staged staged = {dynamic, n_in / GROUP};
    const Global<u8> ring =
        dynamic + ((n_in / GROUP * STAGED_BYTES + 15) & ~15) + warp_id() * ring_bytes;
    const u32 end = share.first + share.n_rows;
    const LaneDot<Type> lane_dot;
    Place next = {share.first + warp_id(), 0}, place = next;
    u32 slot = 0;
    float factor = 1.0f, sums[MATRICES] = {};
    typename Output::Early early = {};
    // The first n_stages turns only begin to copy.
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        if (turn == n_stages) {
            input.prefetch(n_in);
            stage(input, staged);
            factor = input.factor(n_in);
        }
        if (turn >= n_stages) {
            if (place.row >= end) {
                break;
            }
            if (place.piece == 0 && lane_id() == 0) {
                early = output.early(place.row);
            }
            wait_for_copies(n_stages - 1);
            __syncwarp();
            const Run run = pieces.run(place);
            Type copied[MATRICES];
            for (u32 m = 0; m < MATRICES; m++) {
                copied[m].place(CopiedRun{run, pieces.blocks,
                                          ring + slot * stage_bytes + m * piece_bytes});
            }
            const u32 n_groups = run.count * (Type::BLOCK / GROUP);
            const u32 first = place.piece * pieces.blocks * (Type::BLOCK / GROUP);
#pragma unroll 1
            for (u32 at = lane_id(); at < n_groups; at += 32) {
                const Activations x = staged.load_group(first + at);
                for (u32 m = 0; m < MATRICES; m++) {
                    sums[m] += lane_dot(copied[m], at, x);
                }
            }
            if (place.piece + 1 == pieces.count) {
                sum_over_lanes(sums);
                if (lane_id() == 0) {
                    for (u32 m = 0; m < MATRICES; m++) {
                        sums[m] *= factor;
                    }
                    output.put(place.row, sums, early);
                }
                for (u32 m = 0; m < MATRICES; m++) {
                    sums[m] = 0.0f;
                }
            }
            place.advance(pieces.count);
            __syncwarp();
        }
        if (next.row < end) {
#pragma unroll 1
            for (u32 m = 0; m < MATRICES; m++) {
                const Global<const u8> base = m == 0 ? bases[0] : bases[MATRICES - 1];
                type.place(CopyRun{Planes(base, n_out, pieces.blocks_per_row), pieces.run(next),
                                   pieces.blocks, ring + slot * stage_bytes + m * piece_bytes});
            }
            next.advance(pieces.count);
        }
        close_copies();
        slot = slot + 1 == n_stages ? 0 : slot + 1;
    }
}

// The same, of matrices of any type whose weights come in groups.
template <class Input, class Output>
__device__ __forceinline__ void decode_gemv(const Global<const u8> (&bases)[Output::MATRICES],
                                            u32 ggml_type, u32 n_out, u32 n_in, u32 ring_bytes,
                                            u32 block, u32 n_blocks, Input& input,
                                            Output& output) {
    const Share share(n_out, block, n_blocks);
    if (share.n_rows == 0) {
        begin();
        return;
    }
    auto rows = [&](auto type) {
        gemv_rows<decltype(type)>(bases, n_out, n_in, ring_bytes, share, input, output);
    };
    switch (ggml_type) {
    case Q4_K::GGML_TYPE: return rows(Q4_K());
    case Q6_K::GGML_TYPE: return rows(Q6_K());
    case Q5_K::GGML_TYPE: return rows(Q5_K());
    case Q8_0::GGML_TYPE: return rows(Q8_0());
    case Q4_0::GGML_TYPE: return rows(Q4_0());
    case Q4_1::GGML_TYPE: return rows(Q4_1());
    case Q5_0::GGML_TYPE: return rows(Q5_0());
    case Q5_1::GGML_TYPE: return rows(Q5_1());
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
