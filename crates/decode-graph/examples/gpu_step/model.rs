//! Models of real shapes with random weights, made on the device.

use decode_graph::{
    KvArena, LayerWeights, ModelDims, ModelWeights, Numerics, RopePlan, StepArena, StepPlan,
    WeightRef,
};
use gpu_slab::cuda::CudaMemory;
use gpu_slab::{Slab, SlabError, View};
use half::f16;
use kernels_ptx::{DeviceProfile, RopePairing};
use kv_paged::{BlockTable, PagedKvConfig};
use q4k_soa::{PackedLayout, Shape as MatrixShape, WeightType};

/// A model by its size.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) dims: ModelDims,
    /// Whether the embedding matrix is also the output matrix.
    pub(crate) tied: bool,
}

const fn dims(layer: u32, embd: u32, heads: [u32; 2], head_dim: u32, ff: u32) -> ModelDims {
    let [n_head, n_kv_head] = heads;
    let (n_layer, n_embd, n_ff) = (layer, embd, ff);
    ModelDims { n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab: 128_256 }
}

/// Llama 3.2 1B and 3B, Llama 3.1 8B.
pub(crate) const SHAPES: [Shape; 3] = [
    Shape { name: "1b", dims: dims(16, 2048, [32, 8], 64, 8192), tied: true },
    Shape { name: "3b", dims: dims(28, 3072, [24, 8], 128, 8192), tied: true },
    Shape { name: "8b", dims: dims(32, 4096, [32, 8], 128, 14_336), tied: false },
];

/// To see whether a program runs at all.
pub(crate) const TINY: Shape = Shape {
    name: "tiny",
    dims: ModelDims { n_vocab: 512, ..dims(9, 256, [4, 2], 64, 512) },
    tied: true,
};

/// A model with everything that a step of it needs.
pub(crate) struct Model {
    pub(crate) slab: Slab<CudaMemory>,
    pub(crate) plan: StepPlan,
    pub(crate) weights: ModelWeights,
    pub(crate) kv: KvArena,
    pub(crate) arena: StepArena,
}

/// Random bytes that matrices are cut from: at addresses of their own, so that repeated contents
/// help no cache.
struct Pool {
    bytes: Vec<u8>,
    next: usize,
    state: u64,
}

impl Pool {
    const BYTES: usize = 48 << 20;

    fn new() -> Self {
        let mut pool = Self { bytes: Vec::new(), next: 0, state: 7 };
        pool.bytes = (0..Self::BYTES / 8).flat_map(|_| pool.word().to_le_bytes()).collect();
        pool
    }

    /// SplitMix64.
    fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Writes random bytes to a part of a view.
    fn fill(
        &mut self,
        slab: &mut Slab<CudaMemory>,
        view: View,
        mut offset_bytes: u64,
        mut len_bytes: u64,
    ) -> Result<(), SlabError> {
        while len_bytes > 0 {
            let here = len_bytes.min((Self::BYTES - self.next) as u64) as usize;
            slab.write_view(view, offset_bytes, &self.bytes[self.next..self.next + here])?;
            self.next = (self.next + here + 4096 + 64) % (Self::BYTES - 4096);
            offset_bytes += here as u64;
            len_bytes -= here as u64;
        }
        Ok(())
    }

    fn uniform(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1 << 24) as f32
    }
}

/// Half-precision scales that give weights of mean 0 and deviation 1 / √n_in.
fn scales(ty: WeightType, n_in: u32, count: u64, pool: &mut Pool) -> Vec<u8> {
    // Of quants and inner scales drawn uniformly.
    let deviation = match ty {
        WeightType::Q4K => 170.0,
        WeightType::Q6K => 1370.0,
        _ => 74.0,
    };
    let d = 1.0 / (deviation * (n_in as f32).sqrt());
    let table: Vec<f16> = (0..1024).map(|_| f16::from_f32(d * (0.5 + pool.uniform()))).collect();
    let mut bytes = Vec::with_capacity(count as usize * 2);
    for i in 0..count as usize {
        let scale = table[i * 7 % table.len()];
        // Of Q4_K's pairs the second is the factor of the mins: as far down as quants go up.
        let min = ty == WeightType::Q4K && i % 2 == 1;
        let scale = if min { f16::from_f32(7.5 * d) } else { scale };
        bytes.extend(scale.to_le_bytes());
    }
    bytes
}

