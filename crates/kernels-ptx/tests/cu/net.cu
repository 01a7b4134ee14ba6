// Small kernels, most of them wrong, each in one way. net.rs says what has to be found.
#include "common.cuh"

extern "C" __global__ void right(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    values[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = values[63 - threadIdx.x];
}

extern "C" __global__ void out_of_bounds(Global<const u32> in, Global<u32> out) {
    begin();
    out[threadIdx.x] = in[threadIdx.x + 1];
}

extern "C" __global__ void before_the_start(Global<const u32> in, Global<u32> out) {
    begin();
    out[threadIdx.x] = in[i32(threadIdx.x) - 1];
}

extern "C" __global__ void uninitialised(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    if (threadIdx.x != 5) {
        values[threadIdx.x] = in[threadIdx.x];
    }
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void reads_output(Global<const u32> in, Global<u32> out) {
    begin();
    out[threadIdx.x] += in[threadIdx.x];
}

extern "C" __global__ void writes_input(Global<u32> in, Global<u32> out) {
    begin();
    in[threadIdx.x] = 0;
}

extern "C" __global__ void misaligned(Global<const u32> in, Global<u32> out) {
    begin();
    const uint4 quad = load<uint4>(in + 1);
    out[threadIdx.x] = quad.x;
}

extern "C" __global__ void does_not_wait(Global<const u32> in, Global<u32> out) {
    out[threadIdx.x] = load_constant<u32>(in + threadIdx.x);
}

extern "C" __global__ void no_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    values[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = values[threadIdx.x ^ 32];
}

extern "C" __global__ void no_warp_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    values[threadIdx.x] = in[threadIdx.x];
    // Brings the lanes together, but orders no memory.
    __shfl_xor_sync(ALL_LANES, threadIdx.x, 1);
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}

extern "C" __global__ void warp_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    values[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    const u32 other = values[threadIdx.x ^ 1];
    __syncwarp();
    values[threadIdx.x ^ 1] = other + 1;
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void copies(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    if (threadIdx.x < 8) {
        copy_async(values + threadIdx.x * 4, in + threadIdx.x * 4, 16);
    }
    close_copies();
    if (threadIdx.x < 8) {
        copy_async(values + 32 + threadIdx.x * 4, in + 32 + threadIdx.x * 4, threadIdx.x);
    }
    close_copies();
    wait_for_copies(1);
    __syncthreads();
    const u32 first = threadIdx.x < 32 ? u32(values[31 - threadIdx.x]) : 0;
    wait_for_copies(0);
    __syncthreads();
    out[threadIdx.x] = threadIdx.x < 32 ? first : u32(values[threadIdx.x]);
}

extern "C" __global__ void copy_not_waited_for(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    for (u32 half = 0; half < 2; half++) {
        if (threadIdx.x < 8) {
            copy_async(values + half * 32 + threadIdx.x * 4, in + half * 32 + threadIdx.x * 4, 16);
        }
        close_copies();
    }
    wait_for_copies(1);
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void copy_without_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    if (threadIdx.x < 16) {
        copy_async(values + threadIdx.x * 4, in + threadIdx.x * 4, 16);
    }
    close_copies();
    wait_for_copies(0);
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void copy_over_copy(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    for (u32 i = 0; i < 2; i++) {
        if (threadIdx.x < 8) {
            copy_async(values + threadIdx.x * 4, in + (i * 8 + threadIdx.x) * 4, 16);
        }
        close_copies();
    }
    wait_for_copies(0);
}

extern "C" __global__ void copy_before_inputs(Global<const u32> in, Global<u32> out) {
    SHARED(u32, values, 64);
    copy_async(values + threadIdx.x * 4 % 64, in + threadIdx.x * 4 % 64, 16);
    begin();
}

extern "C" __global__ void write_after_read(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, values, 64);
    values[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    const u32 first = values[0];
    if (threadIdx.x == 40) {
        values[0] = 1;
    }
    out[threadIdx.x] = first;
}

extern "C" __global__ void two_blocks_write(Global<const u32> in, Global<u32> out) {
    begin();
    out[threadIdx.x] = in[threadIdx.x];
}

extern "C" __global__ void two_blocks_add(Global<const u32> in, Global<u32> out) {
    begin();
    if (blockIdx.x == 0 && threadIdx.x > 0) {
        out[threadIdx.x] = in[0];
    }
    // Needs a value to start from: `out` is not one.
    SHARED(u32, sum, 1);
    if (threadIdx.x == 0) {
        sum[0] = 0;
    }
    __syncthreads();
    atomicAdd(sum, 1u);
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        out[0] = sum[0];
    }
}

extern "C" __global__ void reads_while_others_add(Global<const u32> in, Global<u32> out) {
    begin();
    SHARED(u32, sum, 1);
    if (threadIdx.x == 0) {
        sum[0] = 0;
    }
    __syncthreads();
    atomicAdd(sum, 1u);
    out[threadIdx.x] = sum[0];
}

extern "C" __global__ void diverged_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void left_before_barrier(Global<const u32> in, Global<u32> out) {
    begin();
    if (threadIdx.x == 7) {
        return;
    }
    __syncthreads();
}

extern "C" __global__ void lanes_missing(Global<const u32> in, Global<u32> out) {
    begin();
    if (threadIdx.x % 2 == 0) {
        out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 2);
    }
}

extern "C" __global__ void deadlock(Global<const u32> in, Global<u32> out) {
    begin();
    if (threadIdx.x % 2 == 0) {
        __syncwarp();
    }
    __syncthreads();
}

extern "C" __global__ void diverged_warp(Global<const u32> in, Global<u32> out) {
    begin();
    if (threadIdx.x % 2 == 0) {
        __shfl_xor_sync(ALL_LANES, threadIdx.x, 2);
    } else {
        __syncwarp();
    }
}

extern "C" __global__ void endless(Global<const u32> in, Global<u32> out) {
    begin();
    while (in[0] < 1000) {
    }
}

extern "C" __global__ void warp_operations(Global<const u32> in, Global<u32> out) {
    begin();
    const u32 lane = lane_id(), value = in[threadIdx.x];
    u32 bits = 0;
    bits += __shfl_xor_sync(ALL_LANES, value, 3) == in[threadIdx.x ^ 3];
    bits += __shfl_up_sync(ALL_LANES, value, 2) == in[lane < 2 ? threadIdx.x : threadIdx.x - 2];
    bits += __shfl_down_sync(ALL_LANES, value, 5) == in[lane > 26 ? threadIdx.x : threadIdx.x + 5];
    bits += __shfl_sync(ALL_LANES, value, 9) == in[warp_id() * 32 + 9];
    bits += __shfl_sync(ALL_LANES, u64(value) << 32, 9) == u64(in[warp_id() * 32 + 9]) << 32;
    bits += __ballot_sync(ALL_LANES, lane % 2) == 0xaaaaaaaa;
    bits += __all_sync(ALL_LANES, lane < 32) && !__all_sync(ALL_LANES, lane < 31);
    bits += __any_sync(ALL_LANES, lane == 31) && !__any_sync(ALL_LANES, lane == 32);
    bits += __reduce_add_sync(ALL_LANES, lane) == 496;
    bits += __reduce_max_sync(ALL_LANES, lane) == 31;
    bits += __reduce_min_sync(ALL_LANES, lane + 4) == 4;
    // Half of the lanes by themselves.
    if (lane >= 16) {
        bits += __shfl_xor_sync(0xffff0000, lane, 1) == (lane ^ 1);
        bits += __ballot_sync(0xffff0000, 1) == 0xffff0000;
    } else {
        bits += 2;
    }
    out[threadIdx.x] = bits;
}

extern "C" __global__ void widen(Global<const u32> in, Global<u32> out) {
    begin();
    const u32 i = blockIdx.x * 64 + threadIdx.x;
    out[i] = __float_as_uint(half_to_float(u16(u32(in[i]))));
}

extern "C" __global__ void narrow(Global<const u32> in, Global<u32> out) {
    begin();
    const u32 i = blockIdx.x * 64 + threadIdx.x;
    out[i] = float_to_half(__uint_as_float(in[i]));
}
