//! Products of a decoded row that follow each other, each of which takes what the one before leaves, in one launch: from an attention's result to the next
//! attention's heads.
//!
//! A run begins with a product of int8 that lies in memory. It goes on through the norms and residuals between its products, and ends before whatever is not such a
//! product, at the latest with one whose results several readers take apart (queries, keys and values).

use gemma4c_blocks::DType;
use gemma4c_graph::passes::{Log, WHOLE_GRAPH};
use gemma4c_graph::{Group, Kind, NodeId, Norm, Product, Residual};

use super::forms::is_unbounded;
use super::{Abilities, Pass, Schedule, product_of};
use crate::kernels::run::list::{MOST_OPS, per_word};

pub const PASS: Pass = Pass {
    name: "persistent",
    about: "decode: products between two attentions in one launch, whose blocks exchange the vectors between them",
    required: false,
    asked_for: true,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if !schedule.decodes || schedule.rows > 1 || can.exact {
        return;
    }
    if !can.target.arch.has_tma() {
        log.refuse_group(vec![WHOLE_GRAPH.to_owned()], "the GPU has no bulk copies");
        return;
    }
    let mut parts: Vec<Group> = Vec::new();
    for group in schedule.fused.ordered() {
        if group.kind == Kind::View {
            continue;
        }
        if goes_on(schedule, &parts, &group) {
            let ends = matches!(&group.kind, Kind::Product(product) if product.norm.is_some() && !product.geglu);
            parts.push(group);
            if !ends {
                continue;
            }
            finish(schedule, log, std::mem::take(&mut parts));
            continue;
        }
        finish(schedule, log, std::mem::take(&mut parts));
        if starts(schedule, &group) {
            parts.push(group);
        }
    }
    finish(schedule, log, parts);
}

/// Merges the parts of a run, if they are worth it.
fn finish(schedule: &mut Schedule, log: &mut Log, mut parts: Vec<Group>) {
    let is_joined = |part: &Group| matches!(&part.kind, Kind::Product(product) if product.geglu);
    while parts.last().is_some_and(is_joined) {
        parts.pop();
    }
    let ops: usize = parts.iter().map(|part| if matches!(part.kind, Kind::PerLayerStep { .. }) { 2 } else { 1 }).sum();
    let Some(first) = parts.first().cloned() else { return };
    if ops < 3 || ops > MOST_OPS as usize {
        schedule.refuse(log, &first, "fewer than three products follow each other");
        return;
    }
    let nodes: Vec<NodeId> = parts.iter().flat_map(|part| part.nodes.clone()).collect();
    let residual = parts.iter().rev().find_map(residual_of).map(|residual| residual.sum);
    let left = |node: &NodeId| {
        let last = parts.last().is_some_and(|part| part.nodes.contains(node));
        last || residual == Some(*node)
    };
    let read = |node: &&NodeId| schedule.fused.users(**node).iter().any(|user| !nodes.contains(user));
    if let Some(hidden) = nodes.iter().filter(read).find(|node| !left(node)) {
        let why = format!("{} is read elsewhere", schedule.graph().full_name(*hidden));
        schedule.refuse(log, &first, why);
        return;
    }
    log.merge(&mut schedule.fused, Kind::Run { parts }, &nodes);
}

/// The residual that a part brings up to date.
pub fn residual_of(part: &Group) -> Option<Residual> {
    match &part.kind {
        Kind::Product(product) => product.norm.and_then(|norm| norm.residual),
        Kind::PerLayerStep { residual, .. } => Some(*residual),
        _ => None,
    }
}

/// The type of a product's matrices, if a run can have it.
fn type_of(schedule: &Schedule, matrix: NodeId) -> Option<DType> {
    let weight = schedule.graph().node(matrix).op.weight()?;
    let weight = schedule.graph().weight(weight);
    per_word(weight.dtype).filter(|_| weight.dim(0).is_multiple_of(32)).map(|_| weight.dtype)
}

fn starts(schedule: &Schedule, group: &Group) -> bool {
    let Some(product) = product_of(schedule.graph(), group) else { return false };
    let rounded = schedule.forms(product.input).int8 && !is_unbounded(schedule.graph(), product.input);
    let plain = product.norm.is_none() && product.is_plain() && product.matmuls.len() == 1;
    rounded && plain && group.recomputes.is_empty() && type_of(schedule, product.matmuls[0]).is_some()
}

/// Whether a group takes what the last part leaves, and nothing else that a run does not have.
fn goes_on(schedule: &Schedule, parts: &[Group], group: &Group) -> bool {
    let Some((first, last)) = parts.first().zip(parts.last()) else { return false };
    let graph = schedule.graph();
    let (Some(start), Some(result)) = (product_of(graph, first), last.last()) else { return false };
    let dtype = type_of(schedule, start.matmuls[0]);
    let width = graph.node(start.matmuls[0]).ty.width;
    let is_of_type = |matrix: &NodeId| type_of(schedule, *matrix) == dtype;
    let before = parts.iter().rev().find_map(residual_of).map(|residual| residual.sum);
    // The residual is the run's own, as wide as what is added to it.
    let adds = |norm: &Norm| {
        let residual = norm.residual.filter(|residual| residual.branch.is_none());
        let own = |residual: Residual| before.is_none_or(|sum| residual.before == sum);
        norm.input == result && graph.node(result).ty.width == width && residual.is_some_and(own)
    };
    let whole = |product: &Product| {
        let outputs = graph.node(product.matmuls[0]).ty.width;
        !product.geglu || outputs.is_multiple_of(32)
    };
    if !group.recomputes.is_empty() {
        return false;
    }
    match &group.kind {
        Kind::PerLayerStep { gate, projection, .. } => {
            gate.norm.as_ref().is_some_and(adds) && is_of_type(&gate.matmuls[0]) && is_of_type(projection)
        }
        _ => product_of(graph, group).is_some_and(|product| {
            let follows = match &product.norm {
                Some(norm) => adds(norm) && norm.next.is_some_and(|(_, weight)| weight.is_some()),
                None => product.input == result && is_joined(last) && product.matmuls.len() == 1,
            };
            follows && product.epilogue.is_empty() && whole(&product) && product.matmuls.iter().all(is_of_type)
        }),
    }
}

fn is_joined(part: &Group) -> bool {
    matches!(&part.kind, Kind::Product(product) if product.geglu)
}
