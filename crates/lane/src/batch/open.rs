//! From a model file to an engine.

use super::device::BatchDevice;
use super::engine::Engine;
use super::plan::BatchOptions;
use super::scheduler::Scheduler;
use crate::lane::LaneError;
use crate::loading::Progress;
use crate::open::{LaneOptions, ModelFile};
use crate::residency::ResidencyError;
use crate::tokenizer::Tokenizer;

/// A model loaded for many sequences.
pub struct BatchLane {
    /// The tokenizer of the model.
    pub tokenizer: Tokenizer,
    /// What decodes.
    pub engine: Engine<Box<dyn BatchDevice>>,
}

impl ModelFile {
    /// Loads the model for many sequences, each of the context that `options` say at most.
    pub fn load_batch(
        &self,
        options: &LaneOptions,
        batch: &BatchOptions,
        progress: Progress<'_>,
    ) -> Result<BatchLane, LaneError> {
        let mut options = options.clone();
        options.plan.batch = Some(*batch);
        let (decoder, tokenizer) = self.load_with_tokenizer(&options, progress)?;
        let (scheduler, device) =
            decoder.into_batch().ok_or(ResidencyError::Missing("cache of many sequences"))?;
        Ok(BatchLane { tokenizer, engine: Engine::new(device, Scheduler::new(scheduler)?) })
    }
}
