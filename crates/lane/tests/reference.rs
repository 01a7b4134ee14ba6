//! Logits and greedy continuations against a float64 reference program's, on the host.

#[allow(dead_code, reason = "it serves another test too")]
mod support;

use decode_graph::Numerics;
use lane::{BackendChoice, FusionChoice};
use support::whales;

#[test]
fn exact_logits_are_the_references() {
    for whale in whales() {
        whale.check_logits(BackendChoice::Host, Numerics::Exact, 1e-4);
    }
}

#[test]
fn q8_logits_are_near_the_references() {
    for whale in whales() {
        whale.check_logits(BackendChoice::Host, Numerics::Q8, 3e-2);
    }
}

#[test]
fn q8_logits_of_the_persistent_step_are_near_the_references() {
    for whale in whales() {
        whale.check_fused(BackendChoice::Host, Numerics::Q8, FusionChoice::Persistent, 3e-2);
    }
}

#[test]
fn exact_greedy_continuations_are_the_references() {
    for whale in whales() {
        whale.check_greedy(BackendChoice::Host);
    }
}
