//! What the passes report of a plan: the logs of all its phases as one.

use std::collections::HashSet;

use gemma4c_graph::passes::{self, Log, Report};
use gemma4c_plan::cuda::{PassReport, Refusal};

/// What all passes did in all phases so far: the graph's own, and the target's.
#[derive(Default)]
pub struct Reports {
    graph: Vec<Report>,
    target: Vec<Report>,
}

impl Reports {
    pub fn add_graph(&mut self, reports: Vec<Report>) {
        merge_reports(&mut self.graph, reports);
    }

    pub fn add_target(&mut self, reports: Vec<Report>) {
        merge_reports(&mut self.target, reports);
    }

    /// Of the phases of a tower, whose nodes may have the names of the text's: the tower's name precedes theirs.
    pub fn add_tower(&mut self, tower: &str, graph: Vec<Report>, target: Vec<Report>) {
        let named = |mut report: Report| {
            let Log { merged, refused, covered, .. } = &mut report.log;
            // What has nothing to do in a tower may have in the text.
            refused.retain(|(node, _)| node != passes::WHOLE_GRAPH);
            let names = merged.iter_mut().chain(refused.iter_mut().map(|(node, _)| node)).chain(covered);
            names.for_each(|name| *name = format!("{tower} {name}"));
            report
        };
        self.add_graph(graph.into_iter().map(named).collect());
        self.add_target(target.into_iter().map(named).collect());
    }

    /// In the order of the passes.
    pub fn all(&self) -> impl Iterator<Item = &Report> {
        self.graph.iter().chain(&self.target)
    }
}

/// The reports of all phases as one. A node counts once: what one phase merged the others did not refuse, and what
/// several refuse is one refusal, also where a later one has cut the group in two.
fn merge_reports(all: &mut Vec<Report>, more: Vec<Report>) {
    if all.is_empty() {
        *all = more;
        return;
    }
    for (known, new) in all.iter_mut().zip(more) {
        let log = &mut known.log;
        log.applied = log.applied.max(new.log.applied);
        log.merged.extend(new.log.merged);
        for (node, reason) in new.log.refused {
            match log.refused.iter_mut().find(|(known, _)| *known == node) {
                Some((_, said)) if *said == reason => {}
                Some((_, said)) if said.contains(&reason) => {}
                Some((_, said)) => *said += &format!("; in another phase: {reason}"),
                None if log.covered.contains(&node) => {}
                None => log.refused.push((node, reason)),
            }
        }
        log.covered.extend(new.log.covered);
        let merged: HashSet<&String> = log.merged.iter().collect();
        let applied = log.applied > 0;
        log.refused.retain(|(node, _)| match node.as_str() {
            passes::WHOLE_GRAPH => !applied,
            _ => !merged.contains(node),
        });
    }
}

pub fn pass_report(report: &Report) -> PassReport {
    let refusal = |(node, reason): &(String, String)| Refusal { node: node.clone(), reason: reason.clone() };
    PassReport {
        name: report.name.to_owned(),
        about: report.about.to_owned(),
        enabled: report.enabled,
        applied: report.log.applied,
        refused: report.log.refused.iter().map(refusal).collect(),
    }
}
