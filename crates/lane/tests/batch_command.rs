//! The command with many sequences: `lane serve-file`, `lane bench -B`.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const REQUESTS: &str = r#"{"id": "a", "prompt": "Call me Ishmael.", "n": 12, "temp": 0}
{"id": "b", "prompt": "Call me Ishmael.", "n": 6, "seed": 3, "salt": "other"}

{"id": "c", "prompt": "The whale", "temperature": 0}
nothing
{"id": "d", "messages": [{"role": "user", "content": "What is a whale?"}], "n": 5, "top_k": 1}
{"id": "e", "prompt": "Call me Ishmael.", "n": 3, "temp": 0}"#;

fn serve(args: &[&str], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lane"))
        .args(["serve-file", "--backend", "host"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin).unwrap();
    child.wait_with_output().unwrap()
}

/// Records by their line.
fn records(text: &[u8]) -> BTreeMap<u64, Value> {
    let text = std::str::from_utf8(text).unwrap();
    let records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    records.into_iter().map(|record| (record["line"].as_u64().unwrap(), record)).collect()
}

#[test]
fn each_request_has_its_record_and_bad_lines_stop_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (requests, out) = (folder.path().join("requests.jsonl"), folder.path().join("out.jsonl"));
    std::fs::write(&requests, REQUESTS).unwrap();
    let done = serve(&[requests.to_str().unwrap(), "--out", out.to_str().unwrap()], b"");
    assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0));
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert!(stderr.contains("4 answers"), "{stderr}");
    assert!(stderr.ends_with("error: 2 lines were refused; their records say why\n"), "{stderr}");

    let from_file = records(&std::fs::read(&out).unwrap());
    assert_eq!(from_file.keys().copied().collect::<Vec<_>>(), [1, 2, 4, 5, 6, 7]);
    let error = |line: u64| from_file[&line]["error"].as_str().unwrap();
    assert!(error(4).starts_with("unknown field `temperature`"), "{}", error(4));
    assert_eq!((error(5), &from_file[&4]["id"]), ("a request is a JSON object", &"c".into()));
    for (line, n, id) in [(1, 12, "a"), (2, 6, "b"), (6, 5, "d"), (7, 3, "e")] {
        let answer = &from_file[&line];
        assert_eq!((&answer["id"], &answer["finish"]), (&id.into(), &"length".into()));
        assert_eq!(answer["tokens"].as_array().unwrap().len(), n);
    }
    let tokens = |line: u64| from_file[&line]["tokens"].as_array().unwrap();
    assert_eq!(tokens(1)[..3], tokens(7)[..]);
    assert_eq!(from_file[&2]["cached_tokens"], 0, "its salt is another");

    // From stdin, with a cache so small that requests wait for each other, they are the same.
    let small = ["-", "--ctx-total", "48", "--max-batch", "2"];
    for preempt in ["recompute", "swap"] {
        let done = serve(&[&small[..], &["--preempt", preempt]].concat(), REQUESTS.as_bytes());
        let from_stdin = records(&done.stdout);
        for (line, answer) in &from_file {
            assert_eq!(answer["text"], from_stdin[line]["text"]);
            assert_eq!(answer["error"], from_stdin[line]["error"]);
        }
    }
}

#[test]
fn the_answer_is_that_of_generate() {
    let done = serve(&["-"], br#"{"prompt": "The great white whale", "n": 20, "temp": 0}"#);
    assert_eq!(done.status.code(), Some(0));
    let answer = &records(&done.stdout)[&1];
    let generated = Command::new(env!("CARGO_BIN_EXE_lane"))
        .args(["generate", "The great white whale", "-n", "20", "--temp", "0", "--backend", "host"])
        .output()
        .unwrap();
    let text = format!("{}\n", answer["text"].as_str().unwrap());
    assert_eq!(text.as_bytes(), generated.stdout);
}

#[test]
fn what_cannot_be_read_or_does_not_fit_is_refused_in_one_sentence() {
    let refused = |args: &[&str]| {
        let done = serve(args, b"");
        assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0));
        String::from_utf8(done.stderr).unwrap()
    };
    let missing = refused(&["no-such-file.jsonl"]);
    assert!(missing.starts_with("error: cannot read no-such-file.jsonl"), "{missing}");
    let folder = refused(&["tests"]);
    assert!(folder.contains("error: cannot read tests: "), "{folder}");
    let large = refused(&["-", "--ctx-total", "1000000", "--vram", "16MiB"]);
    assert!(large.contains("--ctx-total") && large.contains("short"), "{large}");
    assert_eq!(large.lines().count(), 1, "{large}");
    let fused = refused(&["-", "--fusion", "persistent"]);
    assert_eq!(
        fused,
        "error: fusion persistent: must be auto or ops where many sequences decode\n"
    );
}

