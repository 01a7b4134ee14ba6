//! What a live graph tells about itself.

use crate::key::GraphKey;

/// Read-only facts about a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphTelemetry {
    /// Identity.
    pub key: GraphKey,
    /// Kernel nodes, counted by the backend.
    pub nodes: usize,
    /// Replays so far.
    pub replays: u64,
    /// Bytes that went from host to device between the end of the last-but-one replay and the
    /// end of the last one, counted at the slab's write path; `None` before the second replay.
    pub h2d_bytes_per_token: Option<u64>,
}
