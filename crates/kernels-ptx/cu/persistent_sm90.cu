// The decode step of one token, embedding row to next token, as one kernel: a thread block per
// multiprocessor, all at the same time.
//
//   weights        everything that no step writes: matrices in the stream layout, norms, ...
//   table          the schedule: a header, then each block's operations (persistent_table.cuh)
//   block_table    [layer][logical block]
//   kv             [layer][n_blocks][K, V][n_kv_head][block_size][head_dim] of f32 or f16
//   exchange       epoch, hint counters, vectors (exchange.cuh); zero before the first step
//   tokens         [3]: position, ring slot, token id
//   logits         [n_vocab]
//   token          [1], step_count [1]: written if the header says greedy
//   weights_16, kv_16           lengths in 16 bytes
//   table_words, block_table_entries, exchange_words, n_vocab   lengths
//   watchdog_us    longest wait for another block, 0: forever
//   jitter         nanoseconds that waits are delayed at random, 0: not
//   table_hash     not read: the key of a graph covers it
//
// A block has 12 warps that compute, one that copies and one that sums squares. The copying warp
// streams the block's weights, operation after operation, and the cached keys and values of its
// attention, into the ring; it waits for free slots only and knows nothing of activations. The
// computing warps go through the operations: wait for the input vector, quantise it (every block
// for itself, from f16), multiply unit by unit, and publish their rows:
//
//   q/k/v      rms norm of the input, + bias         -> attention in some blocks -> its vector
//   output     + residual, which the owner of a row keeps in f32 in shared memory
//   gate/up    rms norm of the input, SwiGLU
//   down       + residual
//   logits     rms norm of the input; the best of each block, and the last block chooses
//
// docs/PERSISTENT.md says why every wait ends and why what is read is what was written.
//
// Geometry: cooperative, a block of 448 threads per multiprocessor; the schedule knows the shared
// memory. Alignment: weights and kv 16 bytes.
#include "persistent_input.cuh"
#include "persistent_units.cuh"

// The order of candidates as integers: the larger logit, then the lower id, is the larger key.
// Adding +0 makes equal zeros of -0 and +0.
__device__ __forceinline__ u64 logit_key(float value, u32 index) {
    return u64(ordered_bits(value + 0.0f)) << 32 | ~index;
}

// ---- the warp that copies

// One thread.
__device__ __forceinline__ void copy_weights(const Block& b, Producer& producer, const Op& op) {
    const u32 chunks = op.chunks;
    const u32 last_groups = op.n_in / 32 - (chunks - 1) * UNIT_GROUPS;
    for (u32 r = 0; r < 3; r++) {
        const Run run = op.runs[r];
        const u32 bytes = group_bytes(run.format());
        const u8* from = b.weights + u64(run.base) * 16;
        const u32 n_units = run.n_blocks * chunks, per_slot = 1 << run.shift();
        if (last_groups == UNIT_GROUPS) {
            const u32 slot_bytes = per_slot * UNIT_GROUPS * bytes;
            const u8* end = from + u64(n_units) * UNIT_GROUPS * bytes;
            for (; from < end; from += slot_bytes) {
                producer.fill(from, min(slot_bytes, u32(end - from)));
            }
            continue;
        }
        u32 chunk = 0;
        for (u32 unit = 0; unit < n_units; unit += per_slot) {
            u32 groups = 0;
            for (u32 i = 0; i < per_slot && unit + i < n_units; i++) {
                const bool last = ++chunk == chunks;
                groups += last ? last_groups : UNIT_GROUPS;
                chunk = last ? 0 : chunk;
            }
            producer.fill(from, groups * bytes);
            from += groups * bytes;
        }
    }
}

