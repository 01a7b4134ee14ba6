//! A server that keeps the caches of its requests in pages of a device it never sees.

use kv_paged::{
    DenseStrides, GroupId, LayerGroup, PlanError, Planner, PlannerConfig, Request, SequenceId,
};

fn main() -> Result<(), PlanError> {
    // 11 pages of 16 tokens besides the null page, for at most 4 requests of at most 96 tokens.
    let config = PlannerConfig::new(vec![LayerGroup::full(2, 12)], 4, 96)?;
    let mut planner = Planner::new(config);
    let system: Vec<u32> = (0..32).collect();
    let mut running: Vec<SequenceId> = Vec::new();
    for question in 0..3 {
        let prompt: Vec<u32> = system.iter().copied().chain([100 + question; 8]).collect();
        let created = planner.create(&Request { prompt: &prompt, max_tokens: 96, salt: 0 })?;
        let rest = &prompt[created.cached_tokens as usize..];
        planner.append(created.id, rest)?;
        planner.commit(created.id, rest.len() as u32)?;
        assert_eq!(
            created.cached_tokens,
            if question == 0 { 0 } else { 32 },
            "system prompt shared"
        );
        running.push(created.id);
    }

    // Decode until there is no page left.
    let mut steps = 0;
    let full = 'decoding: loop {
        for &id in &running {
            if let Err(error) = planner.append(id, &[7]).and_then(|()| planner.commit(id, 1)) {
                break 'decoding error;
            }
        }
        steps += 1;
    };
    assert!(matches!(full, PlanError::OutOfBlocks { group: GroupId(0), .. }), "{full}");

    // The kernels' table of the whole batch.
    let batch: Vec<_> = running.iter().copied().map(Some).collect();
    let mut table = vec![0_i32; 3 * 6];
    planner.write_dense(&batch, 6, DenseStrides { sequence: 6, group: 6 }, &mut table)?;
    assert_eq!(table[0], table[6], "one page, two requests");
    for id in running {
        planner.free(id)?;
    }
    println!("{steps} steps of 3 requests in 11 pages");
    Ok(())
}
