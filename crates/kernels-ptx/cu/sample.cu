// Draws the next token of each output by parameters of its own, and makes it the input of the next
// step. Of an output without a row nothing is written.
//
// The candidates are the top_k largest logits (0 or above 1024: 1024) in falling order, equal
// logits by rising id, NaN as -infinity. With p_i = e^(logit_i - logit_first): the shortest run
// from the front whose sum reaches top_p of all is kept (at least one; all if top_p is 1 or more),
// and it ends before the first p_i < min_p. Then weight_i = e^((logit_i - logit_first) /
// temperature), and the first i is taken whose running weight exceeds u * (sum of weights), u in
// [0, 1) from seed and position. A temperature at or below 0 takes the first candidate.
//
// logits       [n_outputs][n_vocab]
// outputs      [n_outputs], the row of each; one that is no row: none
// sampling     [n_outputs]
// tokens       [n_tokens][3]
// step_count   [n_outputs]
// token        [n_outputs]
//
// Geometry: a block of 1024 threads for each output: candidates are found by radix selection on 64-bit keys
// (logit, then id), sorted and weighed a thread each.
// Alignment: of the elements.
#include "choose.cuh"

constexpr u32 THREADS = 1024, MAX_CANDIDATES = 1024;
constexpr u32 DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;

struct SamplingPack {
    float temperature, top_p, min_p;
    u32 top_k, seed_low, seed_high;
};

// Larger logits, then lower ids, have larger keys; no two are equal.
__device__ __forceinline__ u64 sampling_key(float logit, u32 id) {
    return u64(ordered_bits(logit)) << 32 | ~id;
}

__device__ __forceinline__ float key_logit(u64 key) {
    return from_ordered_bits(u32(key >> 32));
}

// Running sums over the block's threads, this thread's value included. All threads call it.
__device__ __forceinline__ u32 block_scan(u32 value) {
    SHARED(u32, warp_sums, 32);
    for (u32 offset = 1; offset < 32; offset *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, value, offset);
        if (lane_id() >= offset) {
            value += other;
        }
    }
    if (lane_id() == 31) {
        warp_sums[warp_id()] = value;
    }
    __syncthreads();
    u32 before = 0;
    for (u32 i = 0; i < warp_id(); i++) {
        before += warp_sums[i];
    }
    return before + value;
}

// Turns weights into running sums, one after the other as the CPU twin adds them. The other
// threads wait: 1024 additions are 3 us, the usual 40 are nothing.
__device__ __forceinline__ void accumulate(Global<float> weights, u32 count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < count; i++) {
            sum += weights[i];
            weights[i] = sum;
        }
    }
    __syncthreads();
}

// The keys of at least `floor << shift` are the `keep` largest.
struct Threshold {
    u64 floor;
    u32 shift;
};

__device__ __forceinline__ Threshold select(Global<const float> logits, u32 n_vocab, u32 keep) {
    SHARED(u32, histogram, BINS);
    SHARED(u32, found, 3);  // bin, keys above it, keys in it
    u64 prefix = 0;
    u32 shift = 64, remaining = keep;
    while (shift > 0) {
        const u32 above = shift;
        shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) {
            histogram[i] = 0;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < n_vocab; i += THREADS) {
            const u64 key = sampling_key(logits[i], i);
            if (above == 64 || key >> above == prefix) {
                const u32 digit = u32(key >> shift) & ((1u << (above - shift)) - 1);
                atomicAdd(histogram + digit, 1u);
            }
        }
        __syncthreads();
        // From the largest bin down, two bins a thread.
        const u32 bin = BINS - 1 - 2 * threadIdx.x;
        const u32 first = histogram[bin], second = histogram[bin - 1];
        const u32 sum = block_scan(first + second), before = sum - first - second;
        if (before < remaining && sum >= remaining) {
            const bool in_first = before + first >= remaining;
            found[0] = in_first ? bin : bin - 1;
            found[1] = in_first ? before : before + first;
            found[2] = in_first ? first : second;
        }
        __syncthreads();
        prefix = prefix << (above - shift) | found[0];
        remaining -= found[1];
        if (found[2] == remaining) {
            break;
        }
    }
    return {prefix, shift};
}

