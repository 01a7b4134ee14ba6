//! A decoder that fails, or is cancelled, where a test wants it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use decode_graph::{Drive, Head};
use kernels_ptx::SamplingPack;
use lane::decode::Decode;
use lane::residency::ResidencyError;
use lane::{Cancel, Lane, LaneOptions, ModelFile, PlanOptions};

/// A lane of the embedded model, and how many steps it makes: further ones fail. With `cancel`, the
/// last of them cancels.
pub(crate) fn failing(
    plan: PlanOptions,
    asynchronous: bool,
    cancel: Option<Cancel>,
) -> (Lane, Arc<AtomicU32>) {
    let file = ModelFile::open(None).unwrap();
    let options = LaneOptions { plan, ..Default::default() };
    let decoder = Box::new(file.load_host(&options, &mut |_| {}).unwrap());
    let steps_left = Arc::new(AtomicU32::new(u32::MAX));
    let decoder = Failing { asynchronous, cancel, decoder, steps_left: steps_left.clone() };
    (Lane::new(Box::new(decoder), file.tokenizer().unwrap()), steps_left)
}

/// May say of itself that it runs on its own.
struct Failing {
    asynchronous: bool,
    cancel: Option<Cancel>,
    decoder: Box<dyn Decode>,
    steps_left: Arc<AtomicU32>,
}

impl Failing {
    fn check(&self) -> Result<(), ResidencyError> {
        match self.steps_left.load(Ordering::Relaxed) {
            0 => Err(ResidencyError::Missing("working device")),
            _ => Ok(()),
        }
    }

    fn count(&self) {
        let was_last = self.steps_left.fetch_sub(1, Ordering::Relaxed) == 1;
        if let Some(cancel) = self.cancel.as_ref().filter(|_| was_last) {
            cancel.cancel();
        }
    }
}

impl Decode for Failing {
    fn backend(&self) -> &'static str {
        self.decoder.backend()
    }
    fn device(&self) -> String {
        self.decoder.device()
    }
    fn is_asynchronous(&self) -> bool {
        self.asynchronous
    }
    fn n_vocab(&self) -> u32 {
        self.decoder.n_vocab()
    }
    fn max_context_tokens(&self) -> u32 {
        self.decoder.max_context_tokens()
    }
    fn kv(&self) -> kv_paged::PagedKvConfig {
        self.decoder.kv()
    }
    fn prepare(&mut self, head: Head) -> Result<(), ResidencyError> {
        self.decoder.prepare(head)
    }
    fn set_sampling(&mut self, pack: &SamplingPack) -> Result<(), ResidencyError> {
        self.decoder.set_sampling(pack)
    }
    fn prefill(&mut self, position: u32, ids: &[u32]) -> Result<usize, ResidencyError> {
        self.check()?;
        let n_tokens = self.decoder.prefill(position, ids)?;
        if n_tokens > 0 {
            self.count();
        }
        Ok(n_tokens)
    }
    fn step(&mut self, drive: Drive<'_>) -> Result<(), ResidencyError> {
        self.check()?;
        self.decoder.step(drive)?;
        self.count();
        Ok(())
    }
    fn token(&mut self) -> Result<u32, ResidencyError> {
        self.decoder.token()
    }
    fn queue_token(&mut self) -> Result<gpu_slab::QueuedRead, ResidencyError> {
        self.decoder.queue_token()
    }
    fn finish_token(&mut self, queued: gpu_slab::QueuedRead) -> Result<u32, ResidencyError> {
        self.decoder.finish_token(queued)
    }
    fn logits(&mut self, logits: &mut [f32]) -> Result<(), ResidencyError> {
        self.decoder.logits(logits)
    }
    fn fingerprint(&self) -> u64 {
        self.decoder.fingerprint()
    }
    fn read_cache(&mut self, n_tokens: u32) -> Result<Vec<u8>, ResidencyError> {
        self.decoder.read_cache(n_tokens)
    }
    fn write_cache(&mut self, n_tokens: u32, blocks: &[u8]) -> Result<(), ResidencyError> {
        self.decoder.write_cache(n_tokens, blocks)
    }
    fn time_ops(
        &mut self,
        depth: u32,
        repetitions: u32,
    ) -> Result<(Vec<decode_graph::OpTime>, f64), ResidencyError> {
        self.decoder.time_ops(depth, repetitions)
    }
    fn read_bandwidth(&mut self) -> Result<f64, ResidencyError> {
        self.decoder.read_bandwidth()
    }
    fn telemetry(&self) -> lane::residency::Telemetry {
        self.decoder.telemetry()
    }
    fn report(&self) -> gpu_slab::Report {
        self.decoder.report()
    }
}
