// Turns q and k by their position, writes q out, appends k and v to one layer of the paged KV
// cache at the token's slot of its sequence.
//
// Per head of q and k: with q_norm or k_norm first an RMS norm over the head; then it is turned by
// absolute_position as rope.cuh says. v is not turned.
//
// qkv                   [n_tokens][q heads, k heads, v heads][head_dim]
// q_norm, k_norm        [head_dim] or null
// inverse_frequencies   [n_pairs]
// tokens                [n_tokens][3]
// sequences             [n_tokens], which beyond the last count as the last
// block_table           [n_logical] every table_stride, for each of n_sequences
// q                     [n_tokens][n_head][head_dim]
// kv                    [n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16; or in q8, i8
//                       with scales, see Q8Block
//
// Geometry: a warp per head: grid (ceil((n_head + 2 * n_kv_head) / 4), n_tokens), block 128.
// Alignment: of the elements; kv in q8 16 bytes.
#include "rope.cuh"
#include "tables.cuh"

// A row of the cache in q8: turn(put) gives put(i, value) its elements, as often as it is called.
template <class Turn>
__device__ __forceinline__ void append_q8(const CacheIndex& index, u32 slot, bool is_v, u32 kv_head,
                                          Global<u8> kv, const Turn& turn) {
    const Q8Block block(index);
    const u32 row = (is_v * index.n_kv_head + kv_head) * index.block_size + slot % index.block_size;
    const Global<u8> at = kv + u64(u32(index.block_table[slot / index.block_size])) * block.bytes;
    u32 amax_bits = 0;
    turn([&](u32, float value) {
        amax_bits = max(amax_bits, __float_as_uint(value) & 0x7fffffff);
    });
    const Q8Range range(__reduce_max_sync(ALL_LANES, amax_bits));
    turn([&](u32 i, float value) { at[row * index.head_dim + i] = range.quantize(value); });
    if (lane_id() == 0) {
        store(at + (block.scales_at + row * 4), range.scale);
    }
}

template <class Elem>
__device__ __forceinline__ void rope_append(Global<const float> qkv, Global<const float> q_norm,
                                            Global<const float> k_norm, const Rope& rope,
                                            Global<const u32> tokens, const Tables& tables,
                                            CacheIndex index, Global<float> q, Global<u8> kv,
                                            u32 n_head) {
    const u32 token = blockIdx.y, n_kv_head = index.n_kv_head, head_dim = index.head_dim;
    const u32 n_heads = n_head + 2 * n_kv_head;
    const u32 head = blockIdx.x * 4 + warp_id();
    const Global<const float> x = qkv + (u64(token) * n_heads + head) * head_dim;
    // What the step itself does not change before its end is fetched before its kernels are waited for.
    const Global<const u32> params = tokens + token * TOKEN_WORDS;
    const u32 position = load_constant<u32>(params + POSITION);
    const u32 slot = load_constant<u32>(params + RING_SLOT);
    if (head >= n_head) {
        index.block_table = tables.of_row(token);
        prefetch_constant(index.block_table + slot / index.block_size);
    }
    begin();
    if (head >= n_heads) {
        return;
    }
    auto turns = [&](u32 pair) { return rope.turn_of(position, pair); };
    if (head < n_head) {
        const Global<float> to = q + (u64(token) * n_head + head) * head_dim;
        rope.turn_head(x, q_norm, head_dim, turns,
                       [&](u32 i, float value) { to[i] = value; });
        return;
    }
    const bool is_v = head >= n_head + n_kv_head;
    const u32 kv_head = (head - n_head) % n_kv_head;
    auto turn = [&](const auto& put) {
        if (is_v) {
            rope.copy_head(x, head_dim, put);
        } else {
            rope.turn_head(x, k_norm, head_dim, turns, put);
        }
    };
    if constexpr (sizeof(Elem) == 1) {
        append_q8(index, slot, is_v, kv_head, kv, turn);
    } else {
        const Global<u8> to = kv + index.at(slot, is_v, kv_head) * sizeof(Elem);
        turn([&](u32 i, float value) { store_cached<Elem>(to, i, value); });
    }
}

#define ROPE_APPEND(NAME, ELEM)                                                                   \
    extern "C" __global__ void __launch_bounds__(128) NAME(                                       \
        Global<const float> qkv, Global<const float> q_norm, Global<const float> k_norm,          \
        Global<const double> inverse_frequencies, Global<const u32> tokens,                       \
        Global<const u32> sequences, Global<const u32> block_table, Global<float> q,              \
        Global<u8> kv, u32 n_tokens, u32 n_head, u32 n_kv_head, u32 head_dim, u32 n_pairs,        \
        u32 pairing, u32 block_size, u32 n_blocks, u32 n_sequences, u32 table_stride,             \
        u32 n_logical, u32 kv_elem_bytes, float norm_eps, float magnitude) {                      \
        const Rope rope = {inverse_frequencies, n_pairs, pairing, norm_eps, magnitude};           \
        const Tables tables = {block_table, sequences, n_sequences, table_stride};                \
        const CacheIndex index = {nullptr, n_kv_head, block_size, head_dim};                      \
        rope_append<ELEM>(qkv, q_norm, k_norm, rope, tokens, tables, index, q, kv, n_head);       \
    }

ROPE_APPEND(rope_append_f32, float)
ROPE_APPEND(rope_append_f16, u16)
ROPE_APPEND(rope_append_q8, i8)
