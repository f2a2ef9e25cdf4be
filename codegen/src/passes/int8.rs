//! Counts the products of one row whose activations are rounded to 8 bits. Whether any are is the caller's choice,
//! which all other passes follow ([`Abilities::exact`]); of each product its weights' type decides.

use gemma4c_blocks::DType;
use gemma4c_graph::passes::Log;
use gemma4c_graph::{Kind, NodeId};

use super::schedule::{Abilities, Pass, Schedule, product_of};
use crate::kernels::matvec::formats::format;

pub const PASS: Pass = Pass {
    name: "int8",
    about: "a row's products with 8-bit activations, over repacked weights; without it every product, prefill's too, is in f32 from the file's blocks",
    required: false,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, _: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        if !schedule.is_int8_row(&group) {
            continue;
        }
        let all = &group.nodes;
        match &group.kind {
            Kind::PerLayerStep { projection, .. } => {
                count(schedule, log, &all[..all.len() - 1]);
                count(schedule, log, &[*projection]);
            }
            Kind::ExpertGateUp { dense, .. } | Kind::ExpertDown { dense, .. } => {
                let of_dense = |id: &NodeId| {
                    let matmuls = dense.as_ref().map_or(&[][..], |dense| &dense.product.matmuls);
                    matmuls.contains(id) || dense.as_ref().is_some_and(|dense| dense.out == *id)
                };
                let (dense, experts): (Vec<NodeId>, Vec<NodeId>) = all.iter().partition(|id| of_dense(id));
                count(schedule, log, &experts);
                count(schedule, log, &dense);
            }
            _ if product_of(schedule.graph(), &group).is_some() => count(schedule, log, all),
            _ => {}
        }
    }
}

/// Counts the product among these nodes, or says why its activations are not rounded.
fn count(schedule: &Schedule, log: &mut Log, nodes: &[NodeId]) {
    let graph = schedule.graph();
    let is_product = |op: &str| op == "matmul" || op == "expert_matmul";
    let matrix = nodes.iter().map(|id| graph.node(*id)).find(|node| is_product(node.op.name()));
    let dtype: Option<DType> = matrix.and_then(|node| node.op.weight()).map(|weight| graph.weight(weight).dtype);
    match dtype.map(|dtype| format(dtype).integer) {
        Some(true) => schedule.mark(log, nodes),
        Some(false) => log.refuse_group(schedule.names(nodes), "its weights are floats: so are a row's activations"),
        None => {}
    }
}
