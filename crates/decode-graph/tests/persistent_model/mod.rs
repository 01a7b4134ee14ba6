//! The same random model packed both ways on one slab: planes for a step of operations, the stream
//! for a persistent one, each with a cache and buffers of its own.
#![allow(dead_code, reason = "each test uses a part")]

use decode_graph::{
    Backend, Drive, Fusion, Graph, Head, KvArena, LayerWeights, ModelDims, ModelWeights, Numerics,
    PersistentOptions, Recording, RopePlan, StepArena, StepPlan, WeightRef, record,
    record_persistent,
};
use gpu_slab::{DeviceMemory, Slab, View};
use half::f16;
use kernels_ptx::{DeviceProfile, RopePairing, TokenParams};
use kv_paged::{BlockTable, KvType, PagedKvConfig};
use q4k_soa::{LayoutId, PackedLayout, Shape, WeightType, pack};

/// What a model is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) dims: ModelDims,
    pub(crate) context: u32,
    pub(crate) block_size: u32,
    pub(crate) kv_type: KvType,
    pub(crate) pairing: RopePairing,
    /// Of most matrices.
    pub(crate) most: WeightType,
    /// Of v and down in every second layer.
    pub(crate) some: WeightType,
    /// Of embedding and output.
    pub(crate) ends: WeightType,
    pub(crate) tied: bool,
    pub(crate) bias: bool,
    pub(crate) head_norms: bool,
    /// Of every second layer; 0: none.
    pub(crate) window: u32,
    pub(crate) seed: u64,
}

const fn dims(
    n_layer: u32,
    n_embd: u32,
    [n_head, n_kv_head, head_dim]: [u32; 3],
    n_ff: u32,
    n_vocab: u32,
) -> ModelDims {
    ModelDims { n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab }
}

pub(crate) const TINY: Spec = Spec {
    name: "tiny",
    dims: dims(2, 256, [4, 2, 64], 512, 321),
    context: 48,
    block_size: 8,
    kv_type: KvType::F16,
    pairing: RopePairing::Adjacent,
    most: WeightType::Q4K,
    some: WeightType::Q6K,
    ends: WeightType::Q6K,
    tied: true,
    bias: false,
    head_norms: false,
    window: 0,
    seed: 7,
};

/// Everything that is different somewhere.
pub(crate) const VARIANTS: [Spec; 7] = [
    TINY,
    Spec {
        name: "q8_0, odd widths",
        dims: dims(3, 288, [9, 3, 32], 1120, 500),
        most: WeightType::Q8_0,
        some: WeightType::Q8_0,
        ends: WeightType::Q8_0,
        pairing: RopePairing::Halves,
        ..TINY
    },
    Spec {
        name: "bias, head norms, window",
        bias: true,
        head_norms: true,
        window: 11,
        pairing: RopePairing::Halves,
        ..TINY
    },
    Spec {
        name: "several segments",
        dims: dims(2, 512, [6, 2, 128], 1024, 777),
        context: 1000,
        block_size: 16,
        tied: false,
        ..TINY
    },
    Spec {
        name: "heads of 256, wide input",
        dims: dims(2, 1280, [4, 1, 256], 2560, 640),
        block_size: 32,
        context: 64,
        some: WeightType::Q8_0,
        ..TINY
    },
    Spec {
        name: "heads of 80, nine queries a key",
        dims: dims(2, 768, [18, 2, 80], 768, 640),
        most: WeightType::Q8_0,
        context: 40,
        ..TINY
    },
    Spec {
        name: "heads of 96, one query a key",
        dims: dims(2, 768, [8, 8, 96], 1536, 640),
        context: 300,
        ..TINY
    },
];

const fn llama(
    name: &'static str,
    n_layer: u32,
    n_embd: u32,
    heads: [u32; 3],
    n_ff: u32,
    tied: bool,
) -> Spec {
    let dims = dims(n_layer, n_embd, heads, n_ff, 128_256);
    Spec { name, dims, context: 8192, block_size: 16, tied, ..TINY }
}

