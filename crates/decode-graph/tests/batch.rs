//! Steps of many rows on the host backend: sequences that share a cache, chunks of prompts.

mod support;

use decode_graph::batch::{NO_ROW, PADDING, Row};
use decode_graph::{
    Drive, Graph, Head, HostBackend, KvArena, Numerics, StepArena, StepPlan, record,
};
use kernels_ptx::{SamplingPack, TokenParams};
use kv_paged::{Delta, KvType, LayerGroup, Planner, PlannerConfig, Request, SequenceId};
use support::{CONTEXT, DIMS, Tiny};

fn params(position: u32, token_id: u32) -> TokenParams {
    TokenParams { absolute_position: position, ring_slot: position, token_id }
}

/// The tiny model with a cache for many, and graphs of several plans over it.
struct Many {
    tiny: Tiny,
    kv: KvArena,
    arena: StepArena,
    planner: Planner,
    delta: Delta,
    graphs: Vec<Graph<HostBackend>>,
}

const BATCH: u32 = 4;
const CHUNK: u32 = 8;

impl Many {
    fn new(numerics: Numerics, kv_type: KvType, head: Head) -> Self {
        let groups = vec![LayerGroup::full(DIMS.n_layer, 24)];
        Self::with_groups(Tiny::new(numerics, kv_type, false, 1), groups, head)
    }

    /// Graph 0 is a batch, graph 1 a chunk.
    fn with_groups(mut tiny: Tiny, groups: Vec<LayerGroup>, head: Head) -> Self {
        let config = PlannerConfig::new(groups, 6, CONTEXT).unwrap().with_block_size(8).unwrap();
        tiny.plan.head = head;
        let batch = tiny.plan.for_batch(BATCH, config.clone(), &tiny.profile);
        let chunk = tiny.plan.for_chunk(CHUNK, Some(config.clone()), &tiny.profile);
        let kv = KvArena::for_plan(&mut tiny.slab, &batch).unwrap();
        let arena = StepArena::for_plans(&mut tiny.slab, &[batch.clone(), chunk.clone()]).unwrap();
        // Whatever was there before.
        tiny.slab.fill_view(kv.blocks, 0x3c).unwrap();
        tiny.slab.fill_view(kv.table, 0).unwrap();
        arena.zero(&mut tiny.slab).unwrap();
        let mut many = Self {
            tiny,
            kv,
            arena,
            planner: Planner::new(config),
            delta: Delta::new(),
            graphs: Vec::new(),
        };
        for plan in [&batch, &chunk] {
            let graph = many.capture(plan);
            many.graphs.push(graph);
        }
        many
    }

    fn capture(&mut self, plan: &StepPlan) -> Graph<HostBackend> {
        let Tiny { weights, profile, slab, .. } = &mut self.tiny;
        let recording = record(plan, weights, &self.kv, &self.arena, profile).unwrap();
        Graph::capture(&mut HostBackend, slab, &recording).unwrap()
    }

    fn create(&mut self, prompt: &[u32]) -> SequenceId {
        self.planner.create(&Request { prompt, max_tokens: CONTEXT, salt: 0 }).unwrap().id
    }

    /// Room for tokens that the next step computes.
    fn append(&mut self, id: SequenceId, tokens: &[u32]) {
        self.planner.append(id, tokens).unwrap();
    }

    fn upload_table(&mut self) {
        self.planner.take_delta(&mut self.delta);
        assert!(self.delta.transfers().is_empty());
        for run in self.delta.runs() {
            let at = u64::from(run.index) * 4;
            self.tiny.slab.write_view(self.kv.table, at, bytemuck::cast_slice(run.values)).unwrap();
        }
    }

    fn write(&mut self, rows: &[Row], outputs: &[u32]) {
        self.arena.write_rows(&mut self.tiny.slab, 0, rows).unwrap();
        self.arena.write_outputs(&mut self.tiny.slab, 0, outputs).unwrap();
    }

    fn step(&mut self, graph: usize) -> [u32; BATCH as usize] {
        self.upload_table();
        let slab = &mut self.tiny.slab;
        self.graphs[graph].replay(&mut HostBackend, slab, Drive::SelfAdvance).unwrap();
        let mut tokens = [0; BATCH as usize];
        self.arena.read_tokens(slab, &mut tokens).unwrap();
        tokens
    }

