// Which sequence's block table a row of a step has.
#pragma once

#include "common.cuh"

// The block tables of the sequences of a step, [n_sequences] every `stride` entries. Of a sequence
// beyond the last, that of the last.
struct Tables {
    Global<const u32> entries, sequences;
    u32 n_sequences, stride;

    // No kernel of a step writes them: allowed before wait_for_inputs().
    __device__ __forceinline__ Global<const u32> of_row(u32 row) const {
        return entries + u64(min(load_constant<u32>(sequences + row), n_sequences - 1)) * stride;
    }
};