#[test]
fn a_start_that_fails_leaves_what_the_file_of_answers_held() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (requests, answers) = (path("requests.jsonl"), path("answers.jsonl"));
    std::fs::write(&requests, REQUESTS).unwrap();
    std::fs::write(&answers, "earlier answers").unwrap();
    let refused = |args: &[&str]| {
        let done = serve(args, b"");
        assert_eq!(done.status.code(), Some(1));
        String::from_utf8(done.stderr).unwrap()
    };
    refused(&[&requests, "--out", &answers, "--model", "no-such-model.gguf"]);
    refused(&["no-such-file.jsonl", "--out", &answers]);
    assert_eq!(std::fs::read_to_string(&answers).unwrap(), "earlier answers");
    let same = refused(&[&requests, "--out", &requests]);
    assert!(same.contains("another file"), "{same}");
    assert_eq!(std::fs::read_to_string(&requests).unwrap(), REQUESTS);
    // One that goes well leaves nothing of them.
    assert!(serve(&["-", "--out", &answers], b"").status.success());
    assert_eq!(std::fs::read_to_string(&answers).unwrap(), "");
}

#[test]
fn bench_of_nothing_is_refused() {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_lane"));
    let done = bench.args(["bench", "--backend", "host", "-p", "0", "-n", "0"]).output().unwrap();
    assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0));
    let error = String::from_utf8(done.stderr).unwrap();
    assert!(error.starts_with("error: nothing to measure"), "{error}");
}

#[test]
fn bench_has_a_row_for_each_number_of_sequences() {
    let done = Command::new(env!("CARGO_BIN_EXE_lane"))
        .args(["bench", "--backend", "host", "-p", "20,40", "-n", "5", "-r", "1", "-o", "json"])
        .args(["-B", "1,2,8", "-d", "0,30"])
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let rows: Vec<Value> = serde_json::from_slice(&done.stdout).unwrap();
    let number = |row: &Value, name: &str| row[name].as_u64().unwrap();
    let tests: Vec<[u64; 4]> = rows
        .iter()
        .map(|row| ["n_prompt", "n_gen", "n_depth", "n_parallel"].map(|name| number(row, name)))
        .collect();
    let of_one = |depth| [[20, 0, depth, 1], [40, 0, depth, 1], [0, 5, depth, 1]];
    let of_many = |depth| [[0, 5, depth, 2], [0, 5, depth, 8]];
    assert_eq!(tests, [&of_one(0)[..], &of_one(30), &of_many(0), &of_many(30)].concat());
    assert!(rows.iter().all(|row| row["avg_ts"].as_f64().unwrap() > 0.0));
}

#[test]
fn bench_refuses_sequences_that_the_cache_cannot_hold_together() {
    let bench = |sequences: &str| {
        Command::new(env!("CARGO_BIN_EXE_lane"))
            .args(["bench", "--backend", "host", "-p", "0", "-n", "200", "-r", "1", "-o", "json"])
            .args(["--chunk", "8", "--vram", "8MiB", "-B", sequences])
            .output()
            .unwrap()
    };
    let done = bench("2");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let refused = bench("32");
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0));
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(stderr.contains("32 sequences do not fit the cache together"), "{stderr}");
}

/// Ctrl-C ends the answers; what was made of them is there and summed up.
#[cfg(unix)]
#[test]
fn interrupted_requests_are_recorded_and_exit_with_130() {
    use std::io::{BufRead, BufReader};
    let mut child = Command::new(env!("CARGO_BIN_EXE_lane"))
        .args(["serve-file", "--backend", "host", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Held open: without Ctrl-C more lines could come for ever.
    let mut requests = child.stdin.take().unwrap();
    requests.write_all(b"{\"prompt\": \"The whale\", \"n\": 1, \"temp\": 0}\n").unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
    let first: Value = serde_json::from_str(&answers.next().unwrap().unwrap()).unwrap();
    assert_eq!(first["finish"], "length");
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("1 answers, 1 tokens"), "{stderr}");
    drop(requests);
}
