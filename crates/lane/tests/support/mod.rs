//! Reference cases of the embedded model and its Q4_K sister, and the check of a backend by them.
//! Part of the program, so that a test binary can be carried to a machine with a GPU.

pub(crate) mod failing;

use decode_graph::Numerics;
use lane::tokenizer::Special;
use lane::{
    BackendChoice, DriveMode, FusionChoice, GenerateOptions, Lane, LaneOptions, ModelFile,
    PlanOptions, Sampling,
};
use serde::Deserialize;

/// A model file with the reference program's results for it.
pub(crate) struct Whale {
    pub(crate) name: &'static str,
    pub(crate) file: ModelFile,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Gold {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    ids: Vec<u32>,
    nll_mean: f64,
    logits_l2: f64,
    top: Vec<(usize, f64)>,
    probe: Vec<(usize, f64)>,
    greedy: Vec<u32>,
    greedy_margin: Vec<f64>,
}

pub(crate) fn whales() -> [Whale; 2] {
    let whale = |name, bytes, gold| {
        let Gold { cases } = serde_json::from_str(gold).unwrap();
        assert!(!cases.is_empty());
        Whale { name, file: ModelFile::from_static(bytes).unwrap(), cases }
    };
    [
        whale(
            "whale q4_k_m",
            lane::open::EMBEDDED_MODEL,
            include_str!("../gold/whale-q4_k_m.json"),
        ),
        whale(
            "whale q4_k",
            include_bytes!("../models/whale-5.8m-q4_k.gguf"),
            include_str!("../gold/whale-q4_k.json"),
        ),
    ]
}

pub(crate) fn load(file: &ModelFile, backend: BackendChoice, numerics: Numerics) -> Lane {
    load_fused(file, backend, numerics, FusionChoice::Auto)
}

pub(crate) fn load_fused(
    file: &ModelFile,
    backend: BackendChoice,
    numerics: Numerics,
    fusion: FusionChoice,
) -> Lane {
    let plan = PlanOptions { numerics, fusion, ..Default::default() };
    file.load(&LaneOptions { backend, plan, ..Default::default() }, &mut |_| {}).unwrap()
}

pub(crate) fn greedy(n_tokens: u32, drive: DriveMode) -> GenerateOptions {
    let sampling = Sampling::GREEDY;
    GenerateOptions { n_tokens, sampling, drive, ignore_end: true, ..Default::default() }
}

pub(crate) fn ids(lane: &Lane, prompt: &[u32], options: GenerateOptions) -> Vec<u32> {
    lane.generate(prompt, options).unwrap().map(|token| token.unwrap().id).collect()
}

impl Whale {
    /// Token ids, likelihoods and logits of every case.
    pub(crate) fn check_logits(&self, backend: BackendChoice, numerics: Numerics, tolerance: f64) {
        self.check_fused(backend, numerics, FusionChoice::Ops, tolerance);
    }

    /// The same for a form of the step.
    pub(crate) fn check_fused(
        &self,
        backend: BackendChoice,
        numerics: Numerics,
        fusion: FusionChoice,
        tolerance: f64,
    ) {
        let lane = load_fused(&self.file, backend, numerics, fusion);
        for case in &self.cases {
            let ids = lane.tokenizer().encode_prompt(&case.prompt, Special::AsText).unwrap();
            assert_eq!(ids, case.ids, "{}", case.prompt);
            let evaluation = lane.evaluate(&ids).unwrap();
            let logits = &evaluation.logits;

            let error = case.error(logits);
            let start: String = case.prompt.chars().take(24).collect();
            println!(
                "{} {numerics:?} {fusion:?} {start:?}: relative L2 error {error:.2e}",
                self.name
            );
            assert!(error < tolerance, "{}: {error}", case.prompt);
            let l2 = logits.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            assert!((l2 / case.logits_l2 - 1.0).abs() < tolerance, "{}: {l2}", case.prompt);
            let nll = evaluation.nll_mean.unwrap();
            let nll_error = (nll / case.nll_mean - 1.0).abs();
            assert!(nll_error < tolerance, "{}: {nll}", case.prompt);

            let top = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            if numerics == Numerics::Exact || case.top[0].1 - case.top[1].1 > 1.0 {
                assert_eq!(top, case.top[0].0, "{}", case.prompt);
            }
        }
    }

    /// Of each case the prompt's ids, what the reference generates greedily, and its margins.
    #[allow(dead_code)]
    pub(crate) fn greedy_cases(&self) -> impl Iterator<Item = (&[u32], &[u32], &[f64])> {
        self.cases.iter().map(|case| (&case.ids[..], &case.greedy[..], &case.greedy_margin[..]))
    }

    /// Greedy continuations in exact numerics, up to the first step that is nearly a tie and may
    /// fall either way in f32.
    pub(crate) fn check_greedy(&self, backend: BackendChoice) {
        let lane = load(&self.file, backend, Numerics::Exact);
        for case in &self.cases {
            let sure = case.greedy_margin.iter().take_while(|&&margin| margin >= 0.001).count();
            assert!(sure > 0);
            let options = greedy(case.greedy.len() as u32, DriveMode::SelfAdvance);
            let ids = ids(&lane, &case.ids, options);
            assert_eq!(ids[..sure], case.greedy[..sure], "{} {}", self.name, case.prompt);
        }
    }
}

impl Case {
    /// Relative L2 distance of logits from the reference, over `top` and `probe` together.
    fn error(&self, logits: &[f32]) -> f64 {
        let points = || self.top.iter().chain(&self.probe);
        let distance: f64 =
            points().map(|&(id, value)| (f64::from(logits[id]) - value).powi(2)).sum();
        let norm: f64 = points().map(|&(_, value)| value.powi(2)).sum();
        (distance / norm).sqrt()
    }
}
