//! What a layer does with its per-layer input, for one row: gate and projection in one launch, where the GPU has
//! clusters of 16.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Epilogue, Group, Kind, NodeId, Op, Product, Residual};

use super::schedule::{Abilities, Pass, Schedule, product_of};
use crate::kernels::per_layer::step::{MOST_CLUSTER_BLOCKS, Step};

pub const PASS: Pass = Pass {
    name: "per-layer-step",
    about: "decode: the per-layer gate and its projection in one launch, by a cluster of blocks",
    required: false,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        let Kind::Product(gate) = &group.kind else { continue };
        let Some((slice, residual, projection)) = gate_and_projection(schedule, gate) else { continue };
        if schedule.rows_of(&group) >= FEWEST_ROWS_APART {
            schedule.refuse(log, &group, "many rows: products that read the weights once are faster");
            continue;
        }
        match step(schedule, can, gate, projection) {
            Ok(_) => {
                let kind = Kind::PerLayerStep { gate: gate.clone(), slice, residual, projection };
                let nodes = [&group.nodes[..], &[projection]].concat();
                log.merge(&mut schedule.fused, kind, &nodes);
            }
            Err(why) => schedule.refuse(log, &group, why),
        }
    }
}

/// Rows of a decode from which gate and projection are products of their own: a cluster for each row would read all
/// weights again.
const FEWEST_ROWS_APART: u32 = 16;

/// Whether one row's launch of this product is a [`Step`]: several rows then norm as it does.
pub fn is_step_of_one_row(schedule: &Schedule, can: &Abilities, gate: &Product) -> bool {
    let parts = gate_and_projection(schedule, gate);
    can.per_layer_step && parts.is_some_and(|(_, _, projection)| step(schedule, can, gate, projection).is_ok())
}

/// The slice of a layer's input, the residual and the projection, if the product is a per-layer gate that nobody else
/// reads.
fn gate_and_projection(schedule: &Schedule, gate: &Product) -> Option<(NodeId, Residual, NodeId)> {
    let graph = schedule.graph();
    let [Epilogue { node: gelu, .. }, Epilogue { node: gated, operand: Some(slice) }] = gate.epilogue[..] else {
        return None;
    };
    let is_gate = graph.node(gelu).op == Op::Gelu && graph.node(gated).op == Op::Mul && gate.matmuls.len() == 1;
    let norm = gate.norm.filter(|norm| norm.next.is_none())?;
    let residual = norm.residual.filter(|residual| residual.branch.is_none() && residual.scale.is_none())?;
    let projection = schedule.fused.sole_user(gated)?;
    let reader: &Group = schedule.fused.group(projection);
    let plain = product_of(graph, reader)
        .is_some_and(|product| product.matmuls == [projection] && product.is_plain() && product.adapted.is_empty());
    (is_gate && plain).then_some((slice, residual, projection))
}

/// The kernel for it, or why there is none.
pub fn step(schedule: &Schedule, can: &Abilities, gate: &Product, projection: NodeId) -> Result<Step, &'static str> {
    let graph = schedule.graph();
    let weight_of = |node: NodeId| graph.node(node).op.weight().map(|weight| graph.weight(weight));
    let (Some(of_gate), Some(of_projection), Some(norm)) =
        (weight_of(gate.matmuls[0]), weight_of(projection), gate.norm)
    else {
        return Err("it has no residual before it");
    };
    let step = Step {
        gate: of_gate.dtype,
        projection: of_projection.dtype,
        width: of_gate.dim(0) as u32,
        inputs: of_gate.dim(1) as u32,
        cluster_size: can.cluster.min(MOST_CLUSTER_BLOCKS),
        epsilon: norm.eps,
    };
    if (of_projection.dim(0), of_projection.dim(1)) != (of_gate.dim(1), of_gate.dim(0)) {
        return Err("its projection does not lead back to the residual");
    }
    step.refusal().map_or(Ok(step), Err)
}
