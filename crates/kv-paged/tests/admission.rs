//! Who may start, and who makes room.

use kv_paged::{
    AdmissionPolicy, GroupId, LayerGroup, PlanError, Planner, PlannerConfig, Request, Reserve,
    SequenceId, Verdict,
};
use proptest::prelude::*;

const G: GroupId = GroupId(0);

fn planner_of(groups: Vec<LayerGroup>, sequences: u32) -> Planner {
    Planner::new(
        PlannerConfig::new(groups, sequences, 64).and_then(|c| c.with_block_size(4)).unwrap(),
    )
}

fn planner(usable: u32) -> Planner {
    planner_of(vec![LayerGroup::full(1, usable + 1)], 4)
}

fn request(prompt: &[u32], max_tokens: u32) -> Request<'_> {
    Request { prompt, max_tokens, salt: 0 }
}

fn admit(planner: &Planner, requests: &[Request<'_>], policy: &AdmissionPolicy) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let n = planner.admit(requests, policy, &mut verdicts);
    let admitted = verdicts.iter().filter(|v| matches!(v, Verdict::Admit { .. })).count();
    assert_eq!(n as usize, admitted);
    verdicts
}

fn start(planner: &mut Planner, tokens: &[u32], max_tokens: u32) -> SequenceId {
    let created = planner.create(&request(tokens, max_tokens)).unwrap();
    planner.append(created.id, &tokens[created.cached_tokens as usize..]).unwrap();
    planner.commit(created.id, tokens.len() as u32 - created.cached_tokens).unwrap();
    created.id
}

fn wait(needed_blocks: u32, available_blocks: u32) -> Verdict {
    Verdict::WaitForBlocks { group: G, needed_blocks, available_blocks }
}

const FITS: Verdict = Verdict::Admit { cached_tokens: 0 };

#[test]
fn requests_fit_in_order_until_one_does_not() {
    let planner = planner(10);
    let (small, large) = ([1; 8], [2; 36]);
    let requests = [request(&small, 64), request(&large, 64), request(&small, 64)];
    let mut policy = AdmissionPolicy::default();
    assert_eq!(admit(&planner, &requests, &policy), [FITS, wait(9, 8), Verdict::WaitForTurn]);
    policy.overtake = true;
    assert_eq!(admit(&planner, &requests, &policy), [FITS, wait(9, 8), FITS]);
}

#[test]
fn a_request_that_never_fits_blocks_nobody() {
    let planner = planner(5);
    let (small, large) = ([1; 8], [2; 24]);
    let requests =
        [request(&large, 64), request(&small, 65), request(&small, 7), request(&small, 8)];
    let verdicts = admit(&planner, &requests, &AdmissionPolicy::default());
    let over = |more_tokens, max_tokens| {
        Verdict::Never(PlanError::OverMaxContext { len_tokens: 0, more_tokens, max_tokens })
    };
    let no_blocks = PlanError::OutOfBlocks { group: G, needed: 6, free: 5, evictable: 0 };
    assert_eq!(verdicts, [Verdict::Never(no_blocks), over(65, 64), over(8, 7), FITS]);
}

#[test]
fn the_watermark_is_for_running_sequences() {
    let mut planner = planner(10);
    let policy = AdmissionPolicy { watermark_blocks: 2, ..Default::default() };
    let prompt = [1; 40];
    assert_eq!(admit(&planner, &[request(&prompt, 64)], &policy), [FITS]);
    start(&mut planner, &[2; 4], 64);
    assert_eq!(admit(&planner, &[request(&prompt[..32], 64)], &policy), [wait(8, 7)]);
    assert_eq!(admit(&planner, &[request(&prompt[..28], 64)], &policy), [FITS]);
}

#[test]
fn a_maximum_reservation_counts_what_is_to_come() {
    let mut planner = planner(10);
    start(&mut planner, &[2; 4], 24);
    let maximum = AdmissionPolicy { reserve: Reserve::Maximum, ..Default::default() };
    let requests = [request(&[1; 4], 16), request(&[1; 4], 4)];
    assert_eq!(
        admit(&planner, &requests, &maximum),
        [FITS, wait(1, 0)],
        "6 blocks for the running one, 4 for the first"
    );
    assert_eq!(admit(&planner, &requests, &AdmissionPolicy::default()), [FITS, FITS]);
}

#[test]
fn a_shared_prefix_in_use_costs_nothing_and_a_cached_one_its_blocks() {
    let mut planner = planner(6);
    let text: Vec<u32> = (0..17).collect();
    let running = start(&mut planner, &text[..16], 64);
    let policy = AdmissionPolicy::default();
    let hit = Verdict::Admit { cached_tokens: 16 };
    let requests = [request(&text, 64), request(&text, 64), request(&text, 64)];
    assert_eq!(admit(&planner, &requests, &policy), [hit.clone(), hit.clone(), wait(1, 0)],);
    planner.free(running).unwrap();
    assert_eq!(admit(&planner, &requests[..2], &policy), [hit, wait(5, 1)]);
}

#[test]
fn a_fork_will_copy_the_block_that_it_shares() {
    let mut planner = planner(10);
    let parent = start(&mut planner, &[1; 6], 8);
    let maximum = AdmissionPolicy { reserve: Reserve::Maximum, ..Default::default() };
    let large = [request(&[2; 4], 32)];
    assert_eq!(admit(&planner, &large, &maximum), [FITS]);
    planner.fork(parent).unwrap();
    assert_eq!(admit(&planner, &large, &maximum), [wait(8, 6)]);
}

#[test]
fn rows_run_out_too() {
    let mut planner = planner(60);
    for token in 0..3 {
        start(&mut planner, &[token; 4], 64);
    }
    let requests = [request(&[7], 64), request(&[8], 64)];
    let verdicts = admit(&planner, &requests, &AdmissionPolicy::default());
    assert_eq!(verdicts, [FITS, Verdict::WaitForSequence]);
}

#[test]
fn the_youngest_make_room_and_shared_blocks_do_not_count() {
    let mut planner = planner(10);
    let old = start(&mut planner, &[1; 16], 64);
    let fork = planner.fork(old).unwrap();
    let young = start(&mut planner, &[2; 24], 64);
    assert!(planner.append(old, &[1]).is_err());

    let preemption = planner.preemption(G, 1, Some(old)).unwrap();
    assert_eq!((preemption.victims.as_slice(), preemption.freed_blocks), (&[young][..], 6));
    let all = planner.preemption(G, 7, Some(old)).unwrap();
    assert_eq!((all.victims.as_slice(), all.freed_blocks), (&[young][..], 6));
    assert!(!all.victims.contains(&fork), "it would free nothing");

    planner.free(young).unwrap();
    planner.append(old, &[1]).unwrap();
    // Computing the victim again starts from what is still cached of it.
    assert_eq!(planner.create(&request(&[2; 24], 64)).unwrap().cached_tokens, 20);
}

#[test]
fn a_prefix_that_is_being_computed_is_found() {
    let mut planner = planner(20);
    let text: Vec<u32> = (0..20).collect();
    let id = planner.create(&request(&text, 64)).unwrap().id;
    planner.append(id, &text[..14]).unwrap();
    planner.commit(id, 5).unwrap();
    let live = planner.longest_live_prefix(&text, 0).unwrap();
    assert_eq!((live.id, live.common_tokens, live.committed_tokens), (id, 12, 4));
    assert_eq!(planner.longest_live_prefix(&text, 1), None);
    assert_eq!(planner.longest_live_prefix(&[5; 20], 0), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Whoever is admitted for its maximum reaches it, whatever the others do meanwhile.
    #[test]
    fn a_maximum_reservation_is_kept(
        requests in prop::collection::vec((0_u32..3, 0_u32..40, 1_u32..30), 1..30),
        blocks in 12_u32..80,
        window_blocks in 5_u32..24,
        window in 1_u32..16,
        sinks in 0_u32..8,
        chunk_tokens in 1_u32..9,
        overtake: bool,
    ) {
        let groups = vec![LayerGroup::full(1, blocks + 1), LayerGroup::sliding(1, window_blocks + 1, window, sinks)];
        let mut planner = planner_of(groups, 5);
        let policy = AdmissionPolicy { reserve: Reserve::Maximum, chunk_tokens, overtake, watermark_blocks: 0 };
        let text = |kind: u32, position: u32| if position < 10 { position } else { position + 50 * kind };
        let mut waiting: Vec<(u32, Vec<u32>, u32)> = requests
            .into_iter()
            .map(|(kind, len, more)| {
                let max = (len + more).min(64);
                (kind, (0..len).map(|p| text(kind, p)).collect(), max)
            })
            .collect();
        let mut running: Vec<(SequenceId, u32, u32)> = Vec::new();
        let mut verdicts = Vec::new();
        let mut round = 0_u32;
        while !waiting.is_empty() || !running.is_empty() {
            let requests: Vec<Request<'_>> =
                waiting.iter().map(|(_, prompt, max)| request(prompt, *max)).collect();
            planner.admit(&requests, &policy, &mut verdicts);
            for (request, verdict) in requests.iter().zip(&verdicts) {
                if matches!(verdict, Verdict::Admit { .. }) {
                    let kind = request.prompt.last().map_or(0, |t| t / 50);
                    running.push((planner.create(request).unwrap().id, kind, request.max_tokens));
                }
            }
            let mut verdicts = verdicts.iter();
            waiting.retain(|_| !matches!(verdicts.next(), Some(Verdict::Admit { .. } | Verdict::Never(_))));
            prop_assert!(waiting.is_empty() || !running.is_empty(), "nobody runs and nobody may");
            for &(id, kind, max) in &running {
                let len = planner.tokens(id).unwrap().len() as u32;
                let n = (1 + (round + id.row()) % chunk_tokens).min(max - len);
                let tokens: Vec<u32> = (len..len + n).map(|p| text(kind, p)).collect();
                let appended = planner.append(id, &tokens);
                prop_assert_eq!(appended, Ok(()));
            }
            for &(id, ..) in &running {
                let n = planner.tokens(id).unwrap().len() as u32 - planner.committed_tokens(id).unwrap();
                planner.commit(id, n).unwrap();
            }
            running.retain(|&(id, _, max)| {
                let goes_on = (planner.tokens(id).unwrap().len() as u32) < max;
                if !goes_on {
                    planner.free(id).unwrap();
                }
                goes_on
            });
            round += 1;
        }
    }
}
