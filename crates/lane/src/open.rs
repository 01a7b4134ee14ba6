//! From a model file to a lane: description, tokenizer, plan, backend, load.

use std::path::Path;

use decode_graph::{Backend, HostBackend};
use gpu_slab::HostMemory;

use crate::decode::Decode;
use crate::decoder::{Decoder, Progress};
use crate::gguf::Gguf;
use crate::lane::{Lane, LaneError};
use crate::memory_plan::{MemoryPlan, PlanOptions};
use crate::model::Model;
use crate::residency::ResidencyError;
use crate::tokenizer::{Tokenizer, Vocabulary};

/// The model that is part of the program: 5.8 M parameters, public domain.
pub static EMBEDDED_MODEL: &[u8] = include_bytes!("../models/whale-5.8m-q4_k_m.gguf");

/// Name of the embedded model, for people.
pub const EMBEDDED_MODEL_NAME: &str = "whale-5.8m-q4_k_m (embedded)";

/// Which backend to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best there is.
    #[default]
    Auto,
    /// The CPU.
    Host,
}

/// Everything that decides how a model is loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneOptions {
    /// Backend.
    pub backend: BackendChoice,
    /// Context, numerics, KV type, budget. Without a budget: what the machine has available.
    pub plan: PlanOptions,
}

/// A model file, opened and described; nothing is loaded yet.
pub struct ModelFile {
    /// The file.
    pub gguf: Gguf,
    /// What it is a model of.
    pub model: Model,
}

impl ModelFile {
    /// Opens a GGUF file, or the embedded model.
    pub fn open(path: Option<&Path>) -> Result<Self, LaneError> {
        let gguf = match path {
            Some(path) => Gguf::open(path)?,
            None => Gguf::from_static(EMBEDDED_MODEL)?,
        };
        let model = Model::from_gguf(&gguf)?;
        Ok(Self { gguf, model })
    }

    /// Builds the tokenizer of the file.
    pub fn tokenizer(&self) -> Result<Tokenizer, LaneError> {
        let tokenizer = Tokenizer::new(Vocabulary::from_gguf(&self.gguf)?)?;
        for warning in tokenizer.warnings() {
            log::warn!(target: "lane", "tokenizer: {warning}");
        }
        Ok(tokenizer)
    }

    /// Loads the model.
    pub fn load(&self, options: &LaneOptions, progress: Progress<'_>) -> Result<Lane, LaneError> {
        for name in &self.model.extra_tensors {
            log::info!(target: "lane", "tensor {name} is not used");
        }
        let tokenizer = self.tokenizer()?;
        let decoder = self.load_host(&options.plan, progress)?;
        Ok(Lane::new(decoder, tokenizer))
    }

    fn load_host(
        &self,
        options: &PlanOptions,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Decode>, LaneError> {
        let usable_bytes = options.usable_bytes.or_else(available_memory_bytes);
        let options = PlanOptions { usable_bytes, ..*options };
        let plan = MemoryPlan::new(&self.gguf, &self.model, &HostBackend.profile(), &options)?;
        if let Some(wanted) = plan.shrunk_from {
            log::warn!(
                target: "lane",
                "context shrunk from {wanted} to {} tokens to fit the memory",
                plan.step.kv.max_context_tokens()
            );
        }
        let slab = gpu_slab::Slab::with_sizes(&[plan.bytes.total_bytes()], HostMemory::new)
            .map_err(ResidencyError::from)?;
        let memory = slab.into_memory();
        let decoder = Decoder::load(HostBackend, memory, &self.gguf, &self.model, &plan, progress)?;
        Ok(Box::new(decoder))
    }
}

/// What the operating system could give without swapping, where it says so.
fn available_memory_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
