//! `lane bench --ops`: where the time of a step goes.

use decode_graph::OpTime;
use lane::Lane;
use serde::Serialize;

use super::{Args, Facts};

/// A row; the last two of a depth are the sum of the others and the step as one graph, in which
/// operations overlap where the device lets them.
#[derive(Serialize)]
pub(super) struct Row {
    model_filename: String,
    model_type: String,
    backends: String,
    gpu_info: String,
    n_depth: u32,
    op: &'static str,
    kernel: &'static str,
    launches: usize,
    /// Of all launches of a step.
    us: f64,
    /// Of the sum, 0 to 1.
    share: f64,
    /// Bytes of weights and live KV cache over the time.
    gb_per_s: f64,
    read_gb_per_s: f64,
    read_fraction: f64,
}

pub(super) fn measure(args: &Args, lane: &Lane, facts: &Facts) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &depth in &args.d {
        let (ops, step_seconds) = lane.time_ops(depth, args.r)?;
        let sum_seconds: f64 = ops.iter().map(|op| op.seconds).sum();
        let bytes: u64 = ops.iter().map(|op| op.bytes).sum();
        let launches = ops.iter().map(|op| op.launches).sum();
        let (backends, gpu_info) = (lane.backend()?.to_owned(), lane.device()?);
        let row = |op, kernel, launches, seconds: f64, bytes: u64| {
            let gb_per_s = bytes as f64 / seconds / 1e9;
            Row {
                model_filename: facts.model.clone(),
                model_type: facts.label.clone(),
                backends: backends.clone(),
                gpu_info: gpu_info.clone(),
                n_depth: depth,
                op,
                kernel,
                launches,
                us: seconds * 1e6,
                share: seconds / sum_seconds,
                gb_per_s,
                read_gb_per_s: facts.read_gb_per_s,
                read_fraction: gb_per_s / facts.read_gb_per_s,
            }
        };
        rows.extend(ops.iter().map(|&OpTime { what, kernel, launches, seconds, bytes }| {
            row(what, kernel.name(), launches, seconds, bytes)
        }));
        rows.push(row("sum", "", launches, sum_seconds, bytes));
        rows.push(row("step", "", launches, step_seconds, bytes));
    }
    Ok(rows)
}

pub(super) fn table(rows: &[Row], facts: &Facts) -> String {
    let mut out = format!(
        "{}, read bandwidth {:.1} GB/s\n\n\
         | depth | op | kernel | launches | µs | share | GB/s | of read |\n\
         |--:|---|---|--:|--:|--:|--:|--:|\n",
        facts.label, facts.read_gb_per_s
    );
    for row in rows {
        out += &format!(
            "| {} | {} | {} | {} | {:.1} | {:.1} % | {:.1} | {:.0} % |\n",
            row.n_depth,
            row.op,
            row.kernel,
            row.launches,
            row.us,
            100.0 * row.share,
            row.gb_per_s,
            100.0 * row.read_fraction,
        );
    }
    out
}