/// Llama 3.2 1B and 3B, Llama 3.1 8B.
pub(crate) const SHAPES: [Spec; 3] = [
    llama("1b", 16, 2048, [32, 8, 64], 8192, true),
    llama("3b", 28, 3072, [24, 8, 128], 8192, true),
    llama("8b", 32, 4096, [32, 8, 128], 14_336, false),
];

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// Blocks of random quants with scales that give weights of mean 0 and deviation 1 / √n_in.
    fn source(&mut self, layout: &PackedLayout) -> Vec<u8> {
        let (ty, n_in) = (layout.weight_type(), layout.shape().n_in);
        let mut source = vec![0; layout.source_bytes() as usize];
        for bytes in source.chunks_mut(8) {
            bytes.copy_from_slice(&self.next().to_le_bytes()[..bytes.len()]);
        }
        let (deviation, d_at) = match ty {
            WeightType::Q4K => (170.0, 0),
            WeightType::Q6K => (1370.0, 208),
            _ => (74.0, 0),
        };
        let d = 1.0 / (deviation * (n_in as f32).sqrt());
        for block in source.chunks_exact_mut(ty.block_bytes() as usize) {
            let own = f16::from_f32(d * (0.5 + self.uniform()));
            block[d_at..d_at + 2].copy_from_slice(&own.to_le_bytes());
            if ty == WeightType::Q4K {
                block[2..4].copy_from_slice(&f16::from_f32(7.5 * d).to_le_bytes());
            }
        }
        source
    }
}

/// One form of the model with what a step of it needs.
pub(crate) struct Form {
    pub(crate) plan: StepPlan,
    pub(crate) weights: ModelWeights,
    pub(crate) kv: KvArena,
    pub(crate) arena: StepArena,
}

pub(crate) struct Pair<M> {
    pub(crate) spec: Spec,
    pub(crate) slab: Slab<M>,
    pub(crate) profile: DeviceProfile,
    pub(crate) ops: Form,
    pub(crate) persistent: Form,
    /// Operations in exact numerics: what both should come near to.
    pub(crate) exact: Form,
}

/// Which step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Ops,
    Persistent,
    Exact,
}

/// Bytes that a pair takes, generously.
pub(crate) fn memory_bytes(spec: &Spec) -> u64 {
    let d = spec.dims;
    let layer = u64::from(d.n_embd) * u64::from(2 * d.q_elems() + 2 * d.kv_elems() + 3 * d.n_ff);
    let ends = u64::from(d.n_vocab) * u64::from(d.n_embd) * 2;
    let per_weight = |ty| if ty == WeightType::Q8_0 { 9 } else { 7 };
    let bits = per_weight(spec.most).max(per_weight(spec.some)).max(per_weight(spec.ends));
    let cache = 3 * u64::from(d.n_layer * spec.context) * u64::from(2 * d.kv_elems()) * 4;
    2 * (u64::from(d.n_layer) * layer + ends) * bits / 8 + cache + (96 << 20)
}

struct Packed {
    planes: WeightRef,
    stream: WeightRef,
}

