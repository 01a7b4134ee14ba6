// y[i] = row rows[i] of x: the rows of a step that have outputs, one after the other. A row that is
// none of x reads the last one.
//
// x      [n_tokens][n]
// rows   [n_rows]
// y      [n_rows][n]
//
// Geometry: a block per row, a thread per four elements, at most 1024 threads.
// Alignment: of the elements.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    gather_rows(Global<const float> x, Global<const u32> rows, Global<float> y, u32 n_tokens,
                u32 n_rows, u32 n) {
    begin();
    const u32 row = min(u32(rows[blockIdx.x]), n_tokens - 1);
    x = x + u64(row) * n;
    y = y + u64(blockIdx.x) * n;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = x[i];
    }
}
