//! Appending to the KV cache, and attention over it.

use kernels_ptx::ops::{attention, attention_combine, attention_step, rope_append};
use kernels_ptx::{DeviceProfile, Kernel};
use kv_paged::{KvLayout, KvType, PagedKvConfig};

use super::{Buffers, Model};
use crate::cu::cases::kv::{cache_contents, kv_type};
use crate::cu::cases::{Buf, Case, Compare, Memory, Random};

pub(super) const BLOCK_SIZE: u32 = 16;

/// One layer of so many blocks.
pub(super) fn layout(kernel: Kernel, model: Model, n_blocks: u32) -> KvLayout {
    let config = PagedKvConfig::new(1, model.n_kv_head, model.head_dim, BLOCK_SIZE)
        .and_then(|config| config.with_block_size(BLOCK_SIZE))
        .and_then(|config| config.with_kv_type(kv_type(kernel)));
    KvLayout::with_blocks(&config.expect("a valid layer"), n_blocks).expect("it fits")
}

/// How what was appended has to agree.
fn appended(layout: &KvLayout) -> Compare {
    match layout.kv_type() {
        KvType::Q8 => Compare::Q8Cache(*layout),
        KvType::F16 => Compare::Half,
        _ => Compare::F32 { per: layout.head_dim() as usize },
    }
}

pub(super) fn rope_case(
    kernel: Kernel,
    model: Model,
    device: &DeviceProfile,
    random: &mut Random,
) -> Case {
    let Model { n_head, n_kv_head, head_dim, .. } = model;
    let (n_blocks, n_pairs) = (64, head_dim / 2);
    let position = 100_000 + random.below(1000);
    let frequencies: Vec<f64> =
        (0..n_pairs).map(|i| 500_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
    let layout = layout(kernel, model, n_blocks);
    let (kv, compare) = (cache_contents(&layout, random), appended(&layout));
    let mut b = Buffers::default();
    let args = rope_append::Args {
        qkv: b.input(&random.floats(((n_head + 2 * n_kv_head) * head_dim) as usize)),
        q_norm: None,
        k_norm: None,
        inverse_frequencies: b.input(&frequencies),
        tokens: b.input(&[position, position % (n_blocks * BLOCK_SIZE), 1]),
        sequences: b.input(&[0u32]),
        block_table: b.input(&random.shuffled(n_blocks)),
        q: b.output::<f32>(n_head * head_dim, Compare::F32 { per: head_dim as usize }),
        kv: b.memory(Memory { bytes: kv, set: None, compare }),
        n_tokens: 1,
        n_head,
        n_kv_head,
        head_dim,
        n_pairs,
        pairing: 0,
        block_size: BLOCK_SIZE,
        n_blocks,
        n_sequences: 1,
        table_stride: 0,
        n_logical: n_blocks,
        kv_elem_bytes: layout.kv_type().elem_bytes() as u32,
        norm_eps: 1e-5,
        magnitude: 1.0,
    };
    case!(b, kernel, model.name.into(), args, device)
}

/// How far a sequence has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    pub(super) n_context: u32,
    pub(super) max_context_tokens: u32,
    pub(super) window: u32,
}