    fn logits(&mut self, output: u32) -> Vec<f32> {
        let mut logits = vec![0.0f32; DIMS.n_vocab as usize];
        let at = u64::from(output * DIMS.n_vocab) * 4;
        let bytes = bytemuck::cast_slice_mut(&mut logits);
        self.tiny.slab.read_view(self.arena.logits, at, bytes).unwrap();
        logits
    }

    /// Computes a prompt in chunks; the token chosen behind it.
    fn prefill(&mut self, id: SequenceId, prompt: &[u32]) -> u32 {
        let mut token = 0;
        for (index, tokens) in prompt.chunks(CHUNK as usize).enumerate() {
            self.append(id, tokens);
            let first = index as u32 * CHUNK;
            let mut rows: Vec<Row> = (first..)
                .zip(tokens)
                .map(|(position, token)| Row {
                    sequence: id.row(),
                    params: params(position, *token),
                })
                .collect();
            rows.resize(CHUNK as usize, PADDING);
            self.write(&rows, &[tokens.len() as u32 - 1]);
            token = self.step(1)[0];
            self.planner.commit(id, tokens.len() as u32).unwrap();
        }
        token
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 37 + seed * 101 + 5) % DIMS.n_vocab).collect()
}

/// The tokens chosen behind a prompt by a model of one sequence that owns its cache.
fn alone(numerics: Numerics, kv_type: KvType, prompt: &[u32], n: u32) -> Vec<u32> {
    let mut tiny = Tiny::new(numerics, kv_type, true, 1);
    let mut graph = tiny.capture(Head::Greedy);
    let mut ids = Vec::new();
    for position in 0..prompt.len() as u32 + n - 1 {
        let given = prompt.get(position as usize).map(|token| [params(position, *token)]);
        let drive = given.as_ref().map_or(Drive::SelfAdvance, |params| Drive::Host(params));
        graph.replay(&mut HostBackend, &mut tiny.slab, drive).unwrap();
        if position + 1 >= prompt.len() as u32 {
            ids.push(tiny.u32(tiny.arena.token));
        }
    }
    ids
}

/// Sequences of other prompts and lengths join and leave; the tokens of each.
fn together(many: &mut Many, prompts: &[Vec<u32>], n: u32) -> Vec<Vec<u32>> {
    let mut ids: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    // Which sequence is in which row, and when the next one joins.
    let mut rows: [Option<(usize, SequenceId)>; BATCH as usize] = Default::default();
    let mut waiting = 0..prompts.len();
    let mut step = 0;
    many.write(&[PADDING; BATCH as usize], &[NO_ROW; BATCH as usize]);
    loop {
        for (row, entry) in rows.iter_mut().enumerate() {
            if let Some((index, id)) = *entry
                && ids[index].len() as u32 == n
            {
                many.planner.free(id).unwrap();
                many.arena.write_rows(&mut many.tiny.slab, row as u32, &[PADDING]).unwrap();
                many.arena.write_outputs(&mut many.tiny.slab, row as u32, &[NO_ROW]).unwrap();
                *entry = None;
            }
        }
        // One joins every third step, into the last free row. The chunk that computes its prompt
        // uses the same buffers, so all rows are written anew.
        if step % 3 == 0
            && let Some(free) = rows.iter().rposition(Option::is_none)
            && let Some(index) = waiting.next()
        {
            let id = many.create(&prompts[index]);
            let token = many.prefill(id, &prompts[index]);
            ids[index].push(token);
            rows[free] = Some((index, id));
            for (row, entry) in rows.iter().enumerate() {
                let (written, output) = match entry {
                    None => (PADDING, NO_ROW),
                    Some((index, id)) => {
                        let known = prompts[*index].len() + ids[*index].len() - 1;
                        let token = *ids[*index].last().unwrap();
                        let params = params(known as u32, token);
                        (Row { sequence: id.row(), params }, row as u32)
                    }
                };
                let slab = &mut many.tiny.slab;
                many.arena.write_rows(slab, row as u32, &[written]).unwrap();
                many.arena.write_outputs(slab, row as u32, &[output]).unwrap();
            }
        }
        if rows.iter().all(Option::is_none) && waiting.is_empty() {
            return ids;
        }
        for (index, id) in rows.iter().flatten() {
            let token = *ids[*index].last().unwrap();
            many.append(*id, &[token]);
        }
        let tokens = many.step(0);
        for (row, (index, id)) in
            rows.iter().enumerate().filter_map(|(row, entry)| entry.map(|entry| (row, entry)))
        {
            many.planner.commit(id, 1).unwrap();
            if (ids[index].len() as u32) < n {
                ids[index].push(tokens[row]);
            }
        }
        step += 1;
    }
}

