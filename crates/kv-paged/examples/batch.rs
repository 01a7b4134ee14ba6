//! Three requests on a cache that is too small for them, step by step.
//!
//! `cargo run -p kv-paged --example batch`

use kv_paged::{
    AdmissionPolicy, Delta, GroupId, LayerGroup, PlanError, Planner, PlannerConfig, Request,
    SequenceId, Transfer, Verdict,
};

fn main() -> Result<(), PlanError> {
    let groups = vec![LayerGroup::full(6, 16).with_host_blocks(16)];
    let mut planner = Planner::new(PlannerConfig::new(groups, 4, 128)?);
    let mut delta = Delta::new();

    let system: Vec<u32> = (0..64).collect();
    let prompt = |question: u32| {
        let mut tokens = system.clone();
        tokens.extend((0..20).map(|i| 1000 * question + i));
        tokens
    };
    let prompts = [prompt(1), prompt(2), prompt(3)];
    let requests = prompts.each_ref().map(|p| Request { prompt: p, max_tokens: 128, salt: 0 });

    println!("The first request computes the 64 tokens that all begin with.");
    let first = start(&mut planner, &requests[0])?;
    show(&mut planner, &mut delta);

    println!("\nThe others share them, so both fit:");
    let mut verdicts = Vec::new();
    planner.admit(&requests[1..], &AdmissionPolicy::default(), &mut verdicts);
    let mut running = vec![first];
    for (request, verdict) in requests[1..].iter().zip(&verdicts) {
        println!("  {verdict:?}");
        if matches!(verdict, Verdict::Admit { .. }) {
            running.push(start(&mut planner, request)?);
        }
    }
    show(&mut planner, &mut delta);

    println!("\nThe first is forked, and the fork goes its own way:");
    let fork = planner.fork(first)?;
    decode(&mut planner, fork, 1)?;
    show(&mut planner, &mut delta);

    println!("\nAll decode until the blocks run out; then the youngest is swapped out:");
    running.push(fork);
    'decoding: loop {
        for &id in &running {
            match decode(&mut planner, id, 1) {
                Ok(()) => {}
                Err(PlanError::OutOfBlocks { group, needed, free, evictable }) => {
                    println!("  {needed} needed, {free} free, {evictable} evictable");
                    for victim in planner.preemption(group, needed, Some(id))?.victims {
                        let moved = planner.swap_out(victim)?;
                        println!("  row {} swapped out, {moved} blocks", victim.row());
                    }
                    break 'decoding;
                }
                Err(other) => return Err(other),
            }
        }
    }
    show(&mut planner, &mut delta);

    println!("\nThe first ends, and there is room again:");
    planner.free(first)?;
    for id in planner.sequences().collect::<Vec<_>>() {
        if planner.is_swapped_out(id)? {
            println!("  row {} back with {} blocks copied", id.row(), planner.swap_in(id)?);
        }
    }
    show(&mut planner, &mut delta);
    Ok(())
}

/// Creates a sequence and "computes" its prompt.
fn start(planner: &mut Planner, request: &Request<'_>) -> Result<SequenceId, PlanError> {
    let created = planner.create(request)?;
    let rest = &request.prompt[created.cached_tokens as usize..];
    planner.append(created.id, rest)?;
    planner.commit(created.id, rest.len() as u32)?;
    Ok(created.id)
}

fn decode(planner: &mut Planner, id: SequenceId, token: u32) -> Result<(), PlanError> {
    planner.append(id, &[token])?;
    planner.commit(id, 1)
}

/// What the device would have to do, and what it looks like then.
fn show(planner: &mut Planner, delta: &mut Delta) {
    planner.take_delta(delta);
    for transfer in delta.transfers() {
        match transfer {
            Transfer::Copy { from, to, .. } => println!("  copy block {} to {}", from.0, to.0),
            Transfer::Out { from, to, .. } => println!("  block {} to host {}", from.0, to.0),
            Transfer::In { from, to, .. } => println!("  host {} to block {}", from.0, to.0),
        }
    }
    println!("  {} bytes of table in {} runs", delta.value_bytes(), delta.runs().len());
    for id in planner.sequences() {
        let Ok(blocks) = planner.blocks(id, GroupId(0)) else { continue };
        let blocks: Vec<u32> = blocks.map(|(_, block)| block.0).collect();
        println!("  row {}: {blocks:?}", id.row());
    }
    for line in planner.report().to_string().lines() {
        println!("  {line}");
    }
}
