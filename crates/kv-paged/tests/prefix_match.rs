//! The prefix cache against a list of everything that was ever computed.

use kv_paged::{LayerGroup, Planner, PlannerConfig, Request, SequenceId};
use proptest::prelude::*;
use std::collections::HashSet;

const BLOCK_SIZE: usize = 4;

proptest! {
    /// Nothing is evicted from a pool that is large enough, so a match is as long as the longest
    /// common prefix of full blocks with anything computed before, window or not.
    #[test]
    fn a_match_is_the_longest_there_is(
        requests in prop::collection::vec(
            (prop::collection::vec(0_u32..2, 0..30), 0_u64..2, prop::bool::ANY), 1..40),
        window in 1_u32..12,
        sinks in 0_u32..10,
    ) {
        let groups = vec![LayerGroup::full(1, 2000), LayerGroup::sliding(1, 2000, window, sinks)];
        let config = PlannerConfig::new(groups, 64, 64)
            .and_then(|config| config.with_block_size(BLOCK_SIZE as u32))
            .unwrap();
        let mut planner = Planner::new(config);
        let mut computed: HashSet<(u64, Vec<u32>)> = HashSet::new();
        let mut live: Vec<SequenceId> = Vec::new();
        for (prompt, salt, end_one) in requests {
            let mut expected = 0;
            while expected + BLOCK_SIZE < prompt.len()
                && computed.contains(&(salt, prompt[..expected + BLOCK_SIZE].to_vec()))
            {
                expected += BLOCK_SIZE;
            }
            let created = planner.create(&Request { prompt: &prompt, max_tokens: 64, salt }).unwrap();
            prop_assert_eq!(created.cached_tokens as usize, expected);
            planner.append(created.id, &prompt[expected..]).unwrap();
            planner.commit(created.id, (prompt.len() - expected) as u32).unwrap();
            for full in (BLOCK_SIZE..=prompt.len()).step_by(BLOCK_SIZE) {
                computed.insert((salt, prompt[..full].to_vec()));
            }
            live.push(created.id);
            if end_one {
                let id = live.remove(prompt.len() % live.len());
                planner.free(id).unwrap();
            }
        }
        // As many blocks as there are different prefixes: everything that can be shared is.
        prop_assert_eq!(planner.report().prefix_nodes as usize, computed.len());
    }
}