// Sorts a power of two of keys, the largest first.
__device__ __forceinline__ void sort_falling(Global<u64> keys, u32 count) {
    for (u32 run = 2; run <= count; run *= 2) {
        for (u32 distance = run / 2; distance > 0; distance /= 2) {
            const u32 low = threadIdx.x / distance * distance * 2 + threadIdx.x % distance;
            if (low + distance < count) {
                const u64 a = keys[low], b = keys[low + distance];
                const bool falling = (low & run) == 0;
                if ((a < b) == falling) {
                    keys[low] = b;
                    keys[low + distance] = a;
                }
            }
            __syncthreads();
        }
    }
}

// A number in [0, 1): the upper 24 bits of a SplitMix64 output.
__device__ __forceinline__ float uniform(u64 seed, u32 position) {
    u64 z = seed + (u64(position) + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return float(u32(z >> 40)) / float(1 << 24);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(Global<const float> logits, Global<const u32> outputs,
           Global<const SamplingPack> sampling, Global<u32> tokens, Global<u32> step_count,
           Global<u32> token, u32 n_vocab, u32 n_tokens, u32 n_outputs, u32 max_context_tokens) {
    begin();
    const u32 output = blockIdx.x, row = outputs[output];
    if (row >= n_tokens) {
        return;
    }
    logits = logits + u64(output) * n_vocab;
    tokens = tokens + row * TOKEN_WORDS;
    const SamplingPack pack = sampling[output];
    u32 keep = pack.top_k >= 1 && pack.top_k <= MAX_CANDIDATES ? pack.top_k : MAX_CANDIDATES;
    keep = pack.temperature <= 0.0f ? 1 : min(keep, n_vocab);
    u32 sorted = 1;
    while (sorted < keep) {
        sorted *= 2;
    }

    SHARED(u64, keys, MAX_CANDIDATES);
    SHARED(float, running, MAX_CANDIDATES);
    SHARED(u32, counter, 1);
    SHARED(u32, kept, 1);
    SHARED(u32, chosen, 1);
    if (threadIdx.x == 0) {
        counter[0] = 0;
        kept[0] = keep;
    }
    if (threadIdx.x >= keep && threadIdx.x < sorted) {
        keys[threadIdx.x] = 0;
    }
    Threshold threshold = {0, 0};
    if (keep < n_vocab) {
        threshold = select(logits, n_vocab, keep);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n_vocab; i += THREADS) {
        const u64 key = sampling_key(logits[i], i);
        if (key >> threshold.shift >= threshold.floor) {
            keys[atomicAdd(counter, 1u)] = key;
        }
    }
    __syncthreads();
    sort_falling(keys, sorted);

    // From here on thread i has candidate i.
    const u32 i = threadIdx.x;
    const float first = key_logit(keys[0]);
    const float logit = i < keep ? key_logit(keys[i]) - first : 0.0f;
    const float likelihood = i < keep ? expf(logit) : 0.0f;
    running[i] = likelihood;
    accumulate(running, keep);
    if (i > 0 && i < keep) {
        // A sum may round to the whole before its end: top_p of 1 cuts nothing.
        const bool reached = pack.top_p < 1.0f && running[i - 1] >= pack.top_p * running[keep - 1];
        if (reached || likelihood < pack.min_p) {
            atomicMin(kept, i);
        }
    }
    __syncthreads();
    const u32 n_kept = kept[0];
    running[i] = i < n_kept ? expf(logit / pack.temperature) : 0.0f;
    if (i == 0) {
        chosen[0] = n_kept - 1;
    }
    accumulate(running, n_kept);
    const u64 seed = u64(pack.seed_high) << 32 | pack.seed_low;
    const float target = uniform(seed, tokens[POSITION]) * running[n_kept - 1];
    if (i < n_kept && running[i] > target) {
        atomicMin(chosen, i);
    }
    __syncthreads();
    if (i == 0) {
        const NextStep next = {token + output, tokens, step_count + output, max_context_tokens};
        next.begin_with(~u32(keys[chosen[0]]));
    }
}
