//! The KV cache: what is in it, and appending to it.

use half::f16;
use kernels_ptx::ops::rope_append;
use kernels_ptx::{DeviceProfile, Kernel};
use kv_paged::{KvCoord, KvLayout, KvPart, KvType, PagedKvConfig};

use super::{Buf, Builder, Case, Compare, Memory, Random};

/// One layer of a paged cache whose blocks lie in any order, of several sequences.
pub(super) struct Layer {
    layout: KvLayout,
    pub(super) n_logical: u32,
    /// Entries between tables that belong to no sequence of this layer.
    gap: u32,
    pub(super) block_table: Vec<u32>,
}

impl Layer {
    pub(super) fn new(
        kv_type: KvType,
        dims: [u32; 2],
        block_size: u32,
        slots: u32,
        random: &mut Random,
    ) -> Self {
        Self::of_sequences(1, kv_type, dims, block_size, slots, random)
    }

    pub(super) fn of_sequences(
        n_sequences: u32,
        kv_type: KvType,
        [n_kv_head, head_dim]: [u32; 2],
        block_size: u32,
        slots: u32,
        random: &mut Random,
    ) -> Self {
        let config = PagedKvConfig::new(1, n_kv_head, head_dim, slots)
            .and_then(|config| config.with_block_size(block_size))
            .and_then(|config| config.with_kv_type(kv_type));
        let config = config.expect("a valid layer");
        let n_logical = config.blocks_per_layer();
        let n_blocks = n_sequences * n_logical;
        let layout = KvLayout::with_blocks(&config, n_blocks).expect("it is small");
        let gap = if n_sequences > 1 { 3 } else { 0 };
        let mut block_table = Vec::new();
        for blocks in random.shuffled(n_blocks).chunks(n_logical as usize) {
            block_table.extend((0..gap * u32::from(!block_table.is_empty())).map(|_| u32::MAX));
            block_table.extend(blocks);
        }
        Self { layout, n_logical, gap, block_table }
    }

    pub(super) fn n_blocks(&self) -> u32 {
        self.layout.blocks_per_layer()
    }

    pub(super) fn elem_bytes(&self) -> u32 {
        self.layout.kv_type().elem_bytes() as u32
    }

    pub(super) fn table_stride(&self) -> u32 {
        self.n_logical + self.gap
    }

    pub(super) fn n_sequences(&self) -> u32 {
        self.n_blocks() / self.n_logical
    }

    /// Byte ranges of key and value of a slot, all heads.
    pub(super) fn slot_of(&self, sequence: u32, slot: u32) -> Vec<std::ops::Range<usize>> {
        let block_size = self.layout.block_size_tokens();
        let at = sequence.min(self.n_sequences() - 1) * self.table_stride() + slot / block_size;
        let block = self.block_table[at as usize];
        let mut ranges = Vec::new();
        for (part, head) in [KvPart::Key, KvPart::Value]
            .into_iter()
            .flat_map(|part| (0..self.layout.n_kv_head()).map(move |head| (part, head)))
        {
            let at = KvCoord { layer: 0, block, part, head, token: slot % block_size, dim: 0 };
            let first = self.layout.elem_index(at).expect("it is there") as usize;
            let (bytes, dims) = (self.elem_bytes() as usize, self.layout.head_dim() as usize);
            ranges.push(first * bytes..(first + dims) * bytes);
            let scale = self.layout.scale_offset_bytes(at).expect("it is there");
            ranges.extend(scale.map(|at| at as usize..at as usize + 4));
        }
        ranges
    }

    pub(super) fn contents(&self, random: &mut Random) -> Vec<u8> {
        cache_contents(&self.layout, random)
    }

    /// How what was appended has to agree.
    pub(super) fn compare(&self) -> Compare {
        match self.layout.kv_type() {
            KvType::Q8 => Compare::Q8Cache(self.layout),
            KvType::F16 => Compare::Half,
            _ => Compare::F32 { per: self.layout.head_dim() as usize },
        }
    }
}

/// The element type of a kernel's cache.
pub(crate) fn kv_type(kernel: Kernel) -> KvType {
    match kernel {
        Kernel::RopeAppendF32 | Kernel::AttentionF32 | Kernel::AttentionStepF32 => KvType::F32,
        Kernel::RopeAppendQ8 | Kernel::AttentionQ8 => KvType::Q8,
        _ => KvType::F16,
    }
}

