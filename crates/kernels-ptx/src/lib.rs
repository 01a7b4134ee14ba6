#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod geometry;
pub mod ops;
mod params;
pub mod schedule;
mod table;
mod types;

pub use geometry::{DeviceProfile, Dim3, Geometry, VectorProduct};
pub use params::{
    Access, Arg, ArgList, Elem, MAX_PARAMS, Param, ParamError, ParamKind, ScalarType, Slice,
    TwinArgs,
};
pub use table::Kernel;
pub use types::{Candidate, MAX_CANDIDATES, RopePairing, SamplingPack, TokenParams};
