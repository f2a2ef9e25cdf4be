//! Which gates and ups of several decoded rows are written as int8 for the product after them, in tiles of eight rows
//! as its tensor cores read them (panels, in [`rows`]): a launch less.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Group, Kind, NodeId, Product};

use super::readers::{is_unbounded, wanted_forms};
use super::schedule::{Abilities, Pass, Schedule, product_of};
use crate::kernels::matvec::{self, Prologue};
use crate::kernels::outputs::Outputs;
use crate::kernels::rows::{self, Shape, SumOrder};

pub const PASS: Pass = Pass {
    name: "activation-tiles",
    about: "decode of several sequences: gate and up are written as int8 tiles that the next product's tensor cores read, without a launch between",
    required: false,
    asked_for: false,
    run,
};

/// What a launch between two products costs, in cycles of [`Tiles::cycles`](rows::tiling::Tiles::cycles): whole groups
/// of 32 outputs are coarser tasks, so that some SMs have more of them than others. On the H200 a step of 4 rows takes
/// 6 % less time with activation tiles on E4B Q8_0 (3,700 cycles more by the rule), 8 % on 12B Q4_0 (1,000), 10 % on
/// 12B Q8_0 (5,000); of 16 rows 1 % more on E4B Q8_0 (9,700), 6 and 4 % less on 12B.
const LAUNCH_CYCLES: f64 = 5500.0;
/// Rows from which the launch counts no more: with 64 and 128 a step takes between 3 % less and 5 % more.
const MOST_ROWS: u32 = 32;

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        let Kind::Product(product) = &group.kind else { continue };
        let gated = product.geglu && !can.exact && schedule.is_int8_row(&group) && schedule.is_decoded_together(&group);
        let Some(joined) = group.last().filter(|_| gated) else { continue };
        match writes_tiles(schedule, can, &group, joined, product) {
            Ok(()) => {
                schedule.mark(log, &group.nodes);
                schedule.in_tiles.insert(joined);
            }
            Err(why) => log.refuse_group(schedule.names(&group.nodes), why),
        }
    }
}

/// Whether gate and up, joined, are written as tiles of int8: where both they and their one reader are products by
/// tiles; or why not.
fn writes_tiles(
    schedule: &Schedule,
    can: &Abilities,
    group: &Group,
    joined: NodeId,
    product: &Product,
) -> Result<(), &'static str> {
    let reader = schedule.fused.sole_user(joined).map(|user| schedule.fused.group(user));
    let next = reader.and_then(|reader| product_of(schedule.graph(), reader));
    let next =
        next.filter(|next| next.input == joined && next.norm.is_none()).ok_or("its reader is not one product")?;
    if wanted_forms(schedule, can, joined) != Outputs::INT8 {
        return Err("its reader takes no int8");
    }
    let rows = schedule.rows_of(group);
    let of = |product| of_rows(schedule, product, rows).ok_or("its sums are in the order of another kernel");
    let (first, second) = (of(product)?, of(&next)?);
    // Gate and up are not brought to tensor cores by it; their reader is: a launch less is worth more than what so few
    // rows lose there.
    let second = rows::Product { arrives_in_panels: true, ..second };
    let writing = rows::Product { leaves_panels: true, ..first.clone() };
    let cycles = |of: &rows::Product| match of.choose(&can.target).0 {
        Shape::Tiles(tiles) => Some(tiles.cycles(of, &can.target)),
        _ => None,
    };
    let (Some(without), Some(with), Some(_)) = (cycles(&first), cycles(&writing), cycles(&second)) else {
        return Err("it or its reader is no product by tiles");
    };
    if !writing.choose(&can.target).0.can_leave_panels(first.one.outputs) {
        return Err("its outputs are no whole tiles");
    }
    let pays = rows <= MOST_ROWS && with <= without + LAUNCH_CYCLES;
    if pays { Ok(()) } else { Err("a launch that quantises costs less") }
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
