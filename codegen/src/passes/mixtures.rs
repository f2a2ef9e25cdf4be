//! A mixture's router takes along the residual and the norms before it; for few decoded rows, its dense half runs in
//! the experts' launches. For many it does not: it is a product on tensor cores, in the order in which one row adds.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{DenseHalf, Group, Kind, NodeId, Norm, Product, WeightId};

use super::readers::is_unbounded;
use super::schedule::{Abilities, Pass, Schedule, product_of};
use crate::kernels::moe::gathered::MOST_DENSE_ROWS;
use crate::kernels::rows::SumOrder;

pub const PASS: Pass = Pass {
    name: "mixtures",
    about: "a mixture's residual, norms and router in one launch; decode: its dense half in the launches of the experts",
    required: false,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        if let Kind::Norm(norm) = &group.kind
            && let Some((kind, nodes)) = entry(schedule, &group, norm)
        {
            log.merge(&mut schedule.fused, kind, &nodes);
        }
    }
    for group in schedule.fused.ordered() {
        match &group.kind {
            Kind::Router(_) => {
                schedule.refuse(log, &group, "what comes before it is not a norm for it and its experts");
            }
            Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. } if schedule.is_int8_row(&group) && !can.exact => {
                merge_dense_half(schedule, log, &group);
            }
            _ => {}
        }
    }
}

/// A norm with the router that reads the same residual, and the norm of the experts' input.
fn entry(schedule: &Schedule, group: &Group, norm: &Norm) -> Option<(Kind, Vec<NodeId>)> {
    let residual = norm.residual.filter(|residual| residual.branch.is_none() && residual.scale.is_none())?;
    norm.next.filter(|(_, weight)| weight.is_some())?;
    let alike = |reader: &&Group| schedule.rows_of(reader) == schedule.rows_of(group);
    let readers = || schedule.fused.users(residual.sum).iter().map(|user| schedule.fused.group(*user)).filter(alike);
    let (router_group, router) = readers().find_map(|reader| match reader.kind {
        Kind::Router(router) if router.input == residual.sum && router.eps == norm.eps => Some((reader, router)),
        _ => None,
    })?;
    let (expert_group, expert_norm) = readers().find_map(|reader| match reader.kind {
        Kind::Norm(Norm { input, residual: None, next: Some((node, Some(weight))), eps })
            if input == residual.sum && eps == norm.eps =>
        {
            Some((reader, (node, weight)))
        }
        _ => None,
    })?;
    let nodes = [&group.nodes[..], &router_group.nodes[..], &expert_group.nodes[..]].concat();
    Some((Kind::MixtureEntry { norm: *norm, expert_norm, router }, nodes))
}

/// Merges the experts' products with those of the dense half of the same layer.
fn merge_dense_half(schedule: &mut Schedule, log: &mut Log, group: &Group) {
    let layer = |group: &Group| schedule.graph().node(group.anchor()).layer;
    let fits = |other: &Group| {
        let product = product_of(schedule.graph(), other)?;
        let same_layer = layer(other) == layer(group) && can_join_experts(schedule, group, other, &product);
        let nodes = [&other.nodes[..], &group.nodes[..]].concat();
        (same_layer && schedule.fused.can_merge(&nodes).is_ok()).then_some((other.last()?, product, nodes))
    };
    let Some((last, product, nodes)) = schedule.fused.ordered().iter().find_map(fits) else {
        schedule.refuse(log, group, "no dense half of its layer has its type and width");
        return;
    };
    if schedule.rows_of(group) > MOST_DENSE_ROWS {
        let order = if matches!(group.kind, Kind::ExpertDown { .. }) { SumOrder::Down } else { SumOrder::GateUp };
        schedule.orders.insert(product.matmuls[0], order);
        schedule.mark(log, &product.matmuls);
        return;
    }
    let half = Some(DenseHalf { product, out: last });
    let kind = match group.kind.clone() {
        Kind::ExpertGateUp { weight, input, routing, out, .. } => {
            Kind::ExpertGateUp { weight, input, routing, out, dense: half }
        }
        Kind::ExpertDown { weight, scale, input, routing, out, .. } => {
            Kind::ExpertDown { weight, scale, input, routing, out, dense: half }
        }
        other => other,
    };
    log.merge(&mut schedule.fused, kind, &nodes);
}

/// Whether a dense half's product is of the experts' type, and of the same width at the end where they meet.
fn can_join_experts(schedule: &Schedule, experts: &Group, dense: &Group, of: &Product) -> bool {
    let (weight, input, is_down): (WeightId, NodeId, bool) = match experts.kind {
        Kind::ExpertGateUp { weight, input, .. } => (weight, input, false),
        Kind::ExpertDown { weight, input, .. } => (weight, input, true),
        _ => return false,
    };
    // Gate and up take both inputs in one form: norms write whichever it is.
    let is_norm = |node| {
        let kind = &schedule.fused.group(node).kind;
        matches!(kind, Kind::Norm(_) | Kind::MixtureEntry { .. }) && !is_unbounded(schedule.graph(), node)
    };
    let graph = schedule.graph();
    let Some(matrix) = graph.node(of.matmuls[0]).op.weight() else { return false };
    let (experts_weight, matrix) = (graph.weight(weight), graph.weight(matrix));
    let same_shape = match is_down {
        true => of.matmuls.len() == 1 && matrix.dim(1) == experts_weight.dim(1) && matrix.dim(0).is_multiple_of(32),
        false => of.geglu && matrix.dim(0) == experts_weight.dim(0) && is_norm(input) && is_norm(of.input),
    };
    let alike = schedule.rows_of(experts) == schedule.rows_of(dense);
    alike
        && same_shape
        && is_down != of.geglu
        && of.epilogue.is_empty()
        && of.adapted.is_empty()
        && matrix.dtype == experts_weight.dtype
}