// The cached tokens that this block attends to, in the order in which they are used.
__device__ __forceinline__ void copy_cache(const Block& b, Producer& producer, const Op& op,
                                           const u8* kv, const u32* block_table) {
    const Header& h = b.h;
    const u32 row_bytes = h.head_dim * h.kv_elem_bytes;
    const u8* layer = kv + u64(op.layer) * h.kv_layer * 16;
    const u32* table = block_table + op.layer * h.n_blocks;
    u32 blocks = 0;
    for (u32 unit = 0; unit < b.item.units; unit++) {
        // The blocks of the next 32 units at once: one after the other they would take longer than
        // their copies.
        if (unit % 32 == 0) {
            const u32 slot = b.item.first + (unit + lane_id()) * h.unit_tokens;
            blocks = slot < b.item.end ? table[slot / h.block_size] : 0;
        }
        const u32 block = __shfl_sync(ALL_LANES, blocks, unit % 32);
        const u32 slot = b.item.first + unit * h.unit_tokens;
        const u32 bytes = min(h.unit_tokens, b.item.end - slot) * row_bytes;
        const u64 plane_bytes = u64(h.n_kv_head) * h.block_size * row_bytes;
        const u64 head_bytes = (u64(b.item.kv_head) * h.block_size + slot % h.block_size) * row_bytes;
        const u8* keys = layer + block * 2 * plane_bytes + head_bytes;
        if (lane_id() == 0) {
            // The attention waits for these; the cap for idle times would keep it waiting.
            producer.acquire(2 * bytes, h.outstanding_busy);
            producer.copy(0, keys, bytes);
            producer.copy(h.unit_tokens * row_bytes, keys + plane_bytes, bytes);
            producer.next();
        }
    }
}

__device__ __forceinline__ void produce(const Block& b, const u8* kv, const u32* block_table) {
    Producer producer(b.ring, &b.misc.limit);
    for (u32 i = 0; i < b.h.n_ops; i++) {
        if (lane_id() == 0) {
            copy_weights(b, producer, b.ops[i]);
        }
        __syncwarp();
        if (b.ops[i].kind == OP_QKV) {
            copy_cache(b, producer, b.ops[i], kv, block_table);
        }
    }
}

// ---- the warp that sums squares

__device__ __forceinline__ void sum_squares(const Block& b) {
    const float4* squares = reinterpret_cast<const float4*>(b.shared + b.h.squares_at);
    for (u32 i = 0; i < b.h.n_ops; i++) {
        const Op& op = b.ops[i];
        if (b.skips(op)) {
            continue;
        }
        sync_with_summer();
        float sum = 0.0f;
        for (u32 at = lane_id(); at < CONSUMERS / 4; at += 32) {
            const float4 quad = squares[at];
            sum += (quad.x + quad.y) + (quad.z + quad.w);
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            b.misc.inverse_rms = op.norm == NONE ? 1.0f : inverse_rms(sum, op.n_in, b.h.norm_eps);
        }
        sync_with_summer();
    }
}

// ---- the warps that compute

// Sums of two neighbouring rows over the units of their block of rows.
__device__ __forceinline__ float2 sum_pair(const float* sums, u32 chunks, float scale) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll 4
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        const float2 part = *reinterpret_cast<const float2*>(sums + chunk * UNIT_ROWS);
        sum.x += part.x;
        sum.y += part.y;
    }
    return {sum.x * scale, sum.y * scale};
}

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

// Publishes the operation's rows, a pair a thread.
__device__ __forceinline__ void publish(const Block& b, const Op& op) {
    const u32 kind = op.kind, chunks = op.chunks;
    const u32 first_blocks = op.runs[0].n_blocks;
    u32 n_blocks = first_blocks;
    if (kind == OP_QKV) {
        n_blocks += op.runs[1].n_blocks + op.runs[2].n_blocks;
    }
    const u32 n_pairs = n_blocks * (UNIT_ROWS / 2);
    // Warps with high numbers have fewer units and are here first.
    const u32 first_pair = (CONSUMER_WARPS - 1 - warp_id()) * 32;
    if (first_pair >= n_pairs) {
        return;
    }
    const float inverse = b.misc.inverse_rms;
    const float* scratch = reinterpret_cast<const float*>(b.shared + b.h.scratch_at);
    float* residual = reinterpret_cast<float*>(b.shared + b.h.residual_at);
    u32* vector = b.peers.exchange + op.output;
    u32 published = 0;
    for (u32 start = first_pair; start < n_pairs; start += CONSUMERS) {
        const u32 pair = start + lane_id();
        if (pair < n_pairs) {
            const u32 block = pair / 4;
            const float* sums = scratch + block * chunks * UNIT_ROWS + pair % 4 * 2;
            float2 y = sum_pair(sums, chunks, inverse);
            u32 to = op.runs[0].first_row / 2 + pair;
            if (kind == OP_GATE_UP) {
                const float2 up =
                    sum_pair(sums + first_blocks * chunks * UNIT_ROWS, chunks, inverse);
                y.x = silu(y.x) * up.x;
                y.y = silu(y.y) * up.y;
            } else if (kind == OP_QKV) {
                const u32 second = pair - first_blocks * 4;
                if (block >= first_blocks) {
                    to = op.runs[1].first_row / 2 + second;
                }
                if (block >= first_blocks + op.runs[1].n_blocks) {
                    to = op.runs[2].first_row / 2 + second - op.runs[1].n_blocks * 4;
                }
                if (op.bias != NONE) {
                    y.x += b.floats(op.bias)[2 * to];
                    y.y += b.floats(op.bias)[2 * to + 1];
                }
            } else {
                float2* own = reinterpret_cast<float2*>(residual) + pair;
                y.x += own->x;
                y.y += own->y;
                *own = y;
            }
            store_relaxed(vector + to, pack_pair(y.x, y.y, b.phase));
        }
        published += min(n_pairs - start, 32u);
    }
    __syncwarp();
    if (lane_id() == 0) {
        add_relaxed(b.peers.exchange + op.counter_out, published);
    }
}

