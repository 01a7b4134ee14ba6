//! CUDA kernels of a decode step, their signature table, launch geometry, and a CPU twin of each.
