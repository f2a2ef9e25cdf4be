//! Element-wise operations on a product's result become its epilogue: the softcap of the logits.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Epilogue, Kind, Product};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "epilogues",
    about: "element-wise operations on a product's result are applied before it is stored",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let matmuls: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| matches!(node.op, Op::MatMul { .. })).map(|(id, _)| id).collect();
    for matmul in matmuls.into_iter().filter(|id| fused.is_single(*id)).collect::<Vec<_>>() {
        let (mut nodes, mut epilogue) = (vec![matmul], Vec::new());
        let mut last = matmul;
        while let Some(user) = fused.sole_user(last) {
            match fused.graph.node(user).op {
                Op::Scale { .. } | Op::Gelu | Op::Softcap { .. } if fused.is_single(user) => {}
                Op::Add | Op::Mul => {
                    log.refuse(fused.graph.full_name(user), "its other operand may not be there before the product");
                    break;
                }
                _ => break,
            }
            epilogue.push(Epilogue { node: user, operand: None });
            nodes.push(user);
            last = user;
        }
        if !epilogue.is_empty() {
            let input = fused.graph.node(matmul).inputs[0];
            log.merge(fused, Kind::Product(Product { epilogue, ..Product::new(input, vec![matmul]) }), &nodes);
        }
    }
}
