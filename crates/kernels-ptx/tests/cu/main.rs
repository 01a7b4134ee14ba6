//! The CUDA sources, compiled as C++ against `shim/` and run on the host: against their twins,
//! and changed on purpose to see that it would be noticed.

mod cases;
mod compile;
mod launch;
mod mutants;
mod net;
mod twin;
