//! Every row once, bytes in order, balance, places that do not overlap.

use q4k_soa::{PackedLayout, Shape, WeightType};

use super::model::units;
use super::planner::partition;
use super::*;

const H200: (u32, u32) = (132, 232_448);

/// A Llama in the mix that most files have: Q4_K, with Q6_K for v and down of half the layers
/// and the output.
fn llama(
    n_layer: u32,
    n_embd: u32,
    n_head: u32,
    n_kv_head: u32,
    n_ff: u32,
    n_vocab: u32,
) -> ModelSpec {
    let head_dim = 64.max(n_embd / n_head);
    let mut end = 0;
    let mut matrix = |weight_type, n_out, n_in| {
        let shape = Shape { n_out, n_in };
        let len = PackedLayout::stream(weight_type, shape).unwrap().len_bytes();
        let offset_bytes = end;
        end += len.next_multiple_of(256);
        MatrixSpec { weight_type, shape, offset_bytes }
    };
    let (q4, q6) = (WeightType::Q4K, WeightType::Q6K);
    let (q_elems, kv_elems) = (n_head * head_dim, n_kv_head * head_dim);
    let layers = (0..n_layer)
        .map(|layer| {
            let more = if layer % 2 == 0 { q6 } else { q4 };
            LayerSpec {
                attn_norm: 0,
                qkv: [
                    matrix(q4, q_elems, n_embd),
                    matrix(q4, kv_elems, n_embd),
                    matrix(more, kv_elems, n_embd),
                ],
                qkv_bias: None,
                q_norm: None,
                k_norm: None,
                o: matrix(q4, n_embd, q_elems),
                ffn_norm: 0,
                gate_up: [matrix(q4, n_ff, n_embd), matrix(q4, n_ff, n_embd)],
                down: matrix(more, n_embd, n_ff),
                window: 0,
            }
        })
        .collect();
    let output = matrix(q6, n_vocab, n_embd);
    ModelSpec {
        n_embd,
        n_head,
        n_kv_head,
        head_dim,
        n_ff,
        n_vocab,
        n_pairs: head_dim / 2,
        pairing: 0,
        magnitude: 1.0,
        norm_eps: 1e-5,
        embed_scale: 1.0,
        attention_scale: 1.0,
        block_size: 16,
        n_blocks: 512,
        max_context_tokens: 8192,
        kv_elem_bytes: 2,
        embed: output,
        inverse_frequencies: 0,
        layers,
        output_norm: 0,
        output,
        greedy: true,
    }
}

fn shapes() -> [ModelSpec; 4] {
    [
        llama(16, 2048, 32, 8, 8192, 128_256),
        llama(28, 3072, 24, 8, 8192, 128_256),
        llama(32, 4096, 32, 8, 14_336, 128_256),
        llama(2, 256, 4, 2, 512, 321),
    ]
}

/// The blocks of rows of a matrix that a run has.
fn blocks_of(run: &Run, matrix: &MatrixSpec) -> Option<std::ops::Range<u32>> {
    let g = units("matrix", matrix).unwrap();
    let offset = (u64::from(run.base) * 16).checked_sub(matrix.offset_bytes)?;
    let first = (offset / g.block_bytes()) as u32;
    assert!(run.n_blocks == 0 || offset.is_multiple_of(g.block_bytes()) || first >= g.n_blocks);
    (run.n_blocks > 0 && first < g.n_blocks).then(|| first..first + run.n_blocks)
}

