//! Hands out the rows of one operation after the other.

use q4k_soa::StreamUnits;

use super::SLOT_BYTES;
use super::model::{MatrixSpec, ScheduleError, place, units};
use super::table::{Op, OpKind, Run, format_code};

/// How an operation's rows are handed out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    /// Rows of all matrices, one after the other.
    Rows,
    /// The same rows of both matrices.
    Pairs,
    /// To those who have these rows in every layer.
    Owners,
}

pub(super) struct Planner {
    n_ctas: usize,
    pub(super) n_ops: u32,
    /// Operations of each block.
    pub(super) ops: Vec<Vec<Op>>,
    /// Bytes of each block so far.
    pub(super) bytes: Vec<u64>,
    pub(super) max_units: u32,
    pub(super) max_chunks: u32,
    pub(super) max_owned: u32,
}

impl Planner {
    pub(super) fn new(n_ctas: u32, n_layer: usize) -> Self {
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

    pub(super) fn add(
        &mut self,
        op: Op,
        matrices: &[MatrixSpec],
        split: Split,
    ) -> Result<(), ScheduleError> {
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

    pub(super) fn balance(&self) -> f64 {
        let max = self.bytes.iter().copied().max().unwrap_or(0);
        let mean = self.bytes.iter().sum::<u64>() as f64 / self.n_ctas as f64;
        max as f64 / mean.max(1.0)
    }

    pub(super) fn into_table(self) -> Vec<Op> {
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
pub(super) fn partition(pieces: &[(u32, u64)], n: usize) -> Vec<u32> {
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