impl<M: DeviceMemory> Pair<M> {
    pub(crate) fn new(memory: M, profile: DeviceProfile, spec: Spec) -> Self {
        let mut slab = Slab::new(memory);
        let mut random = Random(spec.seed);
        let d = spec.dims;
        let matrix = |slab: &mut Slab<M>, random: &mut Random, weight_type, n_out, n_in| {
            let shape = Shape { n_out, n_in };
            let source = random.source(&PackedLayout::planes(weight_type, shape).unwrap());
            let mut packed = |id: LayoutId| {
                let layout = match id {
                    LayoutId::STREAM => PackedLayout::stream(weight_type, shape),
                    _ => PackedLayout::planes(weight_type, shape),
                };
                let layout = layout.unwrap();
                let mut packed = vec![0; layout.len_bytes() as usize];
                pack(&layout, &source, &mut packed).unwrap();
                let view = slab.allocate_and_write("weights", &packed).unwrap();
                WeightRef { view, weight_type, shape, layout: id }
            };
            Packed { planes: packed(LayoutId::PLANES), stream: packed(LayoutId::STREAM) }
        };
        let floats = |slab: &mut Slab<M>, random: &mut Random, n: u32, mean: f32, around: f32| {
            let values: Vec<f32> =
                (0..n).map(|_| mean + around * (random.uniform() - 0.5)).collect();
            slab.allocate_and_write("floats", bytemuck::cast_slice(&values)).unwrap()
        };
        let n_pairs = d.head_dim / 2;
        let frequencies: Vec<f64> =
            (0..n_pairs).map(|i| 500_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
        let inverse_frequencies =
            slab.allocate_and_write("rope", bytemuck::cast_slice(&frequencies)).unwrap();
        let output_norm = floats(&mut slab, &mut random, d.n_embd, 1.0, 0.5);
        let embed = matrix(&mut slab, &mut random, spec.ends, d.n_vocab, d.n_embd);
        let output =
            (!spec.tied).then(|| matrix(&mut slab, &mut random, spec.ends, d.n_vocab, d.n_embd));
        let output = output.as_ref().unwrap_or(&embed);
        let mut layers = [Vec::new(), Vec::new()];
        for layer in 0..d.n_layer {
            let some = if layer % 2 == 0 { spec.some } else { spec.most };
            let norm =
                |slab: &mut Slab<M>, random: &mut Random, n| floats(slab, random, n, 1.0, 0.5);
            let (attn_norm, ffn_norm) =
                (norm(&mut slab, &mut random, d.n_embd), norm(&mut slab, &mut random, d.n_embd));
            let bias = d.q_elems() + 2 * d.kv_elems();
            let qkv_bias = spec.bias.then(|| floats(&mut slab, &mut random, bias, 0.0, 0.5));
            let head_norm = |slab: &mut Slab<M>, random: &mut Random| {
                spec.head_norms.then(|| floats(slab, random, d.head_dim, 1.0, 0.5))
            };
            let (q_norm, k_norm) =
                (head_norm(&mut slab, &mut random), head_norm(&mut slab, &mut random));
            let mut m = |ty, n_out, n_in| matrix(&mut slab, &mut random, ty, n_out, n_in);
            let parts = [
                m(spec.most, d.q_elems(), d.n_embd),
                m(spec.most, d.kv_elems(), d.n_embd),
                m(some, d.kv_elems(), d.n_embd),
                m(spec.most, d.n_embd, d.q_elems()),
                m(spec.most, d.n_ff, d.n_embd),
                m(spec.most, d.n_ff, d.n_embd),
                m(some, d.n_embd, d.n_ff),
            ];
            for (layers, stream) in layers.iter_mut().zip([false, true]) {
                let part = |i: usize| if stream { parts[i].stream } else { parts[i].planes };
                layers.push(LayerWeights {
                    attn_norm,
                    q: part(0),
                    k: part(1),
                    v: part(2),
                    qkv_bias,
                    q_norm,
                    k_norm,
                    o: part(3),
                    ffn_norm,
                    gate: part(4),
                    up: part(5),
                    down: part(6),
                    post_attn_norm: None,
                    post_ffn_norm: None,
                    inverse_frequencies: None,
                    window: if layer % 2 == 1 { spec.window } else { 0 },
                });
            }
        }
        let [planes, stream] = layers;
        let weights = |layers, embed, output| ModelWeights {
            embed,
            inverse_frequencies,
            layers,
            output_norm,
            output,
        };
        let planes = weights(planes, embed.planes, output.planes);
        let stream = weights(stream, embed.stream, output.stream);

        let config = PagedKvConfig::new(d.n_layer, d.n_kv_head, d.head_dim, spec.context)
            .unwrap()
            .with_block_size(spec.block_size)
            .unwrap()
            .with_kv_type(spec.kv_type)
            .unwrap();
        let rope = RopePlan { pairing: spec.pairing, n_pairs, magnitude: 1.0 };
        let plan = StepPlan::new(d, config, Numerics::Q8, rope, 1e-5, &profile);
        let mut form = |weights, fusion, numerics| {
            let plan = StepPlan { fusion, numerics, ..plan.clone() };
            let kv = KvArena::allocate(&mut slab, config).unwrap();
            let arena = StepArena::allocate(&mut slab, &plan).unwrap();
            arena.zero(&mut slab).unwrap();
            slab.fill_view(kv.blocks, 0).unwrap();
            let blocks = config.blocks_per_layer();
            let step = (2..).find(|step| gcd(*step, blocks) == 1).unwrap();
            let entries = (0..d.n_layer)
                .flat_map(|l| (0..blocks).map(move |i| ((i * step) % blocks + l) % blocks));
            let table = BlockTable::from_permutation(&config, entries.collect()).unwrap();
            slab.write_view(kv.table, 0, bytemuck::cast_slice(table.entries())).unwrap();
            Form { plan, weights, kv, arena }
        };
        let exact = form(planes.clone(), Fusion::Ops, Numerics::Exact);
        let ops = form(planes, Fusion::Ops, Numerics::Q8);
        let persistent = form(stream, Fusion::Persistent, Numerics::Q8);
        Self { spec, slab, profile, ops, persistent, exact }
    }

    pub(crate) fn record(&mut self, which: Which, head: Head) -> Recording {
        let form = match which {
            Which::Ops => &mut self.ops,
            Which::Exact => &mut self.exact,
            Which::Persistent => return self.record_persistent(head, PersistentOptions::default()),
        };
        form.plan.head = head;
        record(&form.plan, &form.weights, &form.kv, &form.arena, &self.profile).unwrap()
    }

    pub(crate) fn record_persistent(
        &mut self,
        head: Head,
        options: PersistentOptions,
    ) -> Recording {
        let form = &mut self.persistent;
        form.plan.head = head;
        record_persistent(
            &mut self.slab,
            &form.plan,
            &form.weights,
            &form.kv,
            &form.arena,
            &self.profile,
            options,
        )
        .unwrap()
    }

    pub(crate) fn capture<B: Backend<Memory = M>>(
        &mut self,
        backend: &mut B,
        which: Which,
    ) -> Graph<B> {
        let recording = self.record(which, Head::Greedy);
        Graph::capture(backend, &mut self.slab, &recording).unwrap()
    }

    pub(crate) fn params(&self, position: u32, token_id: u32) -> TokenParams {
        let ring_slot = position % self.spec.context;
        TokenParams { absolute_position: position, ring_slot, token_id }
    }

    pub(crate) fn u32(&mut self, view: View) -> u32 {
        let mut value = [0; 4];
        self.slab.read_view(view, 0, &mut value).unwrap();
        u32::from_le_bytes(value)
    }

    pub(crate) fn floats(&mut self, view: View, n: usize) -> Vec<f32> {
        let mut values = vec![0.0f32; n];
        self.slab.read_view(view, 0, bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    }

    pub(crate) fn arena(&self, which: Which) -> StepArena {
        match which {
            Which::Ops => self.ops.arena,
            Which::Persistent => self.persistent.arena,
            Which::Exact => self.exact.arena,
        }
    }

    /// Runs one step; token and logits, which are numbers, and the token the best of them.
    pub(crate) fn step<B: Backend<Memory = M>>(
        &mut self,
        backend: &mut B,
        graph: &mut Graph<B>,
        which: Which,
        drive: Drive<'_>,
    ) -> (u32, Vec<f32>) {
        graph.replay(backend, &mut self.slab, drive).unwrap();
        let arena = self.arena(which);
        let n_vocab = self.spec.dims.n_vocab as usize;
        let (token, logits) = (self.u32(arena.token), self.floats(arena.logits, n_vocab));
        assert_eq!(token, best(&logits), "{}: not the best of its own logits", self.spec.name);
        (token, logits)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Relative L2 error.
pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

/// The token of the largest logit, the first of equals. Panics if one is no number.
pub(crate) fn best(logits: &[f32]) -> u32 {
    assert!(logits.iter().all(|logit| logit.is_finite()), "logits that are no numbers");
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

/// Two forms of the step choose different tokens only where the best logit is no further ahead.
pub(crate) const MARGIN: f32 = 0.3;

/// How far the best logit is ahead.
pub(crate) fn margin(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}
