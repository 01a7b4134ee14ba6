//! From a model file to a lane: description, tokenizer, plan, backend, load.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};

use decode_graph::{Backend, HostBackend};
use gpu_slab::{HostMemory, Slab};
use kernels_ptx::DeviceProfile;

use crate::decode::Decode;
use crate::decoder::Decoder;
use crate::gguf::Gguf;
use crate::lane::{Lane, LaneError};
use crate::layout;
use crate::loading::{CachePlace, Progress};
use crate::memory_plan::{MemoryPlan, PlanOptions};
use crate::model::Model;
use crate::residency::ResidencyError;
use crate::tokenizer::{Tokenizer, TokenizerWarning, Vocabulary};

/// The model that is part of the program: 5.8 M parameters, public domain.
pub static EMBEDDED_MODEL: &[u8] = include_bytes!("../models/whale-5.8m-q4_k_m.gguf");

/// Name of the embedded model, for people.
pub const EMBEDDED_MODEL_NAME: &str = "whale-5.8m-q4_k_m (embedded)";

/// Which backend to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The GPU if there is one that can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Host,
    /// The GPU or nothing.
    Cuda,
}

/// Everything that decides how a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct LaneOptions {
    /// Backend.
    pub backend: BackendChoice,
    /// Number of the GPU.
    pub device: u32,
    /// Bytes that must stay free on the device; `None`: [`DEFAULT_VRAM_RESERVE_BYTES`] on a GPU.
    pub vram_reserve_bytes: Option<u64>,
    /// Context, numerics, KV type, budget. Without a budget: what the device has free.
    pub plan: PlanOptions,
    /// Refuse models with weights that would be computed with as another type.
    pub no_transcoding: bool,
    /// Where the packed weights are kept, for the next start to be quicker.
    pub cache: CachePlace,
}

