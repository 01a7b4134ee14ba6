//! Whole models on a GPU. Without one, every test says that it was skipped; with
//! `GPU_TESTS_REQUIRED=1` it fails instead.

#![cfg(cuda_backend)]

#[allow(dead_code, reason = "it serves another test too")]
mod support;

use std::io::Write;

use decode_graph::Numerics;
use lane::synth::{Mix, Shape};
use lane::{
    BackendChoice, ContextSize, DriveMode, FusionChoice, LaneError, LaneOptions, ModelFile,
    PlanOptions,
};
use support::{greedy, ids, load, whales};

/// Whether there is a GPU; if not, says that `name` is skipped.
fn gpu(name: &str) -> bool {
    let Err(reason) = lane::open_cuda::open(0) else { return true };
    assert!(std::env::var_os("GPU_TESTS_REQUIRED").is_none(), "{name}: {reason}");
    // Not through the harness, which swallows what passing tests print.
    let _ = writeln!(std::io::stderr(), "skipped {name}: {reason}");
    false
}

#[test]
fn exact_logits_are_the_references() {
    if gpu("exact logits on the GPU") {
        for whale in whales() {
            whale.check_logits(BackendChoice::Cuda, Numerics::Exact, 1e-4);
        }
    }
}

#[test]
fn q8_logits_are_near_the_references() {
    if gpu("q8 logits on the GPU") {
        for whale in whales() {
            whale.check_logits(BackendChoice::Cuda, Numerics::Q8, 3e-2);
        }
    }
}

#[test]
fn q8_logits_of_the_persistent_step_are_near_the_references() {
    if gpu("q8 logits of the persistent step on the GPU") {
        for whale in whales() {
            whale.check_fused(BackendChoice::Cuda, Numerics::Q8, FusionChoice::Persistent, 3e-2);
        }
    }
}

#[test]
fn exact_greedy_continuations_are_the_references() {
    if gpu("greedy continuations on the GPU") {
        for whale in whales() {
            whale.check_greedy(BackendChoice::Cuda);
        }
    }
}

#[test]
fn s19_the_gpu_generates_what_the_host_generates() {
    if !gpu("GPU and host generate the same") {
        return;
    }
    for whale in whales() {
        let host = load(&whale.file, BackendChoice::Host, Numerics::Exact);
        let cuda = load(&whale.file, BackendChoice::Cuda, Numerics::Exact);
        let prompt = [0, 35, 452, 443];
        let options = || greedy(256, DriveMode::SelfAdvance);
        assert_eq!(ids(&host, &prompt, options()), ids(&cuda, &prompt, options()));
        let nodes = |lane: &lane::Lane| lane.telemetry().unwrap().graph.unwrap().nodes;
        assert_eq!(nodes(&host), nodes(&cuda));
    }
}

#[test]
fn s19_a_model_of_1b_shape_generates_what_the_host_generates() {
    if !gpu("1B shape on GPU and host") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("1b.gguf");
    let out = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    lane::synth::write(Shape::Llama32_1b, Mix::Q4KM, 1, out, |_| {}).unwrap();
    let file = ModelFile::open(Some(&path)).unwrap();
    let host = load(&file, BackendChoice::Host, Numerics::Exact);
    let cuda = load(&file, BackendChoice::Cuda, Numerics::Exact);
    let prompt = [128_000, 9906, 1917];
    const TOKENS: u32 = 256;
    let ours = ids(&cuda, &prompt, greedy(TOKENS, DriveMode::SelfAdvance));
    // Fed to the host one by one: equal up to the first step that is nearly a tie.
    let fed: Vec<u32> = prompt.iter().chain(&ours).copied().collect();
    let mut differs = None;
    let mut index = 0;
    host.evaluate_each(&fed[..fed.len() - 1], |logits| {
        if index + 1 >= prompt.len() && differs.is_none() {
            let (mut best, mut second) = ((0, f32::MIN), f32::MIN);
            for (id, &logit) in logits.iter().enumerate() {
                if logit > best.1 {
                    (best, second) = ((id, logit), best.1);
                } else if logit > second {
                    second = logit;
                }
            }
            let at = index + 1 - prompt.len();
            if best.0 != ours[at] as usize {
                differs = Some((at, best.1 - second));
            }
        }
        index += 1;
    })
    .unwrap();
    if let Some((at, margin)) = differs {
        println!("equal for {at} of {TOKENS} tokens, then a margin of {margin}");
        assert!(margin < 0.001, "token {at}: {margin}");
    }
}

#[test]
fn s18_bytes_per_token_are_12_or_none_and_nothing_else_happens() {
    if !gpu("bytes per token on the GPU") {
        return;
    }
    let [whale, _] = whales();
    let lane = load(&whale.file, BackendChoice::Cuda, Numerics::Q8);
    let prompt = [0, 35, 452, 443];
    let mut texts = Vec::new();
    for (drive, bytes) in [(DriveMode::Host, 12), (DriveMode::SelfAdvance, 0)] {
        texts.push(ids(&lane, &prompt, greedy(64, drive)));
        let telemetry = lane.telemetry().unwrap();
        assert_eq!(telemetry.graph.unwrap().h2d_bytes_per_token, Some(bytes));
        assert_eq!(telemetry.d2h_bytes_per_token, Some(4));
        assert_eq!(telemetry.captures, 1);
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn s14_a_budget_is_kept_on_the_gpu() {
    if !gpu("memory budget on the GPU") {
        return;
    }
    let [whale, _] = whales();
    let options = |plan| LaneOptions { backend: BackendChoice::Cuda, plan, ..Default::default() };
    let usable_bytes = Some(4_700_000);
    let context = ContextSize::Tokens(512);
    let plan = PlanOptions { usable_bytes, context, ..Default::default() };
    let refusal = whale.file.load(&options(plan), &mut |_| {}).map(|_| ()).unwrap_err();
    assert!(matches!(refusal, LaneError::DoesNotFit(_)), "{refusal}");
    // All of the device kept free: nothing fits, and the sentence says how much there is.
    let reserve =
        LaneOptions { vram_reserve_bytes: Some(u64::MAX), ..options(PlanOptions::default()) };
    let refusal = whale.file.load(&reserve, &mut |_| {}).map(|_| ()).unwrap_err();
    assert!(refusal.to_string().contains("usable 0"), "{refusal}");
}

#[test]
fn a_device_that_is_not_there_is_one_sentence() {
    if !gpu("a device that is not there") {
        return;
    }
    let [whale, _] = whales();
    let options = LaneOptions { backend: BackendChoice::Cuda, device: 99, ..Default::default() };
    let error = whale.file.load(&options, &mut |_| {}).map(|_| ()).unwrap_err();
    assert!(matches!(error, LaneError::NoBackend(_)), "{error}");
}
