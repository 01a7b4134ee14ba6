// A group of 32 weights times a group of q8 activations.
#pragma once

#include "matrix.cuh"

// d * scale_x * (scales . integer dot products) + offset * scaled_sum_x; the integers are exact.
// Element i of the activations is in byte i % 4 of word i / 4.
template <class Type>
__device__ __forceinline__ float group_dot(const Group& weights, const u32 activations[8],
                                           Q8Group q8) {
    i32 dots[2] = {0, 0};
    for (u32 i = 0; i < 8; i++) {
        dots[i / 4] = __dp4a(i32(weights.quants[i]), i32(activations[i]), dots[i / 4]);
    }
    const i32 scaled = Type::TWO_SCALES ? weights.scales[0] * dots[0] + weights.scales[1] * dots[1]
                                        : weights.scales[0] * (dots[0] + dots[1]);
    const float product = weights.d * q8.scale * float(scaled);
    return Type::OFFSET ? product + weights.offset * q8.scaled_sum : product;
}
