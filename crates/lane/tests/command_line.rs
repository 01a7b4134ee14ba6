//! Manners of the command line: help, manual, exit codes, pipes, signals, what JSON is made of.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The command on a machine without a GPU, wherever the test runs.
fn lane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lane"));
    command.env("CUDA_LOAD_LIBRARY", "").args(args).stdin(Stdio::null());
    command
}

fn text(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn in_crate(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).to_str().unwrap().to_owned()
}

/// Names of all subcommands, as the help lists them, but for `help` itself.
fn subcommands() -> BTreeSet<String> {
    let help = text(lane(&["--help"]).output().unwrap());
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.split_whitespace().next().map(str::to_owned));
    names.filter(|name| name != "help").collect()
}

/// For each subcommand a call that prints something.
fn a_call_of_each() -> Vec<Vec<String>> {
    let (model, prose) =
        (in_crate("models/whale-5.8m-q4_k_m.gguf"), in_crate("tests/gold/ishmael.txt"));
    let calls: &[&[&str]] = &[
        &["generate", "Call me Ishmael.", "-n", "40"],
        &["chat", "-n", "8"],
        &["logits", "--ids", "1,2"],
        &["inspect", &model],
        &["fingerprint", &model],
        &["bench", "-p", "0", "-n", "2", "-r", "1"],
        &["perplexity", &prose, "-c", "32", "--chunks", "1"],
        &["serve-file", "-"],
        &["completions", "bash"],
        &["man"],
        &["help"],
    ];
    calls.iter().map(|call| call.iter().map(|&arg| arg.to_owned()).collect()).collect()
}

#[test]
fn a_reader_that_has_gone_is_no_panic_of_any_subcommand() {
    let calls = a_call_of_each();
    let called: BTreeSet<String> = calls.iter().map(|call| call[0].clone()).collect();
    // One needs a GPU, one prints nothing.
    let others: BTreeSet<String> = ["diff", "synth"].map(str::to_owned).into();
    let missed = &subcommands() - &(&called | &others);
    assert!(missed.is_empty(), "{missed:?}");
    for call in &calls {
        let args: Vec<&str> = call.iter().map(String::as_str).collect();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (input, mut turns) = std::io::pipe().unwrap();
        turns.write_all(b"Where is the whale?\n").unwrap();
        drop(turns);
        let output = lane(&args).stdin(input).stdout(writer).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{call:?}: {stderr}");
        assert_eq!(output.status.code(), Some(0), "{call:?}: {stderr}");
    }
}

#[test]
fn help_tells_the_exit_codes_and_keeps_to_100_columns() {
    let help = text(lane(&["--help"]).output().unwrap());
    for part in ["Exit codes:", "130  interrupted", "NO_COLOR"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    for name in subcommands() {
        let help = text(lane(&[&name, "--help"]).output().unwrap());
        assert!(help.contains("Usage: "), "{help}");
        let widest = help.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "{help}");
    }
}

#[test]
fn a_missing_file_is_told_once() {
    let output = lane(&["generate", "x", "-m", "/nonexistent.gguf"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.matches("No such file").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("/nonexistent.gguf").count(), 1, "{stderr}");
}

#[test]
fn no_color_means_no_colour() {
    const ESCAPE: char = '\u{1b}';
    let help = |no_color: Option<&str>| {
        let mut command = lane(&["--help"]);
        command.env("CLICOLOR_FORCE", "1").env_remove("NO_COLOR");
        no_color.map(|value| command.env("NO_COLOR", value));
        text(command.output().unwrap())
    };
    assert!(help(None).contains(ESCAPE), "nothing to take away");
    assert!(!help(Some("1")).contains(ESCAPE));
}

#[test]
fn completions_and_manual_pages_name_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let script = text(lane(&["completions", shell]).output().unwrap());
        for name in subcommands() {
            assert!(script.contains(&name), "{shell} {name}");
        }
    }
    let page = text(lane(&["man"]).output().unwrap());
    assert!(page.contains(".TH lane 1") && page.contains("Exit codes"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    text(lane(&["man", folder.path().to_str().unwrap()]).output().unwrap());
    for name in subcommands() {
        let page = folder.path().join(format!("lane-{name}.1"));
        assert!(page.is_file(), "{}", page.display());
    }
    let refused = lane(&["man", "/nonexistent/folder"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
}

#[test]
fn synth_replaces_nothing_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, "precious").unwrap();
    let synth = ["synth", "--shape", "tiny", "--out", path.to_str().unwrap()];
    let refused = lane(&synth).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--force"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    text(lane(&[&synth[..], &["--force"]].concat()).output().unwrap());
    assert!(std::fs::metadata(&path).unwrap().len() > 10_000);
}

/// A device is never replaced by a file; a socket stands for one here.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let socket = path.to_str().unwrap();
    for call in [
        &["synth", "--shape", "tiny", "--force", "--out", socket][..],
        &["generate", "Call me", "-n", "1", "--save-state", socket],
    ] {
        let output = lane(call).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("not a regular file"), "{stderr}");
        assert!(std::fs::metadata(&path).unwrap().file_type().is_socket(), "{call:?}");
    }
}