#[test]
fn every_row_of_every_matrix_is_computed_once() {
    for model in shapes() {
        for n_ctas in [132, 114, 9] {
            let Ok(schedule) = Schedule::new(&model, n_ctas, 8 * H200.1) else {
                panic!("{n_ctas}")
            };
            let n_ops = schedule.header().n_ops;
            assert_eq!(n_ops, 4 * model.layers.len() as u32 + 1);
            for op in 0..n_ops as usize {
                let layer = model.layers.get(op / 4);
                let matrices = match (layer, op % 4) {
                    (None, _) => vec![model.output],
                    (Some(layer), 0) => layer.qkv.to_vec(),
                    (Some(layer), 1) => vec![layer.o],
                    (Some(layer), 2) => layer.gate_up.to_vec(),
                    (Some(layer), _) => vec![layer.down],
                };
                let mut first_row = 0;
                for (index, matrix) in matrices.iter().enumerate() {
                    let mut taken = vec![0; units("matrix", matrix).unwrap().n_blocks as usize];
                    for cta in 0..n_ctas {
                        let op = &schedule.ops(cta)[op];
                        for run in &op.runs {
                            let Some(blocks) = blocks_of(run, matrix) else { continue };
                            let base = if op.kind == OpKind::GateUp as u32 { 0 } else { first_row };
                            assert_eq!(run.first_row, base + 8 * blocks.start);
                            assert_eq!(run.weight_type(), Some(matrix.weight_type));
                            blocks.for_each(|block| taken[block as usize] += 1);
                        }
                        if op.kind == OpKind::GateUp as u32 {
                            // Gate row and up row are at the same place.
                            assert_eq!(op.runs[0].n_blocks, op.runs[1].n_blocks);
                            assert_eq!(op.runs[0].first_row, op.runs[1].first_row);
                        }
                    }
                    assert!(taken.iter().all(|&taken| taken == 1), "op {op}, matrix {index}");
                    first_row += matrix.shape.n_out;
                }
            }
        }
    }
}

#[test]
fn bytes_are_in_order_and_slots_are_counted() {
    for model in shapes() {
        let schedule = Schedule::new(&model, H200.0, H200.1).unwrap();
        for cta in 0..H200.0 {
            let mut slots = 0;
            for op in schedule.ops(cta) {
                assert_eq!(op.first_slot, slots);
                let units: u32 = op.runs.iter().map(|run| run.n_blocks * op.chunks).sum();
                assert_eq!(op.n_units, units);
                slots += op
                    .runs
                    .iter()
                    .map(|run| (run.n_blocks * op.chunks).div_ceil(run.units_per_slot()))
                    .sum::<u32>();
                assert_eq!(op.first_slot + op.n_slots, slots);
                assert!(op.runs.windows(2).all(|w| w[1].n_blocks == 0 || w[0].base < w[1].base));
            }
        }
    }
}

#[test]
fn no_block_streams_2_percent_more_than_the_mean() {
    // Owners of n_embd's rows decide: on 114 multiprocessors the 1B's best is 8 %, because 256
    // blocks of rows make 2 or 3 each.
    for model in &shapes()[..3] {
        let balance = Schedule::new(model, H200.0, H200.1).unwrap().balance();
        assert!(balance < 1.02, "{} layers: {balance}", model.layers.len());
    }
}

#[test]
fn no_operation_has_more_than_a_block_of_rows_above_its_share() {
    for model in &shapes()[..3] {
        let schedule = Schedule::new(model, H200.0, H200.1).unwrap();
        for op in 0..schedule.header().n_ops as usize {
            let bytes = |cta: u32| -> u64 {
                let op = &schedule.ops(cta)[op];
                let row_groups = u64::from(op.n_in / 32);
                let group = |run: &Run| [148, 210, 272][(run.format & 0xff) as usize];
                op.runs.iter().map(|run| u64::from(run.n_blocks) * row_groups * group(run)).sum()
            };
            let all: Vec<u64> = (0..H200.0).map(bytes).collect();
            let share = all.iter().sum::<u64>() / u64::from(H200.0);
            let block = u64::from(schedule.ops(0)[op].n_in / 32) * 210 * 2;
            assert!(all.iter().all(|&bytes| bytes <= share + block), "op {op}");
        }
    }
}

#[test]
fn owners_keep_their_rows_in_every_layer() {
    for model in shapes() {
        let schedule = Schedule::new(&model, H200.0, H200.1).unwrap();
        for cta in 0..H200.0 {
            let rows = |op: &Op| {
                (op.runs[0].n_blocks > 0).then_some((op.runs[0].first_row, op.runs[0].n_blocks))
            };
            let owned = rows(&schedule.ops(cta)[1]);
            for op in schedule.ops(cta) {
                if [OpKind::Output as u32, OpKind::Down as u32].contains(&op.kind) {
                    assert_eq!(rows(op), owned);
                }
            }
        }
    }
}

