// Turns q and k by their position, writes q out, appends k and v to one layer of the paged KV
// cache at the token's slot.
//
// Per head of q and k: with q_norm or k_norm first an RMS norm over the head; then pair i turns by
// absolute_position * inverse_frequencies[i], the product taken and reduced to one turn in f64;
// cosine and sine times magnitude. Pairs are (2i, 2i + 1) for pairing 0, else (i, i + n_pairs).
// Elements from 2 * n_pairs on are not turned, nor is v.
//
// qkv                   [n_tokens][q heads, k heads, v heads][head_dim]
// q_norm, k_norm        [head_dim] or null
// inverse_frequencies   [n_pairs]
// tokens                [n_tokens][3]
// block_table           [n_blocks]
// q                     [n_tokens][n_head][head_dim]
// kv                    [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16
//
// Geometry: a warp per head: grid (ceil((n_head + 2 * n_kv_head) / 4), n_tokens), block 128.
// Alignment: of the elements.
#include "common.cuh"

// Where a head's results go: to q, or rounded to the cache.
template <class Elem>
struct HeadOutput {
    Global<float> q;  // null for k and v
    Global<u8> cache;

    __device__ __forceinline__ void put(u32 i, float value) const {
        if (q) {
            q[i] = value;
        } else if constexpr (sizeof(Elem) == 2) {
            store(cache + u64(i) * 2, float_to_half(value));
        } else {
            store(cache + u64(i) * 4, value);
        }
    }
};

struct Turn {
    float cosine, sine;
};

__device__ __forceinline__ Turn turn(u32 position, double inverse_frequency, float magnitude) {
    const double half_turns = double(position) * inverse_frequency * 0.31830988618379067154;
    const float angle = float(half_turns - 2.0 * rint(half_turns * 0.5));
    Turn turn;
    sincospif(angle, &turn.sine, &turn.cosine);
    turn.cosine *= magnitude;
    turn.sine *= magnitude;
    return turn;
}

template <class Elem>
__device__ __forceinline__ void rope_append(
    Global<const float> qkv, Global<const float> q_norm, Global<const float> k_norm,
    Global<const double> inverse_frequencies, Global<const u32> tokens,
    Global<const u32> block_table, Global<float> q, Global<u8> kv, u32 n_head, u32 n_kv_head,
    u32 head_dim, u32 n_pairs, u32 pairing, u32 block_size, float norm_eps, float magnitude) {
    begin();
    const u32 token = blockIdx.y;
    const u32 n_heads = n_head + 2 * n_kv_head;
    const u32 head = blockIdx.x * 4 + warp_id();
    if (head >= n_heads) {
        return;
    }
    const bool is_q = head < n_head, is_v = head >= n_head + n_kv_head;
    const Global<const float> x = qkv + (u64(token) * n_heads + head) * head_dim;

    HeadOutput<Elem> out = {nullptr, kv};
    if (is_q) {
        out.q = q + (u64(token) * n_head + head) * head_dim;
    } else {
        const CacheIndex index = {block_table, n_kv_head, block_size, head_dim};
        const u32 slot = tokens[token * TOKEN_WORDS + RING_SLOT];
        const u64 at = index.at(slot, is_v, (head - n_head) % n_kv_head);
        out.cache = kv + at * sizeof(Elem);
    }

    Global<const float> norm = nullptr;
    if (!is_v) {
        norm = is_q ? q_norm : k_norm;
    }
    float inverse = 1.0f;
    if (norm) {
        float sum = 0.0f;
        for (u32 i = lane_id(); i < head_dim; i += 32) {
            sum += x[i] * x[i];
        }
        inverse = inverse_rms(warp_sum(sum), head_dim, norm_eps);
    }

    const u32 position = tokens[token * TOKEN_WORDS + POSITION];
    const u32 n_turned = is_v ? 0 : n_pairs;
    for (u32 i = lane_id(); i < n_turned; i += 32) {
        const u32 first = pairing == 0 ? 2 * i : i;
        const u32 second = pairing == 0 ? 2 * i + 1 : i + n_pairs;
        float a = x[first], b = x[second];
        if (norm) {
            a = a * inverse * norm[first];
            b = b * inverse * norm[second];
        }
        const Turn by = turn(position, inverse_frequencies[i], magnitude);
        out.put(first, a * by.cosine - b * by.sine);
        out.put(second, a * by.sine + b * by.cosine);
    }
    for (u32 i = 2 * n_turned + lane_id(); i < head_dim; i += 32) {
        out.put(i, norm ? x[i] * inverse * norm[i] : float(x[i]));
    }
}

#define ROPE_APPEND(NAME, ELEM)                                                                   \
    extern "C" __global__ void __launch_bounds__(128) NAME(                                       \
        Global<const float> qkv, Global<const float> q_norm, Global<const float> k_norm,          \
        Global<const double> inverse_frequencies, Global<const u32> tokens,                       \
        Global<const u32> block_table, Global<float> q, Global<u8> kv, u32 n_tokens, u32 n_head,  \
        u32 n_kv_head, u32 head_dim, u32 n_pairs, u32 pairing, u32 block_size, u32 n_blocks,      \
        u32 kv_elem_bytes, float norm_eps, float magnitude) {                                     \
        rope_append<ELEM>(qkv, q_norm, k_norm, inverse_frequencies, tokens, block_table, q, kv,   \
                          n_head, n_kv_head, head_dim, n_pairs, pairing, block_size, norm_eps,    \
                          magnitude);                                                             \
    }

ROPE_APPEND(rope_append_f32, float)
ROPE_APPEND(rope_append_f16, u16)
