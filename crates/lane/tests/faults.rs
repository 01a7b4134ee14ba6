//! Loading with memory and a backend that fail at every call in turn (S13): each failure is one
//! sentence, leaves everything that was resident as it was, and the next try succeeds.

use decode_graph::testing::FaultyBackend;
use decode_graph::{Backend, Drive, HostBackend};
use gpu_slab::testing::FailingMemory;
use gpu_slab::{HostMemory, Slab};
use kernels_ptx::{DeviceProfile, TokenParams};
use lane::decode::Decode;
use lane::decoder::Decoder;
use lane::loading::load_weights;
use lane::residency::{Residency, WeightSource};
use lane::synth::{Mix, Shape};
use lane::{MemoryPlan, ModelFile, PlanOptions};

type Faulty = FaultyBackend<HostBackend>;

struct Model {
    file: ModelFile,
    plan: MemoryPlan,
}

fn tiny() -> Model {
    let mut bytes = Vec::new();
    lane::synth::write(Shape::Tiny, Mix::Q4KM, 1, &mut bytes, |_| {}).unwrap();
    let file = ModelFile::from_vec(bytes).unwrap();
    let options = PlanOptions { context: lane::ContextSize::Tokens(64), ..PlanOptions::default() };
    let plan = MemoryPlan::new(&file.gguf, &file.model, &DeviceProfile::A2000, &options).unwrap();
    Model { file, plan }
}

impl Model {
    fn load(
        &self,
        backend: Faulty,
        fault: impl FnOnce(FailingMemory<HostMemory>) -> FailingMemory<HostMemory>,
    ) -> Result<Decoder<Faulty>, lane::LaneError> {
        let memory = HostMemory::new(self.plan.bytes.total_bytes()).unwrap();
        let memory = fault(FailingMemory::new(memory));
        let (gguf, model) = (&self.file.gguf, &self.file.model);
        Decoder::load(backend, memory, gguf, model, &self.plan, None, &mut |_| {})
    }
}

fn backend() -> Faulty {
    FaultyBackend::new(HostBackend)
}

#[test]
fn s13_memory_that_fails_at_any_call_of_loading_is_a_soft_failure() {
    let model = tiny();
    let calls = model.load(backend(), |m| m).unwrap().residency().slab().memory().calls();
    assert!(calls > 50, "{calls}");
    for number in 1..=calls {
        let result = model.load(backend(), |memory| memory.refuse_call(number));
        let error = result.map(|_| ()).expect_err("every call matters").to_string();
        assert!(error.contains(&format!("call {number} was refused")), "{error}");
        assert!(error.contains('`'), "names what was being loaded: {error}");
    }
    model.load(backend(), |memory| memory.refuse_call(calls + 1)).unwrap();
}

#[test]
fn s13_a_backend_that_fails_at_any_call_of_loading_is_a_soft_failure() {
    let model = tiny();
    let calls = model.load(backend(), |m| m).unwrap().residency().backend().calls();
    assert!(calls >= 3, "capture, node count, replay: {calls}");
    for number in 1..=calls {
        let result = model.load(backend().refuse_call(number), |m| m);
        let error = result.map(|_| ()).expect_err("every call matters").to_string();
        assert!(error.contains(&format!("call {number} was refused")), "{error}");
    }
}

/// A residency that holds a weight already, into which a model is loaded with a fault.
#[test]
fn s13_what_was_resident_survives_every_failure_and_the_next_try_succeeds() {
    let model = tiny();
    let own = vec![0x21u8; 16 * 144];
    let source = WeightSource {
        name: "own",
        weight_type: q4k_soa::WeightType::Q4K,
        shape: q4k_soa::Shape { n_out: 16, n_in: 256 },
        layout: q4k_soa::LayoutId::PLANES,
        bytes: &own,
    };
    let bytes = model.plan.bytes.total_bytes() + (1 << 20);
    let calls = {
        let mut residency = with_own_weight(bytes, &source, None);
        load(&mut residency, &model).unwrap();
        residency.slab().memory().calls()
    };
    let own_calls = with_own_weight(bytes, &source, None).slab().memory().calls();
    for number in own_calls + 1..=calls {
        let mut residency = with_own_weight(bytes, &source, Some(number));
        let before = residency.telemetry();
        load(&mut residency, &model).expect_err("every call matters");
        let after = residency.telemetry();
        assert_eq!(after.resident_weights, before.resident_weights, "call {number}");
        assert_eq!(after.permanent_end_bytes, before.permanent_end_bytes);
        assert_eq!(residency.slab().used_bytes(), residency.slab().permanent_end_bytes());
        assert!(!residency.make_resident(&source).unwrap().1, "still resident");
        load(&mut residency, &model).expect("the next try");
    }
}

fn with_own_weight(
    bytes: u64,
    source: &WeightSource<'_>,
    refuse: Option<u64>,
) -> Residency<Faulty> {
    let mut memory = FailingMemory::new(HostMemory::new(bytes).unwrap());
    if let Some(number) = refuse {
        memory = memory.refuse_call(number);
    }
    let limits = lane::residency::Limits::UNLIMITED;
    let mut residency = Residency::over(backend(), Slab::new(memory), limits);
    residency.make_resident(source).unwrap();
    residency.seal();
    residency
}

fn load(residency: &mut Residency<Faulty>, model: &Model) -> Result<(), lane::LaneError> {
    residency.transaction(|residency| {
        let (gguf, weights) = (&model.file.gguf, &model.file.model);
        load_weights(residency, gguf, weights, &model.plan.step, None, &mut |_| {})?;
        residency.kv_arena(model.plan.step.kv, None)?;
        residency.step_arena(&model.plan.step)?;
        Ok(())
    })
}

#[test]
fn a_step_that_fails_is_named_and_the_next_one_runs() {
    let model = tiny();
    let loaded = model.load(backend(), |m| m).unwrap().residency().backend().calls();
    let mut decoder = model.load(backend().refuse_call(loaded + 1), |m| m).unwrap();
    let residency = decoder.residency_mut();
    let params = [TokenParams { absolute_position: 0, ring_slot: 0, token_id: 1 }];
    let error = residency.replay(Drive::Host(&params)).unwrap_err().to_string();
    assert!(error.contains("replay"), "{error}");
    residency.replay(Drive::Host(&params)).unwrap();
    residency.read_token().unwrap();
    assert_eq!(residency.backend().name(), "host");
}

#[test]
fn after_a_prompt_chunk_that_fails_the_step_of_a_token_runs() {
    let model = tiny();
    let prompt: Vec<u32> = (1..=20).collect();
    let loaded = model.load(backend(), |m| m).unwrap().residency().backend().calls();
    let chunk_calls = {
        let mut decoder = model.load(backend(), |m| m).unwrap();
        assert!(decoder.prefill(0, &prompt).unwrap() > 1, "a chunk");
        decoder.residency().backend().calls() - loaded
    };
    assert!(chunk_calls >= 2, "capture and replay: {chunk_calls}");
    for number in 1..=chunk_calls {
        let mut decoder = model.load(backend().refuse_call(loaded + number), |m| m).unwrap();
        decoder.prefill(0, &prompt).expect_err("every call matters");
        let params = TokenParams { absolute_position: 0, ring_slot: 0, token_id: 1 };
        decoder.step(Drive::Host(&[params])).unwrap();
        decoder.token().unwrap();
    }
}
