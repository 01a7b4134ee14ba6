//! Who does what in the persistent step: which thread block computes which rows of which matrix,
//! in which order its weights stream, and where the vectors lie through which blocks tell each
//! other their results. Pure code of the host; the kernel and its twin read the same table.
//!
//! A step is a sequence of operations: for each layer q/k/v, output projection, gate/up, down,
//! and at the end the logits. Every operation's rows are split among the blocks in multiples of
//! 8, the height of a unit of the stream layout ([`q4k_soa::StreamUnits`]). A block's rows of one
//! operation are at most three runs of consecutive units, so that its weights are read in long
//! pieces. The rows of the output projection and of down are the same in every layer, because
//! their owner keeps the residual of its rows to itself; everything else is handed out so that
//! the blocks with the fewest bytes so far get the largest parts.

mod model;
mod places;
mod planner;
mod table;

use q4k_soa::StreamUnits;

pub use self::model::{ExchangeDims, LayerSpec, MatrixSpec, ModelSpec, ScheduleError};
pub use self::table::{HEADER_WORDS, Header, OP_WORDS, Op, OpKind, Run, format_code, format_type};

use self::model::{check, optional, place};
use self::places::{Exchange, Shared};
use self::planner::{Planner, Split};
use self::table::EMPTY_OP;
use crate::geometry::Geometry;

/// Warps that compute; beside them one copies and one sums squares.
pub const CONSUMER_WARPS: u32 = 12;
/// Threads of a block.
pub const THREADS: u32 = (CONSUMER_WARPS + 2) * 32;
/// Bytes of a slot of the ring in shared memory: two units of Q4_K.
pub const SLOT_BYTES: u32 = 9472;
/// Most results of heads that the warps of a block leave for joining.
pub const JOINED_HEADS: u32 = 48;
/// Most query heads of a key head.
const MAX_GROUP: u32 = 16;
/// Bytes behind a query in shared memory.
const QUERY_PAD: u32 = 64;
/// Fewest tokens of an attention segment: what a block attends to in about the time of one
/// exchange between blocks.
pub const SEGMENT_MIN_TOKENS: u32 = 192;
/// Copies in flight while there is something to compute, in slots: 111 KiB.
const OUTSTANDING_BUSY: u32 = 12;
/// While waiting for other blocks: more, and their results queue behind the weights.
const OUTSTANDING_IDLE: u32 = 3;
/// No place, no vector, no weight.
pub const NONE: u32 = u32::MAX;
/// Words in front of the exchange buffer: [`EPOCH`], [`FAILURE`] and what belongs to it.
pub const EXCHANGE_HEADER_WORDS: u32 = 32;
/// Word of the exchange buffer that counts steps; its parity is the phase of the step's words.
pub const EPOCH: u32 = 0;
/// Word of the exchange buffer that says that the watchdog fired: 0, or one more than the kind of
/// wait; in the words behind it block, operation, and what was seen.
pub const FAILURE: u32 = 4;
/// Word of the exchange buffer that counts blocks at the end of a step.
pub const ARRIVALS: u32 = 1;
/// Words from one hint counter to the next: each has a line of the cache to itself.
const COUNTER_WORDS: u32 = 32;
/// Fewest slots that keep the copies going.
const MIN_SLOTS: u32 = 6;

/// The whole plan of a persistent step.
#[derive(Clone, Debug)]
pub struct Schedule {
    header: Header,
    ops: Vec<Op>,
    exchange_words: u32,
    shared_bytes: u32,
    balance: f64,
}