#[test]
fn a_batch_chooses_what_each_sequence_chooses_alone_in_exact_numerics() {
    let prompts: Vec<Vec<u32>> = [3, 11, 8, 17, 1, 5, 9].map(|len| prompt(len, len)).into();
    for kv_type in [KvType::F32, KvType::Q8] {
        let mut many = Many::new(Numerics::Exact, kv_type, Head::Greedy);
        let found = together(&mut many, &prompts, 12);
        for (prompt, found) in prompts.iter().zip(found) {
            assert_eq!(found, alone(Numerics::Exact, kv_type, prompt, 12));
        }
    }
}

#[test]
fn who_shares_the_batch_changes_no_bit() {
    for kv_type in [KvType::F16, KvType::Q8] {
        who_shares_the_batch(kv_type);
    }
}

fn who_shares_the_batch(kv_type: KvType) {
    let run = |others: u32| {
        let mut many = Many::new(Numerics::Q8, kv_type, Head::Greedy);
        let mut rows = vec![PADDING; BATCH as usize];
        let mut outputs = vec![NO_ROW; BATCH as usize];
        let mut ids = Vec::new();
        // The one that is looked at joins last, in row 2 in both runs.
        for (row, len) in [(0, 9), (3, 20), (1, 2), (2, 13)].into_iter().skip(3 - others as usize) {
            let prompt = prompt(row, len);
            let id = many.create(&prompt);
            let token = many.prefill(id, &prompt);
            rows[row as usize] = Row { sequence: id.row(), params: params(len, token) };
            outputs[row as usize] = row;
            ids.push((id, row, token));
        }
        many.write(&rows, &outputs);
        let mut logits = Vec::new();
        let h2d = many.tiny.slab.counters().h2d_bytes;
        let mut table_bytes = 0;
        for _ in 0..10 {
            ids.iter().for_each(|(id, _, token)| many.planner.append(*id, &[*token]).unwrap());
            let tokens = many.step(0);
            table_bytes += many.delta.value_bytes();
            for (id, row, token) in &mut ids {
                many.planner.commit(*id, 1).unwrap();
                *token = tokens[*row as usize];
            }
            logits.extend(many.logits(2).into_iter().map(f32::to_bits));
        }
        // The device advances the rows; only the table's changes are written.
        assert_eq!(many.tiny.slab.counters().h2d_bytes - h2d, table_bytes);
        logits
    };
    assert_eq!(run(0), run(3));
}

#[test]
fn rows_of_a_prompt_may_stand_beside_rows_that_decode() {
    let numerics = (Numerics::Exact, KvType::F32);
    let mut many = Many::new(numerics.0, numerics.1, Head::Greedy);
    let (first, second) = (prompt(1, 10), prompt(2, 6));
    let id = many.create(&first);
    let mut chosen = vec![many.prefill(id, &first)];
    let other = many.create(&second);
    // Two steps: row 1 decodes, the other rows are three tokens of the second prompt each.
    let mut behind = 0;
    for step in 0..2u32 {
        let tokens = &second[step as usize * 3..][..3];
        many.append(id, &chosen[chosen.len() - 1..]);
        many.append(other, tokens);
        let row = |i: u32| Row {
            sequence: other.row(),
            params: params(step * 3 + i, tokens[i as usize]),
        };
        let decoding = Row { sequence: id.row(), params: params(10 + step, chosen[step as usize]) };
        let outputs = if step == 0 { [1, NO_ROW] } else { [1, 3] };
        many.write(&[row(0), decoding, row(1), row(2)], &[outputs[0], outputs[1], NO_ROW, NO_ROW]);
        let tokens = many.step(0);
        chosen.push(tokens[0]);
        behind = tokens[1];
        many.planner.commit(id, 1).unwrap();
        many.planner.commit(other, 3).unwrap();
    }
    assert_eq!(chosen, alone(numerics.0, numerics.1, &first, 3));
    assert_eq!([behind], alone(numerics.0, numerics.1, &second, 1)[..]);
}

