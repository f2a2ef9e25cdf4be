//! bf16 copies of the weights for the products of many rows by warpgroups, where memory has room: their products
//! dequantise nothing then.

use gemma4c_graph::Kind;
use gemma4c_graph::passes::Log;

use super::schedule::{Abilities, Pass, Schedule};
use super::warpgroups::{EVERY_PRODUCT, NO_FIT, fits, products_of_many_rows};
use crate::kernels::product::warpgroups::Source;

pub const PASS: Pass = Pass {
    name: "bf16-copies",
    about: "prefill: bf16 copies of the weights for the products by warpgroups, where memory allows",
    required: false,
    asked_for: true,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact {
        return;
    }
    for (group, first) in products_of_many_rows(schedule) {
        let of_experts = matches!(group.kind, Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. });
        let room = if of_experts { can.copies_of_experts } else { can.copies };
        match room.and_then(|()| fits(schedule, can, &group, Source::Copy)) {
            Ok(()) => {
                schedule.mark(log, &group.nodes);
                schedule.sources.insert(first, Source::Copy);
            }
            Err(why) if why == NO_FIT => schedule.refuse(log, &group, why),
            Err(why) => {
                // One refusal for all; where no product has them, experts are not another.
                let all = if of_experts && can.copies.is_ok() { "all experts of many rows" } else { EVERY_PRODUCT };
                if !log.covered.iter().any(|known| known == all) {
                    log.refuse_group(vec![all.into()], why);
                }
            }
        }
    }
}
