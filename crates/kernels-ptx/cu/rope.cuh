// Rotary embedding of one head, with an RMS norm before it where the model has one.
//
// Pair i turns by position * inverse_frequencies[i], the product taken and reduced to one turn in
// f64; cosine and sine times magnitude. Pairs are (2i, 2i + 1) for pairing 0, else (i, i + n_pairs).
// Elements from 2 * n_pairs on are not turned.
#pragma once

#include "common.cuh"

struct Turn {
    float cosine, sine;
};

__device__ __forceinline__ Turn turn(u32 position, double inverse_frequency, float magnitude) {
    const double half_turns = double(position) * inverse_frequency * 0.31830988618379067154;
    const float angle = float(half_turns - 2.0 * rint(half_turns * 0.5));
    Turn turn;
    sincospif(angle, &turn.sine, &turn.cosine);
    turn.cosine *= magnitude;
    turn.sine *= magnitude;
    return turn;
}

// Turns of a position's pairs, in shared memory: [n_pairs][cosine, sine].
struct Turns {
    Global<float> words;

    __device__ __forceinline__ void set(u32 pair, const Turn& turn) const {
        words[2 * pair] = turn.cosine;
        words[2 * pair + 1] = turn.sine;
    }
    __device__ __forceinline__ Turn operator()(u32 pair) const {
        return {words[2 * pair], words[2 * pair + 1]};
    }
};

struct Rope {
    Global<const double> inverse_frequencies;
    u32 n_pairs, pairing;
    float norm_eps, magnitude;

    // May be called before the inputs are waited for.
    __device__ __forceinline__ Turn turn_of(u32 position, u32 pair) const {
        return turn(position, load_constant<double>(inverse_frequencies + pair), magnitude);
    }

    // A warp's work: calls put(i, value) once for each of the head's elements; turns(i) is pair i's
    // turn. The norm's weights may be null.
    template <class TurnOfPair, class Put>
    __device__ __forceinline__ void turn_head(Global<const float> x, Global<const float> norm,
                                              u32 head_dim, const TurnOfPair& turns,
                                              const Put& put) const {
        turn_pairs(x, norm, head_dim, n_pairs, turns, put);
    }
    // The same without turning.
    template <class Put>
    __device__ __forceinline__ void copy_head(Global<const float> x, u32 head_dim,
                                              const Put& put) const {
        turn_pairs(x, nullptr, head_dim, 0, [](u32) { return Turn(); }, put);
    }

    template <class TurnOfPair, class Put>
    __device__ __forceinline__ void turn_pairs(Global<const float> x, Global<const float> norm,
                                               u32 head_dim, u32 n_turned, const TurnOfPair& turns,
                                               const Put& put) const {
        float inverse = 1.0f;
        if (norm) {
            float sum = 0.0f;
            for (u32 i = lane_id(); i < head_dim; i += 32) {
                sum += x[i] * x[i];
            }
            inverse = inverse_rms(warp_sum(sum), head_dim, norm_eps);
        }
        for (u32 i = lane_id(); i < n_turned; i += 32) {
            const u32 first = pairing == 0 ? 2 * i : i;
            const u32 second = pairing == 0 ? 2 * i + 1 : i + n_pairs;
            float a = x[first], b = x[second];
            if (norm) {
                a = a * inverse * norm[first];
                b = b * inverse * norm[second];
            }
            const Turn by = turns(i);
            put(first, a * by.cosine - b * by.sine);
            put(second, a * by.sine + b * by.cosine);
        }
        for (u32 i = 2 * n_turned + lane_id(); i < head_dim; i += 32) {
            put(i, norm ? x[i] * inverse * norm[i] : float(x[i]));
        }
    }
};