/// Ctrl-C ends the text; what was made of it is there and summed up.
#[cfg(unix)]
#[test]
fn an_interrupted_text_is_summed_up_and_exits_with_130() {
    use std::io::Read;
    let mut child = lane(&["generate", "Call me Ishmael.", "-n", "1000000", "--ring"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(output.stdout.ends_with(b"\n"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("tok/s") && stderr.contains("nodes"), "{stderr}");
}

/// Names of all fields, but for those of objects whose names are data.
fn fields(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                into.insert(name.clone());
                match value {
                    Value::Object(types) if name == "tensors_by_type" => {
                        types.values().for_each(|value| fields(value, into));
                    }
                    value => fields(value, into),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| fields(value, into)),
        _ => {}
    }
}

#[test]
fn every_field_of_json_is_documented() {
    let docs = PathBuf::from(in_crate("../../docs/JSON.md"));
    let Ok(docs) = std::fs::read_to_string(&docs) else {
        // Not through the harness, which swallows what passing tests print.
        let test = "every_field_of_json_is_documented";
        let _ =
            writeln!(std::io::stderr(), "skipped {test}: no {}, as in a package", docs.display());
        return;
    };
    let (model, prose) =
        (in_crate("models/whale-5.8m-q4_k_m.gguf"), in_crate("tests/gold/ishmael.txt"));
    let calls: &[&[&str]] = &[
        &["generate", "It was", "-n", "3", "--logprobs", "2", "--json"],
        &["logits", "--ids", "1,2"],
        &["inspect", &model, "--json"],
        &["perplexity", &prose, "-c", "32", "--chunks", "1", "--kl", "exact", "--json"],
        &["bench", "-p", "2", "-n", "2", "-r", "1", "-o", "json"],
        &["bench", "--ops", "-r", "1", "-o", "json"],
    ];
    for call in calls {
        let printed: Value = serde_json::from_str(&text(lane(call).output().unwrap())).unwrap();
        let section =
            docs.split("\n## ").find(|part| part.starts_with(&format!("`lane {}", call[0])));
        let section = section.unwrap_or_else(|| panic!("no section of {}", call[0]));
        let mut names = BTreeSet::new();
        fields(&printed, &mut names);
        for name in names {
            let named = [format!("`{name}`"), format!(".{name}`"), format!("`{name}.")];
            assert!(named.iter().any(|name| section.contains(name)), "{}: {name}", call[0]);
        }
    }
}

#[test]
fn bench_ops_accounts_for_the_whole_step() {
    // Of these numerics all but two operations read weights or the cache.
    let q8 = ["bench", "--ops", "--numerics", "q8", "-r", "1"];
    let rows = text(lane(&[&q8[..], &["-d", "0,7", "-o", "json"]].concat()).output().unwrap());
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    for depth in [0, 7] {
        let rows: Vec<&Value> = rows.iter().filter(|row| row["n_depth"] == depth).collect();
        let (ops, ends) = rows.split_at(rows.len() - 2);
        let sum = |field: &str| ops.iter().map(|row| row[field].as_f64().unwrap()).sum::<f64>();
        assert!((sum("us") / ends[0]["us"].as_f64().unwrap() - 1.0).abs() < 1e-9);
        assert!((sum("share") - 1.0).abs() < 1e-9);
        assert_eq!(sum("launches"), ends[1]["launches"].as_f64().unwrap());
        assert_eq!(ends[1]["op"], "step");
        for row in ops {
            let reads_neither = row["op"] == "embed" || row["op"] == "attention norm";
            assert!(row["us"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["gb_per_s"] == 0.0, reads_neither, "{row}");
            assert!(row["read_gb_per_s"].as_f64().unwrap() > 0.1, "{row}");
        }
    }
    let table = text(lane(&["bench", "--ops", "-r", "1"]).output().unwrap());
    assert!(
        table.contains("| depth | op | kernel |") && table.contains("read bandwidth"),
        "{table}"
    );
}
