//! In which forms the readers of a value want it: what passes ask before they decide in which form it is written.
//!
//! Products of many rows take bf16 and nothing else. Products of one row take int8 where the producer has written it,
//! and quantise floats themselves where it has not, so that they are never a reason for a conversion.

use gemma4c_blocks::DType;
use gemma4c_graph::{Graph, Kind, NodeId, Op, Product};

use super::schedule::{Abilities, Schedule, multiplies_exactly, product_of};
use crate::kernels::matvec::formats::format;
use crate::kernels::outputs::Outputs;

/// Whether a value is the residual itself or an embedding: no norm's weights have damped its massive channels, which
/// would take the whole scale of an int8 group. Products of such a value quantise it themselves, with fine codes.
pub fn is_unbounded(graph: &Graph, node: NodeId) -> bool {
    let node = graph.node(node);
    match node.op {
        Op::Add | Op::Gather { .. } | Op::PlaceSoft | Op::Concat => true,
        Op::Scale { .. } | Op::MulWeight { .. } | Op::TakeAsked | Op::Columns { .. } => {
            is_unbounded(graph, node.inputs[0])
        }
        _ => false,
    }
}

/// The forms in which the readers of a node want it.
pub fn wanted_forms(schedule: &Schedule, can: &Abilities, node: NodeId) -> Outputs {
    let graph = schedule.graph();
    let unbounded = is_unbounded(graph, node);
    let dtype = |id: NodeId| graph.node(id).op.weight().map(|weight| graph.weight(weight).dtype);
    let mut all = Outputs::NONE;
    for user in schedule.fused.users(node) {
        let group = schedule.fused.group(*user);
        if group.computes(node) {
            continue;
        }
        let one_row = schedule.is_int8_row(group);
        let of_product = |dtype: Option<DType>| match (can.exact, one_row, dtype.is_some_and(|d| format(d).integer)) {
            (true, ..) => Outputs::FLOATS,
            (_, true, true) if !unbounded => Outputs::INT8,
            (_, true, _) => Outputs::FLOATS,
            (_, false, _) => Outputs::BF16,
        };
        all = all.and(match &group.kind {
            Kind::ExpertGateUp { weight, input, dense, .. }
                if *input == node || dense.as_ref().is_some_and(|dense| dense.product.input == node) =>
            {
                of_product(Some(graph.weight(*weight).dtype))
            }
            // One row's hidden values are rounded where they are read, those of several where they are computed.
            Kind::ExpertDown { .. } if one_row && !schedule.is_decoded_together(group) => Outputs::FLOATS,
            Kind::ExpertDown { weight, dense: Some(dense), .. } if dense.product.input == node => {
                of_product(Some(graph.weight(*weight).dtype))
            }
            Kind::ExpertDown { weight, input, .. } | Kind::ExpertProduct { weight, input, .. } if *input == node => {
                of_product(Some(graph.weight(*weight).dtype))
            }
            Kind::ExpertDown { .. } => Outputs::FLOATS,
            _ => match product_of(graph, group) {
                Some(product) if !one_row && multiplies_exactly(schedule, can, &product) => Outputs::FLOATS,
                Some(product) if product.inputs().any(|input| input == node) && !is_operand(&product, node) => {
                    of_product(dtype(product.matmuls[0]))
                }
                _ => Outputs::FLOATS,
            },
        });
    }
    if all == Outputs::NONE { Outputs::FLOATS } else { all }
}

fn is_operand(product: &Product, node: NodeId) -> bool {
    product.epilogue.iter().any(|epilogue| epilogue.operand == Some(node))
}
