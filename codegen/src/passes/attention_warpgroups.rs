//! Attention of many rows by warpgroups: where the GPU has wgmma, and heads and caches are what its kernel takes.
//! Elsewhere it is computed by warps.

use gemma4c_graph::Op;
use gemma4c_graph::passes::Log;

use super::schedule::{Abilities, Pass, Schedule, cache_of};
use super::warpgroups::NO_WARPGROUPS;

pub const PASS: Pass = Pass {
    name: "attention-warpgroups",
    about: "prefill: attention by warpgroups, all query heads of a key-value head together",
    required: false,
    asked_for: false,
    run,
};

/// What is refused where there are no warpgroups at all.
const EVERY_ATTENTION: &str = "all attention of many rows";

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact || schedule.soft_rows.is_some() {
        return;
    }
    for group in schedule.fused.ordered() {
        let Some(node) = group.last() else { continue };
        let is_attention = matches!(schedule.graph().node(node).op, Op::Attention { .. } | Op::AttentionAhead { .. });
        if !is_attention || schedule.is_one_row(&group) {
            continue;
        }
        if !can.target.arch.has_wgmma() {
            if log.covered.is_empty() {
                log.refuse_group(vec![EVERY_ATTENTION.into()], NO_WARPGROUPS);
            }
            schedule.notes.insert(node, NO_WARPGROUPS.to_owned());
            continue;
        }
        let Some((cache, heads)) = cache_of(schedule.graph(), node) else { continue };
        match can.attention(schedule.graph(), cache, heads, 1).fits_warpgroups() {
            Ok(()) => {
                schedule.mark(log, &group.nodes);
                schedule.by_warpgroups.insert(node);
            }
            Err(why) => schedule.refuse(log, &group, why),
        }
    }
}
