//! The life of a sequence, case by case.

use kv_paged::{
    BlockId, Delta, GroupId, LayerGroup, PlanError, Planner, PlannerConfig, Request, SequenceId,
    Transfer,
};

const G: GroupId = GroupId(0);

fn planner_of(groups: Vec<LayerGroup>) -> Planner {
    let config = PlannerConfig::new(groups, 8, 64).and_then(|c| c.with_block_size(4)).unwrap();
    Planner::new(config)
}

/// One full group of `usable` blocks.
fn planner(usable: u32) -> Planner {
    planner_of(vec![LayerGroup::full(1, usable + 1)])
}

fn create(planner: &mut Planner, prompt: &[u32]) -> (SequenceId, u32) {
    let created = planner.create(&Request { prompt, max_tokens: 64, salt: 0 }).unwrap();
    (created.id, created.cached_tokens)
}

/// A sequence with these tokens computed.
fn computed(planner: &mut Planner, tokens: &[u32]) -> SequenceId {
    let (id, cached) = create(planner, tokens);
    planner.append(id, &tokens[cached as usize..]).unwrap();
    planner.commit(id, tokens.len() as u32 - cached).unwrap();
    id
}

fn blocks(planner: &Planner, id: SequenceId) -> Vec<u32> {
    planner.blocks(id, G).unwrap().map(|(_, block)| block.0).collect()
}

fn delta(planner: &mut Planner) -> Delta {
    let mut delta = Delta::new();
    planner.take_delta(&mut delta);
    delta
}

fn used(planner: &Planner) -> u32 {
    planner.pool(G).unwrap().used_blocks()
}

#[test]
fn a_step_uploads_only_what_changed() {
    let mut planner = planner(8);
    let (id, _) = create(&mut planner, &[]);
    assert!(delta(&mut planner).is_empty());
    planner.append(id, &[1, 2, 3]).unwrap();
    assert_eq!(delta(&mut planner).value_bytes(), 4);
    planner.append(id, &[4]).unwrap();
    assert!(delta(&mut planner).is_empty());
    planner.append(id, &[5]).unwrap();
    let second = delta(&mut planner);
    let runs: Vec<_> = second.runs().map(|run| (run.index, run.values.to_vec())).collect();
    assert_eq!(runs, [(1, vec![2])]);
}

#[test]
fn a_refused_append_says_what_is_missing_and_changes_nothing() {
    let mut planner = planner(3);
    let cached = computed(&mut planner, &[9, 9, 9, 9]);
    planner.free(cached).unwrap();
    let (id, _) = create(&mut planner, &[]);
    planner.append(id, &[1]).unwrap();
    let before = planner.clone();
    let refused = planner.append(id, &[0; 12]);
    assert_eq!(refused, Err(PlanError::OutOfBlocks { group: G, needed: 3, free: 1, evictable: 1 }));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "group 0: 3 blocks needed, 1 free and 1 evictable"
    );
    assert_eq!(planner, before);
    planner.append(id, &[0; 11]).unwrap();
}

#[test]
fn a_sequence_cannot_outgrow_its_maximum_or_the_context() {
    let mut planner = planner(20);
    let request = |max_tokens, prompt| Request { prompt, max_tokens, salt: 0 };
    let over = |len_tokens, more_tokens, max_tokens| PlanError::OverMaxContext {
        len_tokens,
        more_tokens,
        max_tokens,
    };
    assert_eq!(planner.create(&request(65, &[])), Err(over(0, 65, 64)));
    assert_eq!(planner.create(&request(2, &[1, 2, 3])), Err(over(0, 3, 2)));
    let id = planner.create(&request(5, &[])).unwrap().id;
    planner.append(id, &[1, 2, 3]).unwrap();
    assert_eq!(planner.append(id, &[4, 5, 6]), Err(over(3, 3, 5)));
    planner.append(id, &[4, 5]).unwrap();
}