impl Schedule {
    /// Plans the step of `model` for `n_ctas` blocks with `shared_bytes` of shared memory each.
    pub fn new(model: &ModelSpec, n_ctas: u32, shared_bytes: u32) -> Result<Self, ScheduleError> {
        check(model, n_ctas)?;
        let exchange = Exchange::of(&model.exchange_dims(), n_ctas);
        let mut planner = Planner::new(n_ctas, model.layers.len());
        let mut input = (NONE, NONE);
        for (index, layer) in model.layers.iter().enumerate() {
            let [qkv, attention, o, middle, down] = exchange.layers[index];
            let op = |kind: OpKind, n_in: u32, input: (u32, u32), output: (u32, u32)| Op {
                kind: kind as u32,
                n_in,
                chunks: n_in.div_ceil(StreamUnits::GROUPS * 32),
                kv_before: index as u32 + u32::from(kind != OpKind::Qkv),
                input: input.0,
                counter_in: input.1,
                output: output.0,
                counter_out: output.1,
                layer: index as u32,
                ..EMPTY_OP
            };
            let first = Op {
                attention: attention.0,
                counter_attention: attention.1,
                norm: place("attention norm", layer.attn_norm)?,
                bias: optional("bias", layer.qkv_bias)?,
                q_norm: optional("norm of queries", layer.q_norm)?,
                k_norm: optional("norm of keys", layer.k_norm)?,
                window: layer.window,
                ..op(OpKind::Qkv, model.n_embd, input, qkv)
            };
            planner.add(first, &layer.qkv, Split::Rows)?;
            let q_elems = model.n_head * model.head_dim;
            planner.add(op(OpKind::Output, q_elems, attention, o), &[layer.o], Split::Owners)?;
            let gate_up = Op {
                norm: place("feed-forward norm", layer.ffn_norm)?,
                ..op(OpKind::GateUp, model.n_embd, o, middle)
            };
            planner.add(gate_up, &layer.gate_up, Split::Pairs)?;
            let last = op(OpKind::Down, model.n_ff, middle, down);
            planner.add(last, &[layer.down], Split::Owners)?;
            input = down;
        }
        let logits = Op {
            kind: OpKind::Logits as u32,
            n_in: model.n_embd,
            chunks: model.n_embd.div_ceil(StreamUnits::GROUPS * 32),
            kv_before: model.layers.len() as u32,
            input: input.0,
            counter_in: input.1,
            norm: place("output norm", model.output_norm)?,
            layer: model.layers.len() as u32,
            ..EMPTY_OP
        };
        planner.add(logits, &[model.output], Split::Rows)?;

        let row_bytes = model.head_dim * model.kv_elem_bytes;
        let unit_tokens = (1..=model.block_size)
            .rev()
            .find(|&tokens| {
                model.block_size.is_multiple_of(tokens) && 2 * tokens * row_bytes <= SLOT_BYTES
            })
            .ok_or(ScheduleError::Unsupported {
                what: "bytes of a cached head",
                value: row_bytes.into(),
                needs: "a key and a value to fit one slot",
            })?;
        let shared = Shared::of(model, &planner, shared_bytes)?;
        let kv_layer_bytes = 2
            * u64::from(model.n_blocks)
            * u64::from(model.n_kv_head)
            * u64::from(model.block_size)
            * u64::from(row_bytes);
        let header = Header {
            n_ctas,
            n_ops: planner.n_ops,
            n_layer: model.layers.len() as u32,
            n_embd: model.n_embd,
            n_head: model.n_head,
            n_kv_head: model.n_kv_head,
            head_dim: model.head_dim,
            n_vocab: model.n_vocab,
            n_pairs: model.n_pairs,
            pairing: model.pairing,
            block_size: model.block_size,
            n_blocks: model.n_blocks,
            max_context_tokens: model.max_context_tokens,
            kv_elem_bytes: model.kv_elem_bytes,
            segments: segments(&model.exchange_dims(), n_ctas),
            segment_min: SEGMENT_MIN_TOKENS.next_multiple_of(model.block_size),
            unit_tokens,
            embed_format: format_code(model.embed.weight_type).unwrap_or(NONE),
            embed: place("embedding", model.embed.offset_bytes)?,
            frequencies: place("frequencies", model.inverse_frequencies)?,
            n_slots: shared.n_slots,
            outstanding_busy: OUTSTANDING_BUSY.min(shared.n_slots - 2),
            outstanding_idle: OUTSTANDING_IDLE.min(shared.n_slots - 2),
            greedy: u32::from(model.greedy),
            kv_layer: place("bytes of a layer of the KV cache", kv_layer_bytes)?,
            partials: exchange.partials,
            bests: exchange.bests,
            quants_at: shared.quants_at,
            scales_at: shared.scales_at,
            halves_at: shared.halves_at,
            scratch_at: shared.scratch_at,
            squares_at: shared.squares_at,
            misc_at: shared.misc_at,
            turns_at: shared.turns_at,
            residual_at: shared.residual_at,
            table_at: shared.table_at,
            barriers_at: shared.barriers_at,
            norm_eps: model.norm_eps,
            magnitude: model.magnitude,
            embed_scale: model.embed_scale,
            attention_scale: model.attention_scale,
            reserved: [0; 23],
        };
        Ok(Self {
            header,
            balance: planner.balance(),
            ops: planner.into_table(),
            exchange_words: exchange.words,
            shared_bytes: shared.bytes,
        })
    }

    /// What all blocks know.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The operations of one block.
    pub fn ops(&self, cta: u32) -> &[Op] {
        let n_ops = self.header.n_ops as usize;
        &self.ops[cta as usize * n_ops..][..n_ops]
    }

    /// The table as the kernel reads it: header, then block after block its operations.
    pub fn words(&self) -> Vec<u32> {
        let mut words = bytemuck::cast_slice(std::slice::from_ref(&self.header)).to_vec();
        words.extend_from_slice(bytemuck::cast_slice(&self.ops));
        words
    }

    /// Words of the exchange buffer, which is zero before the first step.
    pub fn exchange_words(&self) -> u32 {
        self.exchange_words
    }

    /// Bytes that the busiest block streams, over the mean.
    pub fn balance(&self) -> f64 {
        self.balance
    }

    /// A block per multiprocessor, all at once.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            grid: [self.header.n_ctas, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: self.shared_bytes,
            cooperative: true,
        }
    }
}

/// Words of a table, before there is a schedule.
pub fn table_words(n_layer: u32, n_ctas: u32) -> u32 {
    HEADER_WORDS + (4 * n_layer + 1) * n_ctas * OP_WORDS
}

/// Words of the exchange buffer, before there is a schedule.
pub fn exchange_words(dims: &ExchangeDims, n_ctas: u32) -> u32 {
    Exchange::of(dims, n_ctas).words
}

fn segments(dims: &ExchangeDims, n_ctas: u32) -> u32 {
    let needed = dims.max_context_tokens.div_ceil(SEGMENT_MIN_TOKENS);
    (n_ctas / dims.n_kv_head.max(1)).min(needed).max(1)
}

#[cfg(test)]
mod tests;
