//! Attention over the KV cache, and the combining of its segments.

use kernels_ptx::ops::{
    HalfOrder, attention, attention_chunk, attention_combine, attention_rows, attention_step,
    half_bytes,
};
use kernels_ptx::{DeviceProfile, Kernel};
use kv_paged::KvType;

use super::kv::{Layer, kv_type};
use super::{Buf, Builder, Case, Compare, Memory, Random};

/// A launch of attention.
#[derive(Clone, Copy, Debug)]
struct Attention {
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    block_size: u32,
    /// Tokens in the cache, the current one included; more than slots means the ring has turned.
    n_context: u32,
    max_context_tokens: u32,
    n_segments: u32,
    segment_min: u32,
    window: u32,
    n_tokens: u32,
    /// 1: the tokens follow each other; more: each is of another sequence, of another length.
    n_sequences: u32,
}

/// Shapes of one token, the current one included in the context.
fn attention_shapes() -> Vec<Attention> {
    let usual = Attention {
        n_head: 4,
        n_kv_head: 2,
        head_dim: 64,
        block_size: 16,
        n_context: 50,
        max_context_tokens: 80,
        n_segments: 3,
        segment_min: 16,
        window: 0,
        n_tokens: 1,
        n_sequences: 1,
    };
    let mut shapes = vec![
        Attention { n_head: 1, n_kv_head: 1, ..usual },
        Attention { n_head: 128, n_kv_head: 1, head_dim: 80, n_context: 20, ..usual },
        Attention { n_head: 18, n_kv_head: 3, n_context: 130, max_context_tokens: 200, ..usual },
        Attention { n_context: 200, ..usual },
        Attention { n_context: 131, window: 33, ..usual },
        Attention { n_context: 170, window: 33, ..usual },
        Attention { n_context: 40, n_segments: 8, segment_min: 32, ..usual },
        Attention { n_context: 60, window: 7, n_segments: 5, ..usual },
        Attention { block_size: 1, ..usual },
        Attention { block_size: 7, max_context_tokens: 79, n_context: 150, ..usual },
        Attention {
            n_head: 2,
            n_kv_head: 1,
            n_context: 4097,
            max_context_tokens: 4112,
            n_segments: 8,
            segment_min: 64,
            head_dim: 32,
            ..usual
        },
    ];
    for n_context in [1, 15, 16, 17] {
        shapes.push(Attention { n_context, ..usual });
    }
    for head_dim in [2, 7, 8, 16, 20, 80, 96, 128, 256] {
        shapes.push(Attention { head_dim, ..usual });
    }
    shapes
}

pub(crate) fn attention(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let mut shapes = attention_shapes();
    shapes.push(Attention { n_context: 70, n_tokens: 3, n_segments: 2, ..shapes[3] });
    shapes.push(Attention { n_context: 70, n_tokens: 4, n_sequences: 3, window: 9, ..shapes[3] });
    shapes.push(Attention {
        n_context: 90,
        n_tokens: 5,
        n_sequences: 4,
        n_segments: 1,
        ..shapes[3]
    });
    shapes.into_iter().map(|shape| attention_case(kernel, shape, random)).collect()
}

pub(crate) fn step(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let mut shapes = attention_shapes();
    // More heads than are turned at a time, several segments, and the token in each of them.
    let [_, many, groups, ..] = shapes[..] else { unreachable!("there are shapes") };
    shapes.push(Attention { n_context: 50, n_head: 9, n_kv_head: 1, ..many });
    shapes.extend([33, 65, 97, 129].map(|n| Attention { n_context: 400 + n, ..groups }));
    shapes.push(Attention { n_context: 1000, n_segments: 64, max_context_tokens: 1024, ..groups });
    shapes.into_iter().map(|shape| attention_step_case(kernel, shape, random)).collect()
}

