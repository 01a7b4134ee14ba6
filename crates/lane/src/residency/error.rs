//! Refusals of a residency: values with numbers, after which nothing has changed (S13).

use decode_graph::{GraphError, PersistentFailure, RecordError};
use gpu_slab::SlabError;

/// Why something was not made resident, or a step not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// A limit was exceeded.
    #[error("`{name}`: {found} {what}, the limit is {limit}")]
    Limit {
        /// What was refused.
        name: String,
        /// Unit of the numbers.
        what: &'static str,
        /// Asked for.
        found: u64,
        /// Allowed.
        limit: u64,
    },
    /// The slab refused: no room, or the device failed.
    #[error(transparent)]
    Slab(#[from] SlabError),
    /// A weight's bytes do not have the length of its type and shape, or cannot be packed.
    #[error("`{name}`: {source}")]
    Weight {
        /// The weight.
        name: String,
        /// What q4k-soa said.
        source: q4k_soa::Error,
    },
    /// The key 0 means "no key".
    #[error("blob `{name}`: key 0 is reserved")]
    ZeroKey {
        /// The blob.
        name: String,
    },
    /// Nothing was given.
    #[error("`{name}` is empty")]
    Empty {
        /// What was refused.
        name: String,
    },
    /// A blob's key is taken by other bytes.
    #[error("blob `{name}`: key {key:#x} already holds {held_bytes} other bytes")]
    KeyTaken {
        /// The blob.
        name: String,
        /// Its key.
        key: u64,
        /// Length of what the key holds.
        held_bytes: u64,
    },
    /// The KV arena or step arena exists with another shape.
    #[error("the {what} is resident with {resident}; {asked} cannot replace it")]
    OtherShape {
        /// Which arena.
        what: &'static str,
        /// Its shape.
        resident: String,
        /// What was asked for.
        asked: String,
    },
    /// The block table is for another configuration.
    #[error("block table of {found} entries, the KV arena needs {expected}")]
    Table {
        /// Entries needed.
        expected: u64,
        /// Entries given.
        found: u64,
    },
    /// Something must be resident first.
    #[error("no {0} is resident yet")]
    Missing(&'static str),
    /// The logits are NaN.
    #[error("the logits are no numbers: so are some weights, or the arithmetic left its range")]
    NotNumbers,
    /// The watchdog ended a persistent step.
    #[error(transparent)]
    Persistent(#[from] PersistentFailure),
    /// The step cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The graph cannot be captured or replayed.
    #[error(transparent)]
    Graph(#[from] GraphError),
}