#[test]
fn layers_with_a_window_have_a_pool_of_their_own() {
    let windowed = || {
        let mut tiny = Tiny::new(Numerics::Exact, KvType::F32, false, 1);
        tiny.weights.layers[0].window = 11;
        tiny
    };
    let prompt = prompt(4, 19);
    let groups = vec![LayerGroup::full(1, 20), LayerGroup::sliding(1, 8, 11, 0)];
    let mut many = Many::with_groups(windowed(), groups, Head::Greedy);
    let found = together(&mut many, std::slice::from_ref(&prompt), 20);

    let mut tiny = windowed();
    let mut graph = tiny.capture(Head::Greedy);
    let mut ids = Vec::new();
    for position in 0..38 {
        let given = prompt.get(position as usize).map(|token| [params(position, *token)]);
        let drive = given.as_ref().map_or(Drive::SelfAdvance, |params| Drive::Host(params));
        graph.replay(&mut HostBackend, &mut tiny.slab, drive).unwrap();
        ids.push(tiny.u32(tiny.arena.token));
    }
    assert_eq!(found[0], ids[18..]);
}

#[test]
fn each_output_is_drawn_by_its_own_parameters() {
    let mut many = Many::new(Numerics::Exact, KvType::F32, Head::Sampled);
    let pack = |temperature, seed_low| SamplingPack {
        temperature,
        top_p: 1.0,
        min_p: 0.0,
        top_k: 0,
        seed_low,
        seed_high: 0,
    };
    let packs = [pack(0.0, 0), pack(50.0, 1), pack(50.0, 1), pack(50.0, 2)];
    many.arena.write_sampling(&mut many.tiny.slab, 0, &packs).unwrap();
    let prompt = prompt(9, 5);
    let rows: Vec<Row> = (0..BATCH)
        .map(|_| {
            let id = many.create(&prompt);
            many.append(id, &prompt[..1]);
            Row { sequence: id.row(), params: params(0, prompt[0]) }
        })
        .collect();
    many.write(&rows, &[0, 1, 2, 3]);
    let tokens = many.step(0);
    assert_eq!(tokens[0], alone(Numerics::Exact, KvType::F32, &prompt[..1], 1)[0]);
    assert_eq!(tokens[1], tokens[2], "same seed, same position");
    assert_ne!(tokens[1], tokens[3]);
}

#[test]
fn plans_that_do_not_fit_together_are_refused() {
    let tiny = Tiny::new(Numerics::Q8, KvType::F16, false, 1);
    let refusal = |plan: StepPlan| {
        record(&plan, &tiny.weights, &tiny.kv, &tiny.arena, &tiny.profile).unwrap_err().to_string()
    };
    let plan = &tiny.plan;
    assert!(refusal(StepPlan { n_outputs: 2, ..plan.clone() }).contains("outputs"));
    assert!(refusal(StepPlan { n_tokens: 4, run_tokens: 3, ..plan.clone() }).contains("runs"));
    let groups = vec![LayerGroup::full(2, 24)];
    let config = PlannerConfig::new(groups, 6, CONTEXT).unwrap();
    let other = plan.for_batch(2, config, &tiny.profile);
    assert!(refusal(other).contains("block size"));
    let groups = vec![LayerGroup::sliding(2, 24, 16, 4)];
    let config = PlannerConfig::new(groups, 6, CONTEXT).unwrap().with_block_size(8).unwrap();
    assert!(refusal(plan.for_batch(2, config, &tiny.profile)).contains("sinks"));
}
