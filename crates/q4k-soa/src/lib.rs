#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod activation;
pub mod block;
mod error;
mod fingerprint;
mod layout;
mod matrix;
pub mod matvec;
mod pack;
mod quantize;
pub mod transcode;
mod weight_type;

pub use activation::{Q8Group, quantize_q8};
pub use block::dequantize;
pub use error::Error;
pub use fingerprint::{Fingerprint, FingerprintHasher, checksum, fingerprint};
pub use layout::{
    LayoutId, LayoutVersion, PackedLayout, Plane, PlaneId, PlanePiece, PlanePieces, Shape,
    StreamUnits,
};
pub use matrix::PackedMatrix;
pub use matvec::{ArrangedF32, ArrangedQ8, matvec_f32, matvec_q8, rows_dot_f32, rows_dot_q8};
pub use pack::{pack, pack_rows_into, pack_rows_planes, unpack, unpack_rows};
pub use quantize::quantize;
pub use transcode::TranscodedType;
pub use weight_type::{WeightType, ggml_type_block, ggml_type_name};

/// Weights per group: the unit that one activation scale belongs to.
pub const GROUP_ELEMS: usize = 32;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;
