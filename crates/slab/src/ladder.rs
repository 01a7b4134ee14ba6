use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

use crate::MemoryError;
use crate::report::Size;

const MIB: u64 = 1 << 20;

/// Sizes to ask a device for, in order, when nothing is known of the need: 2.5, 2 and 1 GiB.
pub const DEFAULT_LADDER: [u64; 3] = [2560 * MIB, 2048 * MIB, 1024 * MIB];

/// The sizes to ask for when a plan says how much is needed: its total first, then the rungs of
/// [`DEFAULT_LADDER`] that are smaller, for whoever can work with less than all of it.
///
/// ```
/// let gib = 1 << 30;
/// assert_eq!(gpu_slab::ladder_from(2 * gib + 1), [2 * gib + 1, 2 * gib, gib]);
/// assert_eq!(gpu_slab::ladder_from(300), [300]);
/// ```
#[must_use]
pub fn ladder_from(total_bytes: u64) -> Vec<u64> {
    let smaller = DEFAULT_LADDER.into_iter().filter(|&rung| rung < total_bytes);
    core::iter::once(total_bytes).chain(smaller).collect()
}

/// A size that the device did not grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was asked for.
    pub len_bytes: u64,
    /// What the device said.
    pub error: MemoryError,
}

impl Refusal {
    pub(crate) fn list(refusals: &[Self]) -> String {
        if refusals.is_empty() {
            return "no size was asked for".into();
        }
        let mut list = String::new();
        for (index, Self { len_bytes, error }) in refusals.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            // Writing to a string cannot fail.
            let _ = write!(list, "{separator}{}: {error}", Size(*len_bytes));
        }
        list
    }
}
