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

mod places;

use bytemuck::{Pod, Zeroable};
use q4k_soa::{PackedLayout, Shape, StreamUnits, WeightType};

use self::places::{Exchange, Shared};
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

/// A matrix in the stream layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Quantisation.
    pub weight_type: WeightType,
    /// Rows and row length.
    pub shape: Shape,
    /// Where it begins in the buffer of weights.
    pub offset_bytes: u64,
}

/// The weights of one layer; numbers are places in the buffer of weights, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LayerSpec {
    /// f32 `[n_embd]`.
    pub attn_norm: u64,
    /// `[q_elems, n_embd]`, `[kv_elems, n_embd]`, `[kv_elems, n_embd]`.
    pub qkv: [MatrixSpec; 3],
    /// f32 `[q_elems + 2 kv_elems]`.
    pub qkv_bias: Option<u64>,
    /// f32 `[head_dim]`.
    pub q_norm: Option<u64>,
    /// f32 `[head_dim]`.
    pub k_norm: Option<u64>,
    /// `[n_embd, q_elems]`.
    pub o: MatrixSpec,
    /// f32 `[n_embd]`.
    pub ffn_norm: u64,
    /// `[n_ff, n_embd]` each.
    pub gate_up: [MatrixSpec; 2],
    /// `[n_embd, n_ff]`.
    pub down: MatrixSpec,
    /// Ages attended to; 0: all.
    pub window: u32,
}

/// What a persistent step is made for.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // dimensions as everywhere
pub struct ModelSpec {
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_ff: u32,
    pub n_vocab: u32,
    /// Pairs turned per head.
    pub n_pairs: u32,
    /// [`crate::RopePairing`].
    pub pairing: u32,
    /// Factor on cosine and sine.
    pub magnitude: f32,
    pub norm_eps: f32,
    pub embed_scale: f32,
    pub attention_scale: f32,
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV blocks per layer.
    pub n_blocks: u32,
    pub max_context_tokens: u32,
    /// 4 or 2.
    pub kv_elem_bytes: u32,
    /// `[n_vocab, n_embd]`.
    pub embed: MatrixSpec,
    /// f64 `[n_pairs]`.
    pub inverse_frequencies: u64,
    pub layers: Vec<LayerSpec>,
    /// f32 `[n_embd]`.
    pub output_norm: u64,
    /// `[n_vocab, n_embd]`.
    pub output: MatrixSpec,
    /// Whether the step chooses the likeliest token and advances; else it ends with the logits.
    pub greedy: bool,
}

/// What the exchange buffer's size depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ExchangeDims {
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_ff: u32,
    pub max_context_tokens: u32,
}

impl ModelSpec {
    /// The part that the exchange buffer's size depends on.
    pub fn exchange_dims(&self) -> ExchangeDims {
        ExchangeDims {
            n_layer: self.layers.len() as u32,
            n_embd: self.n_embd,
            n_head: self.n_head,
            n_kv_head: self.n_kv_head,
            head_dim: self.head_dim,
            n_ff: self.n_ff,
            max_context_tokens: self.max_context_tokens,
        }
    }
}

/// Why there is no persistent step for a model on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A number is outside of what the kernel is made for.
    #[error("{what} = {value}: the persistent step needs {needs}")]
    Unsupported {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        needs: &'static str,
    },
    /// A matrix that cannot stream.
    #[error("{what}: {source}")]
    Matrix {
        /// Which matrix.
        what: &'static str,
        /// Why.
        source: q4k_soa::Error,
    },
    /// Shared memory does not hold the ring beside everything else.
    #[error(
        "a block has {found_bytes} bytes of shared memory, the persistent step needs {needed_bytes}"
    )]
    SharedMemory {
        /// With the smallest ring.
        needed_bytes: u64,
        /// Of the device.
        found_bytes: u64,
    },
}

