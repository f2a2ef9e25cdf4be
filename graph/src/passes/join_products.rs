//! Products of the same activations with matrices of the same type become one: queries, keys and values take one
//! launch.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, Product};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "join-products",
    about: "products of the same rows by matrices of one type are one product of the stacked matrix",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let inputs: Vec<NodeId> = fused.graph.iter().map(|(id, _)| id).collect();
    for input in inputs {
        // A result of the graph has a place of its own.
        let alone = |id: &NodeId| {
            fused.is_single(*id) && !fused.graph.is_result(*id) && matches!(fused.graph.node(*id).op, Op::MatMul { .. })
        };
        let mut matmuls: Vec<NodeId> = fused.users(input).iter().copied().filter(alone).collect();
        while let Some(&first) = matmuls.first() {
            let dtype = |id: NodeId| fused.graph.node(id).op.weight().map(|w| fused.graph.weight(w).dtype);
            let (same, others): (Vec<NodeId>, Vec<NodeId>) = matmuls.iter().partition(|id| dtype(**id) == dtype(first));
            if let (Some(&other), Some(a), Some(b)) =
                (others.first(), dtype(first), others.first().and_then(|o| dtype(*o)))
            {
                log.refuse(
                    fused.graph.full_name(other),
                    format!("its matrix is {b}, that of {} is {a}", fused.graph.full_name(first)),
                );
            }
            if same.len() > 1 {
                let product = Product::new(input, same.clone());
                log.merge(fused, Kind::Product(product), &same);
            }
            matmuls = others;
        }
    }
}
