//! The decode step of one token, embedding row to next token, as one cooperative kernel: the
//! operations of a [`Schedule`](crate::schedule::Schedule) in order, a thread block per
//! multiprocessor.
//!
//! The same functions as the operations by themselves ([`embed`](super::embed),
//! [`rms_norm_q8`](super::rms_norm_q8), [`gemv_q8`](super::gemv_q8),
//! [`rope_append`](super::rope_append), [`attention`](super::attention), …), except that what one
//! block tells the others is rounded to f16: q, k and v before they are turned, the attention's
//! result, the residual stream as the norms read it (its owner adds to it in f32), and the middle
//! of the feed-forward. Of two neighbours the first is rounded to ten significant bits, because
//! the word of the two carries a flag in its lowest bit.
//!
//! The twin leaves the exchanged vectors where the kernel does, with the same flags.

mod attention;

use bytemuck::{cast_slice, from_bytes};
use half::f16;
use q4k_soa::{
    PackedLayout, PackedMatrix, Q8Group, Shape, StreamUnits, dequantize, pack, quantize_q8,
    rows_dot_q8, unpack, unpack_rows,
};
use rayon::prelude::*;

use self::attention::Attention;
use super::rms_norm::inverse_rms;
use crate::Candidate;
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::schedule::{EPOCH, HEADER_WORDS, Header, NONE, OP_WORDS, Op, OpKind, Run, format_type};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// Everything that no step writes: matrices in the stream layout, norms, frequencies.
        read weights: u8 [weights_16 * 16],
        /// [`Schedule::words`](crate::schedule::Schedule::words).
        read table: u32 [table_words],
        /// `[layer][logical block]`.
        read block_table: u32 [block_table_entries],
        /// The KV arena.
        update kv: u8 [kv_16 * 16],
        /// [`Schedule::exchange_words`](crate::schedule::Schedule::exchange_words), zero before
        /// the first step.
        update exchange: u32 [exchange_words],
        /// [`crate::TokenParams`] of the step.
        update tokens: u32 [3],
        /// `[n_vocab]`.
        write logits: f32 [n_vocab],
        /// The token chosen, if the schedule is greedy.
        update token: u32 [1],
        /// Steps made, if the schedule is greedy.
        update step_count: u32 [1],
    }
    scalars {
        /// Bytes of the weights, in 16.
        weights_16: u32,
        /// Bytes of the KV arena, in 16.
        kv_16: u32,
        /// Words of the table.
        table_words: u32,
        /// Layers times blocks.
        block_table_entries: u32,
        /// Words of the exchange buffer.
        exchange_words: u32,
        /// Length of the logits.
        n_vocab: u32,
        /// Microseconds that a block waits for another before the step is given up; 0: for ever.
        watchdog_us: u32,
        /// Nanoseconds that waits are delayed at random, for tests; 0: not at all.
        jitter: u32,
        /// Of the table, so that the key of a graph covers it; not read.
        table_hash: u32,
    }
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let table = Table::of(kernel, a.table)?;
    let h = *table.header;
    if h.kv_elem_bytes as usize != attention::ELEM_BYTES {
        return Err(error(kernel, "table", "a cache of f16"));
    }
    let mut step = Step { kernel, table, weights: a.weights, residual: Vec::new() };
    step.residual = step.embedding(a.tokens[2])?;
    let mut attention = Attention {
        header: h,
        kv: a.kv,
        block_table: a.block_table,
        position: a.tokens[0],
        slot: a.tokens[1],
    };
    let phase = a.exchange[EPOCH as usize] & 1 ^ 1;
    let mut vector = step.residual.clone();
    for index in 0..h.n_ops as usize {
        let op = *step.op(index, 0)?;
        let mut y = step.product(index, &vector)?;
        if op.kind == OpKind::Logits as u32 {
            a.logits.iter_mut().zip(&y).for_each(|(logit, y)| *logit = *y);
            break;
        }
        if op.kind == OpKind::Qkv as u32 {
            if op.bias != NONE {
                let bias = step.floats(op.bias, y.len())?;
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
            let norm = |at| (at != NONE).then(|| step.floats(at, h.head_dim as usize)).transpose();
            let (q_norm, k_norm) = (norm(op.q_norm)?, norm(op.k_norm)?);
            let frequencies = step.frequencies()?;
            let layer = attention.layer(&op, frequencies, q_norm, k_norm);
            let layer =
                layer.ok_or_else(|| step.error("block_table", "places inside of the cache"))?;
            let qkv = rounded(&y);
            step.publish(a.exchange, op.output, &qkv, phase)?;
            vector = rounded(&layer.run(&qkv));
            step.publish(a.exchange, op.attention, &vector, phase)?;
            continue;
        } else if op.kind == OpKind::GateUp as u32 {
            let (gate, up) = y.split_at(y.len() / 2);
            y = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        } else {
            step.residual.iter_mut().zip(&y).for_each(|(residual, y)| *residual += y);
            y.copy_from_slice(&step.residual);
        }
        vector = rounded(&y);
        step.publish(a.exchange, op.output, &vector, phase)?;
    }
    if h.greedy != 0 {
        let candidates = a.logits.iter().enumerate();
        let best = candidates
            .map(|(index, &value)| Candidate { value, index: index as u32 })
            .reduce(|a, b| if b.beats(a) { b } else { a });
        a.token[0] = best.map_or(0, |best| best.index);
        a.tokens[0] = a.tokens[0].wrapping_add(1);
        a.tokens[1] = (a.tokens[1] + 1) % h.max_context_tokens.max(1);
        a.tokens[2] = a.token[0];
        a.step_count[0] = a.step_count[0].wrapping_add(1);
    }
    a.exchange[EPOCH as usize] = a.exchange[EPOCH as usize].wrapping_add(1);
    Ok(())
}

