// Attention inside the persistent step: a block attends with all query heads of one key head to one
// segment of the context.
//
// What is cached comes through the ring, a slot of `unit_tokens` keys and values at a time, long
// before the queries are known. Of the newest token the block computes key and value itself, if it
// lies in its segment: turns the key, appends both to the cache, and attends to it as to a unit of
// one token. With one live segment the result goes out at once; with more, every block of a key
// head publishes its segment's values and the logarithm of its weight, and joins a slice of the
// head's elements.
//
// Scores and values are products of matrices, m16n8k16 of f16 with f32 sums: tokens or elements of
// a head are the rows, eight query heads the columns. A query is two f16, which together have 22
// bits; keys and values are what the cache holds; weights of tokens are rounded to f16, and it is
// the rounded ones that are summed.
#pragma once

#include "exchange.cuh"
#include "persistent_item.cuh"
#include "ring.cuh"
#include "stream.cuh"

// Bytes behind a query in shared memory: eight queries lie in different banks.
constexpr u32 QUERY_PAD = 64;

// Barrier of the warps that compute.
__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sums[16][8] += a[16][16] b[16][8]. Lane (g, t) = (lane / 4, lane % 4) has of a the rows g and
// g + 8, of b column g, of the sums rows g and g + 8 in columns 2t and 2t + 1.
__device__ __forceinline__ void multiply_add(float sums[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                             u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes 8 x 8 f16, of which lane (g, t) has row g, columns 2t and 2t + 1.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ u32 half_pair(float low, float high) {
    return u32(float_to_half(low)) | u32(float_to_half(high)) << 16;
}

struct Attention {
    const Header& h;
    const Op& op;
    const Item& item;
    const Peers& peers;
    const Ring& ring;
    const u8* weights;
    u8* kv;
    const u32* block_table;
    u8* shared;
    u32 epoch, phase, warp, lane;

    __device__ __forceinline__ u32 row_bytes() const {
        return h.head_dim * 2;
    }
    // Where the activations lie at other times: the newest key and value, then of each query what
    // an f16 holds and what is left, each with padding behind it.
    __device__ __forceinline__ u8* newest() const {
        return shared + h.quants_at;
    }
    __device__ __forceinline__ u8* query(u32 head, u32 rest) const {
        return newest() + 2 * row_bytes() + (2 * head + rest) * (row_bytes() + QUERY_PAD);
    }
    __device__ __forceinline__ float* scratch() const {
        return reinterpret_cast<float*>(shared + h.scratch_at);
    }

    // ---- queries and the newest token, a warp each

    // Of a head, in registers: lane l has the elements 2 j and 2 j + 1 with j = l, l + 32, ...
    // Heads have 256 elements at most.
    struct Elements {
        float2 pairs[4];
    };

    // The raw vector of a head, from the blocks that computed it.
    __device__ __forceinline__ Elements fetch(u32 first_word, u32 op_index) const {
        const u32* vector = peers.exchange + op.output + first_word;
        const u32 n_words = h.head_dim / 2;
        u32 words[4];
        const auto load_all = [&] {
            u32 differs = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                words[i] = phase;
                if (i * 32 < n_words) {
                    words[i] = load_relaxed(vector + min(i * 32 + lane, n_words - 1));
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                differs |= words[i] ^ phase;
            }
            return (opaque(differs) & 1) == 0;
        };
        if (!load_all()) {
            peers.wait(WAIT_HEADS, op_index, load_all);
        }
        __syncwarp();
        Elements x;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            x.pairs[i] = {pair_low(words[i]), pair_high(words[i])};
        }
        return x;
    }

    // Norms and turns one head; `other` is memory of this warp for its elements.
    __device__ __forceinline__ void turn_head(Elements& x, float* other, u32 norm_at,
                                              float factor) const {
        const u32 n_words = h.head_dim / 2, n_pairs = h.n_pairs;
        if (norm_at != NONE) {
            const float2* norm = reinterpret_cast<const float2*>(weights + u64(norm_at) * 16);
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (i * 32 + lane < n_words) {
                    sum += x.pairs[i].x * x.pairs[i].x + x.pairs[i].y * x.pairs[i].y;
                }
            }
            factor *= inverse_rms(warp_sum(sum), h.head_dim, h.norm_eps);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (i * 32 + lane < n_words) {
                    const float2 by = norm[i * 32 + lane];
                    x.pairs[i] = {x.pairs[i].x * by.x, x.pairs[i].y * by.y};
                }
            }
        }
        const Turn* turns = reinterpret_cast<const Turn*>(shared + h.turns_at);
        if (h.pairing == 0) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (i * 32 >= n_words) {
                    break;
                }
                const float a = x.pairs[i].x * factor, b = x.pairs[i].y * factor;
                x.pairs[i] = {a, b};
                if (i * 32 + lane < n_pairs) {
                    const Turn by = turns[i * 32 + lane];
                    x.pairs[i] = {a * by.cosine - b * by.sine, a * by.sine + b * by.cosine};
                }
            }
            return;
        }
        // Element i is turned with i + n_pairs, which other lanes have.
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            x.pairs[i] = {x.pairs[i].x * factor, x.pairs[i].y * factor};
            if (i * 32 + lane < n_words) {
                reinterpret_cast<float2*>(other)[i * 32 + lane] = x.pairs[i];
            }
        }
        __syncwarp();
        const auto turned = [&](u32 element, float own) {
            const bool first = element < n_pairs;
            if (element >= 2 * n_pairs) {
                return own;
            }
            const Turn by = turns[first ? element : element - n_pairs];
            const float a = other[first ? element + n_pairs : element - n_pairs];
            return own * by.cosine + (first ? -a : a) * by.sine;
        };
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i * 32 + lane < n_words) {
                const u32 element = (i * 32 + lane) * 2;
                x.pairs[i] = {turned(element, x.pairs[i].x), turned(element + 1, x.pairs[i].y)};
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void split_query(const Elements& x, u32 head) const {
        u32* whole = reinterpret_cast<u32*>(query(head, 0));
        u32* rest = reinterpret_cast<u32*>(query(head, 1));
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i * 32 >= h.head_dim / 2) {
                break;
            }
            if (i * 32 + lane < h.head_dim / 2) {
                const u32 pair = half_pair(x.pairs[i].x, x.pairs[i].y);
                whole[i * 32 + lane] = pair;
                rest[i * 32 + lane] = half_pair(x.pairs[i].x - half_to_float(u16(pair & 0xffff)),
                                                x.pairs[i].y - half_to_float(u16(pair >> 16)));
            }
        }
    }

    // Rounds the newest key or value as the cache does, and appends it.
    __device__ __forceinline__ void append(const Elements& x, bool value, u32 block) const {
        const u64 plane = (u64(block) * 2 + value) * h.n_kv_head + item.kv_head;
        const u64 row = plane * h.block_size + item.newest_slot % h.block_size;
        u8* cached = kv + u64(op.layer) * h.kv_layer * 16 + row * row_bytes();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 at = i * 32 + lane;
            if (i * 32 >= h.head_dim / 2) {
                break;
            }
            if (at < h.head_dim / 2) {
                const u32 pair = half_pair(x.pairs[i].x, x.pairs[i].y);
                store(cached + at * 4, pair);
                store(newest() + value * row_bytes() + at * 4, pair);
            }
        }
    }

    __device__ __forceinline__ void prepare_heads(u32 op_index) const {
        const u32 n_query = item.group, words = h.head_dim / 2;
        const u32 n_tasks = n_query + (item.newest ? 2 : 0);
        // Requested before it is needed.
        const u32 block =
            item.newest ? load_relaxed(block_table + op.layer * h.n_blocks + item.newest_block) : 0;
        // Scores are exponents of two.
        const float factor = h.attention_scale * 1.44269504088896340736f;
        float* other = scratch() + warp * h.head_dim;
#pragma unroll 1
        for (u32 task = warp; task < n_tasks; task += CONSUMER_WARPS) {
            const u32 value = task - n_query;
            const bool is_query = task < n_query;
            const u32 head = is_query ? item.kv_head * n_query + task
                                      : h.n_head + value * h.n_kv_head + item.kv_head;
            Elements x = fetch(head * words, op_index);
            if (is_query || value == 0) {
                turn_head(x, other, is_query ? op.q_norm : op.k_norm, is_query ? factor : 1.0f);
            }
            if (is_query) {
                split_query(x, task);
            } else {
                append(x, value, block);
            }
        }
    }

    // ---- this warp's share of the segment

    // 16 bytes of a row, or zeros.
    __device__ __forceinline__ static uint4 load_if(bool there, const u8* from) {
        return there ? load<uint4>(from) : make_uint4(0, 0, 0, 0);
    }

    // Scores of 16 tokens with eight heads.
    //
    // The order of a product's 16 columns is free, if both factors have the same: lane t takes
    // eight elements that lie together, and gives them to two products.
    __device__ __forceinline__ void score(float scores[4], const u8* keys, u32 n, u32 first_head,
                                          u32 n_heads) const {
        const u32 g = lane / 4, t = lane % 4, dims = h.head_dim;
        const u8* low = keys + (g * dims + t * 8) * 2;
        const u8* high = low + 8 * dims * 2;
        const u8* whole = query(first_head + g, 0) + t * 16;
        const u8* rest = query(first_head + g, 1) + t * 16;
        float rests[4] = {};
#pragma unroll 1
        for (u32 dim = 0; dim < dims; dim += 32) {
            const bool there = dim + t * 8 < dims, head = there && g < n_heads;
            const uint4 k = load_if(there && g < n, low + dim * 2);
            const uint4 l = load_if(there && g + 8 < n, high + dim * 2);
            const uint4 q = load_if(head, whole + dim * 2);
            const uint4 r = load_if(head, rest + dim * 2);
            multiply_add(scores, k.x, l.x, k.y, l.y, q.x, q.y);
            multiply_add(rests, k.x, l.x, k.y, l.y, r.x, r.y);
            multiply_add(scores, k.z, l.z, k.w, l.w, q.z, q.w);
            multiply_add(rests, k.z, l.z, k.w, l.w, r.z, r.w);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            scores[i] += rests[i];
        }
    }

    // sums += weights x values of 16 tokens. Lane g has the elements 8 g .. 8 g + 8 of each 64, four
    // products for them: rows g and g + 8 of product i are the elements 2 i and 2 i + 1.
    __device__ __forceinline__ void add_values(float sums[8][4], const u8* values, u32 n,
                                               u32 first_dim, u32 weights_low,
                                               u32 weights_high) const {
        const u32 g = lane / 4, t = lane % 4, dims = h.head_dim;
#pragma unroll
        for (u32 upper = 0; upper < 2; upper++) {
            const u32 dim = first_dim + (g + 8 * upper) * 8;
            uint4 rows[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 token = 2 * t + i % 2 + i / 2 * 8;
                rows[i] = load_if(dim < dims && token < n, values + (token * dims + dim) * 2);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 a = word_of(rows[0], i), b = word_of(rows[1], i);
                const u32 c = word_of(rows[2], i), d = word_of(rows[3], i);
                multiply_add(sums[4 * upper + i], __byte_perm(a, b, 0x5410),
                             __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                             __byte_perm(c, d, 0x7632), weights_low, weights_high);
            }
        }
    }

    // Leaves scratch[worker][head][max, sum, values].
    __device__ __forceinline__ void attend() const {
        u32 worker = warp, part = 0;
        if (item.parts > 1) {
            worker = warp / item.parts;
            part = warp % item.parts;
        }
        if (worker >= item.workers) {
            return;
        }
        const u32 first_head = part == 0 ? 0 : part / item.dim_parts * WARP_HEADS;
        const u32 n_heads = min(item.group - first_head, WARP_HEADS);
        const u32 first_dim = part == 0 ? 0 : part % item.dim_parts * WARP_DIMS;
        const u32 g = lane / 4, t = lane % 4;
        // Of heads 2t and 2t + 1.
        float max[2] = {-infinity(), -infinity()}, sum[2] = {}, sums[8][4] = {};
        for (u32 unit = worker; unit < item.units + item.newest; unit += item.workers) {
            const bool cached = unit < item.units;
            u32 position = 0, n = 1;
            const u32 first = item.first + unit * h.unit_tokens;
            const u8* keys = newest();
            const u8* values = keys + row_bytes();
            if (cached) {
                const u32 first_slot = op.first_slot + op.n_slots + op.kv_before * item.units;
                position = ring.wait_full(first_slot + unit);
                n = min(h.unit_tokens, item.end - first);
                keys = shared + position * SLOT_BYTES;
                values = keys + h.unit_tokens * row_bytes();
            }
            for (u32 tile = 0; tile < n; tile += 16) {
                float scores[4] = {};
                score(scores, keys + tile * row_bytes(), n - tile, first_head, n_heads);
                bool attends[2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 token = tile + g + 8 * i;
                    attends[i] =
                        token < n && (!cached || item.attends(first + token, op.window));
                }
                float best[2];
#pragma unroll
                for (u32 head = 0; head < 2; head++) {
                    scores[head] = attends[0] ? scores[head] : -infinity();
                    scores[2 + head] = attends[1] ? scores[2 + head] : -infinity();
                    best[head] = fmaxf(scores[head], scores[2 + head]);
                }
#pragma unroll
                for (u32 offset = 4; offset < 32; offset *= 2) {
                    const float other[2] = {__shfl_xor_sync(ALL_LANES, best[0], offset),
                                            __shfl_xor_sync(ALL_LANES, best[1], offset)};
                    best[0] = fmaxf(best[0], other[0]);
                    best[1] = fmaxf(best[1], other[1]);
                }
                u16 rounded[4];
                float factors[2];
                bool higher = false;
#pragma unroll
                for (u32 head = 0; head < 2; head++) {
                    // An exponent without fraction: what f16 makes of a weight does not depend on it.
                    best[head] = fmaxf(ceilf(best[head]), max[head]);
                    higher |= best[head] != max[head] && max[head] != -infinity();
                    // Nothing attended to yet: -infinity - -infinity would be NaN.
                    const float from = best[head] == -infinity() ? 0.0f : best[head];
                    factors[head] = exp2_approx(max[head] - from);
                    rounded[head] = float_to_half(exp2_approx(scores[head] - from));
                    rounded[2 + head] = float_to_half(exp2_approx(scores[2 + head] - from));
                    max[head] = best[head];
                    sum[head] = sum[head] * factors[head] +
                                (half_to_float(rounded[head]) + half_to_float(rounded[2 + head]));
                }
                // Seldom: the exponents are whole, and at first there is nothing to scale.
                if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
                    for (u32 i = 0; i < 8; i++) {
#pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            sums[i][j] *= factors[j % 2];
                        }
                    }
                }
                add_values(sums, values + tile * row_bytes(), n - tile, first_dim,
                           transposed(rounded[0] | u32(rounded[1]) << 16),
                           transposed(rounded[2] | u32(rounded[3]) << 16));
            }
            if (cached) {
                ring.release(position, SLOT_ARRIVALS / item.parts);
            }
        }
        const u32 record = 2 + h.head_dim;