impl Model {
    pub(crate) fn new(
        memory: CudaMemory,
        profile: &DeviceProfile,
        shape: Shape,
        context: u32,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let d = shape.dims;
        let mut slab = Slab::new(memory);
        let mut pool = Pool::new();
        let mut matrix = |slab: &mut Slab<CudaMemory>, name: &str, ty, n_out, n_in| {
            let shape = MatrixShape { n_out, n_in };
            let layout = PackedLayout::planes(ty, shape).map_err(|e| e.to_string())?;
            let view = slab.allocate(name, layout.len_bytes()).map_err(|e| e.to_string())?;
            for plane in layout.plane_list() {
                let (at, len) = (plane.offset_bytes, plane.len_bytes);
                let written = if plane.name.starts_with('d') {
                    slab.write_view(view, at, &scales(ty, n_in, len / 2, &mut pool))
                } else {
                    pool.fill(slab, view, at, len)
                };
                written.map_err(|e| e.to_string())?;
            }
            Ok::<_, String>(WeightRef { view, weight_type: ty, shape, layout: layout.layout_id() })
        };
        let norm = slab.allocate_and_write("norm", bytemuck::cast_slice(&vec![1.0f32; 4096]))?;
        let norm = norm.slice(0..u64::from(d.n_embd) * 4)?;
        let n_pairs = d.head_dim / 2;
        let frequencies: Vec<f64> =
            (0..n_pairs).map(|i| 500_000f64.powf(-f64::from(i) / f64::from(n_pairs))).collect();
        let inverse_frequencies =
            slab.allocate_and_write("rope", bytemuck::cast_slice(&frequencies))?;

        // Q4_K_M: values and down projections of every third layer and of both ends have 6 bits.
        let (q4, q6) = (WeightType::Q4K, WeightType::Q6K);
        let more = |i: u32| {
            let eighth = d.n_layer / 8;
            i < eighth || i >= 7 * eighth || (i - eighth) % 3 == 2
        };
        let embed_type = if shape.tied { q6 } else { q4 };
        let embed = matrix(&mut slab, "embed", embed_type, d.n_vocab, d.n_embd)?;
        let mut layers = Vec::new();
        for i in 0..d.n_layer {
            let most = if more(i) { q6 } else { q4 };
            layers.push(LayerWeights {
                attn_norm: norm,
                q: matrix(&mut slab, "q", q4, d.q_elems(), d.n_embd)?,
                k: matrix(&mut slab, "k", q4, d.kv_elems(), d.n_embd)?,
                v: matrix(&mut slab, "v", most, d.kv_elems(), d.n_embd)?,
                qkv_bias: None,
                q_norm: None,
                k_norm: None,
                o: matrix(&mut slab, "o", q4, d.n_embd, d.q_elems())?,
                ffn_norm: norm,
                gate: matrix(&mut slab, "gate", q4, d.n_ff, d.n_embd)?,
                up: matrix(&mut slab, "up", q4, d.n_ff, d.n_embd)?,
                down: matrix(&mut slab, "down", most, d.n_embd, d.n_ff)?,
                post_attn_norm: None,
                post_ffn_norm: None,
                inverse_frequencies: None,
                window: 0,
            });
        }
        let output = match shape.tied {
            true => embed,
            false => matrix(&mut slab, "output", q6, d.n_vocab, d.n_embd)?,
        };
        let weights =
            ModelWeights { embed, inverse_frequencies, layers, output_norm: norm, output };

        let config = PagedKvConfig::new(d.n_layer, d.n_kv_head, d.head_dim, context)?;
        let rope = RopePlan { pairing: RopePairing::Adjacent, n_pairs, magnitude: 1.0 };
        let plan = StepPlan::new(d, config, Numerics::Q8, rope, 1e-5, profile);
        let kv = KvArena::allocate(&mut slab, config)?;
        let table = BlockTable::identity(&config);
        slab.write_view(kv.table, 0, bytemuck::cast_slice(table.entries()))?;
        let values: Vec<u8> =
            (0..4 << 20).flat_map(|_| f16::from_f32(pool.uniform() - 0.5).to_le_bytes()).collect();
        let mut at = 0;
        while at < config.total_bytes() {
            let here = (config.total_bytes() - at).min(values.len() as u64);
            slab.write_view(kv.blocks, at, &values[..here as usize])?;
            at += here;
        }
        let arena = StepArena::allocate(&mut slab, &plan)?;
        arena.zero(&mut slab)?;
        Ok(Self { slab, plan, weights, kv, arena })
    }

    /// Bytes of the weights that a token needs.
    pub(crate) fn weight_bytes(&self) -> u64 {
        let layer = |l: &LayerWeights| [l.q, l.k, l.v, l.o, l.gate, l.up, l.down];
        let layers = self.weights.layers.iter().flat_map(layer);
        layers.chain([self.weights.output]).map(|w| w.view.len_bytes()).sum()
    }

    /// Bytes of the cache that a token at this depth reads.
    pub(crate) fn kv_bytes(&self, depth: u32) -> u64 {
        let config = &self.plan.kv;
        config.total_bytes() * u64::from(depth + 1) / u64::from(config.max_context_tokens())
    }
}
