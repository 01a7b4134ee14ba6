//! The decode step as one function of a plan: the list of launches that turns token ids and
//! positions into logits and the next token. Host, eager CUDA and capture all consume it (S19).

use gpu_slab::View;
use kernels_ptx::ops::GemmForm;
use kernels_ptx::{DeviceProfile, Geometry, Kernel, ParamError, ops};
use q4k_soa::LayoutId;

use crate::batch::LayerCache;
use crate::launch::{Label, Launch};
use crate::plan::{
    Activation, Fusion, Head, KvArena, LayerWeights, ModelWeights, Numerics, StepArena, StepPlan,
};
use crate::plan::{WeightRef, half_order};

/// Why a step cannot be recorded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// An argument does not fit its kernel.
    #[error("{label}: {source}")]
    Param {
        /// Place in the step.
        label: Label,
        /// What does not fit.
        source: ParamError,
    },
    /// A view is too short for a part of it to be taken.
    #[error("{label}: {source}")]
    View {
        /// Place in the step.
        label: Label,
        /// What the slab said.
        source: gpu_slab::SlabError,
    },
    /// The plan contradicts itself or its weights.
    #[error("{what}: plan says {expected}, found {found}")]
    Plan {
        /// Which number.
        what: &'static str,
        /// From the plan.
        expected: u64,
        /// From the weights or buffers.
        found: u64,
    },
    /// No kernel is made for this.
    #[error("no kernel for {0}")]
    Unsupported(String),
    /// A matrix is packed in another way than the step reads.
    #[error("{label}: the step reads layout {expected}, the matrix has layout {found}")]
    Layout {
        /// Place in the step.
        label: Label,
        /// The step's.
        expected: q4k_soa::LayoutId,
        /// The matrix's.
        found: q4k_soa::LayoutId,
    },
    /// There is no persistent step for the model or on the device.
    #[error(transparent)]
    Schedule(#[from] kernels_ptx::schedule::ScheduleError),
    /// The slab refused the schedule of a persistent step, or a view of it.
    #[error("schedule: {0}")]
    Slab(gpu_slab::SlabError),
}

/// The launches of a step, and the buffer that its per-token parameters are written to.
#[derive(Clone, Debug)]
pub struct Recording {
    /// In order of execution.
    pub launches: Vec<Launch>,
    /// [`kernels_ptx::TokenParams`] `[n_tokens]`.
    pub tokens: View,
}

/// Records the step of `plan` over the given weights, cache and buffers.
pub fn record(
    plan: &StepPlan,
    weights: &ModelWeights,
    kv: &KvArena,
    arena: &StepArena,
    device: &DeviceProfile,
) -> Result<Recording, RecordError> {
    expect("layers", plan.dims.n_layer.into(), weights.layers.len() as u64)?;
    expect("query heads per key head, rest", 0, (plan.dims.n_head % plan.dims.n_kv_head).into())?;
    if plan.kv != kv.config {
        let (expected, found) = (plan.kv.total_bytes(), kv.config.total_bytes());
        return Err(RecordError::Plan { what: "KV bytes (and shape)", expected, found });
    }
    crate::batch::check(plan)?;
    if plan.fusion != Fusion::Ops {
        return Err(RecordError::Unsupported("a persistent step: record_persistent does".into()));
    }
    let windows: Vec<u32> = weights.layers.iter().map(|layer| layer.window).collect();
    let caches = LayerCache::of_layers(plan, kv, &windows)?;
    let launches = Vec::new();
    let mut recorder = Recorder { plan, arena, device, launches, layer: None, caches };
    recorder.embed(weights)?;
    for (index, layer) in weights.layers.iter().enumerate() {
        recorder.layer = Some(index as u32);
        let frequencies = layer.inverse_frequencies.unwrap_or(weights.inverse_frequencies);
        recorder.attention(index as u32, layer, frequencies)?;
        recorder.feed_forward(layer)?;
    }
    recorder.layer = None;
    recorder.head(weights)?;
    Ok(Recording { launches: recorder.launches, tokens: arena.tokens })
}

