//! Products of many rows over weights that a launch before them widens to bf16, into memory that other such products use again.
//!
//! A product that decodes weights on its way decodes each of them once for every tile of rows, and multiplies more slowly meanwhile. With enough rows, to widen all of them once is
//! less: the launch reads the planes and writes bf16, at the memory's rate. Both ways give the same bits.
//!
//! Weights depend on no launch, so a matrix that is not too large is widened beside the launches before its product. Two buffers take turns: while a product reads one, the weights of the
//! next are widened into the other. The memory is that of two such matrices at most, beside one that is too large for this, not of all.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Kind, NodeId};

use super::warpgroups::{EVERY_PRODUCT, dense, products_of_many_rows};
use super::{Abilities, Pass, Schedule, product_of};
use crate::kernels::planes::planes;
use crate::kernels::product::warpgroups::Source;
use crate::kernels::product::widen;

pub const PASS: Pass = Pass {
    name: "widened-weights",
    about: "prefill: weights widened to bf16 for one product after another, where that is faster than decoding them on the way",
    required: false,
    asked_for: false,
    run,
};

/// Microseconds that a launch takes besides its bytes, and how much of the memory's rate widening reaches: measured (BENCHMARKS.md).
const LAUNCH: f64 = 2.0;
const REACHED: f64 = 0.88;
/// The share of such a launch's time that the rule counts where it runs beside others, which hide the rest: estimated from what E4B gains by it on an H200. With 0.3 12B would widen more, and lose 4 % at 512 rows (BENCHMARKS.md).
const SHOWS: f64 = 0.6;
/// Bytes of a bf16 matrix up to which it is widened beside other launches. E4B's gate and up have 100 MiB and gain by it; 12B and 31B, whose largest matrices have 112.5 MiB and more, gained nothing (BENCHMARKS.md), and
/// these would take twice their memory.
const MOST_BESIDE: u64 = 112 << 20;
/// Fewer rows take what their weights' bytes take: planes are read once, and nothing else.
const LEAST_ROWS: u32 = 256;

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let mut groups = schedule.fused.ordered();
    let mut helpers: Vec<Group> = Vec::new();
    for (group, first) in products_of_many_rows(schedule) {
        if !is_faster(schedule, can, &group, first) {
            continue;
        }
        if let Err(why) = can.widens {
            if log.covered.is_empty() {
                log.refuse_group(vec![EVERY_PRODUCT.into()], why);
            }
            continue;
        }
        schedule.mark(log, &group.nodes);
        schedule.sources.insert(first, Source::Copy);
        helpers.push(Group::new(Kind::WidenWeights { of: first }, Vec::new()));
    }
    if !helpers.is_empty() {
        groups.extend(helpers);
        schedule.fused.regroup(groups);
    }
}

/// Whether so many values are widened beside the launches before their product, not between these and it.
pub fn runs_beside(values: u64) -> bool {
    values.saturating_mul(2) <= MOST_BESIDE
}

/// Whether a product that decodes its weights on the way would be made faster by two launches.
fn is_faster(schedule: &Schedule, can: &Abilities, group: &Group, first: NodeId) -> bool {
    let (Some(planes_of @ Source::Planes(dtype)), Some(product)) =
        (schedule.source(first), product_of(schedule.graph(), group))
    else {
        return false;
    };
    let (graph, rows, target) = (schedule.graph(), schedule.rows_of(group), &can.target);
    if rows < LEAST_ROWS {
        return false;
    }
    let weight = |id: &NodeId| graph.node(*id).op.weight().map(|weight| graph.weight(weight));
    let values: u64 = product.matmuls.iter().filter_map(weight).map(|weight| weight.dim(0) * weight.dim(1)).sum();
    let Some(k) = weight(&first).map(|weight| weight.dim(0)) else { return false };
    let microseconds = |source: Source| {
        let (kind, tile, stored) = dense(graph, &product, product.geglu, rows, source, target)?;
        Some(kind.microseconds(tile, rows, stored, k as u32, target))
    };
    let bytes: u64 = planes(dtype).iter().map(|plane| plane.total_bytes(values / k, k)).sum::<u64>() + values * 2;
    let widening = LAUNCH + bytes as f64 / (target.bandwidth * REACHED) * 1e6;
    if widen::units(dtype, values / k, k).is_none() {
        return false;
    }
    let shown = if runs_beside(values) { widening * SHOWS } else { widening };
    let (decoded, over_copy) = (microseconds(planes_of), microseconds(Source::Copy));
    decoded.zip(over_copy).is_some_and(|(decoded, over_copy)| over_copy + shown < decoded)
}
