//! Very many replays of one graph: nothing grows, and every round of tokens is the first one again.

use decode_graph::{Backend, Drive, Head};
use kernels_ptx::TokenParams;

use super::Tiny;

/// Tokens of a round: the first from the host, the others from the device; fits the context.
const ROUND: u64 = 40;
/// Rounds after which the logits are compared as well.
const LOGITS_EVERY: u64 = 250;
/// What the allocator of the process may keep more at the end than after the first rounds.
const SLACK_BYTES: u64 = 2 << 20;

/// Replays of a long run: `SOAK_REPLAYS`, or a million.
pub(crate) fn replays() -> u64 {
    std::env::var("SOAK_REPLAYS").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000_000)
}

/// What must not grow.
#[derive(Clone, Copy, Debug)]
struct Process {
    resident_bytes: u64,
    open_files: usize,
    threads: u64,
}

impl Process {
    /// As Linux counts; zeros elsewhere.
    fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            number.unwrap_or(0)
        };
        let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        Self { resident_bytes: field("VmRSS:") * 1024, open_files, threads: field("Threads:") }
    }
}

/// Replays in rounds; `device_bytes` is what the device has free, where it can say so. Returns a
/// line for people.
pub(crate) fn run<B: Backend>(
    backend: &mut B,
    tiny: &mut Tiny<B::Memory>,
    replays: u64,
    device_bytes: impl Fn(&B) -> u64,
) -> String {
    let mut graph = tiny.capture_on(backend, Head::Greedy);
    let used_bytes = tiny.slab.used_bytes();
    let rounds = replays.div_ceil(ROUND).max(3);
    let warm = (rounds / 100).clamp(2, LOGITS_EVERY);
    let first = TokenParams { absolute_position: 0, ring_slot: 0, token_id: 4 };
    let (mut expected, mut before, mut h2d_bytes) = (None, None, 0);
    let started = std::time::Instant::now();
    for round in 0..rounds {
        for token in 0..ROUND {
            let drive = if token == 0 { Drive::Host(&[first]) } else { Drive::SelfAdvance };
            graph.replay(backend, &mut tiny.slab, drive).unwrap();
        }
        // The last token of a round is a function of all the others.
        let token = tiny.u32(tiny.arena.token);
        let logits = (round % LOGITS_EVERY == 0).then(|| tiny.logits());
        let (first_token, first_logits) = expected.get_or_insert((token, logits.clone()));
        assert_eq!(token, *first_token, "round {round}");
        assert!(logits.is_none() || logits == *first_logits, "logits of round {round}");
        if round + 1 == warm {
            before = Some((Process::now(), device_bytes(backend)));
            h2d_bytes = tiny.slab.counters().h2d_bytes;
        }
    }
    backend.synchronize().unwrap();
    let seconds = started.elapsed().as_secs_f64();

    let (before, device_before) = before.expect("the warm rounds are among the rounds");
    let after = Process::now();
    assert!(after.resident_bytes < before.resident_bytes + SLACK_BYTES, "{before:?} {after:?}");
    assert_eq!(after.open_files, before.open_files);
    assert_eq!(after.threads, before.threads);
    assert_eq!(device_bytes(backend), device_before, "free bytes of the device");
    assert_eq!(tiny.slab.used_bytes(), used_bytes);
    let uploaded = tiny.slab.counters().h2d_bytes - h2d_bytes;
    assert_eq!(uploaded, (rounds - warm) * 12, "12 bytes a round");
    let telemetry = graph.telemetry();
    assert_eq!(telemetry.replays, rounds * ROUND);
    format!(
        "{} replays in {seconds:.1} s, {} nodes each: resident {} KiB after {} rounds and {} KiB \
         at the end, {} files, {} threads, {} device bytes free, slab {used_bytes} bytes",
        telemetry.replays,
        telemetry.nodes,
        before.resident_bytes / 1024,
        warm,
        after.resident_bytes / 1024,
        after.open_files,
        after.threads,
        device_before,
    )
}
