//! The passes: what turns the declared graph into groups that a kernel computes.
//!
//! They are values in one list, run in its order, and each can be switched off by name. A pass rewrites the graph or
//! merges groups, and reports what it did and what it refused and why. None of them knows a kernel, a type of GPU or a
//! number of rows beyond the graph's own: passes that do follow them, phase by phase, in the crate that has the
//! kernels.
//!
//! Two things need no pass here, unlike in other engines: a layer that shares keys and values reads the cache node of
//! the layer that owns them, and values that are the keys' projection read the same product. There is no copy to
//! remove.

mod adapters;
mod clips;
mod dead_rows;
mod epilogues;
mod expert_sums;
mod fold_constants;
mod geglu;
mod heads;
mod join_products;
mod norms;
mod patches;
mod per_layer_gate;
mod per_layer_inputs;
mod router;

use crate::fused::Fused;
use crate::graph::Graph;

/// What a graph is fused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// One row, whose logits are asked for.
    Decode,
    /// Many rows, of which few are asked for.
    Prefill,
    /// The patches of a picture, all of which are needed.
    Tower,
}

/// A pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    pub name: &'static str,
    pub about: &'static str,
    run: Run,
}

#[derive(Clone, Copy, Debug)]
enum Run {
    /// Before there are groups.
    Rewrite(fn(&Graph, Goal, &mut Log) -> Graph),
    Fuse(fn(&mut Fused, &mut Log)),
}

/// All passes, in the order they run.
pub static PASSES: &[Pass] = &[
    fold_constants::FOLD,
    dead_rows::PASS,
    fold_constants::EMBED,
    per_layer_inputs::PASS,
    adapters::PASS,
    geglu::PASS,
    per_layer_gate::PASS,
    join_products::PASS,
    epilogues::PASS,
    heads::PASS,
    router::PASS,
    expert_sums::PASS,
    norms::PASS,
    patches::PASS,
    clips::PASS,
];

/// What a pass is refused at that has nothing to do for a goal.
pub const WHOLE_GRAPH: &str = "the whole graph";

/// What a pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    pub applied: u32,
    /// The names of the nodes that it merged into groups.
    pub merged: Vec<String>,
    /// Where it could have applied and did not: the node's name, and the reason.
    pub refused: Vec<(String, String)>,
    /// All nodes of the groups that it refused.
    pub covered: Vec<String>,
}

impl Log {
    fn apply(&mut self) {
        self.applied += 1;
    }

    fn refuse(&mut self, node: String, reason: impl Into<String>) {
        self.refused.push((node, reason.into()));
    }

    /// Counts nodes that a pass marks and does not merge.
    pub fn mark(&mut self, nodes: Vec<String>) {
        self.apply();
        self.merged.extend(nodes);
    }

    /// Refuses a group, under the name of its last node.
    pub fn refuse_group(&mut self, nodes: Vec<String>, reason: impl Into<String>) {
        if let Some(last) = nodes.last().cloned() {
            self.refuse(last, reason);
        }
        self.covered.extend(nodes);
    }

    /// Merges, or says why not.
    pub fn merge(&mut self, fused: &mut Fused, kind: crate::Kind, nodes: &[crate::NodeId]) -> bool {
        match fused.merge(kind, nodes) {
            Ok(()) => {
                self.apply();
                self.merged.extend(nodes.iter().map(|node| fused.graph.full_name(*node)));
                true
            }
            Err(reason) => {
                self.refuse(fused.graph.full_name(nodes[nodes.len() - 1]), reason);
                false
            }
        }
    }
}

/// A pass's name, whether it ran, and what it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub name: &'static str,
    pub about: &'static str,
    pub enabled: bool,
    pub log: Log,
}

/// The pass of that name.
pub fn pass(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|pass| pass.name == name)
}

/// Runs all passes but those named in `disabled`.
pub fn fuse(graph: &Graph, goal: Goal, disabled: &[String]) -> (Fused, Vec<Report>) {
    let mut graph = graph.clone();
    let mut reports = Vec::new();
    let enabled = |pass: &Pass| !disabled.iter().any(|name| name == pass.name);
    let mut fused = None;
    for pass in PASSES {
        let mut log = Log::default();
        match pass.run {
            Run::Rewrite(rewrite) if enabled(pass) => graph = rewrite(&graph, goal, &mut log),
            Run::Fuse(fuse) if enabled(pass) => fuse(fused.get_or_insert_with(|| Fused::new(graph.clone())), &mut log),
            _ => {}
        }
        debug_assert!(crate::verify(&graph).is_ok(), "after {}: {:?}", pass.name, crate::verify(&graph));
        let groups = || fused.as_ref().map_or(Ok(()), crate::verify_groups);
        debug_assert!(groups().is_ok(), "after {}: {:?}", pass.name, groups());
        reports.push(Report { name: pass.name, about: pass.about, enabled: enabled(pass), log });
    }
    (fused.unwrap_or_else(|| Fused::new(graph)), reports)
}
