//! Products of the same activations with matrices of the same type become one: queries, keys and values take one
//! launch.

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Kind, Product};
use crate::passes::adapters::product_at;
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
        let results = fused.users(input).iter().filter_map(|user| fused.group(*user).last());
        let alone = |result: NodeId| product_at(fused, result).filter(|_| !fused.graph.is_result(result));
        let mut products: Vec<Product> = Vec::new();
        for product in results.filter_map(alone).filter(|product| product.input == input) {
            // Both halves of what an adapter adds are users, too.
            if !products.contains(&product) {
                products.push(product);
            }
        }
        while let Some(first) = products.first() {
            let weight = |of: &Product| fused.graph.node(of.matmuls[0]).op.weight();
            let dtype = |of: &Product| weight(of).map(|weight| fused.graph.weight(weight).dtype);
            let name = |of: &Product| fused.graph.full_name(of.matmuls[0]);
            let of_first = dtype(first);
            let (same, others): (Vec<Product>, Vec<Product>) =
                products.iter().cloned().partition(|of| dtype(of) == of_first);
            if let Some(other) = others.first()
                && let (Some(a), Some(b)) = (of_first, dtype(other))
            {
                log.refuse(name(other), format!("its matrix is {b}, that of {} is {a}", name(first)));
            }
            if same.len() > 1 {
                let nodes: Vec<NodeId> = same.iter().flat_map(|of| of.matmuls.clone()).collect();
                log.merge(fused, Kind::Product(joined(&same)), &nodes);
            }
            products = others;
        }
    }
}

/// Products of one value, side by side.
pub(super) fn joined(products: &[Product]) -> Product {
    let matmuls = products.iter().flat_map(|of| of.matmuls.clone()).collect();
    let is_adapted = products.iter().any(|of| !of.adapted.is_empty());
    let of_each = products.iter().map(|of| of.adapted.first().copied().flatten());
    let adapted = if is_adapted { of_each.collect() } else { Vec::new() };
    Product { adapted, ..Product::new(products[0].input, matmuls) }
}