#[test]
fn only_computed_full_blocks_are_shared_and_never_the_whole_prompt() {
    let mut planner = planner(20);
    let text: Vec<u32> = (0..12).collect();
    let (first, _) = create(&mut planner, &text);
    planner.append(first, &text).unwrap();
    assert_eq!(create(&mut planner, &text).1, 0, "nothing is computed yet");
    planner.commit(first, 7).unwrap();
    assert_eq!(create(&mut planner, &text).1, 4, "one block is full");
    planner.commit(first, 5).unwrap();
    assert_eq!(create(&mut planner, &text).1, 8, "the last token is left to compute");
    let longer: Vec<u32> = (0..13).collect();
    let (second, cached) = create(&mut planner, &longer);
    assert_eq!(cached, 12);
    assert_eq!(blocks(&planner, first), blocks(&planner, second));
    assert_eq!(used(&planner), 3);
}

#[test]
fn another_salt_shares_nothing() {
    let mut planner = planner(20);
    let text: Vec<u32> = (0..12).collect();
    computed(&mut planner, &text);
    let other = Request { prompt: &text, max_tokens: 64, salt: 1 };
    let created = planner.create(&other).unwrap();
    assert_eq!(created.cached_tokens, 0);
    planner.append(created.id, &text).unwrap();
    planner.commit(created.id, 12).unwrap();
    assert_eq!(planner.pool(G).unwrap().shared_blocks(), 0);
}

#[test]
fn two_that_compute_the_same_at_once_end_up_sharing() {
    let mut planner = planner(20);
    let text: Vec<u32> = (0..10).collect();
    let (a, _) = create(&mut planner, &text);
    let (b, _) = create(&mut planner, &text);
    for id in [a, b] {
        planner.append(id, &text).unwrap();
    }
    assert_eq!(used(&planner), 6);
    for id in [a, b] {
        planner.commit(id, 10).unwrap();
    }
    assert_eq!(used(&planner), 4, "two shared blocks and a partial one each");
    assert_eq!(blocks(&planner, a)[..2], blocks(&planner, b)[..2]);
    assert_eq!(planner.prefix_stats().deduplicated_blocks, 2);
}

#[test]
fn sixty_four_requests_with_a_common_prefix_share_it() {
    let groups = vec![LayerGroup::full(28, 4000)];
    let mut planner = Planner::new(PlannerConfig::new(groups, 64, 1024).unwrap());
    let prompt = |request: u32| (0..512).chain((0..40).map(move |i| 1000 * request + i));
    // All at once, in chunks of 128, which is the worst case.
    let ids: Vec<SequenceId> = (0..64)
        .map(|request| {
            let tokens: Vec<u32> = prompt(request).collect();
            planner.create(&Request { prompt: &tokens, max_tokens: 600, salt: 0 }).unwrap().id
        })
        .collect();
    for (request, &id) in (0..).zip(&ids) {
        for chunk in prompt(request).collect::<Vec<_>>().chunks(128) {
            planner.append(id, chunk).unwrap();
        }
        planner.commit(id, 552).unwrap();
    }
    // 512 tokens once, and 40 for each in three blocks.
    assert_eq!(used(&planner), 32 + 64 * 3);
    assert_eq!(planner.report().groups[0].saved_blocks, 63 * 32);
}

#[test]
fn the_least_recently_used_prefix_goes_first_and_its_end_before_its_start() {
    let mut planner = planner(4);
    let old = computed(&mut planner, &[1; 8]);
    let new = computed(&mut planner, &[2; 8]);
    planner.free(old).unwrap();
    planner.free(new).unwrap();
    let cached = |planner: &Planner, token| planner.cached_prefix_tokens(&[token; 9], 0);
    // Using it makes the old one the newer.
    let (again, hit) = create(&mut planner, &[1; 9]);
    assert_eq!(hit, 8);
    planner.free(again).unwrap();
    let (taker, _) = create(&mut planner, &[]);
    planner.append(taker, &[3]).unwrap();
    assert_eq!(cached(&planner, 2), 4, "its second block is gone");
    planner.append(taker, &[3; 7]).unwrap();
    assert_eq!((cached(&planner, 2), cached(&planner, 1)), (0, 8));
    assert_eq!(planner.prefix_stats().evicted_blocks, 2);
}

