//! Every architecture, feature and weight type against a float64 program that shares no code with
//! this one (`tools/reference`), on small synthetic files, and on real ones where they are there.
//!
//! The program can be carried to a machine with a GPU, if `CARGO_MANIFEST_DIR` says where this crate is
//! there: with `LANE_TEST_BACKEND=cuda` it computes on it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use decode_graph::Numerics;
use lane::batch::{BatchOptions, Job};
use lane::gguf::Gguf;
use lane::tokenizer::{Special, Tokenizer, Vocabulary};
use lane::{
    BackendChoice, DriveMode, GenerateOptions, Lane, LaneOptions, ModelFile, PlanOptions, Sampling,
};
use serde::Deserialize;

/// Results for real files, which are no part of the repository; `target/models` is where the scripts
/// in `tools` put them, `LANE_TEST_MODELS` another place.
const REAL: [(&str, &str); 2] = [
    ("tests/reference-files/gemma-3-270m-q4_k_m.json", "gemma-3-270m-q4_k_m.gguf"),
    ("tests/gold/smollm2-135m-q4_1.json", "SmolLM2-135M-Instruct.Q4_1.gguf"),
];

fn backend() -> BackendChoice {
    match std::env::var("LANE_TEST_BACKEND").as_deref() {
        Ok("cuda") => BackendChoice::Cuda,
        _ => BackendChoice::Host,
    }
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
    top: Vec<(usize, f64)>,
    probe: Vec<(usize, f64)>,
    greedy: Vec<u32>,
    greedy_margin: Vec<f64>,
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

struct Reference {
    name: String,
    path: PathBuf,
    cases: Vec<Case>,
}

impl Reference {
    fn read(json: &Path, model: PathBuf) -> Self {
        let Gold { cases } = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert!(!cases.is_empty());
        let name = json.file_stem().unwrap().to_str().unwrap().to_owned();
        Self { name, path: model, cases }
    }

    /// What exact logits may be off by: rounding to f32, or to Q8_0 where a type becomes that and
    /// loses something.
    fn exact_tolerance(&self) -> f64 {
        match self.name.as_str() {
            "llama-q2_k" => 3e-2,
            "llama-iq4_xs" => 1e-3,
            _ => 1e-4,
        }
    }

    /// Greedy tokens before the first that such errors could turn.
    fn sure_tokens(&self, case: &Case) -> usize {
        let margin = match self.name.as_str() {
            "llama-q2_k" => 0.3,
            "llama-iq4_xs" => 0.03,
            _ => 0.001,
        };
        let sure = case.greedy_margin.iter().take_while(|&&own| own >= margin).count();
        assert!(sure > 0, "{}: no step is surer than {margin}", self.name);
        sure
    }

    /// What logits may be off by.
    fn tolerance(&self, numerics: Numerics) -> f64 {
        let tolerance = match numerics {
            Numerics::Exact => 1e-4,
            Numerics::Q8 => 6e-2,
        };
        self.exact_tolerance().max(tolerance)
    }

    fn load(&self, numerics: Numerics) -> Lane {
        let plan = PlanOptions { numerics, ..Default::default() };
        let options = LaneOptions { backend: backend(), plan, ..Default::default() };
        ModelFile::open(Some(&self.path)).unwrap().load(&options, &mut |_| {}).unwrap()
    }

    fn check_logits(&self, numerics: Numerics) {
        let lane = self.load(numerics);
        for case in &self.cases {
            let evaluation = lane.evaluate(&case.ids).unwrap();
            let error = case.error(&evaluation.logits);
            let tolerance = self.tolerance(numerics);
            println!("{} {numerics:?}: relative L2 error {error:.2e}", self.name);
            assert!(error < tolerance, "{}: {error}", self.name);
            let nll_error = (evaluation.nll_mean.unwrap() / case.nll_mean - 1.0).abs();
            assert!(nll_error < tolerance, "{}: {nll_error}", self.name);
        }
    }

    /// The same continuations in a batch: prompts in chunks, rows of several sequences, a cache in
    /// which layers with a window keep no more than they see.
    fn check_batch(&self) {
        let plan =
            PlanOptions { numerics: Numerics::Exact, chunk_tokens: 16, ..Default::default() };
        let options = LaneOptions { backend: backend(), plan, ..Default::default() };
        let batch = BatchOptions { max_batch: 4, prefix_cache: false, ..Default::default() };
        let file = ModelFile::open(Some(&self.path)).unwrap();
        let mut engine = file.load_batch(&options, &batch, &mut |_| {}).unwrap().engine;
        // Each twice, so that rows are of sequences at the same and at other positions.
        let mut expected = BTreeMap::new();
        for case in self.cases.iter().chain(&self.cases) {
            let job = Job { prompt: case.ids.clone(), n_tokens: case.greedy.len() as u32, salt: 0 };
            expected.insert(engine.submit(job, Sampling::GREEDY).unwrap(), case);
        }
        let mut chosen = Vec::new();
        while engine.step(&mut chosen).unwrap() {
            for token in chosen.drain(..).filter(|token| token.is_last) {
                let found = engine.finish(token.ticket).unwrap().tokens;
                let case = expected.remove(&token.ticket).unwrap();
                let sure = self.sure_tokens(case);
                assert_eq!(found[..sure], case.greedy[..sure], "{}", self.name);
            }
        }
        assert!(expected.is_empty());
    }

    /// Up to the first step that is nearly a tie and may fall either way in f32.
    fn check_greedy(&self) {
        let lane = self.load(Numerics::Exact);
        for case in &self.cases {
            let sure = self.sure_tokens(case);
            let options = GenerateOptions {
                n_tokens: case.greedy.len() as u32,
                sampling: Sampling::GREEDY,
                drive: DriveMode::SelfAdvance,
                ignore_end: true,
                ..Default::default()
            };
            let tokens = lane.generate(&case.ids, options).unwrap();
            let ids: Vec<u32> = tokens.map(|token| token.unwrap().id).collect();
            assert_eq!(ids[..sure], case.greedy[..sure], "{} {}", self.name, case.prompt);
        }
    }
}

/// The synthetic files, and the real ones that are there.
fn references() -> Vec<Reference> {
    let carried = std::env::var_os("CARGO_MANIFEST_DIR");
    let crate_dir = carried.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let files = std::fs::read_dir(crate_dir.join("tests/reference-files")).unwrap();
    let mut paths: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let json = paths.iter().filter(|path| path.extension().is_some_and(|ext| ext == "json"));
    let mut references: Vec<Reference> =
        json.map(|json| Reference::read(json, json.with_extension("gguf"))).collect();
    let models = std::env::var_os("LANE_TEST_MODELS");
    let models = models.map_or_else(|| crate_dir.join("../../target/models"), PathBuf::from);
    for (json, file) in REAL {
        let (json, path) = (crate_dir.join(json), models.join(file));
        references.retain(|reference| !json.ends_with(format!("{}.json", reference.name)));
        if path.exists() {
            references.push(Reference::read(&json, path));
        } else {
            // Not through the harness, which swallows what passing tests print.
            let _ = writeln!(std::io::stderr(), "skipped {file}: it is not in {models:?}");
        }
    }
    assert!(references.len() >= 26);
    references
}

#[test]
fn every_architecture_and_type_has_a_file() {
    let names: Vec<String> = references().into_iter().map(|reference| reference.name).collect();
    for arch in ["llama", "qwen2", "qwen3", "gemma3", "phi3"] {
        assert!(names.iter().any(|name| name.starts_with(arch)), "{arch}");
    }
    let native = q4k_soa::WeightType::ALL.into_iter().map(|ty| ty.name());
    let transcoded = q4k_soa::TranscodedType::ALL.into_iter().map(|ty| ty.name());
    for ty in native.chain(transcoded) {
        let name = format!("llama-{}", ty.to_lowercase());
        assert!(names.contains(&name), "{name}");
    }
}

#[test]
fn ids_are_the_references() {
    for reference in references() {
        let gguf = Gguf::open(&reference.path).unwrap();
        let tokenizer = Tokenizer::new(Vocabulary::from_gguf(&gguf).unwrap()).unwrap();
        for case in &reference.cases {
            let ids = tokenizer.encode_prompt(&case.prompt, Special::AsText).unwrap();
            assert_eq!(ids, case.ids, "{} {}", reference.name, case.prompt);
        }
    }
}

#[test]
fn exact_logits_are_the_references() {
    references().iter().for_each(|reference| reference.check_logits(Numerics::Exact));
}

#[test]
fn q8_logits_are_near_the_references() {
    references().iter().for_each(|reference| reference.check_logits(Numerics::Q8));
}

#[test]
fn exact_greedy_continuations_are_the_references() {
    references().iter().for_each(|reference| reference.check_greedy());
}

#[test]
fn exact_greedy_continuations_in_a_batch_are_the_references() {
    references().iter().for_each(Reference::check_batch);
}
