//! `lane inspect`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use decode_graph::{Backend, HostBackend};
use kernels_ptx::DeviceProfile;
use lane::memory_plan::DoesNotFit;
use lane::{ContextSize, LaneError, MemoryPlan, PlanOptions};
use serde::Serialize;

use super::{ByteSize, KvTypeArg, NumericsArg, context, open_model, print, print_json, visible};

#[derive(clap::Args)]
pub(super) struct Args {
    /// GGUF file
    file: PathBuf,
    /// Print JSON, with every tensor and allocation
    #[arg(long)]
    json: bool,
    /// Memory of the device [default: that of --gpu]
    #[arg(long, value_name = "SIZE")]
    vram: Option<ByteSize>,
    /// Kept free of it for driver and others [default: 0, with --gpu 512MiB]
    #[arg(long, value_name = "SIZE")]
    vram_reserve: Option<ByteSize>,
    /// Tokens of context: a number, `auto` or `max`
    #[arg(short, long, value_name = "N|auto|max", default_value = "auto", value_parser = context)]
    ctx: ContextSize,
    /// Plan for these numerics
    #[arg(long, value_enum, default_value = "auto")]
    numerics: NumericsArg,
    /// Plan for this element type of the KV cache [default: f16, with exact numerics f32]
    #[arg(long, value_enum)]
    kv_type: Option<KvTypeArg>,
    /// Memory bandwidth, GB/s
    #[arg(long, value_name = "GB/s", conflicts_with = "gpu", value_parser = bandwidth)]
    bandwidth: Option<f64>,
    /// A known device
    #[arg(long, value_name = "NAME")]
    gpu: Option<Gpu>,
}

/// Devices by datasheet.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Gpu {
    A2000,
    Rtx3090,
    Rtx4090,
    H100,
    H200,
}

impl Gpu {
    /// GB/s, GiB, and what launch geometry depends on.
    fn facts(self) -> (f64, u64, DeviceProfile) {
        let profile = |sm_count, l2_mib: u64, shared_kib: u32, compute_capability| DeviceProfile {
            sm_count,
            l2_bytes: l2_mib << 20,
            shared_per_block_bytes: (shared_kib - 1) << 10,
            shared_per_sm_bytes: shared_kib << 10,
            compute_capability,
        };
        match self {
            Gpu::A2000 => (288.0, 6, DeviceProfile::A2000),
            Gpu::Rtx3090 => (936.0, 24, profile(82, 6, 100, 86)),
            Gpu::Rtx4090 => (1008.0, 24, profile(128, 72, 100, 89)),
            Gpu::H100 => (3352.0, 80, profile(132, 50, 228, 90)),
            Gpu::H200 => (4800.0, 141, profile(132, 60, 228, 90)),
        }
    }
}

#[derive(Serialize)]
struct Inspection {
    architecture: &'static str,
    name: String,
    label: String,
    dims: Dims,
    parameters: u64,
    bytes_per_token: u64,
    tensors_by_type: BTreeMap<&'static str, TypeCount>,
    unused_tensors: Vec<String>,
    transcoding: Option<String>,
    tokenizer_refusal: Option<String>,
    context_tokens: Option<u32>,
    plan: Option<PlanSummary>,
    usable_bytes: Option<u64>,
    fits: bool,
    refusal: Option<String>,
    max_tokens_per_s: Option<f64>,
    tensors: Vec<TensorSummary>,
}

#[derive(Serialize)]
struct Dims {
    n_layer: u32,
    n_embd: u32,
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    n_ff: u32,
    n_vocab: u32,
    context_length: u32,
}

