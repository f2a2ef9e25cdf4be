//! The passes that ask what a GPU's kernels can do. They follow the graph's own passes in one list; after them a group
//! is a launch.
//!
//! ```text
//! graph passes (no GPU) ──► gemm ──► adapters-apart ──► mixtures ──► absorb-norms ──► per-layer-step ──► attention-step ──► clusters ──► int8 ──► warpgroups
//!                           ──► attention-warpgroups ──► bf16-copies ──► towers ──► cut ──► activation-tiles ──► forms ──► rows
//!                           ──► widened-weights
//! ```
//!
//! All but four merge groups or mark them, and can be switched off. `adapters-apart` and `cut` take apart what no kernel
//! computes in one launch, `forms` decides the form of every value in memory, and `rows` gives products of several decoded rows a
//! launch before them: without these there is no program. No pass launches anything, allocates anything or knows an
//! address.
//!
//! A pass is a file here and a line in [`PASSES`]. What a pass decides is written in the [`Schedule`], where later
//! passes and the lowering read it.

mod absorb_norms;
mod activation_tiles;
mod adapters;
mod attention_step;
mod attention_warpgroups;
pub mod copies;
mod cut;
pub mod forms;
pub mod gemm;
mod int8;
mod mixtures;
pub mod per_layer_step;
pub mod readers;
pub mod rows;
mod schedule;
mod towers;
pub mod warpgroups;
pub mod widened;

use gemma4c_graph::Fused;
use gemma4c_graph::passes::{self, Log, Report};

pub use readers::{narrows_by_tiles, takes_f16, weight_of};
pub use schedule::{Abilities, Pass, PhaseRows, Schedule, cache_of, experts_of, multiplies_exactly, product_of};

/// In the order they run, after [`gemma4c_graph::passes::PASSES`].
pub static PASSES: &[Pass] = &[
    gemm::PASS,
    adapters::PASS,
    mixtures::PASS,
    absorb_norms::PASS,
    per_layer_step::PASS,
    attention_step::PASS,
    attention_step::CLUSTERS,
    int8::PASS,
    warpgroups::PASS,
    attention_warpgroups::PASS,
    copies::PASS,
    towers::PASS,
    cut::PASS,
    activation_tiles::PASS,
    forms::PASS,
    rows::PASS,
    widened::PASS,
];

/// The names of all passes that can be switched off, the graph's own first.
pub fn optional() -> impl Iterator<Item = &'static str> {
    let of_target = PASSES.iter().filter(|pass| !pass.required).map(|pass| pass.name);
    passes::PASSES.iter().map(|pass| pass.name).chain(of_target)
}

/// The passes to switch off where these are asked for and those are not wanted: of the ones that must be asked for, all
/// others.
pub fn switched_off(unwanted: &[String], asked_for: &[String]) -> Vec<String> {
    let silent = PASSES.iter().filter(|pass| pass.asked_for && !asked_for.iter().any(|name| name == pass.name));
    let mut all = unwanted.to_vec();
    all.extend(silent.map(|pass| pass.name.to_owned()).filter(|name| !unwanted.contains(name)));
    all
}

/// Runs the target's passes on a phase's groups.
pub fn schedule(fused: Fused, of: PhaseRows, can: &Abilities, disabled: &[String]) -> (Schedule, Vec<Report>) {
    let mut schedule = Schedule::new(fused, of);
    let mut reports = Vec::new();
    for pass in PASSES {
        let enabled = pass.required || !disabled.iter().any(|name| name == pass.name);
        let mut log = Log::default();
        if enabled {
            (pass.run)(&mut schedule, can, &mut log);
        }
        let groups = || gemma4c_graph::verify_groups(&schedule.fused);
        debug_assert!(groups().is_ok(), "after {}: {:?}", pass.name, groups());
        reports.push(Report { name: pass.name, about: pass.about, enabled, log });
    }
    (schedule, reports)
}
