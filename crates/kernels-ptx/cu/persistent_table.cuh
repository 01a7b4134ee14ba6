// The table of the persistent step: what all blocks know, and each block's operations. Written by
// src/schedule/table.rs, which says what the words mean; both have them in the same order.
#pragma once

#include "common.cuh"

constexpr u32 NONE = 0xffffffff;

struct Header {
    u32 n_ctas, n_ops, n_layer, n_embd;
    u32 n_head, n_kv_head, head_dim, n_vocab;
    u32 n_pairs, pairing, block_size, n_blocks;
    u32 max_context_tokens, kv_elem_bytes, segments, segment_min;
    u32 unit_tokens, embed_format, embed, frequencies;
    u32 n_slots, outstanding_busy, outstanding_idle, greedy;
    u32 kv_layer, partials, bests, quants_at;
    u32 scales_at, halves_at, scratch_at, squares_at;
    u32 misc_at, turns_at, residual_at, table_at;
    u32 barriers_at;
    float norm_eps, magnitude, embed_scale, attention_scale;
    u32 reserved[23];
};

enum OpKind : u32 { OP_QKV, OP_OUTPUT, OP_GATE_UP, OP_DOWN, OP_LOGITS };

enum Format : u32 { FORMAT_Q4_K, FORMAT_Q6_K, FORMAT_Q8_0 };

struct Run {
    u32 base, first_row, n_blocks, format_bits;

    __device__ __forceinline__ Format format() const {
        return Format(format_bits & 0xff);
    }
    // Logarithm of the units in a slot: 0 or 1.
    __device__ __forceinline__ u32 shift() const {
        return format_bits >> 8;
    }
};

struct Op {
    u32 kind, n_in, chunks, n_units;
    u32 n_slots, first_slot, kv_before, input;
    u32 counter_in, output, counter_out, attention;
    u32 counter_attention, norm, bias, q_norm;
    u32 k_norm, window, layer, chunk_reciprocal;
    Run runs[3];
};

static_assert(sizeof(Header) == 64 * 4 && sizeof(Op) == 32 * 4, "as in the schedule");

// Words of the exchange buffer's header.
constexpr u32 EPOCH = 0, ARRIVALS = 1, FAILURE = 4;