// Writes the logits of this block's rows, and the best of each warp's to misc.best.
__device__ __forceinline__ void write_logits(const Block& b, const Op& op, float* logits) {
    u64 key = logit_key(-infinity(), 0xffffffff);
    const u32 n_rows = op.runs[0].n_blocks * UNIT_ROWS;
    const float inverse = b.misc.inverse_rms;
    const float* sums = reinterpret_cast<const float*>(b.shared + b.h.scratch_at);
    for (u32 i = threadIdx.x; i < n_rows; i += CONSUMERS) {
        const u32 row = op.runs[0].first_row + i;
        float sum = 0.0f;
        for (u32 chunk = 0; chunk < op.chunks; chunk++) {
            sum += sums[(i / UNIT_ROWS * op.chunks + chunk) * UNIT_ROWS + i % UNIT_ROWS];
        }
        if (row < b.h.n_vocab) {
            logits[row] = sum * inverse;
            key = max(key, logit_key(sum * inverse, row));
        }
    }
    key = warp_max(key);
    if (lane_id() == 0) {
        b.misc.best[warp_id()] = key;
    }
}

// The block that comes last has everybody's best: it chooses the token and ends the step.
__device__ __forceinline__ void finish(const Block& b, u32* tokens, u32* token, u32* step_count) {
    const Header& h = b.h;
    sync_consumers();
    if (warp_id() != 0) {
        return;
    }
    u64* bests = reinterpret_cast<u64*>(b.peers.exchange + h.bests);
    u32 arrived = 0;
    if (lane_id() == 0) {
        u64 key = 0;
        for (u32 w = 0; w < CONSUMER_WARPS; w++) {
            key = max(key, b.misc.best[w]);
        }
        store_relaxed_u64(bests + b.peers.cta, key);
        arrived = add_acq_rel(b.peers.exchange + ARRIVALS, 1);
    }
    arrived = __shfl_sync(ALL_LANES, arrived, 0);
    if (arrived + 1 != (b.epoch + 1) * h.n_ctas) {
        return;
    }
    u64 best = 0;
    for (u32 i = lane_id(); i < h.n_ctas; i += 32) {
        best = max(best, load_relaxed_u64(bests + i));
    }
    best = warp_max(best);
    if (lane_id() != 0) {
        return;
    }
    if (h.greedy && load_relaxed(b.peers.exchange + FAILURE) == 0) {
        const u32 chosen = ~u32(best);
        token[0] = chosen;
        tokens[POSITION] = tokens[POSITION] + 1;
        tokens[RING_SLOT] = (tokens[RING_SLOT] + 1) % h.max_context_tokens;
        tokens[TOKEN_ID] = chosen;
        step_count[0] = step_count[0] + 1;
    }
    b.peers.exchange[EPOCH] = b.epoch + 1;
}

__device__ __forceinline__ void attend(const Block& b, const Op& op, u32 op_index, u8* kv,
                                       const u32* block_table) {
    const Attention attention = {b.h,     op,       b.item,      b.peers, b.ring,  b.weights,
                                 kv,      block_table, b.shared, b.epoch, b.phase, warp_id(),
                                 lane_id()};
    attention.run(op_index);
}

