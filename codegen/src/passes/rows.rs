//! A product of one row computes the norm before it, and rounds its activations, in every block. For several decoded
//! rows that would be several rows in every block, so it is a launch of its own: a helper that writes the quantised
//! rows, and each row's factor.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Graph, Group, Kind, Product};

use super::readers::is_unbounded;
use super::schedule::{Abilities, Pass, Schedule, product_of};
use crate::kernels::matvec::formats::format;

pub const PASS: Pass = Pass {
    name: "rows",
    about: "decode of several sequences: what a product does before it multiplies is a launch of its own",
    required: true,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact {
        return;
    }
    let mut groups = schedule.fused.ordered();
    let mut helpers: Vec<Group> = Vec::new();
    for group in &groups {
        let Some(product) = product_of(schedule.graph(), group) else { continue };
        let several = schedule.is_decoded_together(group);
        let is_prepared = several && !schedule.in_16_bits && !reads_activations_as_written(schedule, &product);
        // A row on its own takes its adapter with the product; rows that are prepared take the first halves there.
        if !product.adapted.is_empty() && !is_prepared && (several || schedule.in_16_bits) {
            helpers.push(Group::new(Kind::NarrowRows { of: product.matmuls[0] }, Vec::new()));
        }
        if is_prepared {
            schedule.mark(log, &group.nodes);
            helpers.push(Group::new(Kind::RowsPrologue { of: product.matmuls[0] }, Vec::new()));
        }
    }
    groups.extend(helpers);
    schedule.fused.regroup(groups);
}

/// Whether a product of decoded rows finds its activations as it multiplies them: floats by floats, or rounded by who
/// made them.
fn reads_activations_as_written(schedule: &Schedule, product: &Product) -> bool {
    let graph: &Graph = schedule.graph();
    let weight = graph.node(product.matmuls[0]).op.weight();
    let integer = weight.is_some_and(|weight| format(graph.weight(weight).dtype).integer);
    let rounded = !is_unbounded(graph, product.input) && schedule.forms(product.input).int8;
    product.norm.is_none() && (!integer || rounded)
}
