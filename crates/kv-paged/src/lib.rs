#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod admission;
mod config;
mod delta;
mod error;
mod group;
mod ids;
mod kv_type;
mod layout;
mod plan_error;
mod planner;
mod pool;
mod prefix;
mod report;
mod ring;
mod sequence;
mod swap;
mod table;
mod tables;

pub use admission::{AdmissionPolicy, LivePrefix, Preemption, Reserve, Verdict};
pub use config::{DEFAULT_BLOCK_SIZE_TOKENS, PagedKvConfig};
pub use delta::{Delta, DeltaRun, Transfer};
pub use error::KvError;
pub use group::{LayerGroup, MAX_GROUPS, PlannerConfig};
pub use ids::{BlockId, GroupId, HostBlockId, SequenceId};
pub use kv_type::KvType;
pub use layout::{KvCoord, KvLayout, KvPart};
pub use plan_error::PlanError;
pub use planner::{Created, Planner, Request};
pub use pool::BlockPool;
pub use report::{GroupReport, PlannerReport, PrefixStats, SequenceReport};
pub use ring::KvRing;
pub use table::BlockTable;
pub use tables::{CsrBuffers, DenseStrides, Listed, PAD_SLOT, TableInt};
