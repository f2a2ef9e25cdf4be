//! Fuses the per-layer inputs of all layers: the projection's norm, the table's row, their sum and three factors.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, PerLayerInputs};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "per-layer-inputs",
    about: "norm, table row, sum and factors of the per-layer inputs, for all layers at once",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let norms: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| matches!(node.op, Op::RmsNorm { .. })).map(|(id, _)| id).collect();
    for norm in norms {
        match pattern(fused, norm) {
            Some(Ok((kind, nodes))) => _ = log.merge(fused, Kind::PerLayerInputs(kind), &nodes),
            Some(Err(reason)) => log.refuse(fused.graph.full_name(norm), reason),
            None => {}
        }
    }
}

/// `None` where nothing of the pattern is there.
fn pattern(fused: &Fused, norm: NodeId) -> Option<Result<(PerLayerInputs, Vec<NodeId>), &'static str>> {
    let graph = &fused.graph;
    let Op::RmsNorm { weight, group, eps } = graph.node(norm).op else { return None };
    let scaled = graph.node(norm).inputs[0];
    let Op::Scale { factor: projected_scale } = graph.node(scaled).op else { return None };
    let projected = graph.node(scaled).inputs[0];
    let add = fused.sole_user(norm)?;
    if graph.node(add).op != Op::Add {
        return None;
    }
    let other = *graph.node(add).inputs.iter().find(|input| **input != norm)?;
    let (gather, row_scale) = match graph.node(other).op {
        Op::Scale { factor } => (graph.node(other).inputs[0], factor),
        _ => (other, 1.0),
    };
    let Op::Gather { table } = graph.node(gather).op else { return None };
    let Some(norm_weight) = weight else { return Some(Err("the norm has no weight")) };
    let row_is_read = other != gather && fused.sole_user(gather) != Some(other);
    if row_is_read || fused.sole_user(scaled) != Some(norm) || fused.sole_user(other) != Some(add) {
        return Some(Err("a part of it is read by others too"));
    }
    let (out, out_scale) = match fused.sole_user(add).map(|user| (user, graph.node(user).op)) {
        Some((user, Op::Scale { factor })) => (user, factor),
        _ => (add, 1.0),
    };
    let tokens = graph.node(gather).inputs[0];
    let kind = PerLayerInputs {
        projected,
        tokens,
        table,
        norm: norm_weight,
        width: group,
        eps,
        projected_scale,
        row_scale,
        out_scale,
    };
    Some(Ok((kind, vec![scaled, norm, gather, other, add, out])))
}
