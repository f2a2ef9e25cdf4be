//! Which products compute what an adapter adds to them. A product of decoded rows does, where its kernels can; of all
//! others the change is two launches of its own, beside a product that is joined with its neighbours as ever.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Kind, NodeId, Op, Product, WeightId};

use super::readers::is_unbounded;
use super::schedule::{Abilities, Pass, Schedule};

pub const PASS: Pass = Pass {
    name: "adapters-apart",
    about: "what an adapter adds to a product that cannot compute it is a launch before and one after it",
    required: true,
    asked_for: false,
    run,
};

/// Numbers between the halves of a pair, at most: eight lanes have a row of its wide half, 16 bytes each.
const MOST_RANK: u64 = 64;

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let fits = |group: &Group| match &group.kind {
        Kind::Product(product) if !product.adapted.is_empty() => Some(refusal(schedule, can, group, product)),
        _ => None,
    };
    let found: Vec<Option<Option<&'static str>>> = schedule.fused.ordered().iter().map(fits).collect();
    // Each such launch clears what the one before it has sent.
    // Several rows must have the bits of one, so that they ask the same.
    let alone = !schedule.in_16_bits && found.iter().filter(|refusal| **refusal == Some(None)).count() == 1;
    let mut groups = Vec::new();
    for (group, refusal) in schedule.fused.ordered().into_iter().zip(found) {
        let why = refusal.and_then(|refusal| refusal.or(alone.then_some("no other launch would clear what it sends")));
        match (why, &group.kind) {
            (Some(why), Kind::Product(product)) => {
                groups.extend(apart(&group, product));
                schedule.refuse(log, &group, why);
            }
            _ => groups.push(group),
        }
    }
    schedule.fused.regroup(groups);
}

/// Why a product's kernel does not compute what adapters add to it; nothing where it does.
fn refusal(schedule: &Schedule, can: &Abilities, group: &Group, product: &Product) -> Option<&'static str> {
    let graph = schedule.graph();
    let halves = |narrow: NodeId, widen: NodeId| match (graph.node(narrow).op, graph.node(widen).op) {
        (Op::Narrow { weight: a, factor }, Op::Widen { weight: b }) => Some((a, b, factor)),
        _ => None,
    };
    let pairs = product.adapted.iter().flatten().map(|pair| halves(pair.narrow, pair.widen));
    let pairs: Vec<(WeightId, WeightId, f32)> = pairs.flatten().collect();
    let rank = |id: WeightId| (graph.weight(id).dim(1), graph.weight(id).dims.get(2).copied(), graph.weight(id).dtype);
    let is_like_first = |(a, b, factor): &(WeightId, WeightId, f32)| {
        rank(*a) == rank(pairs[0].0)
            && graph.weight(*b).dtype == graph.weight(pairs[0].1).dtype
            && *factor == pairs[0].2
    };
    let ranks = pairs.first().map_or(0, |(a, ..)| graph.weight(*a).dim(1));
    match () {
        () if !schedule.is_one_row(group) || schedule.soft_rows.is_some() => {
            Some("many rows: it is a launch of its own")
        }
        () if can.exact => Some("nothing may be rounded"),
        () if is_unbounded(graph, product.input) => Some("its activations have fine codes"),
        () if product.matmuls.len() > 3 => Some("more than three matrices"),
        () if !pairs.iter().all(is_like_first) => {
            Some("its matrices have adapters of different ranks, types or strengths")
        }
        () if ranks > MOST_RANK || !ranks.is_multiple_of(16) => Some("its rank is not 16, 32, 48 or 64"),
        () => None,
    }
}

/// The narrow halves, the product without a change, the changes, and what follows.
fn apart(group: &Group, product: &Product) -> Vec<Group> {
    let single = |id: NodeId| Group::new(Kind::Single, vec![id]);
    let pairs: Vec<(NodeId, NodeId)> = product.adapted.iter().flatten().map(|pair| (pair.narrow, pair.widen)).collect();
    let plain = match product.matmuls[..] {
        [matmul] => single(matmul),
        _ => Group::new(Kind::Product(Product::new(product.input, product.matmuls.clone())), product.matmuls.clone()),
    };
    let is_done = |id: &NodeId| product.matmuls.contains(id) || pairs.iter().any(|(a, b)| [a, b].contains(&id));
    let rest: Vec<NodeId> = group.nodes.iter().copied().filter(|id| !is_done(id)).collect();
    let rest = match product.results()[..] {
        [gate, up] if product.geglu => vec![Group::new(Kind::Geglu { gate, up }, rest)],
        _ => rest.into_iter().flat_map(|id| vec![single(id)]).collect(),
    };
    let narrow = pairs.iter().map(|(narrow, _)| single(*narrow));
    narrow.chain([plain]).chain(pairs.iter().map(|(_, widen)| single(*widen))).chain(rest).collect()
}
