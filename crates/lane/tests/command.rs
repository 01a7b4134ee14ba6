//! The `lane` command as a user meets it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn lane(args: &[&str]) -> Output {
    command().args(args).stdin(Stdio::null()).output().unwrap()
}

/// The command on a machine without a GPU, wherever the test runs.
fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lane"));
    command.env("CUDA_LOAD_LIBRARY", "");
    command
}

fn json(args: &[&str]) -> Value {
    let output = lane(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn whale() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/whale-5.8m-q4_k_m.gguf")
}

/// Refused with this exit code and one sentence on stderr; returns the sentence.
fn refused(args: &[&str], code: i32) -> String {
    let output = lane(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    if code == 1 {
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
    stderr
}

#[test]
fn generate_streams_text_and_summarises_on_stderr() {
    // What f32 makes of this prompt is dialogue, with fewer words.
    let numerics = ["--numerics", "q8"];
    let generate = ["generate", "Call me Ishmael.", "-n", "24", "--temp", "0"];
    let output = lane(&[&generate[..], &numerics].concat());
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.split_whitespace().count() > 8, "{text}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    for part in ["24 tokens", "tok/s", "0 H2D bytes/token", "slab"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
}

#[test]
fn generate_json_has_every_field_and_the_planned_bytes() {
    let own = json(&["generate", "It was", "-n", "8", "--temp", "0", "--json"]);
    let host = json(&["generate", "It was", "-n", "8", "--temp", "0", "--json", "--drive", "host"]);
    assert_eq!(own["graph"]["h2d_bytes_per_token"], 0);
    assert_eq!(host["graph"]["h2d_bytes_per_token"], 12);
    assert_eq!(own["ids"], host["ids"]);
    assert_eq!(own["text"], host["text"]);
    assert_eq!(own["stop"], "length");
    assert_eq!(own["backend"], "host");
    for (object, fields) in [
        ("graph", &["key", "nodes", "d2h_bytes_per_token", "captures", "replays"][..]),
        ("slab", &["capacity_bytes", "high_water_bytes", "resident_weights", "resident_bytes"]),
        ("kv", &["max_context_tokens", "block_size", "blocks", "bytes"]),
        ("timing", &["load_ms", "first_token_ms", "decode_tokens_per_s", "decode_ms_per_token"]),
    ] {
        for field in fields {
            assert!(!own[object][field].is_null(), "{object}.{field}");
        }
    }
    let inspected = json(&["inspect", whale().to_str().unwrap(), "--json"]);
    assert_eq!(inspected["plan"]["total_bytes"], own["slab"]["permanent_end_bytes"]);
    assert_eq!(
        inspected["plan"]["kv_bytes"].as_u64().unwrap(),
        own["kv"]["bytes"].as_u64().unwrap() + 6 * 32 * 4
    );
}

#[test]
fn generate_reads_stdin() {
    use std::io::Write;
    let mut child = command()
        .args(["generate", "-", "-n", "4", "--temp", "0", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Call me Ishmael.").unwrap();
    let piped: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    let given = json(&["generate", "Call me Ishmael.", "-n", "4", "--temp", "0", "--json"]);
    assert_eq!(piped["ids"], given["ids"]);
}

#[test]
fn generate_reads_a_file_whose_last_newline_is_not_meant() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.txt");
    std::fs::write(&path, "Call me Ishmael.\n").unwrap();
    let from_file =
        json(&["generate", "-f", path.to_str().unwrap(), "-n", "4", "--temp", "0", "--json"]);
    let given = json(&["generate", "Call me Ishmael.", "-n", "4", "--temp", "0", "--json"]);
    assert_eq!(from_file["prompt_ids"], given["prompt_ids"]);
    assert_eq!(from_file["ids"], given["ids"]);
    refused(&["generate", "-f", folder.path().join("missing").to_str().unwrap()], 1);
    std::fs::write(&path, b"caf\xe9").unwrap();
    let sentence = refused(&["generate", "-f", path.to_str().unwrap()], 1);
    assert!(sentence.contains("prompt.txt"), "{sentence}");
}

#[test]
fn a_state_that_cannot_be_saved_does_not_lose_the_answer() {
    let generate = ["generate", "Call me Ishmael.", "-n", "4", "--temp", "0"];
    let answer = lane(&generate).stdout;
    let output = lane(&[&generate[..], &["--save-state", "/nonexistent/state"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stdout, answer);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("cannot save the state to /nonexistent/state"), "{stderr}");
}

#[test]
fn generate_stops_at_stop_texts() {
    let prompt = ["generate", "Call me Ishmael.", "-n", "16", "--temp", "0", "--json"];
    let whole = json(&prompt);
    let text = whole["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(4).unwrap();
    let stopped = json(&[&prompt[..], &["--stop", "--never--", "--stop", word]].concat());
    assert_eq!(stopped["stop"], "stop");
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find(word).unwrap()]);
    assert!(whole["logprobs"].is_null());
}

#[test]
fn generate_tells_logprobs_and_applies_penalties() {
    let prompt = ["generate", "It was", "-n", "6", "--temp", "0", "--json"];
    let plain = json(&prompt);
    let told = json(&[&prompt[..], &["--logprobs", "3"]].concat());
    assert_eq!(told["ids"], plain["ids"]);
    assert_eq!(told["graph"]["h2d_bytes_per_token"], 12);
    assert_eq!(told["graph"]["d2h_bytes_per_token"], 4 * 4096);
    let logprobs = told["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 6);
    let mut text = String::new();
    for (token, id) in logprobs.iter().zip(plain["ids"].as_array().unwrap()) {
        assert_eq!(token["id"], *id);
        assert_eq!(token["top"].as_array().unwrap().len(), 3);
        assert_eq!(token["top"][0]["logprob"], token["logprob"], "greedy takes the likeliest");
        assert!(token["logprob"].as_f64().unwrap() < 0.0);
        text += token["text"].as_str().unwrap();
    }
    assert_eq!(text, plain["text"].as_str().unwrap());
    // A penalty that no token of the prompt or the text survives: all differ.
    let penalised = json(&[&prompt[..], &["--presence-penalty", "1000"]].concat());
    let mut seen = penalised["prompt_ids"].as_array().unwrap().clone();
    for id in penalised["ids"].as_array().unwrap() {
        assert!(!seen.contains(id), "{id} again");
        seen.push(id.clone());
    }
}

#[test]
fn generate_puts_system_text_before_a_chat_message() {
    let chat = ["generate", "--chat", "Where is it?", "-n", "2", "--temp", "0", "--json"];
    let with = json(&[&chat[..], &["--system", "Speak of whales."]].concat());
    let ids = |value: &Value| value["prompt_ids"].as_array().unwrap().len();
    assert!(ids(&with) > ids(&json(&chat)));
}

#[test]
fn logits_prints_the_fields_of_a_reference_case() {
    let logits = json(&["logits", "--prompt", "Call me Ishmael. Some years ago", "--json"]);
    assert_eq!(logits["top"].as_array().unwrap().len(), 16);
    assert_eq!(logits["probe"].as_array().unwrap().len(), 64);
    let ids: Vec<String> =
        logits["ids"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    let by_ids = json(&["logits", "--ids", &ids.join(",")]);
    assert_eq!(by_ids, logits);
}

#[test]
fn inspect_says_what_fits() {
    let path = whale();
    let path = path.to_str().unwrap();
    let fits = json(&["inspect", path, "--json", "--gpu", "a2000"]);
    assert_eq!(fits["fits"], true);
    assert!(fits["max_tokens_per_s"].as_f64().unwrap() > 10_000.0);
    let short = json(&["inspect", path, "--json", "--vram", "4600000", "-c", "512"]);
    assert_eq!(short["fits"], false);
    assert!(short["refusal"].as_str().unwrap().contains("fits"), "{}", short["refusal"]);
    let text = lane(&["inspect", path, "--vram", "6GiB"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("Q4_K") && text.contains("total") && text.contains("fits into"),
        "{text}"
    );
}

#[test]
fn fingerprints_check_against_their_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let path = whale();
    let path = path.to_str().unwrap();
    let printed = lane(&["fingerprint", path]);
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).unwrap();
    assert_eq!(text.lines().count(), 1 + 6 * 7);
    let manifest = folder.path().join("manifest");
    std::fs::write(&manifest, &text).unwrap();
    let manifest_path = manifest.to_str().unwrap();
    assert!(lane(&["fingerprint", path, "--check", manifest_path]).status.success());
    let wrong = text.replacen(&text[..4], "0000", 1);
    std::fs::write(&manifest, wrong).unwrap();
    let sentence = refused(&["fingerprint", path, "--check", manifest_path], 1);
    assert!(sentence.contains("1 of 43 matrices differ"), "{sentence}");
}

#[test]
fn inspect_plans_what_generate_allocates_with_any_numerics() {
    let path = whale();
    let path = path.to_str().unwrap();
    for options in [
        &[][..],
        &["--numerics", "q8"],
        &["--numerics", "exact"],
        &["--kv-type", "f32"],
        &["-c", "100"],
    ] {
        let inspected = json(&[&["inspect", path, "--json"], options].concat());
        let generated = json(&[&["generate", "x", "-n", "1", "--json"], options].concat());
        assert_eq!(inspected["plan"]["total_bytes"], generated["slab"]["permanent_end_bytes"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_stdout_that_fails_is_said() {
    for args in
        [&["--help"][..], &["generate", "-h"], &["--version"], &["man"], &["completions", "bash"]]
    {
        let full = std::fs::File::create("/dev/full").unwrap();
        let output = command().args(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?} {said}");
        assert!(said.starts_with("error: cannot write to stdout: "), "{args:?} {said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_stderr_that_fails_is_no_panic() {
    for (args, code) in [(&["generate", "x", "-n", "2"][..], 0), (&["inspect", "/nonexistent"], 1)]
    {
        let full = std::fs::File::create("/dev/full").unwrap();
        let status = command().args(args).stdout(Stdio::null()).stderr(full).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn synth_writes_a_model_that_generates() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let path = path.to_str().unwrap();
    let made = lane(&["synth", "--shape", "tiny", "--mix", "q4_k_m", "--seed", "7", "--out", path]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let generated = json(&["generate", "abc", "-m", path, "-n", "4", "--temp", "0", "--json"]);
    assert_eq!(generated["ids"].as_array().unwrap().len(), 4);
}

#[test]
fn usage_errors_exit_with_2() {
    for args in [
        &["generate"][..],
        &["generate", "x", "-f", "y"],
        &["generate", "x", "--system", "without --chat"],
        &["generate", "x", "--logprobs", "3"],
        &["generate", "x", "--chat", "--special"],
        &["generate", "x", "-c", "0"],
        &["generate", "x", "--vram", "lots"],
        &["generate", "x", "--threads", "0"],
        &["logits"],
        &["logits", "--prompt", "a", "--ids", "1"],
        &["logits", "--ids", "1,x"],
        &["inspect"],
        &["synth", "--shape", "gpt-5", "--out", "x"],
        &["frobnicate"],
    ] {
        refused(args, 2);
    }
}

#[cfg(unix)]
#[test]
fn invalid_utf8_on_the_command_line_is_a_usage_error() {
    use std::os::unix::ffi::OsStrExt;
    let output =
        command().arg("generate").arg(std::ffi::OsStr::from_bytes(b"caf\xe9")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
}

#[test]
fn bad_input_exits_with_1_and_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let model = std::fs::read(whale()).unwrap();
    let missing = folder.path().join("missing.gguf");
    let folder_path = folder.path().to_str().unwrap().to_owned();
    for path in [
        missing.to_str().unwrap().to_owned(),
        folder_path,
        file("empty.gguf", b""),
        file("text.gguf", b"this is not a model file at all, just some text"),
        file("truncated.gguf", &model[..model.len() - 1]),
        file("header.gguf", &model[..100]),
    ] {
        for command in ["inspect", "fingerprint"] {
            refused(&[command, &path], 1);
        }
        let sentence = refused(&["generate", "x", "-m", &path], 1);
        assert!(sentence.contains(&path), "{sentence}");
    }
    refused(&["generate", ""], 1);
    refused(&["logits", "--prompt", ""], 1);
    refused(&["logits", "--ids", "1,4096"], 1);
    refused(&["generate", "x", "--temp", "-1"], 1);
    refused(&["generate", "x", "--top-p", "7"], 1);
    refused(&["generate", "x", "--repeat-penalty", "0"], 1);
    refused(&["generate", "x", "--presence-penalty", "nan"], 1);
    refused(&["generate", "x", "--stop", ""], 1);
    refused(&["generate", "x", "--vram", "1MiB"], 1);
    refused(&["generate", "a b c d e f g h i j k l m n o p q r s t u", "-c", "4"], 1);
    let out = missing.join("x").to_str().unwrap().to_owned();
    refused(&["synth", "--shape", "tiny", "--out", &out], 1);
}

#[cfg(unix)]
#[test]
fn a_closed_stdout_is_no_panic() {
    let mut child = command()
        .args(["generate", "Call me Ishmael.", "-n", "200"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
    assert!(output.status.success());
}