#[derive(Default, Serialize)]
struct TypeCount {
    tensors: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct PlanSummary {
    total_bytes: u64,
    weights_bytes: u64,
    kv_bytes: u64,
    step_bytes: u64,
    alignment_bytes: u64,
    allocations: Vec<AllocationSummary>,
}

#[derive(Serialize)]
struct AllocationSummary {
    name: String,
    offset_bytes: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorSummary {
    name: String,
    #[serde(rename = "type")]
    ggml_type: &'static str,
    dims: Vec<u64>,
    bytes: u64,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let file = open_model(Some(&args.file))?;
    let (bandwidth, usable_bytes, profile) = device(&args);
    let options = PlanOptions {
        context: args.ctx,
        usable_bytes,
        numerics: args.numerics.of(&file.model, super::FusionArg::Auto),
        kv_type: args.kv_type.map(Into::into),
        ..PlanOptions::default()
    };
    let (plan, refusal) = match MemoryPlan::new(&file.gguf, &file.model, &profile, &options) {
        Ok(plan) => (Some(plan), None),
        Err(LaneError::DoesNotFit(refusal)) => (None, Some(refusal)),
        Err(error) => return Err(error.into()),
    };
    let inspection = Inspection::new(&file, plan.as_ref(), refusal, usable_bytes, bandwidth);
    if args.json { print_json(&inspection) } else { print(&inspection.text(plan.as_ref())) }
}

fn bandwidth(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number of GB/s above 0".into())
}

fn device(args: &Args) -> (Option<f64>, Option<u64>, DeviceProfile) {
    let facts = args.gpu.map(Gpu::facts);
    let vram = args.vram.map(|size| size.0).or(facts.map(|(_, gib, _)| gib << 30));
    let default_reserve = if args.gpu.is_some() { 512 << 20 } else { 0 };
    let reserve = args.vram_reserve.map_or(default_reserve, |size| size.0);
    (
        args.bandwidth.or(facts.map(|(bandwidth, ..)| bandwidth)),
        vram.map(|vram| vram.saturating_sub(reserve)),
        facts.map_or_else(|| HostBackend.profile(), |(.., profile)| profile),
    )
}

impl Inspection {
    fn new(
        file: &lane::ModelFile,
        plan: Option<&MemoryPlan>,
        refusal: Option<DoesNotFit>,
        usable_bytes: Option<u64>,
        bandwidth: Option<f64>,
    ) -> Self {
        let (c, gguf) = (&file.model.config, &file.gguf);
        let mut tensors_by_type: BTreeMap<_, TypeCount> = BTreeMap::new();
        for tensor in gguf.tensors() {
            let count = tensors_by_type.entry(tensor.ggml_type().name()).or_default();
            count.tensors += 1;
            count.bytes += tensor.n_bytes();
        }
        let bytes_per_token = file.model.bytes_per_token();
        Self {
            architecture: c.arch.name(),
            name: c.name.clone(),
            label: file.model.label(),
            dims: Dims {
                n_layer: c.n_layer,
                n_embd: c.n_embd,
                n_head: c.n_head,
                n_kv_head: c.n_kv_head,
                head_dim: c.head_dim,
                n_ff: c.n_ff,
                n_vocab: c.n_vocab,
                context_length: c.context_length,
            },
            parameters: file.model.n_params,
            bytes_per_token,
            tensors_by_type,
            unused_tensors: file.model.extra_tensors.clone(),
            transcoding: file.model.transcoding().map(|transcoding| transcoding.to_string()),
            tokenizer_refusal: file.tokenizer().err().map(|error| error.to_string()),
            context_tokens: plan.map(|plan| plan.step.kv.max_context_tokens()),
            plan: plan.map(PlanSummary::new),
            usable_bytes,
            fits: refusal.is_none(),
            refusal: refusal.map(|refusal| refusal.to_string()),
            max_tokens_per_s: bandwidth.map(|gb| gb * 1e9 / bytes_per_token as f64),
            tensors: gguf
                .tensors()
                .iter()
                .map(|tensor| TensorSummary {
                    name: tensor.name().to_owned(),
                    ggml_type: tensor.ggml_type().name(),
                    dims: tensor.dims().to_vec(),
                    bytes: tensor.n_bytes(),
                })
                .collect(),
        }
    }

    fn text(&self, plan: Option<&MemoryPlan>) -> String {
        let mib = |bytes: u64| bytes as f64 / 1048576.0;
        let d = &self.dims;
        let mut lines = vec![
            format!(
                "{} ({}), {:.2} M parameters",
                self.label,
                self.name,
                self.parameters as f64 / 1e6
            ),
            format!(
                "{}: {} layers, {} embd, {} heads of {}, {} kv heads, {} ff, {} vocab, {} context",
                self.architecture,
                d.n_layer,
                d.n_embd,
                d.n_head,
                d.head_dim,
                d.n_kv_head,
                d.n_ff,
                d.n_vocab,
                d.context_length
            ),
        ];
        for (name, count) in &self.tensors_by_type {
            let (tensors, size) = (count.tensors, mib(count.bytes));
            lines.push(format!("{name:>8} {tensors:>5} tensors {size:>10.2} MiB"));
        }
        if !self.unused_tensors.is_empty() {
            lines.push(format!("not used: {}", self.unused_tensors.join(", ")));
        }
        lines.extend(self.transcoding.clone());
        if let Some(refusal) = &self.tokenizer_refusal {
            lines.push(format!("no text can be generated: {refusal}"));
        }
        if let (Some(summary), Some(plan)) = (&self.plan, plan) {
            lines.push(format!(
                "memory for {} tokens of context:",
                plan.step.kv.max_context_tokens()
            ));
            for (name, bytes) in [
                ("weights", summary.weights_bytes),
                ("kv", summary.kv_bytes),
                ("step", summary.step_bytes),
                ("alignment", summary.alignment_bytes),
                ("total", summary.total_bytes),
            ] {
                lines.push(format!("{name:>10} {:>10.2} MiB {bytes:>14} bytes", mib(bytes)));
            }
            if let Some(wanted) = plan.shrunk_from {
                lines.push(format!("context shrunk from {wanted} tokens to fit"));
            }
        }
        lines.push(match (&self.refusal, self.usable_bytes) {
            (Some(refusal), _) => refusal.clone(),
            (None, Some(usable)) => format!("fits into {:.0} MiB", mib(usable)),
            (None, None) => String::new(),
        });
        if let Some(rate) = self.max_tokens_per_s {
            let read = mib(self.bytes_per_token);
            lines.push(format!("at most {rate:.1} tok/s: {read:.2} MiB of weights per token"));
        }
        lines.retain(|line| !line.is_empty());
        let lines: Vec<String> = lines.iter().map(|line| visible(line)).collect();
        lines.join("\n") + "\n"
    }
}

impl PlanSummary {
    fn new(plan: &MemoryPlan) -> Self {
        let allocations = plan.bytes.allocations();
        let sum = |matches: &dyn Fn(&str) -> bool| {
            allocations.iter().filter(|a| matches(&a.name)).map(|a| a.len_bytes).sum()
        };
        let kv = |name: &str| name.starts_with("kv.");
        let step = |name: &str| name.starts_with("step.");
        Self {
            total_bytes: plan.bytes.total_bytes(),
            weights_bytes: sum(&|name| !kv(name) && !step(name)),
            kv_bytes: sum(&kv),
            step_bytes: sum(&step),
            alignment_bytes: plan.bytes.alignment_bytes(),
            allocations: allocations
                .iter()
                .map(|a| AllocationSummary {
                    name: a.name.to_string(),
                    offset_bytes: a.offset_bytes,
                    bytes: a.len_bytes,
                })
                .collect(),
        }
    }
}
