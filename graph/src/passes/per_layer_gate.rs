//! The per-layer gate: GELU and the multiplication with the layer's slice of the per-layer inputs become the product's
//! epilogue. The slice is read in place.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Epilogue, Kind, Product};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "per-layer-gate",
    about: "gelu and the product with the layer's slice follow the gate's matrix product",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let columns: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| matches!(node.op, Op::Columns { .. })).map(|(id, _)| id).collect();
    for slice in columns {
        let graph = &fused.graph;
        let Some(mul) = fused.sole_user(slice).filter(|user| graph.node(*user).op == Op::Mul) else { continue };
        let Some(&gelu) = graph.node(mul).inputs.iter().find(|input| **input != slice) else { continue };
        let gate = match (graph.node(gelu).op, graph.node(gelu).inputs.first()) {
            (Op::Gelu, Some(gate)) => *gate,
            _ => continue,
        };
        let Op::MatMul { .. } = graph.node(gate).op else { continue };
        if fused.sole_user(gate) != Some(gelu) || fused.sole_user(gelu) != Some(mul) {
            log.refuse(graph.full_name(mul), "the gate is read by others too");
            continue;
        }
        let epilogue = vec![Epilogue { node: gelu, operand: None }, Epilogue { node: mul, operand: Some(slice) }];
        let input = graph.node(gate).inputs[0];
        let kind = Kind::Product(Product { epilogue, ..Product::new(input, vec![gate]) });
        log.merge(fused, kind, &[gate, gelu, slice, mul]);
    }
}