#[test]
fn every_vector_has_words_of_its_own() {
    for model in shapes() {
        let schedule = Schedule::new(&model, H200.0, H200.1).unwrap();
        let h = schedule.header();
        let mut taken = vec![(0, EXCHANGE_HEADER_WORDS), (h.bests, 2 * h.n_ctas)];
        taken.push((h.partials, h.n_head * h.segments * (2 + h.head_dim)));
        let ops = schedule.ops(0);
        for (index, op) in ops.iter().enumerate() {
            if op.output != NONE {
                let n_out = match op.kind {
                    0 => (h.n_head + 2 * h.n_kv_head) * h.head_dim,
                    2 => model.n_ff,
                    _ => h.n_embd,
                };
                taken.extend([(op.output, n_out / 2), (op.counter_out, 1)]);
            }
            if op.kind == OpKind::Qkv as u32 {
                taken
                    .extend([(op.attention, h.n_head * h.head_dim / 2), (op.counter_attention, 1)]);
                assert_eq!(ops[index + 1].input, op.attention);
                assert_eq!(ops[index + 1].counter_in, op.counter_attention);
            } else if op.kind != OpKind::Output as u32 {
                assert_eq!(
                    (op.input, op.counter_in),
                    (ops[index - 1].output, ops[index - 1].counter_out)
                );
            }
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{taken:?}");
        let &(last, len) = taken.last().unwrap();
        assert!(last + len <= schedule.exchange_words());
        assert_eq!(exchange_words(&model.exchange_dims(), H200.0), schedule.exchange_words());
        assert_eq!(table_words(h.n_layer, h.n_ctas) as usize, schedule.words().len());
    }
}

#[test]
fn shared_memory_holds_everything_side_by_side() {
    for model in shapes() {
        let schedule = Schedule::new(&model, H200.0, H200.1).unwrap();
        let h = schedule.header();
        let bytes = schedule.geometry().shared_bytes;
        assert!(bytes <= H200.1 && h.n_slots * SLOT_BYTES <= h.quants_at);
        let places = [
            h.quants_at,
            h.scales_at,
            h.halves_at,
            h.scratch_at,
            h.squares_at,
            h.misc_at,
            h.turns_at,
            h.residual_at,
            h.table_at,
            h.barriers_at,
        ];
        assert!(places.is_sorted() && places.iter().all(|at| at % 128 == 0));
        assert_eq!(h.barriers_at + 16 * h.n_slots, bytes);
        // More than the copies in flight, and 130 KB at least for the models that matter.
        assert!(h.n_slots > h.outstanding_busy && h.n_slots * SLOT_BYTES > 130_000);
    }
}

#[test]
fn parts_of_a_partition_follow_each_other() {
    assert_eq!(partition(&[(8, 1)], 4), [0, 2, 4, 6, 8]);
    assert_eq!(partition(&[(2, 1)], 4), [0, 0, 1, 1, 2]);
    assert_eq!(partition(&[(2, 3), (3, 2)], 2), [0, 2, 5]);
    assert_eq!(partition(&[(0, 1)], 2), [0, 0, 0]);
}

#[test]
fn what_the_kernel_cannot_do_is_refused_with_numbers() {
    let model = llama(2, 256, 4, 2, 512, 320);
    let refused = |change: &dyn Fn(&mut ModelSpec)| {
        let mut model = model.clone();
        change(&mut model);
        Schedule::new(&model, H200.0, H200.1).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|m| m.head_dim = 300),
        "head_dim = 300: the persistent step needs a multiple of 8 up to 256"
    );
    let q5 = refused(&|m| m.layers[1].down.weight_type = WeightType::Q5K);
    assert_eq!(q5, "matrix: a stream holds Q4_K, Q6_K and Q8_0; Q5_K has no units");
    let odd = refused(&|m| m.layers[0].o.offset_bytes += 8);
    assert!(odd.contains("multiple of 16 bytes"), "{odd}");
    let small = Schedule::new(&model, H200.0, 48 << 10).unwrap_err();
    assert!(matches!(small, ScheduleError::SharedMemory { found_bytes: 49_152, .. }));
}
