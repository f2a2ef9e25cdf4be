//! Fuses what lies between two products: the norm of the update, the residual addition, the layer's scale and the next
//! norm.
//!
//! The pattern starts at an addition `residual + norm(x)`. If x is itself a sum of two normed branches (the dense and
//! the expert half of a mixture), their norms belong to it. So do a scale of the whole residual after the addition and
//! the first norm that reads the result. All other norms stay groups of their own.

use gemma4c_ops::{Op, WeightId};

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Branch, Kind, Norm, Residual};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "norms",
    about: "residual, the norms on both sides of it and the layer's scale as one",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let ids: Vec<NodeId> = fused.graph.iter().map(|(id, _)| id).collect();
    for id in &ids {
        match residual(fused, *id) {
            Some(Ok((norm, nodes))) => _ = log.merge(fused, Kind::Norm(norm), &nodes),
            Some(Err(reason)) => log.refuse(fused.graph.full_name(*id), reason),
            None => {}
        }
    }
    for id in ids {
        if let (Op::RmsNorm { weight, group, eps }, true) = (fused.graph.node(id).op, fused.is_single(id))
            && group == fused.graph.node(id).ty.width
        {
            let norm = Norm { input: fused.graph.node(id).inputs[0], residual: None, next: Some((id, weight)), eps };
            log.merge(fused, Kind::Norm(norm), &[id]);
        }
    }
}

/// The pattern around the addition `add`; `None` if it is no residual addition.
fn residual(fused: &Fused, add: NodeId) -> Option<Result<(Norm, Vec<NodeId>), &'static str>> {
    let graph = &fused.graph;
    let node = graph.node(add);
    if node.op != Op::Add || !fused.is_single(add) {
        return None;
    }
    let (before, update) = (node.inputs[0], node.inputs[1]);
    let (post, eps) = whole_norm(fused, update)?;
    // A sum of two normed branches: the update of a residual, not a residual addition.
    if whole_norm(fused, before).is_some() && fused.sole_user(before) == Some(add) {
        return None;
    }
    let Some(post) = post else { return Some(Err("the norm of what is added has no weight")) };
    if fused.sole_user(update) != Some(add) {
        return Some(Err("what is added is read by others too"));
    }
    let mut nodes = vec![update, add];
    let mut input = graph.node(update).inputs[0];
    let branch = branches(fused, input, update, eps);
    if let Some((x, branch_of, members)) = branch {
        input = x;
        nodes.extend(members);
        let scaled = layer_scale(fused, add);
        return Some(Ok(finish(fused, input, before, post, Some(branch_of), scaled, add, eps, nodes)));
    }
    let scaled = layer_scale(fused, add);
    Some(Ok(finish(fused, input, before, post, None, scaled, add, eps, nodes)))
}

#[allow(clippy::too_many_arguments)]
fn finish(
    fused: &Fused,
    input: NodeId,
    before: NodeId,
    post: WeightId,
    branch: Option<Branch>,
    scaled: Option<(NodeId, WeightId)>,
    add: NodeId,
    eps: f32,
    mut nodes: Vec<NodeId>,
) -> (Norm, Vec<NodeId>) {
    let sum = scaled.map_or(add, |(node, _)| node);
    nodes.extend(scaled.map(|(node, _)| node));
    let next = fused.users(sum).iter().copied().find_map(|user| {
        let (weight, its_eps) = whole_norm(fused, user)?;
        (weight.is_some() && its_eps == eps).then_some((user, weight))
    });
    nodes.extend(next.map(|(node, _)| node));
    let residual = Residual { before, post, branch, scale: scaled.map(|(_, weight)| weight), sum };
    (Norm { input, residual: Some(residual), next, eps }, nodes)
}

/// The weight and epsilon of a norm of whole rows that no group has yet.
fn whole_norm(fused: &Fused, id: NodeId) -> Option<(Option<WeightId>, f32)> {
    let node = fused.graph.node(id);
    match node.op {
        Op::RmsNorm { weight, group, eps } if group == node.ty.width && fused.is_single(id) => Some((weight, eps)),
        _ => None,
    }
}

/// A factor of one element for the whole residual, right after the addition.
fn layer_scale(fused: &Fused, add: NodeId) -> Option<(NodeId, WeightId)> {
    let user = fused.sole_user(add)?;
    match fused.graph.node(user).op {
        Op::MulWeight { weight } if fused.graph.weight(weight).dims == [1] && fused.is_single(user) => {
            Some((user, weight))
        }
        _ => None,
    }
}

/// `norm(x) + norm(other)`, where only the sum reads the norms and only `update` reads the sum.
fn branches(fused: &Fused, sum: NodeId, update: NodeId, eps: f32) -> Option<(NodeId, Branch, Vec<NodeId>)> {
    let node = fused.graph.node(sum);
    if node.op != Op::Add || !fused.is_single(sum) || fused.sole_user(sum) != Some(update) {
        return None;
    }
    let (a, b) = (node.inputs[0], node.inputs[1]);
    let (Some((Some(weight), a_eps)), Some((Some(other_weight), b_eps))) = (whole_norm(fused, a), whole_norm(fused, b))
    else {
        return None;
    };
    if a_eps != eps || b_eps != eps || fused.sole_user(a) != Some(sum) || fused.sole_user(b) != Some(sum) {
        return None;
    }
    let input = |id: NodeId| fused.graph.node(id).inputs[0];
    Some((input(a), Branch { weight, other: input(b), other_weight }, vec![a, b, sum]))
}
