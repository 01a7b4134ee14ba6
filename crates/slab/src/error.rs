use alloc::string::String;
use alloc::vec::Vec;

use crate::{MemoryError, Refusal, SlabId};

/// Why a slab refused. Every refusal carries its numbers and leaves the slab as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlabError {
    /// The allocation does not fit.
    #[error(
        "no room for `{name}`: {requested_bytes} bytes asked for, {free_bytes} free, \
         {shortage_bytes} short with alignment"
    )]
    OutOfMemory {
        /// The allocation's name.
        name: String,
        /// Its length.
        requested_bytes: u64,
        /// What was free before alignment.
        free_bytes: u64,
        /// How many more bytes would have made it fit, alignment included.
        shortage_bytes: u64,
    },

    /// The end of the allocation does not fit 64 bits.
    #[error(
        "size of `{name}` overflows: {len_bytes} bytes aligned to {align_bytes} after \
         {offset_bytes} bytes"
    )]
    Overflow {
        /// The allocation's name.
        name: String,
        /// Bytes in use before it.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// Its alignment.
        align_bytes: u64,
    },

    /// The alignment is zero or not a power of two.
    #[error("alignment of `{name}` is {align_bytes} bytes, which is not a power of two")]
    BadAlignment {
        /// The allocation's name.
        name: String,
        /// The alignment asked for.
        align_bytes: u64,
    },

    /// The memory itself starts at an address less aligned than the allocation asks for.
    #[error(
        "`{name}` asks for an alignment of {align_bytes} bytes, but the memory starts at \
         {base_address:#x}"
    )]
    MisalignedBase {
        /// The allocation's name.
        name: String,
        /// The alignment asked for.
        align_bytes: u64,
        /// Where the memory starts.
        base_address: u64,
    },

    /// A rewind took the view's bytes away after it was born.
    #[error(
        "stale view of {len_bytes} bytes at {offset_bytes}: the slab was rewound to \
         {rewound_to_bytes} bytes since"
    )]
    StaleView {
        /// Where the view starts.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// The lowest rewind since its birth.
        rewound_to_bytes: u64,
    },

    /// The view came from another slab, or from the arena that counted for a plan.
    #[error("view of slab {view_slab} used on slab {slab}")]
    ForeignView {
        /// Where the view came from.
        view_slab: SlabId,
        /// Where it was used.
        slab: SlabId,
    },

    /// A rewind went below the checkpoint after it was taken.
    #[error(
        "stale checkpoint at {offset_bytes} bytes: the slab was rewound to {rewound_to_bytes} \
         bytes since"
    )]
    StaleCheckpoint {
        /// Where the checkpoint was taken.
        offset_bytes: u64,
        /// The lowest rewind since.
        rewound_to_bytes: u64,
    },

    /// The checkpoint came from another slab.
    #[error("checkpoint of slab {checkpoint_slab} used on slab {slab}")]
    ForeignCheckpoint {
        /// Where the checkpoint came from.
        checkpoint_slab: SlabId,
        /// Where it was used.
        slab: SlabId,
    },

    /// The rewind would give back permanent bytes.
    #[error(
        "rewind to {target_bytes} bytes goes below the permanent end at {permanent_end_bytes} bytes"
    )]
    BelowPermanentEnd {
        /// Where the rewind would go.
        target_bytes: u64,
        /// Where the permanent region ends.
        permanent_end_bytes: u64,
    },

    /// The rewind would give back what the running transaction may have to restore.
    #[error(
        "rewind to {target_bytes} bytes goes below the start of the running transaction at \
         {transaction_start_bytes} bytes"
    )]
    BelowTransaction {
        /// Where the rewind would go.
        target_bytes: u64,
        /// Bytes in use when the transaction began.
        transaction_start_bytes: u64,
    },

    /// A range does not lie inside its view.
    #[error("bytes {start_bytes}..{end_bytes} do not lie inside a view of {view_len_bytes} bytes")]
    OutOfView {
        /// Start of the range from the view's start.
        start_bytes: u64,
        /// End of the range from the view's start.
        end_bytes: u64,
        /// Length of the view.
        view_len_bytes: u64,
    },

    /// Source and destination of a copy differ in length.
    #[error("copy from {from_bytes} bytes to {to_bytes} bytes")]
    LengthMismatch {
        /// Length of the source.
        from_bytes: u64,
        /// Length of the destination.
        to_bytes: u64,
    },

    /// Source and destination of a copy share bytes, which devices leave undefined.
    #[error(
        "copy of {len_bytes} bytes from {from_offset_bytes} to {to_offset_bytes} overlaps itself"
    )]
    OverlappingCopy {
        /// Where the source starts.
        from_offset_bytes: u64,
        /// Where the destination starts.
        to_offset_bytes: u64,
        /// Length of both.
        len_bytes: u64,
    },

    /// A plan needs more than there is.
    #[error("{needed_bytes} bytes needed, {usable_bytes} usable: {shortage_bytes} short")]
    DoesNotFit {
        /// What the plan needs at its highest.
        needed_bytes: u64,
        /// What may be used.
        usable_bytes: u64,
        /// The difference.
        shortage_bytes: u64,
    },

    /// The device granted none of the sizes it was asked for.
    #[error("no slab: {}", Refusal::list(.refusals))]
    AllSizesRefused {
        /// Each size with the reason, in the order tried.
        refusals: Vec<Refusal>,
    },

    /// The memory under the slab failed.
    #[error("`{name}`: {source}")]
    Memory {
        /// The allocation concerned, or empty where there is no single one.
        name: String,
        /// What the memory said.
        source: MemoryError,
    },
}