#[test]
fn what_comes_behind_a_block_that_the_cache_had_no_room_for_is_not_cached() {
    let config = PlannerConfig::new(vec![LayerGroup::full(1, 20)], 8, 64)
        .and_then(|c| c.with_block_size(4))
        .unwrap()
        .with_prefix_nodes(1);
    let mut planner = Planner::new(config);
    let other = computed(&mut planner, &[1; 4]);
    let id = computed(&mut planner, &[7; 8]);
    assert_eq!(planner.prefix_stats().uncached_blocks, 2);
    planner.free(other).unwrap();
    planner.drop_cached();
    // There is room now, but this block follows eight sevens, not nothing.
    planner.append(id, &[7; 4]).unwrap();
    planner.commit(id, 4).unwrap();
    assert_eq!(planner.cached_prefix_tokens(&[7; 16], 0), 0);
    // Going back to the gap closes it.
    planner.truncate(id, 0).unwrap();
    planner.append(id, &[7; 4]).unwrap();
    planner.commit(id, 4).unwrap();
    assert_eq!(planner.cached_prefix_tokens(&[7; 16], 0), 4);
}

#[test]
fn a_fork_takes_no_block_and_whoever_writes_first_copies_the_partial_one() {
    let mut planner = planner(20);
    let parent = computed(&mut planner, &[1, 2, 3, 4, 5, 6]);
    let child = planner.fork(parent).unwrap();
    assert_eq!(used(&planner), 2);
    delta(&mut planner);

    planner.append(parent, &[7]).unwrap();
    let (from, to) = (BlockId(2), BlockId(3));
    let copy = delta(&mut planner);
    assert_eq!(copy.transfers(), [Transfer::Copy { group: G, from, to }]);
    assert_eq!(copy.value_bytes(), 4);
    assert_eq!(blocks(&planner, parent), [1, 3]);
    assert_eq!(blocks(&planner, child), [1, 2]);

    planner.append(child, &[8]).unwrap();
    assert!(delta(&mut planner).is_empty(), "the child is alone on its block");
}

#[test]
fn a_fork_has_only_what_is_computed() {
    let mut planner = planner(20);
    let parent = computed(&mut planner, &[1, 2, 3]);
    planner.append(parent, &[4, 5]).unwrap();
    let child = planner.fork(parent).unwrap();
    assert_eq!(planner.tokens(child).unwrap(), [1, 2, 3]);
    assert_eq!(blocks(&planner, child), [1]);
}

#[test]
fn rejected_tokens_give_their_blocks_back() {
    let mut planner = planner(20);
    let id = computed(&mut planner, &[1, 2, 3]);
    planner.append(id, &[4, 5, 6, 7, 8, 9]).unwrap();
    planner.commit(id, 2).unwrap();
    planner.truncate(id, 5).unwrap();
    assert_eq!(used(&planner), 2);
    assert_eq!(planner.tokens(id).unwrap(), [1, 2, 3, 4, 5]);
    assert_eq!(
        planner.truncate(id, 6),
        Err(PlanError::TruncateBeyondEnd { to_tokens: 6, len_tokens: 5 })
    );
}

#[test]
fn writing_into_a_cached_block_makes_the_cache_forget_it() {
    let mut planner = planner(20);
    let id = computed(&mut planner, &[1, 2, 3, 4]);
    planner.truncate(id, 2).unwrap();
    assert_eq!(create(&mut planner, &[1, 2, 3, 4, 5]).1, 4, "it is as good as ever");
}

#[test]
fn writing_into_a_cached_block_that_nobody_else_uses_needs_no_copy() {
    let mut planner = planner(20);
    let id = computed(&mut planner, &[1, 2, 3, 4]);
    planner.truncate(id, 2).unwrap();
    planner.append(id, &[9]).unwrap();
    assert!(delta(&mut planner).transfers().is_empty());
    assert_eq!(create(&mut planner, &[1, 2, 3, 4, 5]).1, 0);
}

