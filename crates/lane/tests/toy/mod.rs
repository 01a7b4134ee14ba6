//! A device small enough to be checked by hand: its "keys" are the tokens themselves, and what it
//! chooses is a hash of every token that attention sees through the block table. Any block that is
//! shared wrongly, copied too late or named by a stale table changes what it says.

use kernels_ptx::SamplingPack;
use kv_paged::{GroupId, LayerGroup, Transfer};
use lane::batch::{BatchStep, Bucket, Row, SchedulerOptions, StepKind, Wanted};
use lane::residency::ResidencyError;

pub(crate) const VOCAB: u32 = 1000;
/// Prompts may have more: they are any tokenizer's.
pub(crate) const PROMPT_VOCAB: u32 = 1 << 16;

pub(crate) struct Toy {
    groups: Vec<LayerGroup>,
    block_size: usize,
    columns: usize,
    table: Vec<u32>,
    /// `[group][block][slot]`: the token.
    device: Vec<Vec<Vec<u32>>>,
    host: Vec<Vec<Vec<u32>>>,
    pub(crate) steps: u64,
    pub(crate) uploaded_bytes: u64,
    pub(crate) buckets: Vec<(StepKind, u32)>,
    /// Fails at this step.
    pub(crate) fails_at: Option<u64>,
}

impl Toy {
    pub(crate) fn new(options: &SchedulerOptions) -> Self {
        let block_size = options.block_size_tokens as usize;
        let columns = options.max_context_tokens.div_ceil(options.block_size_tokens) as usize;
        let rows = options.max_batch as usize + 1;
        let blank = |n: u32| vec![vec![u32::MAX; block_size]; n as usize];
        Self {
            table: vec![0; rows * options.groups.len() * columns],
            device: options.groups.iter().map(|g| blank(g.blocks)).collect(),
            host: options.groups.iter().map(|g| blank(g.host_blocks)).collect(),
            groups: options.groups.clone(),
            block_size,
            columns,
            steps: 0,
            uploaded_bytes: 0,
            buckets: Vec::new(),
            fails_at: None,
        }
    }

    fn block(&self, group: usize, sequence: u32, position: u32) -> usize {
        let row = sequence as usize * self.groups.len() + group;
        self.table[row * self.columns + position as usize / self.block_size] as usize
    }

    fn read(&self, group: usize, sequence: u32, position: u32) -> u32 {
        let block = self.block(group, sequence, position);
        assert_ne!(block, 0, "position {position} is visible and has no block");
        self.device[group][block][position as usize % self.block_size]
    }
}

impl BatchStep for Toy {
    fn n_vocab(&self) -> u32 {
        PROMPT_VOCAB
    }

    fn transfer(&mut self, transfer: Transfer) -> Result<(), ResidencyError> {
        let (device, host) = (&mut self.device, &mut self.host);
        match transfer {
            Transfer::Copy { group: GroupId(g), from, to } => {
                device[g as usize][to.0 as usize] = device[g as usize][from.0 as usize].clone();
            }
            Transfer::Out { group: GroupId(g), from, to } => {
                host[g as usize][to.0 as usize] = device[g as usize][from.0 as usize].clone();
            }
            Transfer::In { group: GroupId(g), from, to } => {
                device[g as usize][to.0 as usize] = host[g as usize][from.0 as usize].clone();
            }
        }
        Ok(())
    }

    fn write_table(&mut self, index: u32, values: &[u32]) -> Result<(), ResidencyError> {
        self.table[index as usize..][..values.len()].copy_from_slice(values);
        self.uploaded_bytes += 4 * values.len() as u64;
        Ok(())
    }

    fn run(
        &mut self,
        kind: StepKind,
        bucket: Bucket,
        rows: &[Row],
        wanted: &[Wanted],
        chosen: &mut Vec<u32>,
    ) -> Result<(), ResidencyError> {
        self.steps += 1;
        self.buckets.push((kind, bucket.rows()));
        assert!(rows.len() as u32 <= bucket.rows());
        for (a, b) in rows.iter().zip(&rows[1..]) {
            let follows = a.sequence == b.sequence && a.position + 1 == b.position;
            assert!(if kind == StepKind::Chunk { follows } else { a.sequence != b.sequence });
        }
        if self.fails_at == Some(self.steps) {
            // Half of the work is done, and nothing is known of it.
            self.table.fill(0);
            return Err(ResidencyError::Missing("device"));
        }
        for group in 0..self.groups.len() {
            for row in rows {
                let block = self.block(group, row.sequence, row.position);
                assert_ne!(block, 0, "nobody writes the null block");
                let slot = row.position as usize % self.block_size;
                self.device[group][block][slot] = row.token;
            }
        }
        for want in wanted {
            let row = rows[want.row as usize];
            let read = |group, position| self.read(group, row.sequence, position);
            chosen.push(choose(&self.groups, row.position, read, &want.sampling));
        }
        Ok(())
    }
}

/// The token behind `position`, by what each group sees.
pub(crate) fn choose(
    groups: &[LayerGroup],
    position: u32,
    read: impl Fn(usize, u32) -> u32,
    sampling: &SamplingPack,
) -> u32 {
    let mut hash = 0x1234_5678_9abc_def1_u64;
    if sampling.temperature > 0.0 {
        hash ^= u64::from(sampling.seed_low) << 17;
    }
    for (index, group) in groups.iter().enumerate() {
        for at in 0..=position {
            let seen = group
                .window_tokens
                .is_none_or(|window| at < group.sink_tokens || at + window > position);
            if seen {
                hash = (hash ^ u64::from(read(index, at) + 1)).wrapping_mul(0x0000_0100_0000_01b3);
                hash ^= hash >> 29;
            }
        }
    }
    (hash % u64::from(VOCAB)) as u32
}