/// The launches behind the logits.
pub(crate) fn choose_and_advance(
    plan: &StepPlan,
    arena: &StepArena,
    device: &DeviceProfile,
) -> Result<Vec<Launch>, RecordError> {
    let (launches, caches) = (Vec::new(), Vec::new());
    let mut recorder = Recorder { plan, arena, device, launches, layer: None, caches };
    recorder.choose_and_advance()?;
    Ok(recorder.launches)
}

pub(crate) fn expect(what: &'static str, expected: u64, found: u64) -> Result<(), RecordError> {
    if expected == found { Ok(()) } else { Err(RecordError::Plan { what, expected, found }) }
}

/// Tokens of a run from which on they attend together: a tile of the matrix instructions has 16.
const LONG_RUN_TOKENS: u32 = 16;

/// Where a matrix product finds its input.
#[derive(Clone, Copy)]
enum Input {
    /// In `arena.quants` and `arena.groups`.
    Q8,
    /// An f32 buffer.
    F32(View),
    /// An f16 buffer, to be multiplied by a factor.
    Half(View, f32),
}

/// What a matrix product does with its sums.
#[derive(Clone, Copy)]
enum Epilogue {
    Store,
    Add(View),
    Glu(Activation),
}

/// Up to three matrices with one input, as numbers; 0 for those that are not there.
struct Matrices {
    types: [u32; 3],
    rows: [u32; 3],
    n_in: u32,
}

struct Recorder<'a> {
    plan: &'a StepPlan,
    arena: &'a StepArena,
    device: &'a DeviceProfile,
    launches: Vec<Launch>,
    layer: Option<u32>,
    /// The places of layers in the cache.
    caches: Vec<LayerCache>,
}

/// Appends a launch: arguments are checked, geometry is asked of the operation.
macro_rules! launch {
    ($recorder:expr, $what:expr, $kernel:expr, $args:expr) => {{
        let (recorder, kernel, args) = (&mut *$recorder, $kernel, $args);
        let geometry: Geometry = args.geometry(recorder.device);
        let label = recorder.label($what);
        let list = args.list(kernel, |view: View| view.len_bytes());
        let args = list.map_err(|source| RecordError::Param { label, source })?;
        recorder.launches.push(Launch { kernel, geometry, args, label });
    }};
}

