//! Decoded rows with 16-bit operands: all products of decoded rows, of one row and of 128, have one arithmetic
//! ([`gemm`](crate::kernels::gemm)), so that a row has the same bits in any batch.
//!
//! The pass decides it for the whole plan: norms are then launches of their own, which write 16 bits once for all
//! blocks, and experts multiply sorted rows, as in prefill. Many rows are faster with it, up to twice; fewer than 16
//! are faster with int8 activations (docs/ledger.md). So it is for plans of many sequences, of some where int8 tensor
//! cores cannot multiply the weights, and for whoever asks.

use gemma4c_graph::Kind;
use gemma4c_graph::passes::Log;

use super::schedule::{Abilities, Pass, Schedule, product_of};

pub const PASS: Pass = Pass {
    name: "gemm",
    about: "decode: all products have 16-bit operands, with one arithmetic for 1 to 128 rows; on for 64 sequences or more on Hopper, for 4 or more where weights are floats of 8 bits",
    required: false,
    asked_for: true,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact || schedule.soft_rows.is_some() {
        return;
    }
    schedule.in_16_bits = true;
    for group in schedule.fused.ordered() {
        let of_experts = matches!(group.kind, Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. });
        if schedule.is_one_row(&group) && (of_experts || product_of(schedule.graph(), &group).is_some()) {
            schedule.mark(log, &group.nodes);
        }
    }
}

/// Rows of a group of sorted pairs of an expert: of so many rows, each with `top` of `experts`. A tile of 8 reads
/// weights as fast as one of 16; an expert that more rows choose is read again for each group.
pub fn height(rows: u32, (experts, top): (u32, u32)) -> u32 {
    let pairs = (rows * top).div_ceil(experts.max(1));
    (2 * pairs).next_power_of_two().clamp(8, 64)
}