/// What all blocks know of the step. Words of the table, in this order; `_at` are places in shared
/// memory in bytes, those without unit places in the exchange buffer in words, or places in the
/// weights in 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Header {
    pub n_ctas: u32,
    pub n_ops: u32,
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_head: u32,
    pub n_kv_head: u32,
    pub head_dim: u32,
    pub n_vocab: u32,
    pub n_pairs: u32,
    pub pairing: u32,
    pub block_size: u32,
    pub n_blocks: u32,
    pub max_context_tokens: u32,
    pub kv_elem_bytes: u32,
    /// Most segments of a key head.
    pub segments: u32,
    pub segment_min: u32,
    /// Tokens of a slot of keys and values.
    pub unit_tokens: u32,
    pub embed_format: u32,
    pub embed: u32,
    pub frequencies: u32,
    pub n_slots: u32,
    pub outstanding_busy: u32,
    pub outstanding_idle: u32,
    pub greedy: u32,
    /// Bytes of a layer of the KV cache, in 16.
    pub kv_layer: u32,
    /// `[n_head][segments][1 + head_dim / 2]` pairs of words: a word and its tag.
    pub partials: u32,
    /// `[n_ctas]` candidates as pairs of words.
    pub bests: u32,
    pub quants_at: u32,
    pub scales_at: u32,
    pub halves_at: u32,
    pub scratch_at: u32,
    pub squares_at: u32,
    pub misc_at: u32,
    pub turns_at: u32,
    pub residual_at: u32,
    pub table_at: u32,
    pub barriers_at: u32,
    pub norm_eps: f32,
    pub magnitude: f32,
    pub embed_scale: f32,
    pub attention_scale: f32,
    pub reserved: [u32; 23],
}

/// Words of [`Header`].
pub const HEADER_WORDS: u32 = 64;

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum OpKind {
    Qkv = 0,
    Output = 1,
    GateUp = 2,
    Down = 3,
    Logits = 4,
}

/// One block's part of an operation. Words of the table, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Op {
    /// [`OpKind`].
    pub kind: u32,
    /// Input length.
    pub n_in: u32,
    /// Units along a row.
    pub chunks: u32,
    /// Units of all runs.
    pub n_units: u32,
    /// Slots of the ring that they take.
    pub n_slots: u32,
    /// Slots of weights before.
    pub first_slot: u32,
    /// Attentions before, whose slots come on top.
    pub kv_before: u32,
    /// Input vector in the exchange buffer; [`NONE`]: the embedding row.
    pub input: u32,
    /// Hint counter of the input.
    pub counter_in: u32,
    /// Output vector in the exchange buffer; [`NONE`] for logits.
    pub output: u32,
    /// Hint counter of the output.
    pub counter_out: u32,
    /// Of q/k/v: the attention's result in the exchange buffer.
    pub attention: u32,
    /// Its hint counter.
    pub counter_attention: u32,
    /// Norm weights in the weights, in 16 bytes, or [`NONE`].
    pub norm: u32,
    /// Bias in the weights, in 16 bytes, or [`NONE`].
    pub bias: u32,
    /// Norm of query heads, in 16 bytes, or [`NONE`].
    pub q_norm: u32,
    /// Norm of key heads, in 16 bytes, or [`NONE`].
    pub k_norm: u32,
    /// Ages attended to; 0: all.
    pub window: u32,
    /// Layer.
    pub layer: u32,
    /// ⌈2³² / chunks⌉ modulo 2³²: unit % chunks is the upper half of (unit · this) · chunks.
    pub chunk_reciprocal: u32,
    /// Consecutive rows of one matrix each, unused ones without blocks.
    pub runs: [Run; 3],
}

/// Words of [`Op`].
pub const OP_WORDS: u32 = 32;

const _: () = assert!(size_of::<Header>() == 4 * HEADER_WORDS as usize);
const _: () = assert!(size_of::<Op>() == 4 * OP_WORDS as usize);

/// Consecutive blocks of rows of one matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Run {
    /// Where they begin in the weights, in 16 bytes.
    pub base: u32,
    /// The first row's place in the operation's output; for up, in the rows of gate.
    pub first_row: u32,
    /// Blocks of 8 rows.
    pub n_blocks: u32,
    /// [`format_code`], and from bit 8 on the logarithm of the units in a slot.
    pub format: u32,
}

