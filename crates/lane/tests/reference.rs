//! Logits and greedy continuations against the float64 reference program's, for every case of
//! `tests/gold/`.

use decode_graph::Numerics;
use lane::tokenizer::Special;
use lane::{DriveMode, GenerateOptions, Lane, LaneOptions, ModelFile, PlanOptions, Sampling};
use serde::Deserialize;

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

fn whale(name: &str) -> (ModelFile, Gold) {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let model = match name {
        "q4_k_m" => ModelFile::open(None),
        _ => ModelFile::open(Some(&tests.join("models/whale-5.8m-q4_k.gguf"))),
    };
    let gold = std::fs::read_to_string(tests.join(format!("gold/whale-{name}.json"))).unwrap();
    (model.unwrap(), serde_json::from_str(&gold).unwrap())
}

fn load(file: &ModelFile, numerics: Numerics) -> Lane {
    let plan = PlanOptions { numerics, ..Default::default() };
    file.load(&LaneOptions { plan, ..Default::default() }, &mut |_| {}).unwrap()
}

/// Relative L2 distance of logits from the reference, over `top` and `probe` together.
fn error(case: &Case, logits: &[f32]) -> f64 {
    let points = || case.top.iter().chain(&case.probe);
    let distance: f64 = points().map(|&(id, value)| (f64::from(logits[id]) - value).powi(2)).sum();
    let norm: f64 = points().map(|&(_, value)| value.powi(2)).sum();
    (distance / norm).sqrt()
}

fn check(name: &str, numerics: Numerics, tolerance: f64) {
    let (file, gold) = whale(name);
    let lane = load(&file, numerics);
    assert!(!gold.cases.is_empty());
    for case in &gold.cases {
        let ids = lane.tokenizer().encode_prompt(&case.prompt, Special::AsText).unwrap();
        assert_eq!(ids, case.ids, "{}", case.prompt);
        let evaluation = lane.evaluate(&ids).unwrap();
        let logits = &evaluation.logits;

        let error = error(case, logits);
        println!("{name} {numerics:?} {:.40?}: relative L2 error {error:.2e}", case.prompt);
        assert!(error < tolerance, "{}: {error}", case.prompt);
        let l2 = logits.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        assert!((l2 / case.logits_l2 - 1.0).abs() < tolerance, "{}: {l2}", case.prompt);
        let nll = evaluation.nll_mean.unwrap();
        assert!((nll - case.nll_mean).abs() < tolerance * case.nll_mean, "{}: {nll}", case.prompt);

        let top = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        if numerics == Numerics::Exact || case.top[0].1 - case.top[1].1 > 1.0 {
            assert_eq!(top, case.top[0].0, "{}", case.prompt);
        }
    }
}

#[test]
fn exact_logits_are_the_reference_q4_k_m() {
    check("q4_k_m", Numerics::Exact, 1e-4);
}

#[test]
fn exact_logits_are_the_reference_q4_k() {
    check("q4_k", Numerics::Exact, 1e-4);
}

#[test]
fn q8_logits_are_near_the_reference_q4_k_m() {
    check("q4_k_m", Numerics::Q8, 3e-2);
}

#[test]
fn q8_logits_are_near_the_reference_q4_k() {
    check("q4_k", Numerics::Q8, 3e-2);
}

#[test]
fn exact_greedy_continuations_are_the_references() {
    for name in ["q4_k_m", "q4_k"] {
        let (file, gold) = whale(name);
        let lane = load(&file, Numerics::Exact);
        for case in &gold.cases {
            // A step that is nearly a tie may fall either way in f32.
            let sure = case.greedy_margin.iter().take_while(|&&margin| margin >= 0.001).count();
            let options = GenerateOptions {
                n_tokens: case.greedy.len() as u32,
                sampling: Sampling::GREEDY,
                drive: DriveMode::SelfAdvance,
                ignore_end: true,
                ring: false,
            };
            let tokens = lane.generate(&case.ids, options).unwrap();
            let ids: Vec<u32> = tokens.map(|token| token.unwrap().id).collect();
            assert!(sure > 0);
            assert_eq!(ids[..sure], case.greedy[..sure], "{name} {}", case.prompt);
        }
    }
}
