// Attention inside the persistent step: a block attends with all query heads of one key head to one
// segment of the context.
//
// What is cached comes through the ring, a slot of `unit_tokens` keys and values at a time, long
// before the queries are known. Of the newest token the block computes key and value itself, if it
// lies in its segment: turns the key, appends both to the cache, and uses what it appended. With
// one live segment the result goes out at once; with more, every block of a key head publishes its
// segment's values and the logarithm of its weight, and joins a slice of the head's elements.
#pragma once

#include "exchange.cuh"
#include "ring.cuh"

constexpr u32 CONSUMER_WARPS = 12, CONSUMERS = CONSUMER_WARPS * 32;
constexpr u32 WARP_HEADS = 4, DIMS = 8, TILE = 1;

// Barrier of the warps that compute.
__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS) : "memory");
}

struct Turn {
    float cosine, sine;
};

// As ops/rope_append.rs: the product reduced to one turn in f64.
__device__ __forceinline__ Turn turn(u32 position, double inverse_frequency, float magnitude) {
    const double half_turns = double(position) * inverse_frequency * 0.31830988618379067154;
    const float angle = float(half_turns - 2.0 * rint(half_turns * 0.5));
    Turn turn;
    sincospif(angle, &turn.sine, &turn.cosine);
    turn.cosine *= magnitude;
    turn.sine *= magnitude;
    return turn;
}

// What a block attends to in this step, the same in every layer.
struct Item {
    bool mine, newest;     // whether there is anything; whether the newest token is in it
    u32 kv_head, segment, segments;
    u32 first, end;        // cached slots
    u32 newest_slot;       // in [first, end) when the ring has come round: then stale, not attended
    u32 units;
    u32 ring_slot, max_context_tokens;

    __device__ __forceinline__ Item(const Header& h, u32 cta, u32 position, u32 slot) {
        const u32 n_live = min(u64(position) + 1, u64(h.max_context_tokens));
        const u32 share = max(div_ceil(n_live, h.segments), h.segment_min);
        const u32 per_segment = div_ceil(share, h.block_size) * h.block_size;
        segments = div_ceil(n_live, per_segment);
        kv_head = cta / h.segments;
        segment = cta % h.segments;
        mine = kv_head < h.n_kv_head && segment < segments;
        first = segment * per_segment;
        end = min(first + per_segment, n_live);
        ring_slot = slot;
        max_context_tokens = h.max_context_tokens;
        newest_slot = min(slot, n_live - 1);
        newest = mine && newest_slot >= first && newest_slot < end;
        if (newest && newest_slot + 1 == end) {
            end--;
        }
        units = mine ? div_ceil(end - first, h.unit_tokens) : 0;
    }

    __device__ __forceinline__ bool attends(u32 slot, u32 window) const {
        const u32 age = ring_slot >= slot ? ring_slot - slot
                                          : ring_slot + (max_context_tokens - slot);
        return slot < end && slot != newest_slot && (window == 0 || age < window);
    }
};

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Eight elements of a cached row in shared memory, as floats.
template <class Elem>
__device__ __forceinline__ void load_row(const u8* from, float out[DIMS]) {
    if constexpr (sizeof(Elem) == 2) {
        const uint4 words = load<uint4>(from);
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (u32 i = 0; i < DIMS; i++) {
            out[i] = half_to_float(u16(pairs[i / 2] >> (i % 2 * 16) & 0xffff));
        }
    } else {
        const float4 a = load<float4>(from), b = load<float4>(from + 16);
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    }
}

// Softmax-weighted sums of up to four heads, eight elements a lane. Exponents are of two: the
// queries carry the factor.
struct Running {
    float max[WARP_HEADS], sum[WARP_HEADS], values[WARP_HEADS][DIMS];

    __device__ __forceinline__ Running() {
#pragma unroll
        for (u32 h = 0; h < WARP_HEADS; h++) {
            max[h] = -infinity();
            sum[h] = 0.0f;
#pragma unroll
            for (u32 i = 0; i < DIMS; i++) {
                values[h][i] = 0.0f;
            }
        }
    }

