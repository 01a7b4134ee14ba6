// Reads all of a buffer once, as fast as it can be read: what other kernels are measured by.
//
// data   [n_quads * 4]
// out    [n_blocks], exclusive or of the words that the block read
//
// Geometry: n_blocks blocks of 256 threads; a block reads every n_blocks-th tile of 1024 quads.
// Alignment: data 16 bytes.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    read_bandwidth(Global<const u32> data, Global<u32> out, u32 n_quads, u32 n_blocks) {
    begin();
    SHARED(u32, partial, 8);
    u32 found = 0;
    for (u32 first = blockIdx.x * 1024 + threadIdx.x; first < n_quads; first += n_blocks * 1024) {
        uint4 quads[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 quad = first + i * 256;
            quads[i] = uint4{0, 0, 0, 0};
            if (quad < n_quads) {
                quads[i] = load_constant<uint4>(data + u64(quad) * 4);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            found ^= quads[i].x ^ quads[i].y ^ quads[i].z ^ quads[i].w;
        }
    }
    for (u32 offset = 16; offset > 0; offset /= 2) {
        found ^= __shfl_xor_sync(0xffffffff, found, offset);
    }
    if (lane_id() == 0) {
        partial[warp_id()] = found;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (u32 warp = 0; warp < 8; warp++) {
            all ^= u32(partial[warp]);
        }
        out[blockIdx.x] = all;
    }
}