pub(super) fn attention_case(
    kernel: Kernel,
    model: Model,
    context: Context,
    device: &DeviceProfile,
    random: &mut Random,
) -> Case {
    let Model { n_head, n_kv_head, head_dim, .. } = model;
    let Context { n_context, max_context_tokens, window } = context;
    let n_blocks = max_context_tokens / BLOCK_SIZE;
    let n_segments = device.attention_segments(n_kv_head, max_context_tokens);
    let position = n_context - 1;
    let layout = layout(kernel, model, n_blocks);
    let kv = cache_contents(&layout, random);
    let record = 2 + head_dim;
    let mut b = Buffers::default();
    let args = attention::Args {
        q: b.input(&random.floats((n_head * head_dim) as usize)),
        kv: b.memory(Memory { bytes: kv, set: None, compare: Compare::Exact }),
        sequences: b.input(&[0u32]),
        block_table: b.input(&random.shuffled(n_blocks)),
        tokens: b.input(&[position, position % max_context_tokens, 0]),
        partials: b
            .output::<f32>(n_head * n_segments * record, Compare::F32 { per: record as usize }),
        n_tokens: 1,
        n_head,
        n_kv_head,
        head_dim,
        block_size: BLOCK_SIZE,
        n_blocks,
        n_sequences: 1,
        table_stride: 0,
        n_logical: n_blocks,
        max_context_tokens,
        n_segments,
        segment_min: DeviceProfile::SEGMENT_MIN,
        window,
        kv_elem_bytes: layout.kv_type().elem_bytes() as u32,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    case!(b, kernel, format!("{}, {context:?}", model.name), args, device)
}

pub(super) fn combine_case(model: Model, device: &DeviceProfile, random: &mut Random) -> Case {
    let Model { n_head, head_dim, n_kv_head, .. } = model;
    let n_segments = device.attention_segments(n_kv_head, 8192);
    let mut partials = Vec::new();
    for _ in 0..n_head * n_segments {
        partials.extend([random.float() * 8.0, random.float() + 1.5]);
        partials.extend(random.floats(head_dim as usize));
    }
    let mut b = Buffers::default();
    let args = attention_combine::Args {
        partials: b.input(&partials),
        out: b.output::<f32>(n_head * head_dim, Compare::F32 { per: head_dim as usize }),
        n_tokens: 1,
        n_head,
        head_dim,
        n_segments,
    };
    case!(
        b,
        Kernel::AttentionCombine,
        format!("{}, {n_segments} segments", model.name),
        args,
        device
    )
}

pub(super) fn attention_step_case(
    kernel: Kernel,
    model: Model,
    context: Context,
    device: &DeviceProfile,
    random: &mut Random,
) -> Case {
    let Model { n_head, n_kv_head, head_dim, .. } = model;
    let Context { n_context, max_context_tokens, window } = context;
    let (n_blocks, n_pairs) = (max_context_tokens / BLOCK_SIZE, head_dim / 2);
    let n_segments = device.attention_segments(n_kv_head, max_context_tokens);
    let position = n_context - 1;
    let frequencies: Vec<f64> =
        (0..n_pairs).map(|i| 500_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
    let layout = layout(kernel, model, n_blocks);
    let (kv, compare) = (cache_contents(&layout, random), appended(&layout));
    let record = 2 + head_dim;
    let partials = random.floats((n_head * n_segments * record) as usize);
    let mut b = Buffers::default();
    let args = attention_step::Args {
        qkv: b.input(&random.floats(((n_head + 2 * n_kv_head) * head_dim) as usize)),
        q_norm: None,
        k_norm: None,
        inverse_frequencies: b.input(&frequencies),
        tokens: b.input(&[position, position % max_context_tokens, 0]),
        block_table: b.input(&random.shuffled(n_blocks)),
        kv: b.memory(Memory { bytes: kv, set: None, compare }),
        partials: b.memory(Memory {
            bytes: bytemuck::cast_slice(&partials).to_vec(),
            set: None,
            compare: Compare::F32 { per: record as usize },
        }),
        arrivals: b.input(&vec![0u32; n_kv_head as usize]),
        out: b.output::<f32>(n_head * head_dim, Compare::F32 { per: head_dim as usize }),
        n_head,
        n_kv_head,
        head_dim,
        n_pairs,
        pairing: 0,
        block_size: BLOCK_SIZE,
        n_blocks,
        max_context_tokens,
        n_segments,
        segment_min: DeviceProfile::SEGMENT_MIN,
        window,
        kv_elem_bytes: layout.kv_type().elem_bytes() as u32,
        norm_eps: 1e-5,
        magnitude: 1.0,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    case!(b, kernel, format!("{}, {context:?}", model.name), args, device)
}