/// A vector as other blocks read it: f16, every other element with one bit less.
pub(crate) fn rounded(vector: &[f32]) -> Vec<f32> {
    vector
        .iter()
        .enumerate()
        .map(|(index, &x)| {
            if !index.is_multiple_of(2) {
                return f16::from_f32(x).to_f32();
            }
            // Dekker's split: ten significant bits of x.
            let c = x * 16385.0;
            let bits = f16::from_f32(c - (c - x)).to_bits();
            f16::from_bits(bits & 0xfffe).to_f32()
        })
        .collect()
}

/// The schedule, taken apart.
#[derive(Clone, Copy)]
struct Table<'a> {
    header: &'a Header,
    ops: &'a [Op],
}

impl<'a> Table<'a> {
    fn of(kernel: Kernel, words: &'a [u32]) -> Result<Self, ParamError> {
        let parse = || {
            let (header, ops) = words.split_at_checked(HEADER_WORDS as usize)?;
            let header: &Header = from_bytes(cast_slice(header));
            let n_ops = u64::from(header.n_ops) * u64::from(header.n_ctas);
            (ops.len() as u64 == n_ops * u64::from(OP_WORDS)).then_some(())?;
            Some(Self { header, ops: cast_slice(ops) })
        };
        parse().ok_or_else(|| error(kernel, "table", "a schedule's words"))
    }
}

fn error(kernel: Kernel, param: &'static str, reason: &'static str) -> ParamError {
    ParamError::Value { kernel: kernel.name(), param, value: 0, reason }
}

struct Step<'a> {
    kernel: Kernel,
    table: Table<'a>,
    weights: &'a [u8],
    /// f32, as the owners of its rows keep it.
    residual: Vec<f32>,
}

impl<'a> Step<'a> {
    fn error(&self, param: &'static str, reason: &'static str) -> ParamError {
        error(self.kernel, param, reason)
    }

