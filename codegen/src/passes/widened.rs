//! Products of many rows over weights that a launch before them dequantises to bf16, into memory that other such
//! products use again.
//!
//! A product that dequantises weights itself does so once for every tile of rows, and multiplies more slowly meanwhile.
//! With enough rows, to dequantise all of them once ahead of the product is less work: the launch reads the planes and
//! writes bf16, at the memory's rate. Both ways give the same bits.
//!
//! Weights depend on no launch, so a matrix that is not too large is dequantised concurrently with the launches before
//! its product. Two buffers take turns: while a product reads one, the weights of the next are written to the other.
//! The memory is that of two such matrices at most, and of one that is too large for this, not of all.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Kind, NodeId};

use super::schedule::{Abilities, Pass, Schedule, product_of};
use super::warpgroups::{EVERY_PRODUCT, dense, products_of_many_rows};
use crate::kernels::planes::planes;
use crate::kernels::product::warpgroups::Source;
use crate::kernels::product::widen;

pub const PASS: Pass = Pass {
    name: "widened-weights",
    about: "prefill: weights dequantised to bf16 ahead of one product after another, where that is faster than in the product",
    required: false,
    asked_for: false,
    run,
};

/// Microseconds that a launch takes besides its bytes, and the share of the memory's rate that it reaches: measured
/// (docs/ledger.md).
const LAUNCH_MICROSECONDS: f64 = 2.0;
const BANDWIDTH_SHARE: f64 = 0.88;
/// The share of such a launch's time that the rule counts where it runs concurrently with others, which hide the rest:
/// estimated from what E4B gains by it on an H200. With 0.3 12B would dequantise more ahead, and lose 4 % at 512 rows
/// (docs/ledger.md).
const EXPOSED_SHARE: f64 = 0.6;
/// Bytes of a bf16 matrix up to which it is dequantised concurrently with other launches. E4B's gate and up have 100
/// MiB and gain by it; 12B and 31B, whose largest matrices have 112.5 MiB and more, gained nothing (docs/ledger.md), and
/// these would take twice their memory.
const MOST_CONCURRENT_BYTES: u64 = 112 << 20;
/// Fewer rows take what their weights' bytes take: planes are read once, and nothing else.
const LEAST_ROWS: u32 = 256;

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let mut groups = schedule.fused.ordered();
    let mut helpers: Vec<Group> = Vec::new();
    for (group, first) in products_of_many_rows(schedule) {
        if !is_faster(schedule, can, &group, first) {
            continue;
        }
        if let Err(why) = can.dequantises {
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

/// Whether so many values are dequantised concurrently with the launches before their product, not between these and
/// it.
pub fn runs_concurrently(values: u64) -> bool {
    values.saturating_mul(2) <= MOST_CONCURRENT_BYTES
}

/// Whether a product that dequantises its weights itself would be faster as two launches.
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
    let dequantising = LAUNCH_MICROSECONDS + bytes as f64 / (target.bandwidth * BANDWIDTH_SHARE) * 1e6;
    if widen::units(dtype, values / k, k).is_none() {
        return false;
    }
    let exposed = if runs_concurrently(values) { dequantising * EXPOSED_SHARE } else { dequantising };
    let (decoded, over_copy) = (microseconds(planes_of), microseconds(Source::Copy));
    decoded.zip(over_copy).is_some_and(|(decoded, over_copy)| over_copy + exposed < decoded)
}
