//! What an adapter adds to a product becomes a part of the product: its two small matrices are read with the large one.
//!
//! It runs before the passes that join products, which find a product with its change where they look for a product
//! ([`product_at`]). Whether a kernel can do it is asked later.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, Pair, Product};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "adapters",
    about: "what an adapter adds to a product is a part of that product",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let is_wide = |id: &NodeId| matches!(fused.graph.node(*id).op, Op::Widen { .. });
    let wide: Vec<NodeId> = fused.graph.iter().map(|(id, _)| id).filter(is_wide).collect();
    for widen in wide {
        let [matmul, narrow] = fused.graph.node(widen).inputs[..] else { continue };
        let (of_matmul, of_narrow) = (fused.graph.node(matmul), fused.graph.node(narrow));
        let name = fused.graph.full_name(widen);
        if !matches!(of_matmul.op, Op::MatMul { .. }) {
            log.refuse(name, "another adapter changes the product before");
        } else if fused.users(matmul) != [widen]
            || fused.users(narrow) != [widen]
            || of_matmul.inputs != of_narrow.inputs
        {
            log.refuse(name, "a part of it is read by others too");
        } else {
            let adapted = vec![Some(Pair { narrow, widen })];
            let product = Product { adapted, ..Product::new(of_matmul.inputs[0], vec![matmul]) };
            log.merge(fused, Kind::Product(product), &[matmul, narrow, widen]);
        }
    }
}

/// The product by one matrix that a node is the result of, with what an adapter adds to it; nothing where the node is
/// anything else, or a part of something larger.
pub(super) fn product_at(fused: &Fused, result: NodeId) -> Option<Product> {
    let node = fused.graph.node(result);
    match &fused.group(result).kind {
        Kind::Single if matches!(node.op, Op::MatMul { .. }) => Some(Product::new(node.inputs[0], vec![result])),
        Kind::Product(product) if !product.adapted.is_empty() && product.results() == [result] => Some(product.clone()),
        _ => None,
    }
}