#pragma unroll
        for (u32 offset = 4; offset < 32; offset *= 2) {
            const float other[2] = {__shfl_xor_sync(ALL_LANES, sum[0], offset),
                                    __shfl_xor_sync(ALL_LANES, sum[1], offset)};
            sum[0] += other[0];
            sum[1] += other[1];
        }
#pragma unroll
        for (u32 head = 0; head < 2; head++) {
            const u32 index = 2 * t + head;
            if (index >= n_heads) {
                continue;
            }
            float* out = scratch() + (worker * item.group + first_head + index) * record;
            if (g == 0 && first_dim == 0) {
                out[0] = max[head];
                out[1] = sum[head];
            }
#pragma unroll
            for (u32 upper = 0; upper < 2; upper++) {
                const u32 dim = first_dim + (g + 8 * upper) * 8;
                if (dim < h.head_dim) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const float* both = sums[4 * upper + i];
                        *reinterpret_cast<float2*>(out + 2 + dim + 2 * i) = {both[head],
                                                                             both[2 + head]};
                    }
                }
            }
        }
    }

    // ---- joining

    // A record of this key head's partial results.
    __device__ __forceinline__ u64* partial(u32 query, u32 segment) const {
        const u32 head = item.kv_head * item.group + query;
        const u32 record = 1 + h.head_dim / 2;
        return reinterpret_cast<u64*>(peers.exchange + h.partials) +
               u64(head * h.segments + segment) * record;
    }

    // Joins the warps; publishes the result or, with other segments beside it, a partial one.
    __device__ __forceinline__ void join_warps(u32 tag) const {
        const u32 record = 2 + h.head_dim, n_query = item.group, n_workers = item.workers;
        const u32 pairs = h.head_dim / 2, n_words = n_query * pairs;
        u32* vector = peers.exchange + op.attention + item.kv_head * n_words;
        u32 published = 0;
        for (u32 start = warp * 32; start < n_words; start += CONSUMERS) {
            const u32 word = start + lane;
            if (word < n_words) {
                const u32 query = word / pairs, pair = word % pairs;
                const float* records = scratch() + query * record;
                float best = -infinity();
#pragma unroll
                for (u32 w = 0; w < CONSUMER_WARPS; w++) {
                    best = fmaxf(best, w < n_workers ? records[w * n_query * record] : -infinity());
                }
                const float from = best == -infinity() ? 0.0f : best;
                float sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
                for (u32 w = 0; w < CONSUMER_WARPS; w++) {
                    if (w < n_workers) {
                        const float* of_warp = records + w * n_query * record;
                        const float2 values =
                            *reinterpret_cast<const float2*>(of_warp + 2 + 2 * pair);
                        const float factor = exp2_approx(of_warp[0] - from);
                        sum += factor * of_warp[1];
                        low += factor * values.x;
                        high += factor * values.y;
                    }
                }
                const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
                const u32 packed = pack_pair(low * inverse, high * inverse, phase);
                if (item.segments == 1) {
                    store_relaxed(vector + word, packed);
                } else {
                    u64* to = partial(query, item.segment);
                    store_relaxed_u64(to + 1 + pair, u64(tag) << 32 | packed);
                    if (pair == 0) {
                        const float weight = best + log2f(sum);
                        store_relaxed_u64(to, u64(tag) << 32 | __float_as_uint(weight));
                    }
                }
            }
            published += min(n_words - start, 32u);
        }
        if (item.segments == 1) {
            __syncwarp();
            if (lane == 0 && published > 0) {
                add_relaxed(peers.exchange + op.counter_attention, published);
            }
        }
    }

    // Waits for a word of a partial result, which has been read once.
    __device__ __forceinline__ u32 tagged(u64 word, const u64* from, u32 tag, u32 op_index) const {
        if (u32(word >> 32) != tag) {
            peers.wait(WAIT_PARTIALS, op_index, [&] {
                word = load_relaxed_u64(from);
                return u32(word >> 32) == tag;
            });
        }
        return u32(word);
    }

    // This block's slice of the key head's elements, over all segments: a warp per word, a lane
    // per segment.
    __device__ __forceinline__ void join_segments(u32 tag, u32 op_index) const {
        const u32 pairs = h.head_dim / 2, n_words = item.group * pairs;
        const u32 first = n_words * item.segment / item.segments;
        const u32 end = n_words * (item.segment + 1) / item.segments;
        u32* vector = peers.exchange + op.attention + item.kv_head * n_words;
        u32 published = 0;
        for (u32 word = first + warp; word < end; word += CONSUMER_WARPS) {
            const u32 query = word / pairs, pair = word % pairs;
            float max = -infinity(), sum = 0.0f, low = 0.0f, high = 0.0f;
            for (u32 start = 0; start < item.segments; start += 32) {
                float weight = -infinity();
                u32 packed = 0;
                if (start + lane < item.segments) {
                    const u64* from = partial(query, start + lane);
                    const u64 first = load_relaxed_u64(from), own = load_relaxed_u64(from + 1 + pair);
                    packed = tagged(own, from + 1 + pair, tag, op_index);
                    weight = __uint_as_float(tagged(first, from, tag, op_index));
                }
                __syncwarp();
                float best = fmaxf(max, weight);
                for (u32 offset = 16; offset > 0; offset /= 2) {
                    best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, offset));
                }
                const float old = max == -infinity() ? 0.0f : exp2_approx(max - best);
                const float factor = weight == -infinity() ? 0.0f : exp2_approx(weight - best);
                sum = sum * old + factor;
                low = low * old + factor * pair_low(packed);
                high = high * old + factor * pair_high(packed);
                max = best;
            }
            sum = warp_sum(sum);
            low = warp_sum(low);
            high = warp_sum(high);
            if (lane == 0) {
                store_relaxed(vector + word, pack_pair(low / sum, high / sum, phase));
            }
            published++;
        }
        if (lane == 0 && published > 0) {
            add_relaxed(peers.exchange + op.counter_attention, published);
        }
    }

    // All warps that compute. The activations' place and the scratch are free when it begins and
    // when the next operation's activations are complete.
    __device__ __forceinline__ void run(u32 op_index) const {
        prepare_heads(op_index);
        sync_consumers();
        attend();
        sync_consumers();
        const u32 tag = epoch * h.n_layer + op.layer + 1;
        join_warps(tag);
        if (item.segments > 1) {
            join_segments(tag, op_index);
        }
    }
};
