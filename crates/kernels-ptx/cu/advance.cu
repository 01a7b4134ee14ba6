// Makes the chosen token the input of the next step: position and slot move on by one, the slot
// around the ring; step_count counts the replays.
//
// token        [1]
// tokens       [3]
// step_count   [1]
//
// Geometry: one thread.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1)
    advance(Global<const u32> token, Global<u32> tokens, Global<u32> step_count,
            u32 max_context_tokens) {
    begin();
    tokens[POSITION] = tokens[POSITION] + 1;
    tokens[RING_SLOT] = (tokens[RING_SLOT] + 1) % max_context_tokens;
    tokens[TOKEN_ID] = token[0];
    step_count[0] = step_count[0] + 1;
}