#[test]
fn a_window_keeps_its_sinks_and_its_end() {
    let mut planner = planner_of(vec![LayerGroup::sliding(1, 9, 8, 2)]);
    let (id, _) = create(&mut planner, &[]);
    for chunk in (0..40_u32).collect::<Vec<_>>().chunks(4) {
        planner.append(id, chunk).unwrap();
        planner.commit(id, 4).unwrap();
    }
    // Position 40 sees 33..=40 and the sinks.
    let logical: Vec<u32> = planner.blocks(id, G).unwrap().map(|(logical, _)| logical).collect();
    assert_eq!(logical, [0, 8, 9]);
    assert_eq!(used(&planner), 3);
    assert_eq!(
        planner.truncate(id, 38),
        Err(PlanError::TruncateBehindWindow { group: G, to_tokens: 38, min_tokens: 39 })
    );
    planner.truncate(id, 39).unwrap();
    planner.truncate(id, 3).unwrap();
}

#[test]
fn a_window_hit_needs_only_the_window() {
    let mut planner = planner_of(vec![LayerGroup::sliding(1, 12, 8, 0)]);
    let text: Vec<u32> = (0..33).collect();
    let first = computed(&mut planner, &text[..32]);
    planner.free(first).unwrap();
    // The whole text passed through: every block is cached, the oldest are evicted.
    let (taker, _) = create(&mut planner, &[]);
    planner.append(taker, &[9; 36]).unwrap();
    planner.free(taker).unwrap();
    let (id, cached) = create(&mut planner, &text);
    assert_eq!(cached, 32);
    assert_eq!(planner.blocks(id, G).unwrap().map(|(l, _)| l).collect::<Vec<_>>(), [6, 7]);
}

#[test]
fn a_window_hit_needs_the_sinks_too() {
    let mut planner = planner_of(vec![LayerGroup::sliding(1, 20, 4, 4)]);
    let text: Vec<u32> = (0..13).collect();
    let id = computed(&mut planner, &text[..12]);
    assert_eq!(planner.cached_prefix_tokens(&text, 0), 12);
    // The sink block is written anew; the rest of the window is still cached.
    planner.truncate(id, 2).unwrap();
    planner.append(id, &[99]).unwrap();
    assert_eq!(planner.pool(G).unwrap().evictable_blocks(), 2);
    assert_eq!(planner.cached_prefix_tokens(&text, 0), 0);
}

#[test]
fn layers_with_a_window_do_not_pay_for_full_ones() {
    let mut planner = planner_of(vec![LayerGroup::full(4, 17), LayerGroup::sliding(20, 17, 8, 0)]);
    let (id, _) = create(&mut planner, &[]);
    for position in 0..64 {
        planner.append(id, &[position]).unwrap();
        planner.commit(id, 1).unwrap();
    }
    let used: Vec<u32> = planner.report().groups.iter().map(|g| g.used_blocks).collect();
    assert_eq!(used, [16, 2]);
}

#[test]
fn swapped_out_and_in_again() {
    let mut planner = planner_of(vec![LayerGroup::full(1, 5).with_host_blocks(3)]);
    let id = computed(&mut planner, &[1, 2, 3, 4, 5, 6]);
    delta(&mut planner);
    planner.append(id, &[7]).unwrap();
    assert_eq!(
        planner.swap_out(id),
        Err(PlanError::Uncommitted { sequence: id, uncommitted_tokens: 1 })
    );
    planner.commit(id, 1).unwrap();
    assert_eq!(planner.swap_out(id), Ok(2));
    assert_eq!(delta(&mut planner).transfers().len(), 2);
    assert_eq!(used(&planner), 0);
    assert_eq!(planner.append(id, &[8]), Err(PlanError::SwappedOut { sequence: id }));
    // The full block is still cached, so only the partial one is copied in.
    assert_eq!(planner.swap_in(id), Ok(1));
    assert_eq!(planner.swap_in(id), Err(PlanError::NotSwappedOut { sequence: id }));
    planner.append(id, &[8]).unwrap();

    // With the cache gone both are copied, and the cache has the full one again.
    planner.commit(id, 1).unwrap();
    planner.swap_out(id).unwrap();
    planner.drop_cached();
    assert_eq!(planner.swap_in(id), Ok(2));
    assert_eq!(create(&mut planner, &[1, 2, 3, 4, 5]).1, 4);
}

