//! The identity of a captured graph.

use kernels_ptx::Arg;
use xxhash_rust::xxh3::Xxh3;

use crate::launch::{ByteRange, Launch};

/// Key of a graph: equal keys mean equal launches of equal code on equal addresses, so a graph
/// with the wanted key is used as it is. Covers kernels with versions, geometry, every scalar
/// (and with them the model's dimensions, layouts and KV configuration), every buffer address,
/// and the backend's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphKey(u64);

impl GraphKey {
    /// The key of `launches` over memory at `base_address`, run by code with the hash
    /// `code_hash`.
    pub fn new(launches: &[Launch<ByteRange>], base_address: u64, code_hash: u64) -> Self {
        let mut hasher = Xxh3::new();
        let mut word = |value: u64| hasher.update(&value.to_le_bytes());
        word(base_address);
        word(code_hash);
        for launch in launches {
            // Table order may change between builds, names and versions identify.
            word(xxhash_rust::xxh3::xxh3_64(launch.kernel.name().as_bytes()));
            word(u64::from(launch.kernel.version()));
            let g = launch.geometry;
            g.grid.iter().chain(&g.block).for_each(|&extent| word(u64::from(extent)));
            word(u64::from(g.shared_bytes));
            word(u64::from(g.cooperative));
            for arg in &launch.args {
                match arg {
                    Arg::Buffer(range) => {
                        word(1);
                        word(range.offset_bytes);
                        word(range.len_bytes);
                    }
                    Arg::Null => word(2),
                    Arg::U32(value) => {
                        word(3);
                        word(u64::from(*value));
                    }
                    Arg::F32(value) => {
                        word(4);
                        word(u64::from(value.to_bits()));
                    }
                }
            }
        }
        Self(hasher.digest())
    }
}

impl std::fmt::Display for GraphKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
