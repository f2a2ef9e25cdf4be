//! A norm whose readers are products of one row is computed by each of them: every block has the whole row anyway, and
//! a launch is dearer than the sum of its squares. The first product owns the norm and writes the residual; the others
//! recompute it.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Kind, NodeId, Norm, Product};

use super::schedule::{Abilities, Pass, Schedule, product_of};

pub const PASS: Pass = Pass {
    name: "absorb-norms",
    about: "decode: a product computes the norm before it itself",
    required: false,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        let Kind::Norm(norm) = group.kind else { continue };
        if !schedule.is_int8_row(&group) {
            continue;
        }
        match absorbers(schedule, can, &group, &norm) {
            Ok(products) => absorb(schedule, log, &group, norm, products),
            Err(why) => schedule.refuse(log, &group, why),
        }
    }
}

/// The products that read a norm's result, each with a node of its group; or why they cannot compute it.
fn absorbers(
    schedule: &Schedule,
    can: &Abilities,
    group: &Group,
    norm: &Norm,
) -> Result<Vec<(NodeId, Product)>, &'static str> {
    if can.exact {
        return Err("products of unrounded activations compute no norm");
    }
    let target = match (norm.next, norm.residual) {
        (Some((node, Some(_))), _) => node,
        (None, Some(residual)) => residual.sum,
        _ => return Err("it has no weights"),
    };
    let mut found: Vec<(NodeId, Product)> = Vec::new();
    for &user in schedule.fused.users(target) {
        let reader = schedule.fused.group(user);
        let product = product_of(schedule.graph(), reader).filter(|product| product.input == target);
        match product.filter(|_| schedule.is_int8_row(reader)) {
            Some(_) if found.iter().any(|(known, _)| reader.nodes.contains(known)) => {}
            Some(_) if schedule.is_asked(reader) != schedule.is_asked(group) => {
                return Err("its readers want other rows");
            }
            Some(product) => found.push((user, product)),
            // The residual itself is written to memory for whoever else reads it.
            None if norm.next.is_none() => {}
            None => return Err("its readers are not all products"),
        }
    }
    if found.is_empty() { Err("no product reads it") } else { Ok(found) }
}

fn absorb(schedule: &mut Schedule, log: &mut Log, group: &Group, norm: Norm, products: Vec<(NodeId, Product)>) {
    let mut owned = false;
    for (node, product) in products {
        let kind = Kind::Product(Product { norm: Some(norm), ..product });
        if owned {
            schedule.fused.recompute(node, kind, &group.nodes);
        } else {
            let nodes = [&group.nodes[..], &[node]].concat();
            if !log.merge(&mut schedule.fused, kind, &nodes) {
                return;
            }
            owned = true;
        }
    }
}
