//! Request lines in, records out, over a toy device and the embedded model's tokenizer.

mod toy;

use kv_paged::LayerGroup;
use lane::ModelFile;
use lane::StopReason;
use lane::batch::{
    Answer, Engine, Preempt, Record, RequestId, Scheduler, SchedulerOptions, Service,
};
use lane::tokenizer::Tokenizer;
use toy::Toy;

fn tokenizer() -> Tokenizer {
    ModelFile::open(None).unwrap().tokenizer().unwrap()
}

fn service(tokenizer: &Tokenizer) -> Service<'_, Toy> {
    let options = SchedulerOptions {
        max_batch: 4,
        chunk_tokens: 16,
        max_context_tokens: 64,
        block_size_tokens: 4,
        groups: vec![LayerGroup::full(1, 40)],
        prefix_cache: true,
        watermark_blocks: 1,
        preempt: Preempt::Recompute,
        min_bucket: 1,
    };
    Service::new(Engine::new(Toy::new(&options), Scheduler::new(options).unwrap()), tokenizer)
}

fn records(service: &mut Service<'_, Toy>, lines: &[&str]) -> Vec<Record> {
    let mut records = Vec::new();
    for (number, line) in (1..).zip(lines) {
        service.submit(number, line, &mut records);
    }
    while service.step(&mut records).unwrap() {}
    assert_eq!(service.live_requests(), 0);
    records
}

fn answer(tokenizer: &Tokenizer, line: &str) -> Answer {
    match &records(&mut service(tokenizer), &[line])[..] {
        [Record::Answer(answer)] => (**answer).clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_line_has_one_record_and_a_bad_one_stops_no_other() {
    let tokenizer = tokenizer();
    let long = format!(r#"{{"id": "long", "prompt": "{}"}}"#, "whale ".repeat(100));
    let lines = [
        r#"{"id": "a", "prompt": "Call me", "n": 5, "temp": 0}"#,
        r#"{"id": 2, "prompt": "Call me", "n": "5"}"#,
        "not JSON",
        &long,
        r#"{"prompt": "The whale", "n": 0}"#,
        r#"{"messages": [{"role": "user", "content": "Hi"}], "n": 3, "seed": 4}"#,
    ];
    let records = records(&mut service(&tokenizer), &lines);
    assert_eq!(records.len(), lines.len());
    let mut answered = Vec::new();
    let mut refused = Vec::new();
    for record in &records {
        let json = serde_json::to_value(record).unwrap();
        match record {
            Record::Answer(answer) => {
                assert_eq!(answer.text, tokenizer.decode(&answer.tokens));
                assert_eq!(json["finish"], "length");
                assert!(json["timing"]["total_ms"].as_f64().unwrap() >= 0.0);
                answered.push((answer.line, answer.tokens.len()));
            }
            Record::Refusal(refusal) => refused.push((refusal.line, refusal.id.clone())),
        }
    }
    answered.sort_unstable();
    assert_eq!(answered, [(1, 5), (5, 0), (6, 3)]);
    let text = |text: &str| Some(RequestId::Text(text.into()));
    assert_eq!(refused, [(2, Some(RequestId::Number(2))), (3, None), (4, text("long"))]);
    assert_eq!(
        serde_json::to_string(&records[1]).unwrap(),
        r#"{"line":3,"error":"a request is a JSON object"}"#
    );
}

#[test]
fn an_answer_does_not_depend_on_the_others() {
    let tokenizer = tokenizer();
    let line = |i: usize| {
        let prompt = "Call me Ishmael. ".repeat(1 + i % 3);
        format!(r#"{{"id": {i}, "prompt": "{prompt}", "n": 9, "seed": {}}}"#, i % 4)
    };
    let lines: Vec<String> = (0..12).map(line).collect();
    let together =
        records(&mut service(&tokenizer), &lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(together.len(), 12);
    let mut cached = 0;
    for record in together {
        let Record::Answer(found) = record else { panic!("{record:?}") };
        let alone = answer(&tokenizer, &lines[found.line as usize - 1]);
        assert_eq!(
            (&found.id, &found.tokens, &found.text),
            (&alone.id, &alone.tokens, &alone.text)
        );
        cached += found.cached_tokens;
    }
    assert!(cached > 0);
}

#[test]
fn a_stop_text_ends_the_answer_before_it() {
    let tokenizer = tokenizer();
    let line = r#"{"prompt": "Call me", "n": 20, "temp": 0"#;
    let whole = answer(&tokenizer, &format!("{line}}}"));
    let stop: String = whole.text.chars().skip(10).take(4).collect();
    let stopped = answer(
        &tokenizer,
        &format!(r#"{line}, "stop": {}}}"#, serde_json::to_string(&stop).unwrap()),
    );
    assert_eq!(stopped.finish, StopReason::Stop);
    assert_eq!(stopped.text, whole.text[..whole.text.find(&stop).unwrap()]);
    assert!(whole.tokens.starts_with(&stopped.tokens));
}

#[test]
fn an_answer_that_the_context_cuts_off_says_so() {
    let tokenizer = tokenizer();
    let cut = answer(&tokenizer, r#"{"prompt": "Call me", "n": 1000, "temp": 0}"#);
    assert_eq!(cut.finish, StopReason::Context);
    assert_eq!(cut.prompt_tokens as usize + cut.tokens.len(), 64 + 1);
}

#[test]
fn cancelled_requests_are_recorded_as_far_as_they_came() {
    let tokenizer = tokenizer();
    let mut service = service(&tokenizer);
    let mut records = Vec::new();
    service.submit(1, r#"{"prompt": "Call me", "n": 50, "temp": 0}"#, &mut records);
    for _ in 0..6 {
        service.step(&mut records).unwrap();
    }
    service.cancel_all(&mut records);
    assert!(!service.step(&mut records).unwrap());
    let [Record::Answer(answer)] = &records[..] else { panic!("{records:?}") };
    assert_eq!((answer.finish, answer.tokens.len()), (StopReason::Cancelled, 6));
    assert_eq!(service.engine().report().planner.sequences, 0);
}
