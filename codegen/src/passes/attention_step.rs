//! One row's way from raw heads to the mixed values in one launch; and where clusters merge its parts.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Heads, Kind, NodeId, Op};

use super::schedule::{Abilities, Pass, Schedule, cache_of};

pub const PASS: Pass = Pass {
    name: "attention-step",
    about: "decode: head norms, rotation, store, attention and the merge of its parts in one launch",
    required: false,
    asked_for: false,
    run,
};

pub const CLUSTERS: Pass = Pass {
    name: "clusters",
    about: "decode: parts of an attention are merged in the shared memory of a cluster of blocks, not in memory",
    required: false,
    asked_for: false,
    run: merge_in_clusters,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.verifies && schedule.decodes && schedule.rows > 1 {
        store_before(schedule);
    }
    for group in schedule.fused.ordered() {
        let Kind::Heads(heads) = group.kind else { continue };
        if !schedule.is_one_row(&group) || heads.q.is_none() {
            continue;
        }
        let reader = heads.q.and_then(|queries| schedule.fused.sole_user(queries.out));
        let attention = reader.filter(|user| {
            let alone = schedule.fused.is_single(*user);
            alone && matches!(schedule.graph().node(*user).op, Op::Attention { .. })
        });
        match attention {
            Some(attention) => {
                let nodes = [&group.nodes[..], &[attention]].concat();
                log.merge(&mut schedule.fused, Kind::AttentionStep { heads, attention }, &nodes);
            }
            None if reader.is_some_and(|user| matches!(schedule.graph().node(user).op, Op::AttentionBefore { .. })) => {
                schedule.refuse(log, &group, "a drafter's queries look from another position than they are rotated by");
            }
            None => schedule.refuse(log, &group, "its queries are not read by one attention alone"),
        }
    }
}

/// Takes keys and values out of the groups of heads: where rows may be of one sequence, all rows' keys are stored by a
/// launch of their own before a row looks at them. A row finds the same bits in the cache that it would have kept for
/// itself.
fn store_before(schedule: &mut Schedule) {
    let graph = schedule.graph();
    let part = |group: &Group| match group.kind {
        Kind::Heads(heads) if heads.q.is_some() => heads.kv.map(|kv| (heads, kv.out)),
        _ => None,
    };
    let mut pieces = Vec::new();
    for group in schedule.fused.ordered() {
        let Some((heads, append)) = part(&group) else {
            pieces.push(group);
            continue;
        };
        // The append, what it reads, and the norms before that.
        let mut of_keys = vec![append];
        for _ in 0..2 {
            let inputs = of_keys.iter().flat_map(|id| &graph.node(*id).inputs).copied();
            let inside: Vec<NodeId> = inputs.filter(|id| group.nodes.contains(id) && !of_keys.contains(id)).collect();
            of_keys.extend(inside);
        }
        let (keys, queries): (Vec<NodeId>, Vec<NodeId>) = group.nodes.iter().partition(|id| of_keys.contains(id));
        pieces.push(Group::new(Kind::Heads(Heads { q: None, ..heads }), keys));
        pieces.push(Group::new(Kind::Heads(Heads { kv: None, ..heads }), queries));
    }
    schedule.fused.regroup(pieces);
}

fn merge_in_clusters(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        let Kind::AttentionStep { attention, .. } = group.kind else { continue };
        let Some((cache, heads)) = cache_of(schedule.graph(), attention) else { continue };
        let layer = can.attention(schedule.graph(), cache, heads, can.cluster);
        match layer.peers() {
            1 if layer.splits() > 1 => {
                log.refuse_group(schedule.names(&group.nodes), "the GPU has none, or none so large")
            }
            1 => log.refuse_group(schedule.names(&group.nodes), "one block sees all"),
            _ => {
                schedule.mark(log, &group.nodes);
                schedule.clusters.insert(attention, can.cluster);
            }
        }
    }
}