impl Recorder<'_> {
    /// The matrices of a product as numbers, checked to fit each other.
    fn matrices(&self, what: &'static str, parts: &[WeightRef]) -> Result<Matrices, RecordError> {
        let (mut types, mut rows, n_in) = ([0; 3], [0; 3], parts[0].shape.n_in);
        for (index, part) in parts.iter().enumerate() {
            self.planes(what, part)?;
            expect("row length", n_in.into(), part.shape.n_in.into())?;
            (types[index], rows[index]) = (part.weight_type.ggml_id(), part.shape.n_out);
        }
        Ok(Matrices { types, rows, n_in })
    }

    fn planes(&self, what: &'static str, matrix: &WeightRef) -> Result<(), RecordError> {
        let (expected, found) = (LayoutId::PLANES, matrix.layout);
        if found == expected {
            return Ok(());
        }
        Err(RecordError::Layout { label: self.label(what), expected, found })
    }

    fn label(&self, what: &'static str) -> Label {
        Label { layer: self.layer, what }
    }

    fn slice(
        &self,
        what: &'static str,
        view: View,
        range: std::ops::Range<u64>,
    ) -> Result<View, RecordError> {
        let label = self.label(what);
        view.slice(range).map_err(|source| RecordError::View { label, source })
    }

    fn embed(&mut self, weights: &ModelWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let embed = weights.embed;
        self.planes("embed", &embed)?;
        expect("embedding rows", plan.dims.n_vocab.into(), embed.shape.n_out.into())?;
        expect("embedding row length", plan.dims.n_embd.into(), embed.shape.n_in.into())?;
        let args = ops::embed::Args {
            table: embed.view,
            tokens: arena.tokens,
            x: arena.hidden_a,
            ggml_type: embed.weight_type.ggml_id(),
            n_tokens: plan.n_tokens,
            n_vocab: plan.dims.n_vocab,
            n_embd: plan.dims.n_embd,
            scale: plan.embed_scale,
        };
        launch!(self, "embed", Kernel::Embed, args);
        Ok(())
    }

    fn attention(
        &mut self,
        index: u32,
        layer: &LayerWeights,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let parts = [layer.q, layer.k, layer.v];
        for (part, rows) in parts.iter().zip([d.q_elems(), d.kv_elems(), d.kv_elems()]) {
            expect("rows of q, k or v", rows.into(), part.shape.n_out.into())?;
        }
        let (tokens, bias) = (plan.n_tokens, layer.qkv_bias);
        let (x, norm) = (arena.hidden_a, layer.attn_norm);
        if self.fuses(&parts, tokens) {
            self.gemv_norm("qkv", &parts, x, norm, bias, arena.qkv)?;
        } else {
            let input = self.norm("attention norm", x, norm, tokens)?;
            self.gemv("qkv", &parts, input, bias, Epilogue::Store, arena.qkv, tokens)?;
        }

        let cache = self.caches[index as usize];
        match cache.kernels.step.filter(|_| tokens == 1 && plan.sequences.is_none()) {
            Some(kernel) => self.attention_step(kernel, layer, &cache, inverse_frequencies)?,
            None => self.attention_of_many(layer, &cache, inverse_frequencies)?,
        }
        let (residual, out) = (arena.hidden_a, arena.hidden_b);
        let x = match plan.uses_halves() && cache.kernels.half {
            true => Input::Half(arena.attention_half, 1.0),
            false => Input::F32(arena.attention),
        };
        let names = ["attention output q8", "output projection", "norm after attention"];
        self.add_to_hidden(names, layer.o, x, layer.post_attn_norm, residual, out)
    }

    /// `out = residual + w · x`, or with a norm `out = residual + norm(w · x)`. An f32 `x` is brought
    /// into the form that the product reads.
    fn add_to_hidden(
        &mut self,
        [quantise, product, add_norm]: [&'static str; 3],
        w: WeightRef,
        x: Input,
        norm: Option<View>,
        residual: View,
        out: View,
    ) -> Result<(), RecordError> {
        let (n_tokens, n, eps) = (self.plan.n_tokens, self.plan.dims.n_embd, self.plan.norm_eps);
        let input = match x {
            Input::F32(x) if norm.is_none() && self.fuses(&[w], n_tokens) => {
                return self.gemv_residual(product, w, x, residual, out);
            }
            Input::F32(x) => self.activation(quantise, x, w.shape.n_in)?,
            ready => ready,
        };
        let Some(weight) = norm else {
            let residual = Epilogue::Add(residual);
            return self.gemv(product, &[w], input, None, residual, out, n_tokens);
        };
        // Normed inputs have been read by now, so that their buffer is free.
        let sums = self.arena.normed;
        self.gemv(product, &[w], input, None, Epilogue::Store, sums, n_tokens)?;
        let args = ops::rms_norm_add::Args { x: sums, weight, residual, y: out, n_tokens, n, eps };
        launch!(self, add_norm, Kernel::RmsNormAdd, args);
        Ok(())
    }

    /// Of one token: everything between the products of q, k and v and the output projection.
    fn attention_step(
        &mut self,
        kernel: Kernel,
        layer: &LayerWeights,
        cache: &LayerCache,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let arrivals_bytes = u64::from(d.n_kv_head) * 4;
        let args = ops::attention_step::Args {
            qkv: arena.qkv,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            inverse_frequencies,
            tokens: arena.tokens,
            block_table: cache.block_table,
            kv: cache.kv,
            partials: arena.partials,
            arrivals: self.slice("arrivals", arena.arrivals, 0..arrivals_bytes)?,
            out: arena.attention,
            n_head: d.n_head,
            n_kv_head: d.n_kv_head,
            head_dim: d.head_dim,
            n_pairs: plan.rope.n_pairs,
            pairing: plan.rope.pairing as u32,
            block_size: plan.kv.block_size_tokens(),
            n_blocks: cache.n_blocks,
            max_context_tokens: plan.kv.max_context_tokens(),
            n_segments: plan.n_segments,
            segment_min: DeviceProfile::SEGMENT_MIN,
            window: layer.window,
            kv_elem_bytes: cache.kernels.elem_bytes,
            norm_eps: plan.norm_eps,
            magnitude: plan.rope.magnitude,
            scale: plan.attention_scale,
        };
        launch!(self, "attention", kernel, args);
        Ok(())
    }

    /// The kernel for runs of tokens, where they are long enough to fill its tiles.
    fn chunk_kernel(&self, cache: &LayerCache) -> Option<Kernel> {
        let long = self.plan.run_tokens >= LONG_RUN_TOKENS;
        let usable = long && cache.kernels.half && self.plan.uses_halves();
        usable.then(|| ops::attention_chunk::kernel_for(self.plan.dims.head_dim)).flatten()
    }

    /// Of several tokens, each of which attends to those before it: all are appended first.
    fn attention_of_many(
        &mut self,
        layer: &LayerWeights,
        cache: &LayerCache,
        inverse_frequencies: View,
    ) -> Result<(), RecordError> {
        let (plan, arena, d) = (self.plan, self.arena, self.plan.dims);
        let LayerCache { kv, block_table, n_blocks, n_sequences, table_stride, n_logical, .. } =
            *cache;
        let (sequences, kv_elem_bytes) = (arena.sequences, cache.kernels.elem_bytes);
        let args = ops::rope_append::Args {
            qkv: arena.qkv,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            inverse_frequencies,
            tokens: arena.tokens,
            sequences,
            block_table,
            q: arena.q,
            kv,
            n_tokens: plan.n_tokens,
            n_head: d.n_head,
            n_kv_head: d.n_kv_head,
            head_dim: d.head_dim,
            n_pairs: plan.rope.n_pairs,
            pairing: plan.rope.pairing as u32,
            block_size: plan.kv.block_size_tokens(),
            n_blocks,
            n_sequences,
            table_stride,
            n_logical,
            kv_elem_bytes,
            norm_eps: plan.norm_eps,
            magnitude: plan.rope.magnitude,
        };
        launch!(self, "rope and kv append", cache.kernels.append, args);
        if let Some(kernel) = self.chunk_kernel(cache) {
            let args = ops::attention_chunk::Args {
                q: arena.q,
                kv,
                sequences,
                block_table,
                tokens: arena.tokens,
                out: arena.attention_half,
                n_tokens: plan.n_tokens,
                run_tokens: plan.run_tokens,
                n_head: d.n_head,
                n_kv_head: d.n_kv_head,
                head_dim: d.head_dim,
                block_size: plan.kv.block_size_tokens(),
                n_blocks,
                n_sequences,
                table_stride,
                n_logical,
                window: layer.window,
                order: half_order(plan.n_tokens) as u32,
                scale: plan.attention_scale,
            };
            launch!(self, "attention", kernel, args);
            return Ok(());
        }
        if plan.uses_halves() && cache.kernels.half {
            let args = ops::attention_rows::Args {
                q: arena.q,
                kv,
                sequences,
                block_table,
                tokens: arena.tokens,
                partials: arena.partials,
                arrivals: arena.row_arrivals,
                out: arena.attention_half,
                n_tokens: plan.n_tokens,
                n_head: d.n_head,
                n_kv_head: d.n_kv_head,
                head_dim: d.head_dim,
                block_size: plan.kv.block_size_tokens(),
                n_blocks,
                n_sequences,
                table_stride,
                n_logical,
                max_context_tokens: plan.kv.max_context_tokens(),
                n_segments: plan.n_segments,
                segment_min: DeviceProfile::SEGMENT_MIN,
                window: layer.window,
                order: half_order(plan.n_tokens) as u32,
                scale: plan.attention_scale,
            };
            launch!(self, "attention", Kernel::AttentionRows, args);
            return Ok(());
        }
        let args = ops::attention::Args {
            q: arena.q,
            kv,
            sequences,
            block_table,
            tokens: arena.tokens,
            partials: arena.partials,
            n_tokens: plan.n_tokens,
            n_head: d.n_head,
            n_kv_head: d.n_kv_head,
            head_dim: d.head_dim,
            block_size: plan.kv.block_size_tokens(),
            n_blocks,
            n_sequences,
            table_stride,
            n_logical,
            max_context_tokens: plan.kv.max_context_tokens(),
            n_segments: plan.n_segments,
            segment_min: DeviceProfile::SEGMENT_MIN,
            window: layer.window,
            kv_elem_bytes,
            scale: plan.attention_scale,
        };
        launch!(self, "attention", cache.kernels.attention, args);
        let args = ops::attention_combine::Args {
            partials: arena.partials,
            out: arena.attention,
            n_tokens: plan.n_tokens,
            n_head: d.n_head,
            head_dim: d.head_dim,
            n_segments: plan.n_segments,
        };
        launch!(self, "attention combine", Kernel::AttentionCombine, args);
        Ok(())
    }

    fn feed_forward(&mut self, layer: &LayerWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let tokens = plan.n_tokens;
        let (mid, middle) = match plan.uses_halves() {
            true => {
                let half = arena.ffn_mid_half;
                (half, Input::Half(half, 1.0 / ops::gemm::MIDDLE_SCALE))
            }
            false => (arena.ffn_mid, Input::F32(arena.ffn_mid)),
        };
        let parts = [layer.gate, layer.up];
        for part in parts {
            expect("rows of gate or up", plan.dims.n_ff.into(), part.shape.n_out.into())?;
        }
        let (x, norm) = (arena.hidden_b, layer.ffn_norm);
        let swiglu = plan.activation == Activation::SwiGlu;
        let same_type = layer.gate.weight_type == layer.up.weight_type;
        if swiglu && same_type && self.fuses(&parts, tokens) {
            self.gemv_norm_swiglu("gate and up", parts, x, norm, mid)?;
        } else {
            let input = self.norm("feed-forward norm", x, norm, tokens)?;
            self.gemv(
                "gate and up",
                &parts,
                input,
                None,
                Epilogue::Glu(plan.activation),
                mid,
                tokens,
            )?;
        }
        let (residual, out) = (arena.hidden_b, arena.hidden_a);
        let names = ["feed-forward q8", "down projection", "norm after feed-forward"];
        self.add_to_hidden(names, layer.down, middle, layer.post_ffn_norm, residual, out)
    }

    fn head(&mut self, weights: &ModelWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        if plan.head == Head::None {
            return Ok(());
        }
        // Nobody reads `hidden_b` any more.
        let hidden = match plan.n_tokens {
            1 => arena.hidden_a,
            _ => self.gather_outputs(arena.hidden_a, arena.hidden_b)?,
        };
        let outputs = plan.n_outputs;
        expect("rows of the output", plan.dims.n_vocab.into(), weights.output.shape.n_out.into())?;
        let (output, norm) = ([weights.output], weights.output_norm);
        if self.fuses(&output, plan.n_tokens) {
            if plan.head == Head::Greedy {
                return self.greedy_head(weights.output, hidden, norm);
            }
            self.gemv_norm("logits", &output, hidden, norm, None, arena.logits)?;
        } else {
            let input = self.norm("output norm", hidden, norm, outputs)?;
            self.gemv("logits", &output, input, None, Epilogue::Store, arena.logits, outputs)?;
        }
        self.choose_and_advance()
    }

    /// The rows that have outputs.
    fn gather_outputs(&mut self, x: View, y: View) -> Result<View, RecordError> {
        let (plan, rows) = (self.plan, self.arena.outputs);
        let (n_tokens, n_rows, n) = (plan.n_tokens, plan.n_outputs, plan.dims.n_embd);
        let args = ops::gather_rows::Args { x, rows, y, n_tokens, n_rows, n };
        launch!(self, "rows with outputs", Kernel::GatherRows, args);
        Ok(y)
    }

    /// Logits, the likeliest token, and the step's own advance.
    fn greedy_head(&mut self, output: WeightRef, x: View, norm: View) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let Matrices { types, rows, n_in } = self.matrices("logits", &[output])?;
        let product = ops::gemv_residual::product(types[0], rows[0], n_in, self.device);
        let args = ops::head::Args {
            w: output.view,
            x,
            norm,
            logits: arena.logits,
            best: arena.best,
            arrivals: self.choice_arrivals()?,
            token: arena.token,
            tokens: arena.tokens,
            step_count: arena.step_count,
            ggml_type: types[0],
            n_vocab: rows[0],
            n_in,
            ring_bytes: product.ring_bytes,
            max_context_tokens: plan.kv.max_context_tokens(),
            eps: plan.norm_eps,
        };
        launch!(self, "logits and argmax", Kernel::Head, args);
        Ok(())
    }

    /// The token from the logits, and the step's own advance.
    fn choose_and_advance(&mut self) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let (n_vocab, n_tokens, n_outputs) = (plan.dims.n_vocab, plan.n_tokens, plan.n_outputs);
        let outputs = arena.outputs;
        let (token, tokens, step_count) = (arena.token, arena.tokens, arena.step_count);
        let max_context_tokens = plan.kv.max_context_tokens();
        if plan.head == Head::Greedy {
            let args = ops::argmax::Args {
                logits: arena.logits,
                outputs,
                best: arena.best,
                arrivals: self.choice_arrivals()?,
                token,
                tokens,
                step_count,
                n_vocab,
                n_tokens,
                n_outputs,
                max_context_tokens,
            };
            launch!(self, "argmax", Kernel::Argmax, args);
        } else {
            let args = ops::sample::Args {
                logits: arena.logits,
                outputs,
                sampling: arena.sampling,
                tokens,
                step_count,
                token,
                n_vocab,
                n_tokens,
                n_outputs,
                max_context_tokens,
            };
            launch!(self, "sample", Kernel::Sample, args);
        }
        Ok(())
    }

    /// The counters behind those of the attention.
    fn choice_arrivals(&self) -> Result<View, RecordError> {
        let at = u64::from(self.plan.dims.n_kv_head) * 4;
        let bytes = u64::from(self.plan.n_outputs) * 4;
        self.slice("arrivals", self.arena.arrivals, at..at + bytes)
    }

    /// Whether a product of these matrices and `n_tokens` vectors takes its input as it comes, and
    /// norms or quantises it itself.
    fn fuses(&self, parts: &[WeightRef], n_tokens: u32) -> bool {
        let grouped = parts.iter().all(|part| ops::is_grouped(part.weight_type));
        self.plan.numerics == Numerics::Q8 && n_tokens == 1 && grouped
    }

    fn gemv_norm(
        &mut self,
        what: &'static str,
        parts: &[WeightRef],
        x: View,
        norm: View,
        bias: Option<View>,
        out: View,
    ) -> Result<(), RecordError> {
        let matrices = self.matrices(what, parts)?;
        let numbered = [0, 1, 2].map(|i| (matrices.types[i], matrices.rows[i]));
        let blocks = ops::gemv_norm::blocks(numbered, matrices.n_in, self.device);
        let product = ops::gemv_norm::product(numbered, blocks, matrices.n_in, self.device);
        let args = ops::gemv_norm::Args {
            w0: parts[0].view,
            w1: parts.get(1).map(|w| w.view),
            w2: parts.get(2).map(|w| w.view),
            x,
            norm,
            bias,
            out,
            type0: matrices.types[0],
            type1: matrices.types[1],
            type2: matrices.types[2],
            n_out0: matrices.rows[0],
            n_out1: matrices.rows[1],
            n_out2: matrices.rows[2],
            blocks0: blocks[0],
            blocks1: blocks[1],
            blocks2: blocks[2],
            n_in: matrices.n_in,
            ring_bytes: product.ring_bytes,
            eps: self.plan.norm_eps,
        };
        launch!(self, what, Kernel::GemvNorm, args);
        Ok(())
    }

    fn gemv_norm_swiglu(
        &mut self,
        what: &'static str,
        parts: [WeightRef; 2],
        x: View,
        norm: View,
        out: View,
    ) -> Result<(), RecordError> {
        let Matrices { types, rows, n_in } = self.matrices(what, &parts)?;
        let product = ops::gemv_norm_swiglu::product(types[0], rows[0], n_in, self.device);
        let args = ops::gemv_norm_swiglu::Args {
            gate: parts[0].view,
            up: parts[1].view,
            x,
            norm,
            out,
            ggml_type: types[0],
            n_out: rows[0],
            n_in,
            ring_bytes: product.ring_bytes,
            eps: self.plan.norm_eps,
        };
        launch!(self, what, Kernel::GemvNormSwiglu, args);
        Ok(())
    }

    fn gemv_residual(
        &mut self,
        what: &'static str,
        w: WeightRef,
        x: View,
        residual: View,
        out: View,
    ) -> Result<(), RecordError> {
        let (ggml_type, shape) = (w.weight_type.ggml_id(), w.shape);
        let (n_out, n_in) = (shape.n_out, shape.n_in);
        let product = ops::gemv_residual::product(ggml_type, n_out, n_in, self.device);
        let args = ops::gemv_residual::Args {
            w: w.view,
            x,
            residual,
            out,
            ggml_type,
            n_out,
            n_in,
            ring_bytes: product.ring_bytes,
        };
        launch!(self, what, Kernel::GemvResidual, args);
        Ok(())
    }

    /// RMS norm of `x` into the form that the next matrix product reads.
    fn norm(
        &mut self,
        what: &'static str,
        x: View,
        weight: View,
        n_tokens: u32,
    ) -> Result<Input, RecordError> {
        let (arena, n, eps) = (self.arena, self.plan.dims.n_embd, self.plan.norm_eps);
        if self.plan.uses_halves() {
            return self.halves(what, x, Some(weight), arena.normed_half, n_tokens, n);
        }
        match self.plan.numerics {
            Numerics::Exact => {
                let args = ops::rms_norm::Args { x, weight, y: arena.normed, n_tokens, n, eps };
                launch!(self, what, Kernel::RmsNorm, args);
                Ok(Input::F32(arena.normed))
            }
            Numerics::Q8 => {
                let (quants, groups) = (arena.quants, arena.groups);
                let args = ops::rms_norm_q8::Args { x, weight, quants, groups, n_tokens, n, eps };
                launch!(self, what, Kernel::RmsNormQ8, args);
                Ok(Input::Q8)
            }
        }
    }

    /// An f32 buffer in the form that the next matrix product reads.
    fn activation(&mut self, what: &'static str, x: View, n: u32) -> Result<Input, RecordError> {
        if self.plan.numerics == Numerics::Exact {
            return Ok(Input::F32(x));
        }
        if self.plan.uses_halves() {
            let y = self.arena.attention_half;
            return self.halves(what, x, None, y, self.plan.n_tokens, n);
        }
        let (quants, groups) = (self.arena.quants, self.arena.groups);
        let args = ops::quantize_q8::Args { x, quants, groups, n_tokens: self.plan.n_tokens, n };
        launch!(self, what, Kernel::QuantizeQ8, args);
        Ok(Input::Q8)
    }

    /// `x`, normed if there is a weight, as f16.
    fn halves(
        &mut self,
        what: &'static str,
        x: View,
        weight: Option<View>,
        y: View,
        n_tokens: u32,
        n: u32,
    ) -> Result<Input, RecordError> {
        let (order, eps) = (half_order(n_tokens) as u32, self.plan.norm_eps);
        let args = ops::rms_norm_f16::Args { x, weight, y, n_tokens, n, order, eps };
        launch!(self, what, Kernel::RmsNormF16, args);
        Ok(Input::Half(y, 1.0))
    }

    #[allow(clippy::too_many_arguments)]
    fn gemv(
        &mut self,
        what: &'static str,
        parts: &[WeightRef],
        input: Input,
        bias: Option<View>,
        epilogue: Epilogue,
        out: View,
        n_tokens: u32,
    ) -> Result<(), RecordError> {
        let Matrices { types, rows, n_in } = self.matrices(what, parts)?;
        let part = |index: usize| parts.get(index);
        let n_rows = match epilogue {
            Epilogue::Glu(_) => rows[0],
            _ => rows.iter().sum(),
        };
        let (store, residual) = match epilogue {
            Epilogue::Add(residual) => (1, Some(residual)),
            Epilogue::Store => (0, None),
            Epilogue::Glu(Activation::SwiGlu) => (2, None),
            Epilogue::Glu(Activation::GeGlu) => (3, None),
        };
        /// The operations differ in their input only.
        macro_rules! gemv {
            ($op:ident, $kernels:expr, { $($input:tt)* }) => {{
                let args = ops::$op::Args {
                    w0: parts[0].view,
                    w1: part(1).map(|w| w.view),
                    w2: part(2).map(|w| w.view),
                    $($input)*
                    bias,
                    residual,
                    out,
                    type0: types[0],
                    type1: types[1],
                    type2: types[2],
                    n_out0: rows[0],
                    n_out1: rows[1],
                    n_out2: rows[2],
                    n_rows,
                    n_in,
                    n_tokens,
                };
                launch!(self, what, $kernels[store], args);
            }};
        }
        match input {
            Input::Q8 => {
                let kernels = [
                    Kernel::GemvQ8Store,
                    Kernel::GemvQ8Add,
                    Kernel::GemvQ8Swiglu,
                    Kernel::GemvQ8Geglu,
                ];
                gemv!(gemv_q8, kernels, {
                    quants: self.arena.quants,
                    groups: self.arena.groups,
                });
            }
            Input::Half(x, x_scale) => {
                let form = match epilogue {
                    Epilogue::Store => GemmForm::Store,
                    Epilogue::Add(_) => GemmForm::Add,
                    Epilogue::Glu(Activation::SwiGlu) => GemmForm::Swiglu,
                    Epilogue::Glu(Activation::GeGlu) => GemmForm::Geglu,
                };
                /// The operations differ in the order of x only.
                macro_rules! gemm {
                    ($op:ident, $kernel:expr) => {{
                        let args = ops::$op::Args {
                            w0: parts[0].view,
                            w1: part(1).map(|w| w.view),
                            w2: part(2).map(|w| w.view),
                            x,
                            bias,
                            residual,
                            out,
                            type0: types[0],
                            type1: types[1],
                            type2: types[2],
                            n_out0: rows[0],
                            n_out1: rows[1],
                            n_out2: rows[2],
                            n_in,
                            n_tokens,
                            form: form as u32,
                            x_scale,
                        };
                        launch!(self, what, $kernel, args);
                    }};
                }
                match n_tokens {
                    0..=8 => gemm!(gemm_skinny, Kernel::GemmSkinny8),
                    9..=32 => gemm!(gemm_skinny, Kernel::GemmSkinny32),
                    _ => gemm!(gemm_tiled, Kernel::GemmTiled),
                }
            }
            Input::F32(x) => {
                let kernels = [
                    Kernel::GemvF32Store,
                    Kernel::GemvF32Add,
                    Kernel::GemvF32Swiglu,
                    Kernel::GemvF32Geglu,
                ];
                gemv!(gemv_f32, kernels, { x, });
            }
        }
        Ok(())
    }
}