/// Slots that somebody attends to hold something; the rest is NaN and must not be read. What the
/// token itself writes is not there yet if it is `new`.
fn attended(
    layer: &Layer,
    shape: Attention,
    rows: &[[u32; 2]],
    new: bool,
    kv: &mut [u8],
) -> Vec<std::ops::Range<usize>> {
    let slots = shape.max_context_tokens;
    let mut set = Vec::new();
    let last = layer.n_sequences() - 1;
    for (sequence, slot) in (0..=last).flat_map(|s| (0..slots).map(move |slot| (s, slot))) {
        let attended = rows.iter().filter(|row| row[0].min(last) == sequence).any(|row| {
            let age = (row[1] % slots + slots - slot) % slots;
            let there = !(new && age == 0);
            slot <= row[1] && there && (shape.window == 0 || age < shape.window)
        });
        let ranges = layer.slot_of(sequence, slot);
        match attended {
            true => set.extend(ranges),
            false => ranges.into_iter().for_each(|range| kv[range].fill(0xff)),
        }
    }
    set
}

fn attention_step_case(kernel: Kernel, shape: Attention, random: &mut Random) -> Case {
    let Attention { n_head, n_kv_head, head_dim, block_size, .. } = shape;
    let slots = shape.max_context_tokens;
    let layer = Layer::new(kv_type(kernel), [n_kv_head, head_dim], block_size, slots, random);
    let position = shape.n_context - 1;
    let mut kv = layer.contents(random);
    let set = attended(&layer, shape, &[[0, position]], true, &mut kv);
    let norms = head_dim == 64 || head_dim == 80;
    let pairing = u32::from(head_dim % 3 == 0);
    let n_pairs = if head_dim == 96 { 32 } else { head_dim / 2 };
    let frequencies: Vec<f64> =
        (0..n_pairs).map(|i| 10_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
    let record = 2 + head_dim;
    let n_partials = (n_head * shape.n_segments * record) as usize;
    let mut b = Builder::default();
    let compare = layer.compare();
    let args = attention_step::Args {
        qkv: b.input(&random.floats(((n_head + 2 * n_kv_head) * head_dim) as usize)),
        q_norm: norms.then(|| b.input(&random.floats(head_dim as usize))),
        k_norm: norms.then(|| b.input(&random.floats(head_dim as usize))),
        inverse_frequencies: b.input(&frequencies),
        tokens: b.input(&[position, position % slots, 0]),
        block_table: b.input(&layer.block_table),
        kv: b.add(Memory { bytes: kv, set: Some(set), compare }),
        // Whatever was there stays where a segment is not in use.
        partials: b.add(Memory {
            bytes: bytemuck::cast_slice(&random.floats(n_partials)).to_vec(),
            set: Some(Vec::new()),
            compare: Compare::F32 { per: record as usize },
        }),
        arrivals: b.add(Memory {
            bytes: vec![0; n_kv_head as usize * 4],
            set: None,
            compare: Compare::Exact,
        }),
        out: b.output::<f32>(n_head * head_dim, Compare::F32 { per: head_dim as usize }),
        n_head,
        n_kv_head,
        head_dim,
        n_pairs,
        pairing,
        block_size,
        n_blocks: layer.n_blocks(),
        max_context_tokens: slots,
        n_segments: shape.n_segments,
        segment_min: shape.segment_min,
        window: shape.window,
        kv_elem_bytes: layer.elem_bytes(),
        norm_eps: 1e-6,
        magnitude: 1.0,
        scale: 3.0 / (head_dim as f32).sqrt(),
    };
    let geometry = args.geometry(&DeviceProfile::A2000);
    b.case(kernel, format!("{shape:?}"), args.list(kernel, Buf::len_bytes), geometry)
}

impl AttentionRows {
    fn new(shape: Attention, kv_type: KvType, random: &mut Random) -> Self {
        let Attention { n_head, n_kv_head, head_dim, block_size, n_tokens, .. } = shape;
        let slots = shape.max_context_tokens;
        let n_sequences = shape.n_sequences;
        let dims = [n_kv_head, head_dim];
        let layer = Layer::of_sequences(n_sequences, kv_type, dims, block_size, slots, random);
        // Token t of the launch sees one token more than the one before it, or t sequences have tokens
        // of their own. The last token's sequence is beyond the last.
        let position = |t| match n_sequences {
            1 => shape.n_context - n_tokens + t,
            _ => shape.n_context - 1 - t * 17,
        };
        let positions: Vec<u32> = (0..n_tokens).map(position).collect();
        let sequences: Vec<u32> = match n_sequences {
            1 => vec![0; n_tokens as usize],
            _ => (0..n_tokens)
                .map(|t| if t + 1 == n_tokens { u32::MAX } else { t % n_sequences })
                .collect(),
        };
        let tokens: Vec<u32> = positions.iter().flat_map(|p| [*p, p % slots, 0]).collect();

        let mut kv = layer.contents(random);
        let rows: Vec<[u32; 2]> = sequences.iter().zip(&positions).map(|(s, p)| [*s, *p]).collect();
        let set = attended(&layer, shape, &rows, false, &mut kv);

        let q = random.floats((n_tokens * n_head * head_dim) as usize);
        let q = q.iter().map(|x| x * 3.0).collect();
        Self { layer, sequences, tokens, kv, set, q }
    }
}

fn attention_case(kernel: Kernel, shape: Attention, random: &mut Random) -> Case {
    let Attention { n_head, n_kv_head, head_dim, block_size, n_tokens, n_sequences, .. } = shape;
    let AttentionRows { layer, sequences, tokens, kv, set, q } =
        AttentionRows::new(shape, kv_type(kernel), random);
    let slots = shape.max_context_tokens;
    let record = 2 + head_dim;
    let mut b = Builder::default();
    let args = attention::Args {
        q: b.input(&q),
        kv: b.add(Memory { bytes: kv, set: Some(set), compare: Compare::Exact }),
        sequences: b.input(&sequences),
        block_table: b.input(&layer.block_table),
        tokens: b.input(&tokens),
        partials: b.output::<f32>(
            n_tokens * n_head * shape.n_segments * record,
            Compare::F32 { per: record as usize },
        ),
        n_tokens,
        n_head,
        n_kv_head,
        head_dim,
        block_size,
        n_blocks: layer.n_blocks(),
        n_sequences,
        table_stride: layer.table_stride(),
        n_logical: layer.n_logical,
        max_context_tokens: slots,
        n_segments: shape.n_segments,
        segment_min: shape.segment_min,
        window: shape.window,
        kv_elem_bytes: layer.elem_bytes(),
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    let geometry = args.geometry(&DeviceProfile::A2000);
    b.case(kernel, format!("{shape:?}"), args.list(kernel, Buf::len_bytes), geometry)
}

/// What a launch of attention over rows reads, whichever kernel it is.
struct AttentionRows {
    layer: Layer,
    sequences: Vec<u32>,
    tokens: Vec<u32>,
    kv: Vec<u8>,
    set: Vec<std::ops::Range<usize>>,
    q: Vec<f32>,
}

pub(crate) fn combine(random: &mut Random) -> Vec<Case> {
    // Tokens, heads, head_dim, segments, of which not empty.
    let shapes: [[u32; 5]; 9] = [
        [1, 1, 64, 1, 1],
        [2, 3, 80, 3, 2],
        [1, 2, 96, 8, 8],
        [1, 4, 128, 33, 20],
        [2, 2, 256, 40, 40],
        [1, 128, 8, 9, 1],
        [1, 1, 7, 70, 70],
        [1, 2, 1, 64, 33],
        [1, 1, 100, 16, 0],
    ];
    let mut cases = Vec::new();
    for shape in shapes {
        let [n_tokens, n_head, head_dim, n_segments, filled] = shape;
        let mut partials = Vec::new();
        for _ in 0..n_tokens * n_head {
            let order = random.shuffled(n_segments);
            for segment in if n_segments == 70 { (0..n_segments).collect() } else { order } {
                if segment < filled {
                    // Of many segments the later ones outweigh the first beyond f32's range.
                    let rise = if n_segments == 70 { 3.0 * segment as f32 } else { 0.0 };
                    partials.push(random.float() * 8.0 + rise);
                    partials.push(random.float() + 1.5);
                    partials.extend(random.floats(head_dim as usize));
                } else {
                    partials.push(f32::NEG_INFINITY);
                    partials.extend(vec![0.0; 1 + head_dim as usize]);
                }
            }
        }
        let mut b = Builder::default();
        let args = attention_combine::Args {
            partials: b.input(&partials),
            out: b.output::<f32>(
                n_tokens * n_head * head_dim,
                Compare::F32 { per: head_dim as usize },
            ),
            n_tokens,
            n_head,
            head_dim,
            n_segments,
        };
        let kernel = Kernel::AttentionCombine;
        let geometry = args.geometry(&DeviceProfile::A2000);
        cases.push(b.case(
            kernel,
            format!("{shape:?}"),
            args.list(kernel, Buf::len_bytes),
            geometry,
        ));
    }
    cases
}

/// Runs of tokens, [run, tokens of it, position of the first] and whose: the rest is padding.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    block_size: u32,
    run_tokens: u32,
    window: u32,
    order: HalfOrder,
    /// Position of the first token and number of tokens of each run.
    runs: [[u32; 2]; 2],
}

pub(crate) fn chunk(kernel: Kernel, random: &mut Random) -> Vec<Case> {
    let dims: &[u32] = match kernel {
        Kernel::AttentionChunk64 => &[64, 8, 40],
        Kernel::AttentionChunk128 => &[128, 80, 96],
        _ => &[256, 136, 192],
    };
    let usual = Chunk {
        n_head: 2,
        n_kv_head: 1,
        head_dim: dims[0],
        block_size: 16,
        run_tokens: 80,
        window: 0,
        order: HalfOrder::Rows,
        runs: [[0, 80], [77, 50]],
    };
    let shapes = [
        usual,
        Chunk { head_dim: dims[1], n_head: 3, n_kv_head: 3, runs: [[64, 80], [1, 80]], ..usual },
        Chunk { head_dim: dims[2], window: 33, block_size: 5, runs: [[90, 80], [0, 3]], ..usual },
        Chunk { run_tokens: 16, order: HalfOrder::Fragments, runs: [[130, 16], [7, 9]], ..usual },
        Chunk {
            run_tokens: 4,
            order: HalfOrder::Fragments,
            n_head: 4,
            n_kv_head: 2,
            window: 1,
            runs: [[63, 4], [0, 4]],
            ..usual
        },
    ];
    shapes.into_iter().map(|shape| chunk_case(kernel, shape, random)).collect()
}

fn chunk_case(kernel: Kernel, shape: Chunk, random: &mut Random) -> Case {
    let Chunk { n_head, n_kv_head, head_dim, block_size, run_tokens, window, .. } = shape;
    let slots = 200;
    // The last sequence is that of padding: position 0 of it is there.
    let dims = [n_kv_head, head_dim];
    let layer = Layer::of_sequences(3, KvType::F16, dims, block_size, slots, random);
    let mut rows = Vec::new();
    for (sequence, [first, count]) in (0..).zip(shape.runs) {
        rows.extend((first..first + count).map(|position| [sequence, position]));
        rows.extend((count..run_tokens).map(|_| [u32::MAX, 0]));
    }
    let mut kv = layer.contents(random);
    let mut set = Vec::new();
    // Whole tiles of slots are read, up to the last position; what is older than every window and
    // what is to come is neither set nor read.
    for (sequence, [first, count]) in (0..).zip(shape.runs) {
        let oldest = if window == 0 { 0 } else { (first + 1).saturating_sub(window) };
        for slot in 0..slots {
            let ranges = layer.slot_of(sequence, slot);
            match slot >= oldest / 64 * 64 && slot < first + count {
                true => set.extend(ranges),
                false => ranges.into_iter().for_each(|range| kv[range].fill(0xff)),
            }
        }
    }
    set.extend(layer.slot_of(2, 0));
    let n_tokens = rows.len() as u32;
    let tokens: Vec<u32> = rows.iter().flat_map(|[_, p]| [*p, *p, 0]).collect();
    let sequences: Vec<u32> = rows.iter().map(|[sequence, _]| *sequence).collect();
    let q: Vec<f32> =
        random.floats((n_tokens * n_head * head_dim) as usize).iter().map(|x| x * 3.0).collect();
    let mut b = Builder::default();
    let args = attention_chunk::Args {
        q: b.input(&q),
        kv: b.add(Memory { bytes: kv, set: Some(set), compare: Compare::Exact }),
        sequences: b.input(&sequences),
        block_table: b.input(&layer.block_table),
        tokens: b.input(&tokens),
        out: b.add(Memory {
            bytes: vec![0; half_bytes(shape.order, n_tokens, n_head * head_dim) as usize],
            set: Some(Vec::new()),
            compare: Compare::Weighted { per: head_dim as usize },
        }),
        n_tokens,
        run_tokens,
        n_head,
        n_kv_head,
        head_dim,
        block_size,
        n_blocks: layer.n_blocks(),
        n_sequences: layer.n_sequences(),
        table_stride: layer.table_stride(),
        n_logical: layer.n_logical,
        window,
        order: shape.order as u32,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    let geometry = args.geometry(&DeviceProfile::A2000);
    b.case(kernel, format!("{shape:?}"), args.list(kernel, Buf::len_bytes), geometry)
}

pub(crate) fn rows(random: &mut Random) -> Vec<Case> {
    let mut shapes = attention_shapes();
    shapes.retain(|shape| shape.n_head * shape.head_dim % 8 == 0);
    let [.., usual] = shapes[..] else { unreachable!("there are shapes") };
    let usual = Attention { head_dim: 64, n_context: 200, max_context_tokens: 256, ..usual };
    shapes.push(Attention { n_context: 70, n_tokens: 3, n_segments: 2, ..usual });
    shapes.push(Attention { n_context: 170, n_tokens: 5, n_sequences: 3, window: 9, ..usual });
    shapes.push(Attention { n_context: 190, n_tokens: 9, n_sequences: 4, n_segments: 1, ..usual });
    shapes.push(Attention { n_context: 200, n_tokens: 9, n_sequences: 9, n_segments: 5, ..usual });
    let kernel = Kernel::AttentionRows;
    let case = |(index, shape): (usize, Attention)| {
        let Attention { n_head, n_kv_head, head_dim, block_size, n_tokens, n_sequences, .. } =
            shape;
        let AttentionRows { layer, sequences, tokens, kv, set, q } =
            AttentionRows::new(shape, KvType::F16, random);
        let order = if index % 3 == 2 { HalfOrder::Rows } else { HalfOrder::Fragments };
        let record = 2 + head_dim;
        let n_partials = (n_tokens * n_head * shape.n_segments * record) as usize;
        let mut b = Builder::default();
        let args = attention_rows::Args {
            q: b.input(&q),
            kv: b.add(Memory { bytes: kv, set: Some(set), compare: Compare::Exact }),
            sequences: b.input(&sequences),
            block_table: b.input(&layer.block_table),
            tokens: b.input(&tokens),
            // Whatever was there stays where a segment is not in use.
            partials: b.add(Memory {
                bytes: bytemuck::cast_slice(&random.floats(n_partials)).to_vec(),
                set: Some(Vec::new()),
                compare: Compare::F32 { per: record as usize },
            }),
            arrivals: b.add(Memory {
                bytes: vec![0; (n_tokens * n_kv_head * 4) as usize],
                set: None,
                compare: Compare::Exact,
            }),
            out: b.add(Memory {
                bytes: vec![0; half_bytes(order, n_tokens, n_head * head_dim) as usize],
                set: Some(Vec::new()),
                compare: Compare::Rounded { per: head_dim as usize },
            }),
            n_tokens,
            n_head,
            n_kv_head,
            head_dim,
            block_size,
            n_blocks: layer.n_blocks(),
            n_sequences,
            table_stride: layer.table_stride(),
            n_logical: layer.n_logical,
            max_context_tokens: shape.max_context_tokens,
            n_segments: shape.n_segments,
            segment_min: shape.segment_min,
            window: shape.window,
            order: order as u32,
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let geometry = args.geometry(&DeviceProfile::A2000);
        let label = format!("{order:?}, {shape:?}");
        b.case(kernel, label, args.list(kernel, Buf::len_bytes), geometry)
    };
    shapes.into_iter().enumerate().map(case).collect()
}
