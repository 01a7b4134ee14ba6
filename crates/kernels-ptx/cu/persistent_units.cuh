// The products of an operation of the persistent step: units from the ring times the input in shared
// memory.
#pragma once

#include "persistent_block.cuh"

// The units of one run that this warp takes: first, first + CONSUMER_WARPS, ...
struct Units {
    u32 first, local, end;  // in the operation, in the run; where the run ends
    u32 slot;               // of the step, where the run begins
    u32 shift;              // see Run
    u32 chunks, last_groups, chunk_reciprocal;

    // n % chunks: the fraction of n / chunks, times chunks.
    __device__ __forceinline__ u32 chunk_of(u32 n) const {
        return __umulhi(n * chunk_reciprocal, chunks);
    }
};

// Units to sums[unit][8 rows]; returns the first unit behind the run that this warp would take.
//
// A pass through the loop is as long as a chain of dependent instructions makes it, so all that
// does not depend on the unit's bytes is kept from pass to pass instead of made anew.
template <Format FORMAT, bool FULL>
__device__ __forceinline__ u32 multiply_units(const Block& b, const Units& run, float* sums) {
    const u32 lane = lane_id(), half = lane / 16, k = lane % 16;
    const ActivationPlaces places = {
        b.shared + b.h.quants_at + k * 16,
        reinterpret_cast<const float2*>(b.shared + b.h.scales_at) + k,
        reinterpret_cast<const int2*>(b.shared + b.h.halves_at) + k,
    };
    u32 unit = run.first;
    const u32 first_slot = run.slot + (run.local >> run.shift);
    const u32 round = b.ring.round(first_slot);
    u32 position = first_slot - round * b.ring.n_slots, parity = round & 1;
    // From unit to unit: rounds of the ring, and slots beyond them.
    const u32 slot_step = CONSUMER_WARPS >> run.shift, step_rounds = b.ring.round(slot_step);
    const u32 position_step = slot_step - step_rounds * b.ring.n_slots;
    u32 chunk = run.chunk_of(run.local);
    const u32 chunk_step = run.chunk_of(CONSUMER_WARPS);
    // The second unit of a slot lies behind the first; both share the slot's arrivals. The step is
    // even, so a warp has first ones or second ones.
    const bool second = run.shift != 0 && run.local % 2 == 1;
    sums += unit * UNIT_ROWS;
    const auto release = [&] {
        const bool shared = run.shift != 0 && (second || unit + 1 < run.end);
        b.ring.release(position, shared ? SLOT_ARRIVALS / 2 : SLOT_ARRIVALS);
    };
    // Whether there is another unit.
    const auto advance = [&] {
        unit += CONSUMER_WARPS;
        position += position_step;
        parity ^= step_rounds & 1;
        if (position >= b.ring.n_slots) {
            position -= b.ring.n_slots;
            parity ^= 1;
        }
        chunk += chunk_step;
        chunk -= chunk >= run.chunks ? run.chunks : 0;
        return unit < run.end;
    };
    if constexpr (FULL && FORMAT == FORMAT_Q4_K) {
        const u32 offset = second ? UNIT_GROUPS * group_bytes(FORMAT) : 0;
        UnitQ4K own;
        bool more = true;
        barrier_wait(b.ring.full(position), parity);
        own.load(b.ring.slots + position * SLOT_BYTES + offset, UNIT_GROUPS, half, k);
        while (more) {
            release();
            float rows[4];
            own.multiply(places.of_chunk(chunk), rows);
            more = advance();
            if (more) {
                barrier_wait(b.ring.full(position), parity);
                own.load(b.ring.slots + position * SLOT_BYTES + offset, UNIT_GROUPS, half, k);
            }
            reduce_rows(rows, lane, sums);
            sums += CONSUMER_WARPS * UNIT_ROWS;
        }
        return unit;
    }
    do {
        const u32 groups = FULL || chunk + 1 < run.chunks ? UNIT_GROUPS : run.last_groups;
        const u32 before = FULL || chunk != 0 ? UNIT_GROUPS : run.last_groups;
        const u32 offset = second ? before * group_bytes(FORMAT) : 0;
        barrier_wait(b.ring.full(position), parity);
        const u32 at = b.ring.slots + position * SLOT_BYTES + offset;
        float rows[4] = {};
        if constexpr (FULL) {
            unit_dot<FORMAT>(at, UNIT_GROUPS, places.of_chunk(chunk), half, k, rows, release);
        } else {
            if (k < (groups + 1) / 2) {
                unit_dot<FORMAT>(at, groups, places.of_chunk(chunk), half, k, rows, [] {});
            }
            release();
        }
        reduce_rows(rows, lane, sums);
        sums += CONSUMER_WARPS * UNIT_ROWS;
    } while (advance());
    return unit;
}

template <bool FULL>
__device__ __forceinline__ u32 multiply_run(const Block& b, Format format, const Units& run,
                                             float* sums) {
    switch (format) {
    case FORMAT_Q4_K: return multiply_units<FORMAT_Q4_K, FULL>(b, run, sums);
    case FORMAT_Q6_K: return multiply_units<FORMAT_Q6_K, FULL>(b, run, sums);
    default: return multiply_units<FORMAT_Q8_0, FULL>(b, run, sums);
    }
}

// Units of the operation to scratch[unit][8 rows], a unit a warp.
__device__ __forceinline__ void multiply(const Block& b, const Op& op) {
    u32 slot = op.first_slot + op.kv_before * b.item.units;
    u32 unit = warp_id(), first = 0;
    // Read again for each run: no register is left to keep it in.
    const volatile u32& n_units = op.n_units;
#pragma unroll 1
    for (u32 r = 0; unit < n_units; r++) {
        const Run run = op.runs[r];
        const u32 chunks = op.chunks, shift = run.shift();
        const u32 run_units = run.n_blocks * chunks, end = first + run_units;
        const u32 next_slot = slot + ((run_units + (1 << shift) - 1) >> shift);
        if (unit < end) {
            const u32 last_groups = op.n_in / 32 - (chunks - 1) * UNIT_GROUPS;
            const Units units = {unit,  unit - first, end,         slot,
                                 shift, chunks,       last_groups, op.chunk_reciprocal};
            float* sums = reinterpret_cast<float*>(b.shared + b.h.scratch_at);
            unit = last_groups == UNIT_GROUPS ? multiply_run<true>(b, run.format(), units, sums)
                                              : multiply_run<false>(b, run.format(), units, sums);
        }
        slot = next_slot;
        first = end;
    }
}
