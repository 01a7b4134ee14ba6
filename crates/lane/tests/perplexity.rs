//! Perplexity and divergence against a float64 program's (`tools/reference/perplexity.py`), and
//! the command.

#[allow(dead_code, reason = "it serves other tests too")]
mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use decode_graph::Numerics;
use lane::perplexity::{Chunks, Measurement, PerplexityError};
use lane::{BackendChoice, ContextSize, Lane, LaneOptions, ModelFile, PlanOptions};
use serde_json::Value;

fn in_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn gold() -> Value {
    let text = std::fs::read_to_string(in_crate("tests/gold/perplexity-whale.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn text() -> String {
    std::fs::read_to_string(in_crate("tests/gold/ishmael.txt")).unwrap()
}

fn load(path: &str, numerics: Numerics, n_ctx: u32) -> Lane {
    let context = ContextSize::Tokens(n_ctx);
    let options = LaneOptions {
        backend: BackendChoice::Host,
        plan: PlanOptions { context, numerics, ..Default::default() },
        ..Default::default()
    };
    ModelFile::open(Some(&in_crate(path))).unwrap().load(&options, &mut |_| {}).unwrap()
}

const WHALE: &str = "models/whale-5.8m-q4_k_m.gguf";
const OTHER: &str = "tests/models/whale-5.8m-q4_k.gguf";

#[track_caller]
fn near(found: f64, expected: &Value, tolerance: f64) {
    let expected = expected.as_f64().unwrap();
    assert!((found / expected - 1.0).abs() < tolerance, "{found} instead of {expected}");
}

#[test]
fn exact_numerics_give_the_float64_programs_values() {
    let gold = gold();
    let n_ctx = gold["n_ctx"].as_u64().unwrap() as u32;
    let model = load(WHALE, Numerics::Exact, n_ctx);
    let reference = load(OTHER, Numerics::Exact, n_ctx);
    let chunks = Chunks::new(model.tokenizer(), &text(), n_ctx).unwrap();
    let running = gold["running"].as_array().unwrap();
    assert_eq!(chunks.count(), running.len());
    let mut measurement = Measurement::new(&model, Some(&reference)).unwrap();
    let mut fed = 0;
    for (chunk, expected) in chunks.iter().zip(running) {
        measurement.chunk(&chunk, || fed += 1).unwrap();
        near(measurement.tally().perplexity().0, expected, 1e-4);
    }
    assert_eq!(fed, chunks.count() * (n_ctx as usize - 1));
    let tally = measurement.tally();
    assert_eq!(tally.nll().count(), gold["n_scored"].as_u64().unwrap());
    let (value, error) = tally.perplexity();
    near(value, &gold["ppl"], 1e-4);
    near(error, &gold["ppl_error"], 1e-4);
    let found = tally.divergence().unwrap();
    near(found.kl().value(), &gold["kl_mean"], 1e-3);
    near(found.kl().error(), &gold["kl_error"], 1e-3);
    near(found.kl_quantile(1.0).into(), &gold["kl_max"], 1e-3);
    near(found.same_top().value(), &gold["same_top"], 1e-9);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let model = load(WHALE, Numerics::Q8, 32);
    let short = Chunks::new(model.tokenizer(), "Call me Ishmael.", 32).unwrap_err();
    assert!(matches!(short, PerplexityError::TextTooShort { n_ctx: 32, .. }), "{short}");
    let other = load("tests/reference-files/llama-f32.gguf", Numerics::Q8, 32);
    let refused = Measurement::new(&model, Some(&other)).err().unwrap();
    assert!(matches!(refused, PerplexityError::OtherVocabulary), "{refused}");
}

fn perplexity(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lane"));
    let text = in_crate("tests/gold/ishmael.txt");
    command.env("CUDA_LOAD_LIBRARY", "").arg("perplexity").arg(text).args(args);
    command.stdin(Stdio::null()).output().unwrap()
}

fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_command_prints_a_line_a_chunk_and_the_estimate() {
    let gold = gold();
    let text = succeeded(perplexity(&["-c", "32", "--numerics", "exact"]));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    for (line, expected) in lines.iter().zip(gold["running"].as_array().unwrap()) {
        near(line.split(' ').nth(1).unwrap().parse().unwrap(), expected, 1e-3);
    }
    let estimate = lines[4].strip_prefix("Final estimate: PPL = ").unwrap();
    let (value, error) = estimate.split_once(" +/- ").unwrap();
    near(value.parse().unwrap(), &gold["ppl"], 1e-3);
    near(error.parse().unwrap(), &gold["ppl_error"], 1e-3);
}

#[test]
fn the_command_compares_with_exact_numerics_and_with_files() {
    let json =
        |args: &[&str]| -> Value { serde_json::from_str(&succeeded(perplexity(args))).unwrap() };
    let q8 = ["-c", "32", "--chunks", "2", "--numerics", "q8", "--kl", "exact", "--json"];
    let q8 = json(&q8);
    assert_eq!(q8["chunks"].as_array().unwrap().len(), 2);
    assert_eq!(q8["n_scored"], 30);
    let mean = q8["kl"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 0.01, "{mean}");
    assert!(q8["kl"]["same_top"].as_f64().unwrap() > 0.8, "{q8}");

    let other = in_crate(OTHER);
    let other = other.to_str().unwrap();
    let files = json(&["-c", "32", "--numerics", "exact", "--kl", other, "--json"]);
    near(files["kl"]["mean"].as_f64().unwrap(), &gold()["kl_mean"], 1e-3);
    let own = in_crate(WHALE);
    let own = json(&["-c", "32", "--chunks", "1", "--kl", own.to_str().unwrap(), "--json"]);
    assert_eq!(own["kl"]["mean"], 0.0);
    assert_eq!(own["kl"]["same_top"], 1.0);
    assert_eq!(own["kl"]["reference_ppl"], own["ppl"]);
}

#[test]
fn the_command_refuses_in_one_sentence() {
    for (args, part) in [
        (&["-c", "512"][..], "two chunks of 512 need 1024"),
        (&["-c", "2"], "at least 4"),
        (&["--kl", "/nonexistent.gguf", "-c", "32"], "/nonexistent.gguf"),
    ] {
        let output = perplexity(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert!(errors == 1 && stderr.contains(part), "{stderr}");
    }
}
