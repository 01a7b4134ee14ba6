//! The lock and the switch of a lane, built with loom's primitives instead of the standard library's:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test
//! ```
#![cfg(all(loom, test))]

#[path = "../../../crates/lane/src/shared.rs"]
mod shared;

use loom::sync::Arc;
use loom::thread;
use shared::{Cancel, Held, Shared};

const TOKENS: usize = 2;

/// What the lock of a lane protects, as far as watching goes.
#[derive(Default)]
struct State {
    /// Who made each token.
    history: Vec<usize>,
    steps: usize,
}

fn generate(state: &mut Held<'_, State>, who: usize, cancel: &Cancel) {
    for _ in 0..TOKENS {
        if cancel.is_cancelled() {
            break;
        }
        state.history.push(who);
        state.steps += 1;
        // A step that takes its time.
        thread::yield_now();
    }
}

#[test]
fn texts_do_not_mix_and_a_watcher_sees_whole_ones() {
    loom::model(|| {
        let lane = Arc::new(Shared::new(State::default()));
        let generations: Vec<_> = (0..2)
            .map(|who| {
                let lane = lane.clone();
                thread::spawn(move || {
                    generate(&mut lane.hold().unwrap(), who, &Cancel::default());
                })
            })
            .collect();
        {
            let state = lane.hold().unwrap();
            assert_eq!(state.history.len(), state.steps);
            assert!(state.history.chunks(TOKENS).all(|text| text == [text[0]; TOKENS]));
        }
        for generation in generations {
            generation.join().unwrap();
        }
        assert_eq!(lane.hold().unwrap().steps, 2 * TOKENS);
    });
}

#[test]
fn a_switch_ends_a_text_at_the_latest_when_both_know_of_it() {
    loom::model(|| {
        let lane = Arc::new(Shared::new(State::default()));
        let cancel = Cancel::default();
        let generation = {
            let (lane, cancel) = (lane.clone(), cancel.clone());
            thread::spawn(move || generate(&mut lane.hold().unwrap(), 0, &cancel))
        };
        cancel.cancel();
        // Begun behind the cancellation, and by whoever has seen it: no token.
        generate(&mut lane.hold().unwrap(), 1, &cancel);
        generation.join().unwrap();
        let state = lane.hold().unwrap();
        assert!(state.history.len() <= TOKENS && !state.history.contains(&1));
        drop(state);

        cancel.reset();
        generate(&mut lane.hold().unwrap(), 2, &cancel);
        assert!(lane.hold().unwrap().history.ends_with(&[2; TOKENS]));
    });
}

/// That the model finds what it is for: two steps that let go of the lock in between.
#[test]
#[should_panic(expected = "assertion")]
fn texts_that_share_the_lock_token_by_token_are_seen_to_mix() {
    loom::model(|| {
        let lane = Arc::new(Shared::new(State::default()));
        let other = {
            let lane = lane.clone();
            thread::spawn(move || {
                for _ in 0..TOKENS {
                    lane.hold().unwrap().history.push(1);
                }
            })
        };
        for _ in 0..TOKENS {
            lane.hold().unwrap().history.push(0);
        }
        other.join().unwrap();
        let state = lane.hold().unwrap();
        assert!(state.history.chunks(TOKENS).all(|text| text == [text[0]; TOKENS]));
    });
}