    // Brings a head to a new, not smaller maximum.
    __device__ __forceinline__ void rescale(u32 h, float new_max) {
        // Nothing summed yet: -infinity - -infinity would be NaN.
        const float factor = max[h] == -infinity() ? 0.0f : exp2_approx(max[h] - new_max);
        max[h] = new_max;
        sum[h] *= factor;
#pragma unroll
        for (u32 i = 0; i < DIMS; i++) {
            values[h][i] *= factor;
        }
    }

    // Adds N tokens; those with a score of -infinity count for nothing.
    template <u32 N>
    __device__ __forceinline__ void add(u32 h, const float scores[N], const float rows[N][DIMS]) {
        float best = max[h];
#pragma unroll
        for (u32 t = 0; t < N; t++) {
            best = fmaxf(best, scores[t]);
        }
        rescale(h, best);
#pragma unroll
        for (u32 t = 0; t < N; t++) {
            const float weight = scores[t] == -infinity() ? 0.0f : exp2_approx(scores[t] - best);
            sum[h] += weight;
#pragma unroll
            for (u32 i = 0; i < DIMS; i++) {
                values[h][i] += weight * rows[t][i];
            }
        }
    }
};

template <class Elem>
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

    __device__ __forceinline__ u32 group() const {
        return h.n_head / h.n_kv_head;
    }
    // [query heads of the key head, newest key, newest value][head_dim]
    __device__ __forceinline__ float* heads() const {
        return reinterpret_cast<float*>(shared + h.quants_at);
    }
    __device__ __forceinline__ float* scratch() const {
        return reinterpret_cast<float*>(shared + h.scratch_at);
    }

    // The raw vectors of the heads this block needs, from the blocks that computed them.
    __device__ __forceinline__ void fetch_heads(u32 op_index) const {
        const u32 pairs = h.head_dim / 2, n_query = group() * pairs;
        const u32 q_words = h.n_head * pairs, kv_words = h.n_kv_head * pairs;
        const u32 n_words = n_query + (item.newest ? 2 * pairs : 0);
        const u32* vector = peers.exchange + op.output;
        for (u32 i = threadIdx.x; i < n_words; i += CONSUMERS) {
            u32 at = item.kv_head * n_query + i;
            if (i >= n_query) {
                const bool value = i >= n_query + pairs;
                at = q_words + (value ? kv_words - pairs : 0) + item.kv_head * pairs + (i - n_query);
            }
            u32 word = load_relaxed(vector + at);
            peers.wait(WAIT_HEADS, op_index, [&] {
                if (((word ^ phase) & 1) == 0) {
                    return true;
                }
                word = load_relaxed(vector + at);
                return false;
            });
            heads()[2 * i] = pair_low(word);
            heads()[2 * i + 1] = pair_high(word);
        }
    }

    // Where the newest token of this key head is cached.
    __device__ __forceinline__ u8* newest_row(bool value) const {
        const u32 slot = item.newest_slot;
        const u32 block = block_table[op.layer * h.n_blocks + slot / h.block_size];
        const u64 plane = (u64(block) * 2 + value) * h.n_kv_head + item.kv_head;
        const u64 row = plane * h.block_size + slot % h.block_size;
        return kv + u64(op.layer) * h.kv_layer * 16 + row * h.head_dim * sizeof(Elem);
    }

    // Norms and turns one head in place, by one warp.
    __device__ __forceinline__ void turn_head(float* x, u32 norm_at, float factor) const {
        const float* norm =
            norm_at == NONE ? nullptr : reinterpret_cast<const float*>(weights + u64(norm_at) * 16);
        float inverse = factor;
        if (norm) {
            float sum = 0.0f;
            for (u32 i = lane; i < h.head_dim; i += 32) {
                sum += x[i] * x[i];
            }
            inverse = factor * inverse_rms(warp_sum(sum), h.head_dim, h.norm_eps);
        }
        const Turn* turns = reinterpret_cast<const Turn*>(shared + h.turns_at);
        for (u32 i = lane; i < h.n_pairs; i += 32) {
            const u32 first = h.pairing == 0 ? 2 * i : i;
            const u32 second = h.pairing == 0 ? 2 * i + 1 : i + h.n_pairs;
            const float a = x[first] * inverse * (norm ? norm[first] : 1.0f);
            const float b = x[second] * inverse * (norm ? norm[second] : 1.0f);
            const Turn by = turns[i];
            x[first] = a * by.cosine - b * by.sine;
            x[second] = a * by.sine + b * by.cosine;
        }
        for (u32 i = 2 * h.n_pairs + lane; i < h.head_dim; i += 32) {
            x[i] = x[i] * inverse * (norm ? norm[i] : 1.0f);
        }
        __syncwarp();
    }

    // Rounds the newest key or value as the cache does, and appends it.
    __device__ __forceinline__ void append(float* x, bool value) const {
        u8* row = newest_row(value);
        for (u32 i = lane; i < h.head_dim; i += 32) {
            if constexpr (sizeof(Elem) == 2) {
                const u16 rounded = float_to_half(x[i]);
                store(row + i * 2, rounded);
                x[i] = half_to_float(rounded);
            } else {
                store(row + i * 4, x[i]);
            }
        }
    }

    __device__ __forceinline__ void turn_heads() const {
        const u32 n_query = group();
        // Scores are exponents of two.
        const float factor = h.attention_scale * 1.44269504088896340736f;
        const u32 n_tasks = n_query + (item.newest ? 2 : 0);
        for (u32 task = warp; task < n_tasks; task += CONSUMER_WARPS) {
            float* x = heads() + task * h.head_dim;
            if (task < n_query) {
                turn_head(x, op.q_norm, factor);
            } else if (task == n_query) {
                turn_head(x, op.k_norm, 1.0f);
                append(x, false);
            } else {
                append(x, true);
            }
        }
    }

    // The lanes that share a token: the fewest, a power of two, that hold a head.
    __device__ __forceinline__ u32 team_lanes() const {
        u32 lanes = 1;
        while (lanes * DIMS < h.head_dim) {
            lanes *= 2;
        }
        return lanes;
    }

    // One dot product per head with a key that the team's lanes hold.
    __device__ __forceinline__ static float score(const float query[DIMS], const float key[DIMS],
                                                  u32 team) {
        float dot = 0.0f;
#pragma unroll
        for (u32 i = 0; i < DIMS; i++) {
            dot += query[i] * key[i];
        }
        for (u32 offset = team / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(ALL_LANES, dot, offset);
        }
        return dot;
    }

    // Warps of a part of the heads that have something: a unit, or behind the last the newest token.
    __device__ __forceinline__ u32 active_warps() const {
        const u32 warps = CONSUMER_WARPS / div_ceil(group(), WARP_HEADS);
        return min(item.units + item.newest, warps);
    }

    // This warp's part of the segment, for its heads, to scratch[warp][head][max, sum, values].
    __device__ __forceinline__ void attend() const {
        const u32 parts = div_ceil(group(), WARP_HEADS), warps = CONSUMER_WARPS / parts;
        if (warp / parts >= active_warps()) {
            return;
        }
        const u32 first_head = warp % parts * WARP_HEADS;
        const u32 n_heads = min(group() - first_head, WARP_HEADS);
        const u32 team = team_lanes(), n_teams = 32 / team;
        const u32 dim = lane % team * DIMS;
        const bool has_dims = dim < h.head_dim;

        float queries[WARP_HEADS][DIMS];
#pragma unroll
        for (u32 q = 0; q < WARP_HEADS; q++) {
#pragma unroll
            for (u32 i = 0; i < DIMS; i++) {
                const bool used = q < n_heads && has_dims;
                queries[q][i] = used ? heads()[(first_head + q) * h.head_dim + dim + i] : 0.0f;
            }
        }
        Running running;
        const u32 row_bytes = h.head_dim * sizeof(Elem);
        const u32 first_slot = op.first_slot + op.n_slots + op.kv_before * item.units;
        for (u32 unit = warp / parts; unit < item.units; unit += warps) {
            const u32 position = ring.wait_full(first_slot + unit);
            const u8* keys = shared + position * SLOT_BYTES + dim * sizeof(Elem);
            const u8* values = keys + h.unit_tokens * row_bytes;
            const u32 first = item.first + unit * h.unit_tokens;
            const u32 n = min(h.unit_tokens, item.end - first);
            for (u32 tile = 0; tile < n; tile += n_teams * TILE) {
                float rows[TILE][DIMS], scores[WARP_HEADS][TILE];
                bool attends[TILE];
#pragma unroll
                for (u32 t = 0; t < TILE; t++) {
                    const u32 token = tile + t * n_teams + lane / team;
                    attends[t] = token < n && item.attends(first + token, op.window);
#pragma unroll
                    for (u32 i = 0; i < DIMS; i++) {
                        rows[t][i] = 0.0f;
                    }
                    if (token < n && has_dims) {
                        load_row<Elem>(keys + token * row_bytes, rows[t]);
                    }
                }
#pragma unroll
                for (u32 q = 0; q < WARP_HEADS; q++) {
#pragma unroll
                    for (u32 t = 0; t < TILE; t++) {
                        scores[q][t] = -infinity();
                        if (q < n_heads) {
                            const float s = score(queries[q], rows[t], team);
                            scores[q][t] = attends[t] ? s : -infinity();
                        }
                    }
                }
#pragma unroll
                for (u32 t = 0; t < TILE; t++) {
                    const u32 token = tile + t * n_teams + lane / team;
#pragma unroll
                    for (u32 i = 0; i < DIMS; i++) {
                        rows[t][i] = 0.0f;
                    }
                    if (attends[t] && has_dims) {
                        load_row<Elem>(values + token * row_bytes, rows[t]);
                    }
                }
#pragma unroll
                for (u32 q = 0; q < WARP_HEADS; q++) {
                    if (q < n_heads) {
                        running.add<TILE>(q, scores[q], rows);
                    }
                }
            }
            ring.release(position, SLOT_ARRIVALS / parts);
        }
        if (item.newest && warp / parts == item.units % warps) {
            float rows[1][DIMS];
            const float* key = heads() + group() * h.head_dim;
#pragma unroll
            for (u32 i = 0; i < DIMS; i++) {
                rows[0][i] = has_dims ? key[dim + i] : 0.0f;
            }
            float scores[WARP_HEADS][1];
#pragma unroll
            for (u32 q = 0; q < WARP_HEADS; q++) {
                const float s = score(queries[q], rows[0], team);
                scores[q][0] = q < n_heads && lane < team ? s : -infinity();
            }
#pragma unroll
            for (u32 i = 0; i < DIMS; i++) {
                rows[0][i] = has_dims ? key[h.head_dim + dim + i] : 0.0f;
            }
#pragma unroll
            for (u32 q = 0; q < WARP_HEADS; q++) {
                running.add<1>(q, scores[q], rows);
            }
        }
        // Join the warp's teams.
        for (u32 offset = team; offset < 32; offset *= 2) {
#pragma unroll
            for (u32 q = 0; q < WARP_HEADS; q++) {
                // Both lanes come to the same maximum and add what the other has at it.
                const float other_max = __shfl_xor_sync(ALL_LANES, running.max[q], offset);
                running.rescale(q, fmaxf(running.max[q], other_max));
                running.sum[q] += __shfl_xor_sync(ALL_LANES, running.sum[q], offset);
#pragma unroll
                for (u32 i = 0; i < DIMS; i++) {
                    running.values[q][i] += __shfl_xor_sync(ALL_LANES, running.values[q][i], offset);
                }
            }
        }
        const u32 record = 2 + h.head_dim;
        const u32 n_records = min(group(), WARP_HEADS);
        float* out = scratch() + warp * n_records * record;
#pragma unroll
        for (u32 q = 0; q < WARP_HEADS; q++) {
            if (q < n_heads) {
                if (lane == 0) {
                    out[q * record] = running.max[q];
                    out[q * record + 1] = running.sum[q];
                }
                if (lane < team && has_dims) {
#pragma unroll
                    for (u32 i = 0; i < DIMS; i++) {
                        out[q * record + 2 + dim + i] = running.values[q][i];
                    }
                }
            }
        }
    }

    // A record of this key head's partial results.
    __device__ __forceinline__ u64* partial(u32 query, u32 segment) const {
        const u32 head = item.kv_head * group() + query;
        const u32 record = 1 + h.head_dim / 2;
        return reinterpret_cast<u64*>(peers.exchange + h.partials) +
               u64(head * h.segments + segment) * record;
    }

    // Joins the warps; publishes the result or, with other segments beside it, a partial one.
    __device__ __forceinline__ void join_warps(u32 tag) const {
        const u32 parts = div_ceil(group(), WARP_HEADS);
        const u32 record = 2 + h.head_dim, n_records = min(group(), WARP_HEADS);
        const u32 pairs = h.head_dim / 2, n_words = group() * pairs;
        const u32 n_active = active_warps();
        u32* vector = peers.exchange + op.attention + item.kv_head * n_words;
        u32 published = 0;
        for (u32 start = warp * 32; start < n_words; start += CONSUMERS) {
            const u32 word = start + lane;
            if (word < n_words) {
                const u32 query = word / pairs, pair = word % pairs;
                const float* records =
                    scratch() + (query / WARP_HEADS * n_records + query % WARP_HEADS) * record;
                const u32 stride = parts * n_records * record;
                float max = -infinity();
                for (u32 w = 0; w < n_active; w++) {
                    max = fmaxf(max, records[w * stride]);
                }
                float sum = 0.0f, low = 0.0f, high = 0.0f;
                for (u32 w = 0; w < n_active; w++) {
                    const float* of_warp = records + w * stride;
                    const float factor =
                        of_warp[0] == -infinity() ? 0.0f : exp2_approx(of_warp[0] - max);
                    sum += factor * of_warp[1];
                    low += factor * of_warp[2 + 2 * pair];
                    high += factor * of_warp[3 + 2 * pair];
                }
                const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
                const u32 packed = pack_pair(low * inverse, high * inverse, phase);
                if (item.segments == 1) {
                    store_relaxed(vector + word, packed);
                } else {
                    u64* to = partial(query, item.segment);
                    store_relaxed_u64(to + 1 + pair, u64(tag) << 32 | packed);
                    if (pair == 0) {
                        const float weight = max + log2f(sum);
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

    __device__ __forceinline__ u32 tagged(const u64* from, u32 tag, u32 op_index) const {
        u64 word = load_relaxed_u64(from);
        peers.wait(WAIT_PARTIALS, op_index, [&] {
            if (u32(word >> 32) == tag) {
                return true;
            }
            word = load_relaxed_u64(from);
            return false;
        });
        return u32(word);
    }

    // This block's slice of the key head's elements, over all segments: a warp per word, a lane
    // per segment.
    __device__ __forceinline__ void join_segments(u32 tag, u32 op_index) const {
        const u32 pairs = h.head_dim / 2, n_words = group() * pairs;
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
                    packed = tagged(from + 1 + pair, tag, op_index);
                    weight = __uint_as_float(tagged(from, tag, op_index));
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
        const u32 n_words = (h.n_head + 2 * h.n_kv_head) * h.head_dim / 2;
        if (threadIdx.x == 0) {
            const u32 target = (epoch + 1) * n_words;
            peers.wait(WAIT_HINT, op_index, [&] {
                return i32(load_relaxed(peers.exchange + op.counter_out) - target) >= 0;
            });
        }
        sync_consumers();
        fetch_heads(op_index);
        sync_consumers();
        turn_heads();
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
