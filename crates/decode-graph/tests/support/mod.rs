//! A tiny Llama with random weights on a slab, the host's if nothing else is said.

use decode_graph::{
    Backend, Graph, Head, HostBackend, KvArena, LayerWeights, ModelDims, ModelWeights, Numerics,
    Recording, RopePlan, StepArena, StepPlan, WeightRef, record,
};
use gpu_slab::{DeviceMemory, HostMemory, Slab, View};
use kernels_ptx::{DeviceProfile, RopePairing};
use kv_paged::{BlockTable, KvType, PagedKvConfig};
use q4k_soa::{PackedLayout, Shape, WeightType, pack, quantize};

#[allow(dead_code, reason = "only the long runs need it")]
pub(crate) mod soak;

pub(crate) const DIMS: ModelDims = ModelDims {
    n_layer: 2,
    n_embd: 256,
    n_head: 4,
    n_kv_head: 2,
    head_dim: 64,
    n_ff: 512,
    n_vocab: 320,
};

pub(crate) const CONTEXT: u32 = 48;

/// Enough for the model with any numerics.
pub(crate) const MEMORY_BYTES: u64 = 8 << 20;

pub(crate) struct Tiny<M = HostMemory> {
    pub(crate) slab: Slab<M>,
    pub(crate) profile: DeviceProfile,
    pub(crate) plan: StepPlan,
    pub(crate) weights: ModelWeights,
    pub(crate) kv: KvArena,
    pub(crate) arena: StepArena,
}

/// SplitMix64 as a stream of roughly normal numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        let mut uniform = || (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
        (0..n).map(|_| scale * 3.0 * (uniform() + uniform() + uniform() + uniform())).collect()
    }
}

impl Tiny {
    pub(crate) fn new(numerics: Numerics, kv_type: KvType, shuffled: bool, n_tokens: u32) -> Self {
        let memory = HostMemory::new(MEMORY_BYTES).unwrap();
        Self::in_memory(memory, DeviceProfile::A2000, numerics, kv_type, shuffled, n_tokens)
    }

    pub(crate) fn capture(&mut self, head: Head) -> Graph<HostBackend> {
        self.capture_on(&mut HostBackend, head)
    }
}

impl<M: DeviceMemory> Tiny<M> {
    /// The same model wherever it lies.
    pub(crate) fn in_memory(
        memory: M,
        profile: DeviceProfile,
        numerics: Numerics,
        kv_type: KvType,
        shuffled: bool,
        n_tokens: u32,
    ) -> Self {
        let mut slab = Slab::new(memory);
        let mut random = Random(7);
        let mut matrix = |slab: &mut Slab<M>, name: &str, ty, n_out: u32, n_in: u32| {
            let shape = Shape { n_out, n_in };
            let layout = PackedLayout::planes(ty, shape).unwrap();
            let values = random.normals((n_out * n_in) as usize, 1.0 / (n_in as f32).sqrt());
            let mut source = vec![0; layout.source_bytes() as usize];
            quantize(ty, &values, &mut source).unwrap();
            let mut packed = vec![0; layout.len_bytes() as usize];
            pack(&layout, &source, &mut packed).unwrap();
            let view = slab.allocate_and_write(name, &packed).unwrap();
            WeightRef { view, weight_type: ty, shape, layout: layout.layout_id() }
        };
        let (q4, q6, q8) = (WeightType::Q4K, WeightType::Q6K, WeightType::Q8_0);
        let d = DIMS;
        let norm: Vec<f32> = (0..d.n_embd).map(|i| 1.0 + (i % 7) as f32 / 20.0).collect();
        let norm = slab.allocate_and_write("norm", bytemuck::cast_slice(&norm)).unwrap();
        let frequencies: Vec<f64> = (0..d.head_dim / 2)
            .map(|i| 10_000f64.powf(-2.0 * f64::from(i) / f64::from(d.head_dim)))
            .collect();
        let inverse_frequencies =
            slab.allocate_and_write("rope", bytemuck::cast_slice(&frequencies)).unwrap();
        let mut m = |name: &str, ty, n_out, n_in| matrix(&mut slab, name, ty, n_out, n_in);
        let embed = m("embed", q6, d.n_vocab, d.n_embd);
        let layers = (0..d.n_layer)
            .map(|_| LayerWeights {
                attn_norm: norm,
                q: m("q", q4, d.q_elems(), d.n_embd),
                k: m("k", q4, d.kv_elems(), d.n_embd),
                v: m("v", q6, d.kv_elems(), d.n_embd),
                qkv_bias: None,
                q_norm: None,
                k_norm: None,
                o: m("o", q8, d.n_embd, d.q_elems()),
                ffn_norm: norm,
                gate: m("gate", q4, d.n_ff, d.n_embd),
                up: m("up", q4, d.n_ff, d.n_embd),
                down: m("down", q6, d.n_embd, d.n_ff),
                post_attn_norm: None,
                post_ffn_norm: None,
                inverse_frequencies: None,
                window: 0,
            })
            .collect();
        let weights =
            ModelWeights { embed, inverse_frequencies, layers, output_norm: norm, output: embed };
        let kv = PagedKvConfig::new(d.n_layer, d.n_kv_head, d.head_dim, CONTEXT)
            .unwrap()
            .with_block_size(8)
            .unwrap()
            .with_kv_type(kv_type)
            .unwrap();
        let rope =
            RopePlan { pairing: RopePairing::Adjacent, n_pairs: d.head_dim / 2, magnitude: 1.0 };
        let mut plan = StepPlan::new(d, kv, numerics, rope, 1e-5, &profile);
        plan.n_tokens = n_tokens;
        let kv = KvArena::allocate(&mut slab, kv).unwrap();
        let table =
            if shuffled { shuffled_table(&plan.kv) } else { BlockTable::identity(&plan.kv) };
        slab.write_view(kv.table, 0, bytemuck::cast_slice(table.entries())).unwrap();
        let arena = StepArena::allocate(&mut slab, &plan).unwrap();
        arena.zero(&mut slab).unwrap();
        Self { slab, profile, plan, weights, kv, arena }
    }

    pub(crate) fn record(&self) -> Recording {
        record(&self.plan, &self.weights, &self.kv, &self.arena, &self.profile).unwrap()
    }

    pub(crate) fn capture_on<B: Backend<Memory = M>>(
        &mut self,
        backend: &mut B,
        head: Head,
    ) -> Graph<B> {
        self.plan.head = head;
        let recording = self.record();
        Graph::capture(backend, &mut self.slab, &recording).unwrap()
    }

    pub(crate) fn u32(&mut self, view: View) -> u32 {
        let mut value = [0; 4];
        self.slab.read_view(view, 0, &mut value).unwrap();
        u32::from_le_bytes(value)
    }

    #[allow(dead_code, reason = "not every test that includes this module asks")]
    pub(crate) fn logits(&mut self) -> Vec<f32> {
        let mut logits = vec![0.0f32; DIMS.n_vocab as usize];
        self.slab.read_view(self.arena.logits, 0, bytemuck::cast_slice_mut(&mut logits)).unwrap();
        logits
    }
}

fn shuffled_table(config: &PagedKvConfig) -> BlockTable {
    let blocks = config.blocks_per_layer();
    let entries =
        (0..config.n_layer()).flat_map(|l| (0..blocks).map(move |i| (i * 5 + l + 3) % blocks));
    BlockTable::from_permutation(config, entries.collect()).unwrap()
}
