//! Threads that load, decode, watch and drop, all at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use lane::synth::{Mix, Shape};
use lane::{
    BackendChoice, ContextSize, DriveMode, GenerateOptions, Lane, LaneOptions, ModelFile,
    PlanOptions, Sampling, StopReason,
};

const THREADS: u32 = 4;
const TOKENS: u32 = 12;

fn file() -> ModelFile {
    let mut bytes = Vec::new();
    lane::synth::write(Shape::Tiny, Mix::Q4KM, 1, &mut bytes, |_| {}).unwrap();
    ModelFile::from_vec(bytes).unwrap()
}

fn load(file: &ModelFile) -> Lane {
    let plan = PlanOptions { context: ContextSize::Tokens(64), ..PlanOptions::default() };
    let options = LaneOptions { backend: BackendChoice::Host, plan, ..Default::default() };
    file.load(&options, &mut |_| {}).unwrap()
}

fn options(drive: DriveMode) -> GenerateOptions {
    let sampling = Sampling::GREEDY;
    GenerateOptions { n_tokens: TOKENS, sampling, drive, ignore_end: true, ..Default::default() }
}

fn ids(lane: &Lane, prompt: &[u32], drive: DriveMode) -> Vec<u32> {
    lane.generate(prompt, options(drive)).unwrap().map(|token| token.unwrap().id).collect()
}

#[test]
fn many_threads_on_one_lane_each_get_what_one_alone_gets() {
    let lane = Arc::new(load(&file()));
    let prompts: Vec<Vec<u32>> = (0..THREADS).map(|i| vec![1, i + 2, 2 * i + 3]).collect();
    let expected: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| ids(&lane, prompt, DriveMode::Host)).collect();

    let running = AtomicU32::new(THREADS);
    thread::scope(|scope| {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            let (lane, running) = (&lane, &running);
            scope.spawn(move || {
                for round in 0..6 {
                    let drive =
                        if round % 2 == 0 { DriveMode::SelfAdvance } else { DriveMode::Host };
                    assert_eq!(ids(lane, prompt, drive), *expected);
                }
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        // Whoever watches waits for a generation at most, and sees whole steps.
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) > 0 {
                let telemetry = lane.telemetry().unwrap();
                let graph = telemetry.graph.expect("a graph is live after the first token");
                assert!(
                    graph.nodes > 0 && [Some(0), Some(12)].contains(&graph.h2d_bytes_per_token)
                );
                let report = lane.report().unwrap();
                assert_eq!(report.used_bytes + report.free_bytes, report.capacity_bytes);
                thread::yield_now();
            }
        });
    });
}

#[test]
fn lanes_of_one_file_are_loaded_and_dropped_side_by_side() {
    let file = Arc::new(file());
    let expected = ids(&load(&file), &[1, 2, 3], DriveMode::Host);
    let threads: Vec<_> = (0..THREADS)
        .map(|i| {
            let (file, expected) = (file.clone(), expected.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let lane = load(&file);
                    if i % 2 == 0 {
                        // Dropped in the middle of a text.
                        let mut text = lane.generate(&[1, 2, 3], options(DriveMode::Host)).unwrap();
                        assert_eq!(text.next().unwrap().unwrap().id, expected[0]);
                    } else {
                        assert_eq!(ids(&lane, &[1, 2, 3], DriveMode::SelfAdvance), expected);
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_text_without_end_is_ended_from_another_thread() {
    let lane = load(&file());
    let endless =
        GenerateOptions { n_tokens: u32::MAX, ring: true, ..options(DriveMode::SelfAdvance) };
    let (cancel, n_tokens) = (endless.cancel.clone(), AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while n_tokens.load(Ordering::Relaxed) < TOKENS {
                thread::yield_now();
            }
            cancel.cancel();
        });
        let mut generation = lane.generate(&[1, 2, 3], endless).unwrap();
        for token in generation.by_ref() {
            token.unwrap();
            n_tokens.fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!(generation.stop_reason(), Some(StopReason::Cancelled));
    });
    assert_eq!(ids(&lane, &[1, 2, 3], DriveMode::Host).len(), TOKENS as usize);
}