/// Number of a weight type that streams.
pub const fn format_code(ty: WeightType) -> Option<u32> {
    match ty {
        WeightType::Q4K => Some(0),
        WeightType::Q6K => Some(1),
        WeightType::Q8_0 => Some(2),
        _ => None,
    }
}

/// The inverse of [`format_code`].
pub const fn format_type(code: u32) -> Option<WeightType> {
    match code {
        0 => Some(WeightType::Q4K),
        1 => Some(WeightType::Q6K),
        2 => Some(WeightType::Q8_0),
        _ => None,
    }
}

impl Run {
    /// The weight type.
    pub fn weight_type(&self) -> Option<WeightType> {
        format_type(self.format & 0xff)
    }

    /// Units that share a slot.
    pub fn units_per_slot(&self) -> u32 {
        1 << (self.format >> 8)
    }
}

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

const EMPTY_OP: Op = Op {
    kind: 0,
    n_in: 0,
    chunks: 0,
    n_units: 0,
    n_slots: 0,
    first_slot: 0,
    kv_before: 0,
    input: NONE,
    counter_in: NONE,
    output: NONE,
    counter_out: NONE,
    attention: NONE,
    counter_attention: NONE,
    norm: NONE,
    bias: NONE,
    q_norm: NONE,
    k_norm: NONE,
    window: 0,
    layer: 0,
    chunk_reciprocal: 0,
    runs: [Run { base: 0, first_row: 0, n_blocks: 0, format: 0 }; 3],
};

/// A place in the weights, in 16 bytes.
fn place(what: &'static str, offset_bytes: u64) -> Result<u32, ScheduleError> {
    let units = offset_bytes / 16;
    let fits = offset_bytes.is_multiple_of(16) && units < u64::from(NONE);
    let error = ScheduleError::Unsupported {
        what,
        value: offset_bytes,
        needs: "a multiple of 16 bytes below 64 GiB",
    };
    u32::try_from(units).ok().filter(|_| fits).ok_or(error)
}

fn optional(what: &'static str, offset_bytes: Option<u64>) -> Result<u32, ScheduleError> {
    offset_bytes.map_or(Ok(NONE), |offset_bytes| place(what, offset_bytes))
}

fn segments(dims: &ExchangeDims, n_ctas: u32) -> u32 {
    let needed = dims.max_context_tokens.div_ceil(SEGMENT_MIN_TOKENS);
    (n_ctas / dims.n_kv_head.max(1)).min(needed).max(1)
}

fn check(model: &ModelSpec, n_ctas: u32) -> Result<(), ScheduleError> {
    let is = |ok: bool, what, value: u32, needs| {
        let value = value.into();
        if ok { Ok(()) } else { Err(ScheduleError::Unsupported { what, value, needs }) }
    };
    let (n_head, n_kv_head) = (model.n_head, model.n_kv_head.max(1));
    is(!model.layers.is_empty(), "layers", 0, "one")?;
    is(n_head.is_multiple_of(n_kv_head), "query heads", n_head, "a multiple of the key heads")?;
    is(n_kv_head <= n_ctas, "key heads", n_kv_head, "as many multiprocessors")?;
    let group = n_head / n_kv_head;
    is(group <= MAX_GROUP, "query heads per key head", group, "at most 16")?;
    let dim = model.head_dim;
    is(dim.is_multiple_of(8) && dim <= 256, "head_dim", dim, "a multiple of 8 up to 256")?;
    is(2 * model.n_pairs <= dim, "pairs turned", model.n_pairs, "at most half a head")?;
    let n_ff = model.n_ff;
    is(model.n_embd.is_multiple_of(32), "n_embd", model.n_embd, "a multiple of 32")?;
    is(n_ff.is_multiple_of(32), "n_ff", n_ff, "a multiple of 32")?;
    let q_elems = n_head * dim;
    is(q_elems.is_multiple_of(32), "elements of q", q_elems, "a multiple of 32")?;
    is(model.kv_elem_bytes == 2, "bytes per cached element", model.kv_elem_bytes, "2: f16")?;
    let embed = &model.embed;
    let embed_rows = (embed.shape.n_out, embed.shape.n_in);
    is(
        embed_rows == (model.n_vocab, model.n_embd),
        "embedding rows",
        embed_rows.0,
        "the vocabulary's",
    )?;
    units("embedding", embed)?;
    Ok(())
}

