//! Where things lie: vectors in the exchange buffer, everything in a block's shared memory.

use q4k_soa::StreamUnits;

use super::{
    CONSUMER_WARPS, COUNTER_WORDS, EXCHANGE_HEADER_WORDS, ExchangeDims, HEADER_WORDS, JOINED_HEADS,
    MIN_SLOTS, ModelSpec, OP_WORDS, Planner, QUERY_PAD, SLOT_BYTES, ScheduleError, segments,
};

/// The exchange buffer, in words: header, counters, candidates, partial results of attention,
/// then for each layer its vectors as pairs of f16. Every word is written at most once a step.
pub(super) struct Exchange {
    /// Place and counter of q/k/v, attention, output projection, SwiGLU, down.
    pub(super) layers: Vec<[(u32, u32); 5]>,
    pub(super) bests: u32,
    pub(super) partials: u32,
    pub(super) words: u32,
}

impl Exchange {
    pub(super) fn of(model: &ExchangeDims, n_ctas: u32) -> Self {
        let n_layer = model.n_layer;
        let mut end = EXCHANGE_HEADER_WORDS;
        let mut take = |words: u32| {
            let at = end;
            end = (end + words).next_multiple_of(32);
            at
        };
        let counters = take(5 * n_layer * COUNTER_WORDS);
        let bests = take(2 * n_ctas);
        let record = 2 * (1 + model.head_dim / 2);
        let partials = take(model.n_head * segments(model, n_ctas) * record);
        let q_elems = model.n_head * model.head_dim;
        let qkv_elems = q_elems + 2 * model.n_kv_head * model.head_dim;
        let elems = [qkv_elems, q_elems, model.n_embd, model.n_ff, model.n_embd];
        let layers = (0..n_layer)
            .map(|layer| {
                std::array::from_fn(|i| {
                    let counter = counters + (5 * layer + i as u32) * COUNTER_WORDS;
                    (take(elems[i] / 2), counter)
                })
            })
            .collect();
        Self { layers, bests, partials, words: end }
    }
}

/// Places in shared memory, in bytes; the ring is at 0.
pub(super) struct Shared {
    pub(super) n_slots: u32,
    pub(super) quants_at: u32,
    pub(super) scales_at: u32,
    pub(super) halves_at: u32,
    pub(super) scratch_at: u32,
    pub(super) squares_at: u32,
    pub(super) misc_at: u32,
    pub(super) turns_at: u32,
    pub(super) residual_at: u32,
    pub(super) table_at: u32,
    pub(super) barriers_at: u32,
    pub(super) bytes: u32,
}

impl Shared {
    pub(super) fn of(
        model: &ModelSpec,
        planner: &Planner,
        limit_bytes: u32,
    ) -> Result<Self, ScheduleError> {
        let group = model.n_head / model.n_kv_head;
        // The newest key and value and each query twice, while no activations are there.
        let row_bytes = model.head_dim * 2;
        let heads = 2 * row_bytes + 2 * group * (row_bytes + QUERY_PAD);
        let quants = (planner.max_chunks * 1024).max(heads.next_multiple_of(1024));
        let sums = planner.max_units * StreamUnits::ROWS * 4;
        let results = (CONSUMER_WARPS * group).min(JOINED_HEADS);
        let joined = results.max(CONSUMER_WARPS) * (model.head_dim + 2) * 4;
        let fixed = [
            quants,
            planner.max_chunks * 256,   // scale and scaled sum of a group
            planner.max_chunks * 256,   // sums of its halves
            sums.max(joined),           // scratch
            CONSUMER_WARPS * 32 * 4,    // squares
            256,                        // misc
            (model.n_pairs * 8).max(8), // turns
            (planner.max_owned * 4).max(4), // residual
            (HEADER_WORDS + planner.n_ops * OP_WORDS) * 4, // table
        ];
        let fixed_bytes: u32 = fixed.iter().map(|bytes| bytes.next_multiple_of(128)).sum();
        let slot_bytes = SLOT_BYTES + 16;
        let n_slots = limit_bytes.saturating_sub(fixed_bytes + 128) / slot_bytes;
        if n_slots < MIN_SLOTS {
            return Err(ScheduleError::SharedMemory {
                needed_bytes: u64::from(fixed_bytes + 128 + MIN_SLOTS * slot_bytes),
                found_bytes: limit_bytes.into(),
            });
        }
        let mut end = n_slots * SLOT_BYTES;
        let mut take = |bytes: u32| {
            let at = end.next_multiple_of(128);
            end = at + bytes;
            at
        };
        let [
            quants_at,
            scales_at,
            halves_at,
            scratch_at,
            squares_at,
            misc_at,
            turns_at,
            residual_at,
            table_at,
        ] = fixed.map(&mut take);
        let barriers_at = take(n_slots * 16);
        let bytes = end;
        Ok(Self {
            n_slots,
            quants_at,
            scales_at,
            halves_at,
            scratch_at,
            squares_at,
            misc_at,
            turns_at,
            residual_at,
            table_at,
            barriers_at,
            bytes,
        })
    }
}