/// Kept free on a GPU for the context, other programs and the driver.
pub const DEFAULT_VRAM_RESERVE_BYTES: u64 = 512 << 20;

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
        match path {
            Some(path) => Self::new(Gguf::open(path)?),
            None => Self::from_static(EMBEDDED_MODEL),
        }
    }

    /// Opens a file that is part of the program.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self, LaneError> {
        Self::new(Gguf::from_static(bytes)?)
    }

    /// Opens a file that is in memory.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self, LaneError> {
        Self::new(Gguf::from_vec(bytes)?)
    }

    fn new(gguf: Gguf) -> Result<Self, LaneError> {
        let model = Model::from_gguf(&gguf)?;
        Ok(Self { gguf, model })
    }

    /// Builds the tokenizer of the file.
    pub fn tokenizer(&self) -> Result<Tokenizer, LaneError> {
        let tokenizer = Tokenizer::new(Vocabulary::from_gguf(&self.gguf)?)?;
        for warning in tokenizer.warnings() {
            // Of rare scripts, and true of many good models: nothing to say with every run.
            let rare = matches!(warning, TokenizerWarning::MissingBytes { .. });
            let level = if rare { log::Level::Info } else { log::Level::Warn };
            log::log!(target: "lane", level, "tokenizer: {warning}");
        }
        Ok(tokenizer)
    }

    /// Loads the model.
    pub fn load(&self, options: &LaneOptions, progress: Progress<'_>) -> Result<Lane, LaneError> {
        for name in &self.model.extra_tensors {
            log::info!(target: "lane", "tensor {name} is not used");
        }
        let (decoder, tokenizer) = self.load_with_tokenizer(options, progress)?;
        Ok(Lane::new(decoder, tokenizer))
    }

    /// Loads weights and tokenizer at the same time.
    pub(crate) fn load_with_tokenizer(
        &self,
        options: &LaneOptions,
        progress: Progress<'_>,
    ) -> Result<(Box<dyn Decode>, Tokenizer), LaneError> {
        if let Some(transcoding) = self.model.transcoding() {
            if options.no_transcoding {
                return Err(LaneError::Transcoding(transcoding));
            }
            log::warn!(target: "lane", "{transcoding}");
        }
        std::thread::scope(|scope| {
            let tokenizer = scope.spawn(|| self.tokenizer());
            let decoder = self.load_decoder(options, progress)?;
            Ok((decoder, tokenizer.join().unwrap_or_else(|panic| resume_unwind(panic))?))
        })
    }

    fn load_decoder(
        &self,
        options: &LaneOptions,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Decode>, LaneError> {
        Ok(match options.backend {
            BackendChoice::Host => Box::new(self.load_host(options, progress)?),
            BackendChoice::Cuda => self.load_cuda(options, progress)?,
            BackendChoice::Auto => match self.load_cuda(options, progress) {
                Ok(decoder) => decoder,
                Err(reason) => {
                    let level = match reason {
                        // A machine without a GPU is nothing to warn of.
                        LaneError::NoBackend(_) => log::Level::Info,
                        _ => log::Level::Warn,
                    };
                    log::log!(target: "lane", level, "running on the host: {reason}");
                    Box::new(self.load_host(options, progress)?)
                }
            },
        })
    }

    /// Loads the model onto the CPU.
    pub fn load_host(
        &self,
        options: &LaneOptions,
        progress: Progress<'_>,
    ) -> Result<Decoder<HostBackend>, LaneError> {
        // A cache of many sequences takes what it may have; other programs need memory, too.
        let share = if options.plan.batch.is_some() { 2 } else { 1 };
        let available = || available_memory_bytes().map(|bytes| bytes / share);
        let usable_bytes = options.plan.usable_bytes.or_else(available);
        let plan = self.plan(&HostBackend.profile(), usable_bytes, options)?;
        let cache = self.cache_path(options, &plan);
        self.load_host_with(&plan, cache.as_deref(), progress)
    }

    /// Loads the model onto the CPU by a plan that may have been made for another device.
    pub fn load_host_as_planned(
        &self,
        plan: &MemoryPlan,
        progress: Progress<'_>,
    ) -> Result<Decoder<HostBackend>, LaneError> {
        self.load_host_with(plan, None, progress)
    }

    fn load_host_with(
        &self,
        plan: &MemoryPlan,
        cache: Option<&Path>,
        progress: Progress<'_>,
    ) -> Result<Decoder<HostBackend>, LaneError> {
        let slab = Slab::with_sizes(&[plan.bytes.total_bytes()], HostMemory::new)
            .map_err(ResidencyError::from)?;
        let (memory, gguf, model) = (slab.into_memory(), &self.gguf, &self.model);
        Decoder::load(HostBackend, memory, gguf, model, plan, cache, progress)
    }

    /// The file that keeps the model packed as planned, if one is to.
    pub(crate) fn cache_path(&self, options: &LaneOptions, plan: &MemoryPlan) -> Option<PathBuf> {
        options.cache.path(&self.gguf, layout::layout_id(plan.step.fusion))
    }

    pub(crate) fn plan(
        &self,
        device: &DeviceProfile,
        usable_bytes: Option<u64>,
        options: &LaneOptions,
    ) -> Result<MemoryPlan, LaneError> {
        let options = PlanOptions { usable_bytes, ..options.plan };
        let plan = MemoryPlan::new(&self.gguf, &self.model, device, &options)?;
        if let Some(wanted) = plan.shrunk_from {
            log::warn!(
                target: "lane",
                "context shrunk from {wanted} to {} tokens to fit the memory",
                plan.step.kv.max_context_tokens()
            );
        }
        let (tokens, trained) =
            (plan.step.kv.max_context_tokens(), self.model.config.context_length);
        if tokens > trained {
            log::warn!(
                target: "lane",
                "context of {tokens} tokens, the model was trained for {trained}"
            );
        }
        Ok(plan)
    }
}

/// What the operating system could give without swapping, where it says so.
fn available_memory_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