fn units(what: &'static str, matrix: &MatrixSpec) -> Result<StreamUnits, ScheduleError> {
    let layout = PackedLayout::stream(matrix.weight_type, matrix.shape)
        .map_err(|source| ScheduleError::Matrix { what, source })?;
    let source = q4k_soa::Error::NoUnits { ty: matrix.weight_type };
    layout.units().ok_or(ScheduleError::Matrix { what, source })
}

/// How an operation's rows are handed out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    /// Rows of all matrices, one after the other.
    Rows,
    /// The same rows of both matrices.
    Pairs,
    /// To those who have these rows in every layer.
    Owners,
}

struct Planner {
    n_ctas: usize,
    n_ops: u32,
    /// Operations of each block.
    ops: Vec<Vec<Op>>,
    /// Bytes of each block so far.
    bytes: Vec<u64>,
    max_units: u32,
    max_chunks: u32,
    max_owned: u32,
}

impl Planner {
    fn new(n_ctas: u32, n_layer: usize) -> Self {
        let n_ctas = n_ctas as usize;
        Self {
            n_ctas,
            n_ops: 0,
            ops: vec![Vec::with_capacity(4 * n_layer + 1); n_ctas],
            bytes: vec![0; n_ctas],
            max_units: 0,
            max_chunks: 0,
            max_owned: 0,
        }
    }

    fn add(&mut self, op: Op, matrices: &[MatrixSpec], split: Split) -> Result<(), ScheduleError> {
        let geometry = matrices.iter().map(|matrix| {
            place("matrix", matrix.offset_bytes)?;
            let n_in = matrix.shape.n_in;
            if n_in != op.n_in {
                let (what, needs) = ("row length of a matrix", "the length of its input");
                return Err(ScheduleError::Unsupported { what, value: n_in.into(), needs });
            }
            let n_out = matrix.shape.n_out;
            if op.kind != OpKind::Logits as u32 && !n_out.is_multiple_of(StreamUnits::ROWS) {
                let (what, needs) = ("rows of a matrix", "a multiple of 8");
                return Err(ScheduleError::Unsupported { what, value: n_out.into(), needs });
            }
            units("matrix", matrix)
        });
        let geometry = geometry.collect::<Result<Vec<_>, _>>()?;
        // What is handed out: runs of pieces of equal cost.
        let pieces: Vec<(u32, u64)> = match split {
            Split::Rows => geometry.iter().map(|g| (g.n_blocks, g.block_bytes())).collect(),
            Split::Owners => vec![(geometry[0].n_blocks, 1)],
            Split::Pairs => {
                let bytes = geometry.iter().map(StreamUnits::block_bytes).sum();
                vec![(geometry[0].n_blocks, bytes)]
            }
        };
        let parts = partition(&pieces, self.n_ctas);
        let owner = match split {
            Split::Owners => (0..self.n_ctas).collect(),
            Split::Rows | Split::Pairs => {
                let cost = |part: usize| cost(&pieces, parts[part]..parts[part + 1]);
                lightest_first(&self.bytes, (0..self.n_ctas).map(cost).collect())
            }
        };
        for (part, &cta) in owner.iter().enumerate() {
            let (start, end) = (parts[part], parts[part + 1]);
            let mut op = Op { chunk_reciprocal: (u32::MAX / op.chunks).wrapping_add(1), ..op };
            let mut first = 0;
            for ((run, matrix), g) in op.runs.iter_mut().zip(matrices).zip(&geometry) {
                let (from, to) = match split {
                    Split::Pairs => (start, end),
                    _ => (start.max(first) - first, end.min(first + g.n_blocks).max(first) - first),
                };
                if from < to {
                    *run = self::run(matrix, g, from, to - from)?;
                    if split == Split::Rows {
                        run.first_row += first * StreamUnits::ROWS;
                    }
                    let units = run.n_blocks * op.chunks;
                    op.n_units += units;
                    op.n_slots += units.div_ceil(run.units_per_slot());
                    self.bytes[cta] += u64::from(run.n_blocks) * g.block_bytes();
                }
                if split == Split::Rows {
                    first += g.n_blocks;
                }
            }
            // Runs without rows go last.
            op.runs.sort_by_key(|run| run.n_blocks == 0);
            op.first_slot = self.ops[cta].last().map_or(0, |op| op.first_slot + op.n_slots);
            self.max_units = self.max_units.max(op.n_units);
            if split == Split::Owners {
                self.max_owned = self.max_owned.max(op.runs[0].n_blocks * StreamUnits::ROWS);
            }
            self.ops[cta].push(op);
        }
        self.max_chunks = self.max_chunks.max(op.chunks);
        self.n_ops += 1;
        Ok(())
    }

