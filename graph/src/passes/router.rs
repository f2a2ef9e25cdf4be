//! Fuses a mixture's router, from the residual to the chosen experts. All of it is f32.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, Router};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass =
    Pass { name: "router", about: "norm, scale, product and choice of a router as one", run: Run::Fuse(run) };

fn run(fused: &mut Fused, log: &mut Log) {
    let routes: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| matches!(node.op, Op::Route { .. })).map(|(id, _)| id).collect();
    for route in routes {
        match pattern(fused, route) {
            Some((router, nodes)) => _ = log.merge(fused, Kind::Router(router), &nodes),
            None => log.refuse(fused.graph.full_name(route), "its logits are not those of a scaled norm"),
        }
    }
}

fn pattern(fused: &Fused, route: NodeId) -> Option<(Router, Vec<NodeId>)> {
    let graph = &fused.graph;
    let before = |id: NodeId| -> Option<NodeId> {
        let input = *graph.node(id).inputs.first()?;
        (fused.sole_user(input) == Some(id) && fused.is_single(input)).then_some(input)
    };
    let Op::Route { top_k } = graph.node(route).op else { return None };
    let logits = before(route)?;
    let Op::MatMul { weight } = graph.node(logits).op else { return None };
    let scaled = before(logits)?;
    let Op::Scale { factor } = graph.node(scaled).op else { return None };
    let weighted = before(scaled)?;
    let Op::MulWeight { weight: scale } = graph.node(weighted).op else { return None };
    let normed = before(weighted)?;
    let Op::RmsNorm { weight: None, group, eps } = graph.node(normed).op else { return None };
    if group != graph.node(normed).ty.width {
        return None;
    }
    let input = graph.node(normed).inputs[0];
    Some((Router { input, scale, weight, factor, top_k, eps }, vec![normed, weighted, scaled, logits, route]))
}
