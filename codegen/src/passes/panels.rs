//! Which gates and ups of several decoded rows leave int8 for the product behind them, in panels of eight rows as its tensor cores read them: a launch less.

use gemma4c_graph::{Group, Kind, NodeId, Product};

use super::forms::{is_unbounded, wanted};
use super::{Abilities, Schedule, product_of};
use crate::kernels::matvec::{self, Prologue};
use crate::kernels::outputs::Outputs;
use crate::kernels::rows::{self, Shape, SumOrder};

/// What a launch between two products costs, in cycles of [`Tiles::cycles`](rows::tiling::Tiles::cycles): whole groups of 32 outputs are coarser tasks, so that some SMs have more of them than others. On the H200 a step of 4 rows
/// takes 6 % less time with panels on E4B Q8_0 (3,700 cycles more by the rule), 8 % on 12B Q4_0 (1,000), 10 % on 12B Q8_0 (5,000); of 16 rows 1 % more on E4B Q8_0 (9,700), 6 and 4 % less on 12B.
const LAUNCH_CYCLES: f64 = 5500.0;
/// Rows from which the launch counts no more: with 64 and 128 a step takes between 3 % less and 5 % more.
const MOST_ROWS: u32 = 32;

/// Whether gate and up of several rows leave panels of int8: where both they and their one reader are products by tiles.
pub fn leaves_panels(schedule: &Schedule, can: &Abilities, group: &Group, product: &Product) -> bool {
    let Some(joined) = group.last().filter(|_| product.geglu && !can.exact && schedule.is_decoded_together(group))
    else {
        return false;
    };
    let Some(reader) = schedule.fused.sole_user(joined).map(|user| schedule.fused.group(user)) else { return false };
    let Some(next) = product_of(schedule.graph(), reader) else { return false };
    if next.input != joined || next.norm.is_some() || wanted(schedule, can, joined) != Outputs::INT8 {
        return false;
    }
    let rows = schedule.rows_of(group);
    let (Some(first), Some(second)) = (of_rows(schedule, product, rows), of_rows(schedule, &next, rows)) else {
        return false;
    };
    // Gate and up are not brought to tensor cores by it; their reader is: a launch less is worth more than what so few rows lose there.
    let second = rows::Product { arrives_in_panels: true, ..second };
    let leaving = rows::Product { leaves_panels: true, ..first.clone() };
    let tiles = |of: &rows::Product| match of.choose(&can.target).0 {
        Shape::Tiles(tiles) => Some(tiles.cycles(of, &can.target)),
        _ => None,
    };
    let (Some(without), Some(with), Some(_)) = (tiles(&first), tiles(&leaving), tiles(&second)) else { return false };
    let can_leave = leaving.choose(&can.target).0.can_leave_panels(first.one.outputs);
    can_leave && rows <= MOST_ROWS && with <= without + LAUNCH_CYCLES
}

/// Whether a value lies in panels of eight rows: gate and up of several rows that left int8.
pub fn lies_in_panels(schedule: &Schedule, value: NodeId) -> bool {
    let owner = schedule.fused.group(value);
    let joins = matches!(&owner.kind, Kind::Product(product) if product.geglu);
    joins && schedule.is_decoded_together(owner) && schedule.forms(value).int8
}

/// A product as far as its kernel is chosen by it.
fn of_rows(schedule: &Schedule, product: &Product, rows: u32) -> Option<rows::Product> {
    let graph = schedule.graph();
    let dtype = graph.weight(graph.node(product.matmuls[0]).op.weight()?).dtype;
    let outputs: u32 = product.matmuls.iter().map(|id| graph.node(*id).ty.width).sum();
    let k = graph.node(product.input).ty.width;
    let prologue = if product.norm.is_some() { Prologue::Norm } else { Prologue::Plain };
    let one = matvec::Product {
        geglu: product.geglu,
        unbounded: is_unbounded(graph, product.input),
        ..matvec::Product::new(dtype, outputs / if product.geglu { 2 } else { 1 }, k, prologue)
    };
    let order = schedule.sum_order(product.matmuls[0]);
    (order == SumOrder::Matvec).then_some(rows::Product::new(one, rows, order))
}