#[test]
fn swapping_needs_room_on_both_sides() {
    let mut planner = planner_of(vec![LayerGroup::full(1, 5).with_host_blocks(3)]);
    let long = computed(&mut planner, &[1; 16]);
    assert_eq!(
        planner.swap_out(long),
        Err(PlanError::OutOfHostBlocks { group: G, needed: 4, free: 3 })
    );
    planner.truncate(long, 12).unwrap();
    planner.swap_out(long).unwrap();
    let (taker, _) = create(&mut planner, &[]);
    planner.append(taker, &[2; 8]).unwrap();
    let before = planner.clone();
    assert_eq!(
        planner.swap_in(long),
        Err(PlanError::OutOfBlocks { group: G, needed: 3, free: 0, evictable: 2 })
    );
    assert_eq!(planner, before);
    planner.free(long).unwrap();
    assert_eq!(planner.report().groups[0].host_used_blocks, 0);
}

#[test]
fn a_pool_grows_in_place() {
    let mut planner = planner(2);
    let id = computed(&mut planner, &[1; 8]);
    assert!(planner.append(id, &[1]).is_err());
    delta(&mut planner);
    planner.grow_pool(G, 5).unwrap();
    assert!(delta(&mut planner).is_empty());
    planner.append(id, &[1; 8]).unwrap();
    assert_eq!(blocks(&planner, id), [1, 2, 3, 4]);
    assert_eq!(planner.config().groups()[0].blocks, 5);
    assert!(matches!(
        planner.grow_pool(GroupId(1), 9),
        Err(PlanError::UnknownGroup { group: GroupId(1), groups: 1 })
    ));
}

#[test]
fn a_saved_sequence_is_restored_by_appending_and_committing_it() {
    let mut planner = planner(20);
    let id = computed(&mut planner, &[1, 2, 3, 4, 5, 6]);
    let saved: Vec<u32> = planner.tokens(id).unwrap().to_vec();
    let saved_blocks: Vec<u32> = planner.blocks(id, G).unwrap().map(|(l, _)| l).collect();

    let mut other = self::planner(20);
    let (id, cached) = create(&mut other, &saved);
    other.append(id, &saved[cached as usize..]).unwrap();
    // Here the engine copies the saved keys and values into `blocks`, by logical block.
    let to_fill: Vec<u32> = other.blocks(id, G).unwrap().map(|(l, _)| l).collect();
    assert_eq!(to_fill, saved_blocks);
    other.commit(id, saved.len() as u32 - cached).unwrap();
    assert_eq!(other.committed_tokens(id), Ok(6));
}

#[test]
fn the_report_counts_unused_slots_once() {
    let mut planner = planner(20);
    let a = computed(&mut planner, &[1, 2, 3, 4, 5]);
    planner.fork(a).unwrap();
    let report = planner.report();
    let group = report.groups[0];
    assert_eq!((group.used_blocks, group.shared_blocks, group.saved_blocks), (2, 2, 2));
    assert_eq!(group.unused_slots_tokens, 3);
    let sequence = planner.sequence_report(a, G).unwrap();
    assert_eq!((sequence.blocks, sequence.shared_blocks, sequence.unused_slots_tokens), (2, 2, 3));
    assert_eq!(
        report.to_string(),
        "2 sequences, 0 swapped out; prefix cache: 0 of 5 prompt tokens hit, 1 nodes, 0 blocks evicted\n\
         group 0: 20 blocks = 2 used (2 shared, 2 saved) + 0 cached + 18 free; 3 slots unused; host 0 of 0\n"
    );
}
