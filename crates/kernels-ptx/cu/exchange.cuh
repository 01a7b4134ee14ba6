// How the blocks of the persistent step tell each other their results, through L2.
//
// A vector is words of two f16. The lowest bit of a word is the step's phase, which alternates from
// step to step; a word is written once a step, so a reader that sees the other phase sees the word
// of the step before and looks again. No fence: the word carries its own flag. A counter of the
// words written says when looking is worth while; it is a hint and nothing relies on it.
// docs/PERSISTENT.md argues why that is sound.
#pragma once

#include "persistent_table.cuh"

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Four words, if the condition holds; else the value stays. No branch, and so nothing that keeps the
// compiler from asking for several before it looks at the first.
__device__ __forceinline__ void load_relaxed4_if(bool condition, const u32* from, uint4& value) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
        "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(u32(condition))
        : "memory");
}

__device__ __forceinline__ void store_relaxed(u32* to, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u64 load_relaxed_u64(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed_u64(u64* to, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed(u32* to, u32 value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 add_acq_rel(u32* to, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(to), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Two values as a word: f16 each, the lower one with one bit less, which is the phase.
//
// x rounded to ten significant bits is Dekker's split: c = x * (2^14 + 1), c - (c - x). Each
// operation by itself, so that the twin has the same bits.
__device__ __forceinline__ u32 pack_pair(float low, float high, u32 phase) {
    const float c = __fmul_rn(low, 16385.0f);
    low = __fsub_rn(c, __fsub_rn(c, low));
    return (u32(float_to_half(low)) & 0xfffe) | u32(float_to_half(high)) << 16 | phase;
}

__device__ __forceinline__ float pair_low(u32 word) {
    return half_to_float(u16(word & 0xfffe));
}

__device__ __forceinline__ float pair_high(u32 word) {
    return half_to_float(u16(word >> 16));
}

enum Wait : u32 { WAIT_HINT, WAIT_WORDS, WAIT_HEADS, WAIT_PARTIALS };

// What a thread needs to wait for another block and to give up.
//
// When one wait lasts longer than the limit, the thread writes down where and gives up for its
// whole block: from then on no wait of the block waits. Every block looks for such a note while it
// waits. So the step ends in any case, with wrong numbers, without choosing a token, and with
// every word and counter written as often as always: the next step finds the buffer in order.
struct Peers {
    u32* exchange;
    volatile u32* gave_up;  // in shared memory
    u32 cta, watchdog_us, jitter;

    template <class Ready>
    __device__ __forceinline__ void wait(Wait kind, u32 op, Ready ready) const {
        if (jitter) {
            delay(jitter, cta * 0x9e3779b9 + op * 4 + kind);
        }
        u64 start = 0;
        for (u32 polls = 0; !ready(); polls++) {
            if (watchdog_us != 0 && polls % 64 == 63) {
                if (start == 0) {
                    start = nanoseconds();
                }
                if (gives_up(exchange, gave_up, watchdog_us, cta, op * 4 + kind, polls, start)) {
                    return;
                }
            }
        }
    }

    // Values alone: a reference would put what it refers to into local memory.
    __device__ __noinline__ static bool gives_up(u32* exchange, volatile u32* gave_up,
                                                 u32 watchdog_us, u32 cta, u32 place, u32 polls,
                                                 u64 start) {
        if (*gave_up) {
            return true;
        }
        const bool expired = nanoseconds() - start > u64(watchdog_us) * 1000;
        if (expired && atomicCAS(exchange + FAILURE, 0, 1) == 0) {
            exchange[FAILURE + 1] = cta;
            exchange[FAILURE + 2] = place / 4;
            exchange[FAILURE + 3] = place % 4;
        }
        if (expired || (polls % 1024 == 1023 && load_relaxed(exchange + FAILURE) != 0)) {
            *gave_up = 1;
            return true;
        }
        return false;
    }

    // Up to `jitter` nanoseconds, another time each time: to show that nothing depends on timing.
    __device__ __noinline__ static void delay(u32 jitter, u32 salt) {
        u32 x = u32(clock64()) ^ (salt * 0x85ebca6b) ^ threadIdx.x;
        x ^= x >> 16;
        x *= 0x7feb352d;
        x ^= x >> 15;
        __nanosleep(x % jitter);
    }
};

// Its lowest bit is 0 if all words are of this phase.
__device__ __forceinline__ u32 out_of_phase(uint4 words, u32 phase) {
    return (words.x ^ phase) | (words.y ^ phase) | (words.z ^ phase) | (words.w ^ phase);
}
