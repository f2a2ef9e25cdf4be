//! Fuses the gate and up products with `gelu(gate) * up`: of a dense MLP, and of the chosen experts.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, Product};
use crate::passes::adapters::product_at;
use crate::passes::join_products::joined;
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass =
    Pass { name: "geglu", about: "gate, up, gelu and their product as one matrix product", run: Run::Fuse(run) };

fn run(fused: &mut Fused, log: &mut Log) {
    let gelus: Vec<NodeId> = fused.graph.iter().filter(|(_, node)| node.op == Op::Gelu).map(|(id, _)| id).collect();
    for gelu in gelus {
        let Some(mul) = fused.sole_user(gelu).filter(|user| fused.graph.node(*user).op == Op::Mul) else { continue };
        let gate = fused.graph.node(gelu).inputs[0];
        let Some(&up) = fused.graph.node(mul).inputs.iter().find(|input| **input != gelu) else { continue };
        match kind(fused, gate, up, mul) {
            Ok(Some(kind)) if fused.sole_user(gate) == Some(gelu) && fused.sole_user(up) == Some(mul) => {
                log.merge(fused, kind, &[gate, up, gelu, mul]);
            }
            Ok(Some(_)) => log.refuse(fused.graph.full_name(mul), "gate or up is read by others too"),
            Ok(None) => {}
            Err(reason) => log.refuse(fused.graph.full_name(mul), reason),
        }
    }
}

/// What gate and up form together; nothing, where they are not both products.
fn kind(fused: &Fused, gate: NodeId, up: NodeId, out: NodeId) -> Result<Option<Kind>, String> {
    let graph = &fused.graph;
    let (gate_node, up_node) = (graph.node(gate), graph.node(up));
    if let (Some(of_gate), Some(of_up)) = (product_at(fused, gate), product_at(fused, up)) {
        let weight = |of: &Product| graph.node(of.matmuls[0]).op.weight().map(|weight| graph.weight(weight));
        let (Some(a), Some(b)) = (weight(&of_gate), weight(&of_up)) else { return Ok(None) };
        if of_gate.input != of_up.input {
            return Err("gate and up read different values".into());
        }
        if a.dtype != b.dtype || a.dims != b.dims {
            return Err(format!("{} is {}, {} is {}", a.name, a.dtype, b.name, b.dtype));
        }
        return Ok(Some(Kind::Product(Product { geglu: true, ..joined(&[of_gate, of_up]) })));
    }
    match (gate_node.op, up_node.op) {
        (Op::ExpertMatMul { weight: a, first: start, len: half }, Op::ExpertMatMul { weight: b, first, len }) => {
            if gate_node.inputs != up_node.inputs {
                return Err("gate and up read different values".into());
            }
            if a != b || [start, first, len] != [0, half, half] {
                return Err("gate and up are not the two halves of one tensor".into());
            }
            Ok(Some(Kind::ExpertGateUp {
                weight: a,
                input: gate_node.inputs[0],
                routing: gate_node.inputs[1],
                out,
                dense: None,
            }))
        }
        _ => Ok(None),
    }
}
