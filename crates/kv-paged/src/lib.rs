#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod config;
mod error;
mod kv_type;
mod layout;
mod ring;
mod table;

pub use config::{DEFAULT_BLOCK_SIZE_TOKENS, PagedKvConfig};
pub use error::KvError;
pub use kv_type::KvType;
pub use layout::{KvCoord, KvLayout, KvPart};
pub use ring::KvRing;
pub use table::BlockTable;
