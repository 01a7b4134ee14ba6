//! A sequence's state goes to a file and comes back, into this lane or another of the same model.

#[allow(dead_code)] // Other tests use the rest of it.
mod support;

use std::process::{Command, Output};

use decode_graph::Numerics;
use kv_paged::KvType;
use lane::saved_state::{SavedState, StateError};
use lane::{
    BackendChoice, ContextSize, DriveMode, Lane, LaneError, LaneOptions, ModelFile, PlanOptions,
};
use support::{greedy, ids};

fn load(context: u32, kv_type: KvType) -> Lane {
    let context = ContextSize::Tokens(context);
    let plan = PlanOptions { context, kv_type: Some(kv_type), ..Default::default() };
    let options = LaneOptions { backend: BackendChoice::Host, plan, ..Default::default() };
    ModelFile::open(None).unwrap().load(&options, &mut |_| {}).unwrap()
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| 300 + i * 97 % 3000).collect()
}

fn refusal(lane: &Lane, state: &SavedState) -> String {
    match lane.load_state(state) {
        Err(LaneError::State(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sequence_goes_on_in_another_lane_as_it_would_have_here() {
    for kv_type in [KvType::F16, KvType::F32, KvType::Q8] {
        let here = load(256, kv_type);
        let whole = ids(&here, &prompt(70), greedy(40, DriveMode::SelfAdvance));

        let here = load(256, kv_type);
        let start = ids(&here, &prompt(70), greedy(15, DriveMode::SelfAdvance));
        assert_eq!(start, whole[..15]);
        let saved = SavedState::from_bytes(&here.save_state().unwrap().to_bytes()).unwrap();
        assert!(saved.tokens.len() >= 70 + 14, "{}", saved.tokens.len());

        // The other lane has another context, and held something else.
        let there = load(200, kv_type);
        ids(&there, &prompt(9), greedy(3, DriveMode::Host));
        there.load_state(&saved).unwrap();
        let so_far = [prompt(70), start].concat();
        let mut generation = there.generate(&so_far, greedy(25, DriveMode::SelfAdvance)).unwrap();
        let rest: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        assert_eq!(rest, whole[15..]);
        assert_eq!(generation.timing().prefill_tokens, 1, "nothing was computed again");
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let lane = load(256, KvType::F16);
    assert!(matches!(lane.save_state(), Err(LaneError::State(StateError::Nothing))));
    let answer = ids(&lane, &prompt(40), greedy(10, DriveMode::SelfAdvance));
    let saved = lane.save_state().unwrap();

    let sister = include_bytes!("models/whale-5.8m-q4_k.gguf");
    let sister =
        support::load(&ModelFile::from_static(sister).unwrap(), BackendChoice::Host, Numerics::Q8);
    assert!(refusal(&sister, &saved).starts_with("made with another model"));
    assert_eq!(
        refusal(&load(256, KvType::F32), &saved),
        "made with elements of type f16, this cache has f32"
    );
    assert_eq!(
        refusal(&load(48, KvType::F16), &saved),
        format!("the state has {0} tokens, the context 48: use -c {0}", saved.tokens.len())
    );

    let mut foreign = saved.clone();
    foreign.shape.fingerprint ^= 1;
    assert!(refusal(&lane, &foreign).starts_with("made with another model"));
    let mut foreign = saved;
    foreign.tokens[3] = 4096;
    assert!(matches!(lane.load_state(&foreign), Err(LaneError::TokenOutOfRange { .. })));
    // What the cache holds is still what it held.
    let again = lane.generate(&prompt(40), greedy(10, DriveMode::SelfAdvance)).unwrap();
    assert_eq!(again.timing().prefill_tokens, 1);
    assert_eq!(again.map(|token| token.unwrap().id).collect::<Vec<_>>(), answer);
}

#[test]
fn a_sequence_that_left_its_context_cannot_be_saved() {
    let lane = load(32, KvType::F16);
    let options = lane::GenerateOptions { ring: true, ..greedy(40, DriveMode::SelfAdvance) };
    ids(&lane, &prompt(10), options);
    assert!(matches!(lane.save_state(), Err(LaneError::State(StateError::Wrapped { .. }))));
}

/// In exact numerics, in which chunks of a prompt and single tokens are the same.
fn lane(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lane"))
        .args(args)
        .args(["--backend", "host", "--numerics", "exact", "--temp", "0", "-n", "12"])
        .output()
        .unwrap()
}

#[test]
fn the_command_saves_a_state_and_begins_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ishmael.state");
    let path = path.to_str().unwrap();
    let first = lane(&["generate", "Call me Ishmael. Some years ago", "--save-state", path]);
    assert!(first.status.success());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "and no part of it");
    let text = String::from_utf8(first.stdout).unwrap();
    let more = format!("Call me Ishmael. Some years ago{}", text.trim_end());
    let without = lane(&["generate", &more]);
    let with = lane(&["generate", &more, "--load-state", path]);
    assert!(with.status.success(), "{}", String::from_utf8_lossy(&with.stderr));
    assert_eq!(with.stdout, without.stdout);

    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(path, &bytes).unwrap();
    let damaged = lane(&["generate", &more, "--load-state", path]);
    assert_eq!((damaged.status.code(), damaged.stdout.len()), (Some(1), 0));
    let message = String::from_utf8(damaged.stderr).unwrap();
    assert!(
        message.contains("damaged: its checksum is") && message.lines().count() == 1,
        "{message}"
    );
    std::fs::write(path, b"lane-kv").unwrap();
    let foreign = lane(&["generate", &more, "--load-state", path]);
    assert!(String::from_utf8(foreign.stderr).unwrap().contains("not a saved state"));
}