    fn op(&self, index: usize, cta: usize) -> Result<&'a Op, ParamError> {
        let at = cta * self.table.header.n_ops as usize + index;
        self.table.ops.get(at).ok_or_else(|| self.error("table", "operations of every block"))
    }

    fn bytes(&self, place: u32, len: u64) -> Result<&'a [u8], ParamError> {
        let start = place as usize * 16;
        let bytes = self.weights.get(start..start.saturating_add(len as usize));
        bytes.ok_or_else(|| self.error("table", "places inside of the weights"))
    }

    fn floats(&self, place: u32, n: usize) -> Result<&'a [f32], ParamError> {
        let bytes = self.bytes(place, 4 * n as u64)?;
        bytemuck::try_cast_slice(bytes).map_err(|_| self.error("table", "aligned places"))
    }

    fn frequencies(&self) -> Result<&'a [f64], ParamError> {
        let h = self.table.header;
        let bytes = self.bytes(h.frequencies, 8 * u64::from(h.n_pairs))?;
        bytemuck::try_cast_slice(bytes).map_err(|_| self.error("table", "aligned places"))
    }

    fn stream(&self, format: u32, n_out: u32, n_in: u32) -> Result<PackedLayout, ParamError> {
        let ty = format_type(format & 0xff);
        let layout = ty.and_then(|ty| PackedLayout::stream(ty, Shape { n_out, n_in }).ok());
        layout.ok_or_else(|| self.error("table", "matrices that can stream"))
    }

    /// Puts a rounded vector where other blocks would read it.
    fn publish(
        &self,
        exchange: &mut [u32],
        at: u32,
        vector: &[f32],
        phase: u32,
    ) -> Result<(), ParamError> {
        let words = exchange.get_mut(at as usize..at as usize + vector.len() / 2);
        let words = words.ok_or_else(|| self.error("table", "vectors inside of the exchange"))?;
        let bits = |x: f32| u32::from(f16::from_f32(x).to_bits());
        for (word, pair) in words.iter_mut().zip(vector.chunks_exact(2)) {
            *word = bits(pair[0]) | bits(pair[1]) << 16 | phase;
        }
        Ok(())
    }

    /// The embedding row of a token, an id beyond the vocabulary taking the last.
    fn embedding(&self, token_id: u32) -> Result<Vec<f32>, ParamError> {
        let h = self.table.header;
        let layout = self.stream(h.embed_format, h.n_vocab, h.n_embd)?;
        let packed = self.bytes(h.embed, layout.len_bytes())?;
        let row = token_id.min(h.n_vocab.saturating_sub(1));
        let first = row / StreamUnits::ROWS * StreamUnits::ROWS;
        let rows = first..(first + StreamUnits::ROWS).min(h.n_vocab);
        let row_bytes = layout.row_bytes() as usize;
        let mut source = vec![0; rows.len() * row_bytes];
        let mut x = vec![0.0; h.n_embd as usize];
        let source_row = (row - first) as usize * row_bytes;
        unpack_rows(&layout, rows, packed, &mut source)
            .and_then(|()| {
                dequantize(layout.weight_type(), &source[source_row..][..row_bytes], &mut x)
            })
            .map_err(|_| self.error("table", "an embedding row"))?;
        x.iter_mut().for_each(|x| *x *= h.embed_scale);
        Ok(x)
    }

    /// All rows of an operation: each block's part, put where it belongs.
    fn product(&self, index: usize, x: &[f32]) -> Result<Vec<f32>, ParamError> {
        let h = self.table.header;
        let op = self.op(index, 0)?;
        let n_in = op.n_in as usize;
        if x.len() != n_in || !n_in.is_multiple_of(32) {
            return Err(self.error("table", "inputs as long as the outputs before"));
        }
        let (mut u, mut inverse) = (x.to_vec(), 1.0);
        if op.norm != NONE {
            inverse = inverse_rms(x, h.norm_eps);
            u.iter_mut().zip(self.floats(op.norm, n_in)?).for_each(|(u, weight)| *u *= weight);
        }
        let (mut quants, mut groups) = (vec![0; n_in], vec![Q8Group::default(); n_in / 32]);
        quantize_q8(&u, &mut quants, &mut groups);

        let parts = (0..h.n_ctas as usize).into_par_iter().map(|cta| {
            let op = self.op(index, cta)?;
            let runs = op.runs.iter().enumerate().filter(|(_, run)| run.n_blocks > 0);
            let rows = runs.map(|(place, run)| Ok((place, run, self.rows(run, &quants, &groups)?)));
            rows.collect::<Result<Vec<_>, ParamError>>()
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let n_rows: usize = parts.iter().flatten().map(|(_, _, rows)| rows.len()).sum();
        let mut y = vec![0.0; n_rows];
        for (place, run, rows) in parts.into_iter().flatten() {
            // Gate and up have the same rows; up's lie behind gate's here.
            let up = op.kind == OpKind::GateUp as u32 && place == 1;
            let first = run.first_row as usize + if up { n_rows / 2 } else { 0 };
            let to = y.get_mut(first..first + rows.len());
            let to = to.ok_or_else(|| self.error("table", "every row once"))?;
            to.iter_mut().zip(rows).for_each(|(to, row)| *to = row * inverse);
        }
        Ok(y)
    }

    /// The products of one run's rows: from the stream by way of planes.
    fn rows(&self, run: &Run, quants: &[i8], groups: &[Q8Group]) -> Result<Vec<f32>, ParamError> {
        let n_out = run.n_blocks * StreamUnits::ROWS;
        let stream = self.stream(run.format, n_out, quants.len() as u32)?;
        let packed = self.bytes(run.base, stream.len_bytes())?;
        let product = || {
            let planes = PackedLayout::planes(stream.weight_type(), stream.shape())?;
            let mut source = vec![0; stream.source_bytes() as usize];
            unpack(&stream, packed, &mut source)?;
            let mut bytes = vec![0; planes.len_bytes() as usize];
            pack(&planes, &source, &mut bytes)?;
            let matrix = PackedMatrix::new(planes, &bytes)?;
            let mut rows = vec![0.0; n_out as usize];
            rows_dot_q8(&matrix, matrix.rows(), quants, groups, &mut rows);
            Ok(rows)
        };
        product().map_err(|_: q4k_soa::Error| self.error("table", "runs of whole blocks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_exchanged_is_near_and_leaves_the_lowest_bit_free(
            x in prop::collection::vec(-60000.0f32..60000.0, 2..20),
            exponent in -10i32..1,
        ) {
            let x: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
            for (index, (&x, y)) in x.iter().zip(rounded(&x)).enumerate() {
                let bits = f16::from_f32(y).to_bits();
                prop_assert_eq!(f16::from_bits(bits).to_f32(), y);
                prop_assert!(index % 2 == 1 || bits & 1 == 0);
                let tolerance = x.abs() / if index % 2 == 0 { 1024.0 } else { 2048.0 } + 6e-8;
                prop_assert!((x - y).abs() <= tolerance, "{x} {y}");
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_none() {
        let y = rounded(&[f32::NAN, f32::NAN, 1e30, 1e30]);
        assert!(y[0].is_nan() && y[1].is_nan() && !y[3].is_finite());
        assert!(!y[2].is_finite(), "{}", y[2]);
    }
}
