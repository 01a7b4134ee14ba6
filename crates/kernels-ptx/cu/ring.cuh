// A ring of slots in shared memory, filled by bulk copies. A slot has two barriers: `full`
// completes when a copy has arrived, `empty` when everybody who reads the slot has read it.
#pragma once

#include "common.cuh"

// 2 units of Q4_K.
constexpr u32 SLOT_BYTES = 9472;
// Arrivals that free a slot; its readers share them: divisible by 1, 2, 3 and 4.
constexpr u32 SLOT_ARRIVALS = 12;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

struct Ring {
    u32 slots, barriers;  // addresses in shared memory
    u32 n_slots;
    u32 reciprocal;  // of n_slots, 2^32 / n_slots + 1

    __device__ __forceinline__ Ring(u8* shared, u32 barriers_at, u32 n_slots)
        : slots(shared_address(shared)),
          barriers(shared_address(shared + barriers_at)),
          n_slots(n_slots),
          reciprocal(0xffffffff / n_slots + 1) {}

    __device__ __forceinline__ u32 full(u32 position) const {
        return barriers + position * 16;
    }
    __device__ __forceinline__ u32 empty(u32 position) const {
        return barriers + position * 16 + 8;
    }

    // One thread, before anybody uses it.
    __device__ __forceinline__ void init() const {
        for (u32 i = 0; i < n_slots; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full(i)) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty(i)), "r"(SLOT_ARRIVALS)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // How often the ring has come round when slot number `slot` of the step is filled.
    __device__ __forceinline__ u32 round(u32 slot) const {
        return __umulhi(slot, reciprocal);
    }

    // Where slot number `slot` of the step lies, once it is there.
    __device__ __forceinline__ u32 wait_full(u32 slot) const {
        const u32 round = this->round(slot);
        const u32 position = slot - round * n_slots;
        barrier_wait(full(position), round & 1);
        return position;
    }

    // This warp has read what it needs of the slot; every lane has.
    __device__ __forceinline__ void release(u32 position, u32 arrivals) const {
        __syncwarp();
        if (lane_id() == 0) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty(position)),
                         "r"(arrivals)
                         : "memory");
        }
    }
};

// The side that fills the ring: one thread. It passes here once for every slot of the step, about
// every 400 clocks, so what it does for one has to be little.
struct Producer {
    const Ring& ring;
    const volatile u32* limit;  // copies in flight, set by those who compute
    u32 position = 0, empty_parity = 1;
    u32 done_position = 0, done_parity = 0;
    u32 in_flight = 0;
    u64 policy;

    __device__ __forceinline__ Producer(const Ring& ring, const volatile u32* limit)
        : ring(ring), limit(limit) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }

    // Waits until the next slot may be filled, and says how many bytes will come. The slot is free
    // when the copy of n_slots before has been read; and no more than `limit` copies, or `at_least`
    // if that is more, are in flight, or what the other warps read would queue behind them.
    __device__ __forceinline__ void acquire(u32 bytes, u32 at_least = 0) {
        // A fresh barrier counts as having completed the phase before its first.
        barrier_wait(ring.empty(position), empty_parity);
        while (in_flight >= max(*limit, at_least)) {
            barrier_wait(ring.full(done_position), done_parity);
            in_flight--;
            if (++done_position == ring.n_slots) {
                done_position = 0;
                done_parity ^= 1;
            }
        }
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                         ring.full(position)),
                     "r"(bytes)
                     : "memory");
    }

    // Copies a part of the slot; sizes and places are multiples of 16 bytes.
    __device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes) const {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1], %2, [%3], %4;" ::"r"(ring.slots + position * SLOT_BYTES + to),
            "l"(from), "r"(bytes), "r"(ring.full(position)), "l"(policy)
            : "memory");
    }

    __device__ __forceinline__ void next() {
        in_flight++;
        if (++position == ring.n_slots) {
            position = 0;
            empty_parity ^= 1;
        }
    }

    // A whole slot.
    __device__ __forceinline__ void fill(const u8* from, u32 bytes) {
        acquire(bytes);
        copy(0, from, bytes);
        next();
    }
};
