//! In which forms the readers of a value want it: what passes ask before they decide in which form it is written.
//!
//! Products of many rows take bf16 and nothing else. Products of one row take int8 where the producer has written it,
//! and quantise floats themselves where it has not, so that they are never a reason for a conversion.

use gemma4c_graph::{Graph, Group, Kind, NodeId, Op, Product, WeightId};

use super::schedule::{Abilities, Schedule, multiplies_exactly, product_of};
use crate::kernels::gemm::decode::is_scaled;
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

/// Whether a product of decoded rows takes a value in f16: none of its numbers is beyond that, and the weights' codes
/// become f16 with fewer instructions than bf16, and are rounded eight times finer.
pub fn takes_f16(schedule: &Schedule, can: &Abilities, group: &Group, input: NodeId, weight: Option<WeightId>) -> bool {
    let weight = weight.map(|weight| schedule.graph().weight(weight));
    let scaled = weight.is_some_and(|weight| is_scaled(weight.dtype, weight.dim(0) as u32));
    schedule.is_gemm(group) && can.bounded.contains(&input) && scaled
}

/// Whether a group is the narrow half of an adapter's pair, of a prompt's rows, which tensor cores multiply in bf16.
pub fn narrows_by_tiles(schedule: &Schedule, can: &Abilities, group: &Group) -> bool {
    let node = |group: &Group| schedule.graph().node(group.nodes[0]);
    let of_text = !can.exact && schedule.soft_rows.is_none() && !schedule.is_one_row(group);
    group.kind == Kind::Single
        && of_text
        && matches!(node(group).op, Op::Narrow { .. })
        && node(group).ty.width.is_multiple_of(16)
        && schedule.graph().node(node(group).inputs[0]).ty.width.is_multiple_of(32)
}

/// The first matrix of a product: the others have its type.
pub fn weight_of(graph: &Graph, product: &Product) -> Option<WeightId> {
    graph.node(product.matmuls[0]).op.weight()
}

/// The forms in which the readers of a node want it.
pub fn wanted_forms(schedule: &Schedule, can: &Abilities, node: NodeId) -> Outputs {
    let graph = schedule.graph();
    let unbounded = is_unbounded(graph, node);
    let mut all = Outputs::NONE;
    for user in schedule.fused.users(node) {
        let group = schedule.fused.group(*user);
        if group.computes(node) {
            continue;
        }
        let one_row = schedule.is_int8_row(group);
        let integer = |weight: WeightId| format(graph.weight(weight).dtype).integer;
        let of_product = |weight: Option<WeightId>| match (can.exact, one_row, weight.is_some_and(integer)) {
            (true, ..) => Outputs::FLOATS,
            _ if takes_f16(schedule, can, group, node, weight) => Outputs::F16,
            (_, true, true) if !unbounded => Outputs::INT8,
            (_, true, _) => Outputs::FLOATS,
            (_, false, _) => Outputs::BF16,
        };
        all = all.and(match &group.kind {
            Kind::ExpertGateUp { weight, input, dense, .. }
                if *input == node || dense.as_ref().is_some_and(|dense| dense.product.input == node) =>
            {
                of_product(Some(*weight))
            }
            // One row's hidden values are rounded where they are read, those of several where they are computed.
            Kind::ExpertDown { .. } if one_row && !schedule.is_decoded_together(group) => Outputs::FLOATS,
            Kind::ExpertDown { weight, dense: Some(dense), .. } if dense.product.input == node => {
                of_product(Some(*weight))
            }
            Kind::ExpertDown { weight, input, .. } | Kind::ExpertProduct { weight, input, .. } if *input == node => {
                of_product(Some(*weight))
            }
            Kind::ExpertDown { .. } => Outputs::FLOATS,
            Kind::Single if narrows_by_tiles(schedule, can, group) => Outputs::BF16,
            _ => match product_of(graph, group) {
                Some(product) if !one_row && multiplies_exactly(schedule, can, &product) => Outputs::FLOATS,
                Some(product) if product.inputs().any(|input| input == node) && !is_operand(&product, node) => {
                    of_product(weight_of(graph, &product))
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