__device__ __forceinline__ void consume(const Block& b, u8* kv, const u32* block_table, u32* tokens,
                                        float* logits, u32* token, u32* step_count) {
    volatile u32* limit = &b.misc.limit;
    for (u32 i = 0; i < b.h.n_ops; i++) {
        const Op& op = b.ops[i];
        if (!b.skips(op)) {
            const float squares = take_input(b, op, i);
            reinterpret_cast<float*>(b.shared + b.h.squares_at)[threadIdx.x] = squares;
            sync_with_summer();
            multiply(b, op);
            sync_with_summer();
            if (threadIdx.x == 0) {
                *limit = b.h.outstanding_idle;
            }
            if (op.kind == OP_LOGITS) {
                write_logits(b, op, logits);
            } else {
                publish(b, op);
            }
        }
        if (op.kind == OP_QKV && b.item.mine) {
            attend(b, op, i, kv, block_table);
        }
    }
    finish(b, tokens, token, step_count);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent_sm90(Global<const u8> weights, Global<const u32> table,
                    Global<const u32> block_table, Global<u8> kv, Global<u32> exchange,
                    Global<u32> tokens, Global<float> logits, Global<u32> token,
                    Global<u32> step_count, u32 weights_16, u32 kv_16, u32 table_words,
                    u32 block_table_entries, u32 exchange_words, u32 n_vocab, u32 watchdog_us,
                    u32 jitter, u32 table_hash) {
    extern __shared__ __align__(128) u8 shared[];
    const Header& in_memory = *reinterpret_cast<const Header*>(table);
    const u32 table_at = in_memory.table_at, n_ops = in_memory.n_ops;
    // The table's part for this block: the header and its operations.
    uint4* own = reinterpret_cast<uint4*>(shared + table_at);
    const uint4* header = reinterpret_cast<const uint4*>(table);
    const uint4* ops = header + sizeof(Header) / 16 + blockIdx.x * n_ops * (sizeof(Op) / 16);
    for (u32 i = threadIdx.x; i < sizeof(Header) / 16; i += THREADS) {
        own[i] = header[i];
    }
    for (u32 i = threadIdx.x; i < n_ops * (sizeof(Op) / 16); i += THREADS) {
        own[sizeof(Header) / 16 + i] = ops[i];
    }
    const Header& h = *reinterpret_cast<const Header*>(shared + table_at);
    Misc& misc = *reinterpret_cast<Misc*>(shared + in_memory.misc_at);
    const Ring ring(shared, in_memory.barriers_at, in_memory.n_slots);
    const u32 position = tokens[POSITION];
    if (warp_id() == PRODUCER && lane_id() == 0) {
        ring.init();
        misc.limit = in_memory.outstanding_busy;
        misc.token_id = tokens[TOKEN_ID];
        misc.gave_up = exchange[FAILURE] != 0;
        for (u32 w = 0; w < CONSUMER_WARPS; w++) {
            misc.best[w] = 0;  // below every candidate, for a block without rows of the logits
        }
        misc.item = Item(in_memory, blockIdx.x, position, tokens[RING_SLOT]);
    }
    Turn* turns = reinterpret_cast<Turn*>(shared + in_memory.turns_at);
    const double* frequencies =
        reinterpret_cast<const double*>(weights + u64(in_memory.frequencies) * 16);
    for (u32 i = threadIdx.x; i < in_memory.n_pairs; i += THREADS) {
        turns[i] = turn(position, frequencies[i], in_memory.magnitude);
    }
    const u32 epoch = exchange[EPOCH];
    const Block b = {shared,
                     h,
                     reinterpret_cast<const Op*>(shared + table_at + sizeof(Header)),
                     misc,
                     weights,
                     ring,
                     Peers{exchange, &misc.gave_up, blockIdx.x, watchdog_us, jitter},
                     misc.item,
                     epoch,
                     (epoch & 1) ^ 1};
    __syncthreads();
    if (warp_id() == PRODUCER) {
        produce(b, kv, block_table);
    } else if (warp_id() == SUMMER) {
        sum_squares(b);
    } else {
        consume(b, kv, block_table, tokens, logits, token, step_count);
    }
}