    fn balance(&self) -> f64 {
        let max = self.bytes.iter().copied().max().unwrap_or(0);
        let mean = self.bytes.iter().sum::<u64>() as f64 / self.n_ctas as f64;
        max as f64 / mean.max(1.0)
    }

    fn into_table(self) -> Vec<Op> {
        self.ops.concat()
    }
}

fn run(
    matrix: &MatrixSpec,
    geometry: &StreamUnits,
    first_block: u32,
    n_blocks: u32,
) -> Result<Run, ScheduleError> {
    let offset_bytes = matrix.offset_bytes + u64::from(first_block) * geometry.block_bytes();
    let pairs = u32::from(2 * geometry.unit_bytes() <= SLOT_BYTES);
    Ok(Run {
        base: place("rows of a matrix", offset_bytes)?,
        first_row: first_block * StreamUnits::ROWS,
        n_blocks,
        format: format_code(matrix.weight_type).unwrap_or(0) | pairs << 8,
    })
}

/// Cuts consecutive pieces into `n` parts of nearly equal cost: part i takes the pieces whose
/// middle lies in the i-th of n equal stretches. Returns where the parts begin, and the end.
fn partition(pieces: &[(u32, u64)], n: usize) -> Vec<u32> {
    let total: u64 = pieces.iter().map(|&(count, cost)| u64::from(count) * cost).sum();
    let mut starts = vec![0];
    let (mut before, mut index) = (0u128, 0u32);
    for &(count, cost) in pieces {
        for _ in 0..count {
            let middle = 2 * before + u128::from(cost);
            let part = (middle * n as u128 / (2 * u128::from(total.max(1)))) as usize;
            while starts.len() <= part {
                starts.push(index);
            }
            before += u128::from(cost);
            index += 1;
        }
    }
    starts.resize(n + 1, index);
    starts
}

fn cost(pieces: &[(u32, u64)], range: std::ops::Range<u32>) -> u64 {
    let mut first = 0;
    let mut sum = 0;
    for &(count, cost) in pieces {
        let (from, to) = (range.start.max(first), range.end.min(first + count));
        sum += u64::from(to.saturating_sub(from)) * cost;
        first += count;
    }
    sum
}

/// Block of each part: the costliest part goes to the block with the fewest bytes so far.
fn lightest_first(bytes: &[u64], costs: Vec<u64>) -> Vec<usize> {
    let mut blocks: Vec<usize> = (0..bytes.len()).collect();
    blocks.sort_by_key(|&block| bytes[block]);
    let mut parts: Vec<usize> = (0..costs.len()).collect();
    parts.sort_by_key(|&part| std::cmp::Reverse(costs[part]));
    let mut owner = vec![0; costs.len()];
    parts.into_iter().zip(blocks).for_each(|(part, block)| owner[part] = block);
    owner
}

#[cfg(test)]
mod tests;
