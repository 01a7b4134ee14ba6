//! One file per operation: parameters, geometry, twin. The CUDA source of `ops/<name>.rs` is
//! `cu/<name>.cu`.
//!
//! Shapes are in elements. `n_tokens` is the number of tokens a step computes; matrices of
//! activations are `[n_tokens][n]`.

pub mod argmax;
pub mod attention;
pub mod attention_chunk;
pub mod attention_combine;
pub mod attention_rows;
pub mod attention_step;
pub mod embed;
pub mod gather_rows;
pub mod gemm;
pub mod gemm_skinny;
pub mod gemm_tiled;
pub mod gemv_f32;
pub mod gemv_norm;
pub mod gemv_norm_swiglu;
pub mod gemv_q8;
pub mod gemv_residual;
pub mod head;
pub mod persistent_sm90;
pub mod quantize_q8;
pub mod read_bandwidth;
pub mod rms_norm;
pub mod rms_norm_add;
pub mod rms_norm_f16;
pub mod rms_norm_q8;
pub mod rope_append;
pub mod sample;

mod cache;
mod half_rows;
mod matrix;
mod tables;

pub use gemm::GemmForm;
pub use half_rows::{HalfOrder, half_bytes};
pub use matrix::is_grouped;