/// A cache full of numbers.
pub(crate) fn cache_contents(layout: &KvLayout, random: &mut Random) -> Vec<u8> {
    let values = random.floats(layout.total_elems() as usize);
    match layout.kv_type() {
        KvType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        KvType::Q8 => {
            let block = layout.block_bytes() as usize;
            let scales = layout.scales_offset_in_block_bytes().expect("it has scales") as usize;
            let mut bytes: Vec<u8> =
                (0..layout.total_bytes()).map(|_| random.bits() as u8).collect();
            for block in bytes.chunks_exact_mut(block) {
                for scale in block[scales..].chunks_exact_mut(4) {
                    scale.copy_from_slice(&((random.float() + 2.0) / 200.0).to_le_bytes());
                }
            }
            bytes
        }
        _ => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
    }
}

pub(crate) fn rope_append(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    // Heads, key heads, head_dim, pairs, pairing, block size, tokens, norms.
    let shapes: [[u32; 8]; 10] = [
        [1, 1, 64, 32, 0, 16, 1, 0],
        [4, 2, 80, 40, 1, 16, 1, 0],
        [128, 1, 96, 48, 0, 8, 1, 0],
        [3, 1, 128, 64, 1, 16, 3, 1],
        [2, 2, 256, 64, 1, 32, 2, 1],
        [5, 5, 80, 16, 0, 1, 2, 1],
        [2, 1, 2, 1, 0, 16, 1, 0],
        [1, 1, 7, 3, 1, 3, 1, 1],
        [2, 2, 6, 0, 0, 16, 1, 0],
        [2, 1, 16, 8, 0, 4, 5, 0],
    ];
    let case = |shape: [u32; 8]| {
        let [n_head, n_kv_head, head_dim, n_pairs, pairing, block_size, n_tokens, norms] = shape;
        let mut b = Builder::default();
        let slots = 40;
        // With tokens of several sequences in any order, one of them beyond the last.
        let n_sequences = if n_tokens > 2 { 5 } else { 1 };
        let sequences: Vec<u32> = match n_sequences {
            1 => vec![0; n_tokens as usize],
            _ => [3, u32::MAX, 0]
                .into_iter()
                .chain(std::iter::repeat(1))
                .take(n_tokens as usize)
                .collect(),
        };
        let dims = [n_kv_head, head_dim];
        let kv_type = kv_type(kernel);
        let layer = Layer::of_sequences(n_sequences, kv_type, dims, block_size, slots, random);
        let first = 131_000 + random.below(50);
        let tokens: Vec<u32> =
            (first..first + n_tokens).flat_map(|p| [p, p % slots, random.below(9)]).collect();
        let frequencies: Vec<f64> =
            (0..n_pairs).map(|i| 500_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
        let heads = n_head + 2 * n_kv_head;
        let kv = layer.contents(random);
        let compare = layer.compare();
        let args = rope_append::Args {
            qkv: b.input(&random.floats((n_tokens * heads * head_dim) as usize)),
            q_norm: (norms == 1).then(|| b.input(&random.floats(head_dim as usize))),
            k_norm: (norms == 1).then(|| b.input(&random.floats(head_dim as usize))),
            inverse_frequencies: b.input(&frequencies),
            tokens: b.input(&tokens),
            sequences: b.input(&sequences),
            block_table: b.input(&layer.block_table),
            q: b.output::<f32>(
                n_tokens * n_head * head_dim,
                Compare::F32 { per: head_dim as usize },
            ),
            kv: b.add(Memory { bytes: kv, set: Some(Vec::new()), compare }),
            n_tokens,
            n_head,
            n_kv_head,
            head_dim,
            n_pairs,
            pairing,
            block_size,
            n_blocks: layer.n_blocks(),
            n_sequences,
            table_stride: layer.table_stride(),
            n_logical: layer.n_logical,
            kv_elem_bytes: layer.elem_bytes(),
            norm_eps: 1e-6,
            magnitude: 1.25,
        };
        let geometry = args.geometry(&DeviceProfile::A2000);
        b.case(kernel, format!("{shape:?}"), args.list(kernel, Buf::len_bytes), geometry)
    };
    shapes.into_iter().map(case).collect()
}
