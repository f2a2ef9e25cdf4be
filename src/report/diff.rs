//! How two plans differ: in what was fused, in launches, bytes and memory, in kernels.
//!
//! The first plan is the old one, the second the new one: `48 -> 54 (+6)`. What is equal is not mentioned.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaProgram, Kernel, Launch};

use super::cpu;
use super::facts::{Facts, PhaseFacts, StepFacts};
use super::fold::{fold, layer_of, local_name};
use super::labels::choices;
use super::text::gpus;
use super::units::flops;
use crate::output;

/// What differs, or `None`.
pub fn diff(old: &Plan, new: &Plan) -> Option<String> {
    if old == new {
        return None;
    }
    let mut out = String::new();
    let mut phases_reported = false;
    out += &section("", 0, identity(old, new));
    match (Facts::of(old), Facts::of(new)) {
        (Some(old), Some(new)) => {
            out += &section("passes", 2, passes(&old, &new));
            for phase in &new.phases {
                if let Some(before) = old.phases.iter().find(|p| p.phase.name == phase.phase.name) {
                    let lines = phase_lines(before, phase);
                    phases_reported |= !lines.is_empty();
                    out += &section(&phase.phase.name, 2, lines);
                }
            }
            out += &section("phases", 2, phase_names(&old, &new));
            out += &section("memory", 2, memory(&old, &new));
            out += &section("kernels", 2, kernels(&old, &new));
        }
        _ => out += &section("steps", 2, counts(&cpu::kinds(old), &cpu::kinds(new))),
    }
    out += &section("also different", 2, rest(old, new, phases_reported));
    Some(out)
}

/// A heading and its lines; nothing where there are none.
fn section(heading: &str, indent: usize, lines: Vec<String>) -> String {
    let mut out = String::new();
    if !lines.is_empty() && !heading.is_empty() {
        let _ = writeln!(out, "{heading}");
    }
    for line in &lines {
        let _ = writeln!(out, "{:indent$}{line}", "");
    }
    if !lines.is_empty() {
        out.push('\n');
    }
    out
}

/// `what  old -> new`, where they differ.
fn change<T: PartialEq + Display>(what: &str, old: T, new: T) -> Option<String> {
    (old != new).then(|| format!("{what:<16}{old} -> {new}"))
}

fn counted(what: &str, old: usize, new: usize) -> Option<String> {
    (old != new).then(|| format!("{what:<16}{old} -> {new} ({:+})", new as i128 - old as i128))
}

/// A quantity, and by how much it grew.
fn quantity(what: &str, old: u64, new: u64, say: impl Fn(u64) -> String) -> Option<String> {
    let grew = match old {
        0 => String::new(),
        _ => format!(" ({:+.1} %)", (new as f64 / old as f64 - 1.0) * 100.0),
    };
    (old != new).then(|| format!("{what:<16}{} -> {}{grew}", say(old), say(new)))
}

fn identity(old: &Plan, new: &Plan) -> Vec<String> {
    let name = |plan: &Plan| plan.model.name.clone().unwrap_or_else(|| "(unnamed)".into());
    let fingerprint = |plan: &Plan| format!("{:016x}", plan.model.fingerprint);
    let target = |plan: &Plan| match &plan.cuda {
        None => plan.target.name().to_owned(),
        Some(_) => format!("{} for {}", plan.target.name(), gpus(plan)),
    };
    let kv = |plan: &Plan| plan.cuda.as_ref().map_or(plan.program.kv, |cuda| cuda.program.kv).name();
    let toolchain = |plan: &Plan| plan.cuda.as_ref().map_or("none".to_owned(), |cuda| cuda.program.toolchain.clone());
    let place = |plan: &Plan| if plan.embedded.is_some() { "in the plan" } else { "in the model file" };
    let lines = [
        change("model", name(old), name(new)),
        change("fingerprint", fingerprint(old), fingerprint(new)),
        change("target", target(old), target(new)),
        change("context", old.program.context, new.program.context),
        change("keys and values", kv(old), kv(new)),
        change("weights", place(old), place(new)),
        change("compiler", toolchain(old), toolchain(new)),
    ];
    lines.into_iter().flatten().collect()
}

fn passes(old: &Facts<'_>, new: &Facts<'_>) -> Vec<String> {
    let state = |pass: &gemma4c_plan::cuda::PassReport| match (pass.enabled, pass.refused.len()) {
        (false, _) => "off".to_owned(),
        (true, 0) => format!("applied {}", pass.applied),
        (true, refused) => format!("applied {}, refused {refused}", pass.applied),
    };
    let states = |facts: &Facts<'_>| -> Vec<(String, String)> {
        facts.program().passes.iter().map(|pass| (pass.name.clone(), state(pass))).collect()
    };
    let (old, new) = (states(old), states(new));
    let mut lines = Vec::new();
    for (name, state) in &new {
        let before = old.iter().find(|(other, _)| other == name).map_or("not there", |(_, state)| state);
        lines.extend(change(&format!("{name} "), before, state));
    }
    let gone = old.iter().filter(|(name, _)| !new.iter().any(|(other, _)| other == name));
    lines.extend(gone.map(|(name, state)| format!("{name:<16}{state} -> not there")));
    lines
}

fn phase_lines(old: &PhaseFacts<'_>, new: &PhaseFacts<'_>) -> Vec<String> {
    let mut lines: Vec<String> = [
        change("rows", old.phase.rows, new.phase.rows),
        counted("launches", old.launches(), new.launches()),
        counted("a layer", old.launches_per_layer(), new.launches_per_layer()),
        counted("outside layers", old.launches_outside_layers(), new.launches_outside_layers()),
        quantity("bytes read", old.bytes(), new.bytes(), output::bytes),
        quantity("arithmetic", old.flops(), new.flops(), flops),
        quantity("arena", old.phase.arena_bytes, new.phase.arena_bytes, output::bytes),
    ]
    .into_iter()
    .flatten()
    .collect();
    let (before, after) = (groups(old), groups(new));
    let alone = |this: &Groups<'_>, other: &Groups<'_>, sign: char| {
        let steps = this.iter().filter(|(group, _)| find(other, group).is_none()).map(|(_, step)| *step);
        let lines =
            steps.map(|step| (step.layer, format!("{sign} {}: {}", step.kernel.name, local_names(&step.nodes))));
        lines.collect::<Vec<_>>()
    };
    let groups = fold(alone(&before, &after, '-').into_iter().chain(alone(&after, &before, '+')));
    if !groups.is_empty() {
        lines.push("fused otherwise".to_owned());
    }
    for group in groups {
        lines.push(format!("  {}{}", place_of(&group.layers, &group.place()), group.what));
    }
    // The same values from another kernel, or from another instance of it.
    let mut swaps = Vec::new();
    for (group, step) in &after {
        let replaced = find(&before, group).filter(|old| old.kernel.instance != step.kernel.instance);
        if let Some(old) = replaced {
            swaps.push((step.layer, format!("{}: {}", swap(old.kernel, step.kernel), local_names(&step.nodes))));
        }
    }
    if !swaps.is_empty() {
        lines.push("other kernels".to_owned());
    }
    lines.extend(fold(swaps).iter().map(|swap| format!("  {}{}", place_of(&swap.layers, &swap.place()), swap.what)));
    lines
}

/// Launches by the values they compute. Several may work on the same values, one after the other: they are numbered.
type Groups<'a> = Vec<(Group<'a>, &'a StepFacts<'a>)>;
type Group<'a> = (&'a [&'a str], usize);

fn find<'a>(groups: &Groups<'a>, group: &Group<'_>) -> Option<&'a StepFacts<'a>> {
    groups.iter().find(|(other, _)| other == group).map(|(_, step)| *step)
}

fn groups<'a>(phase: &'a PhaseFacts<'a>) -> Groups<'a> {
    let mut groups = Groups::new();
    for step in phase.steps.iter().filter(|step| !step.nodes.is_empty()) {
        let nodes = step.nodes.as_slice();
        let number = groups.iter().filter(|((other, _), _)| *other == nodes).count();
        groups.push(((nodes, number), step));
    }
    groups
}

/// Two kernels, or what was chosen otherwise for the same one.
fn swap(old: &Kernel, new: &Kernel) -> String {
    if old.name != new.name {
        return format!("{} -> {}", old.name, new.name);
    }
    let (before, after) = (choices(&old.instance), choices(&new.instance));
    let value = |choices: &[(&str, &str)], name: &str| {
        choices.iter().find(|(other, _)| *other == name).map_or("none".to_owned(), |(_, value)| (*value).to_owned())
    };
    let added = after.iter().filter(|(name, _)| !before.iter().any(|(other, _)| other == name));
    let changes = before.iter().chain(added).filter_map(|(name, _)| {
        let (old, new) = (value(&before, name), value(&after, name));
        (old != new).then(|| format!("{name} {old} -> {new}"))
    });
    format!("{} with {}", new.name, changes.collect::<Vec<_>>().join(", "))
}

fn place_of(layers: &[u32], place: &str) -> String {
    if layers.is_empty() { String::new() } else { format!("{place} ") }
}

/// Values without their layers; a step that ends one layer and begins the next says so.
fn local_names(nodes: &[&str]) -> String {
    let last = nodes.last().and_then(|name| layer_of(name));
    let one = |name: &&str| match (layer_of(name), last) {
        (Some(layer), Some(last)) if layer < last => format!("{} of the layer before", local_name(name)),
        (Some(_), None) => format!("{} of the last layer", local_name(name)),
        _ => local_name(name).to_owned(),
    };
    nodes.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn phase_names(old: &Facts<'_>, new: &Facts<'_>) -> Vec<String> {
    let alone = |this: &Facts<'_>, other: &Facts<'_>, sign: char| -> Vec<String> {
        let names = this.phases.iter().map(|phase| &phase.phase.name);
        let alone = names.filter(|name| !other.phases.iter().any(|o| o.phase.name == **name));
        alone.map(|name| format!("{sign} {name}")).collect()
    };
    [alone(old, new, '-'), alone(new, old, '+')].concat()
}

fn memory(old: &Facts<'_>, new: &Facts<'_>) -> Vec<String> {
    let (a, b) = (&old.program().memory, &new.program().memory);
    let lines = [
        quantity("weights", a.weights, b.weights, output::bytes),
        quantity("keys and values", a.kv, b.kv, output::bytes),
        quantity("activations", a.arena, b.arena, output::bytes),
        quantity("seats", a.seats, b.seats, output::bytes),
        quantity("on the host", a.host, b.host, output::bytes),
        quantity("total", old.total_bytes(), new.total_bytes(), output::bytes),
    ];
    lines.into_iter().flatten().collect()
}

fn kernels(old: &Facts<'_>, new: &Facts<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    let alone = |this: &Facts<'_>, other: &Facts<'_>, sign: char| -> Vec<String> {
        let has_instance = |instance: &str| other.program().kernels.iter().any(|kernel| kernel.instance == instance);
        let kernels = this.program().kernels.iter().filter(|kernel| !has_instance(&kernel.instance));
        kernels.map(|kernel| format!("{sign} {}", kernel.instance)).collect()
    };
    lines.extend(alone(old, new, '-'));
    lines.extend(alone(new, old, '+'));
    let texts = |facts: &Facts<'_>| -> BTreeMap<String, usize> {
        let kernels = facts.program().kernels.iter().enumerate();
        kernels.map(|(at, kernel)| (kernel.instance.clone(), at)).collect()
    };
    let before = texts(old);
    for (at, kernel) in new.program().kernels.iter().enumerate() {
        let Some(old_at) = before.get(&kernel.instance) else { continue };
        let (a, b) = (&old.cuda.code[*old_at], &new.cuda.code[at]);
        match (a.source != b.source, a.image != b.image) {
            (true, _) => lines.push(format!("other text: {}", kernel.instance)),
            (false, true) => lines.push(format!("other machine code: {}", kernel.instance)),
            _ => {}
        }
    }
    lines
}

fn counts(old: &BTreeMap<&'static str, usize>, new: &BTreeMap<&'static str, usize>) -> Vec<String> {
    let names: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let count = |kinds: &BTreeMap<&'static str, usize>, name| kinds.get(name).copied().unwrap_or(0);
    names.into_iter().filter_map(|name| counted(name, count(old, name), count(new, name))).collect()
}

/// The first phase's picks.
fn picks(program: &CudaProgram) -> Option<(&[Launch], &[Launch])> {
    program.phases.first().map(|phase| (&phase.pick_largest[..], &phase.pick_sampled[..]))
}

/// Differences that no section above covers. Where a section reports other launches, their arguments differ too and are
/// not listed again.
fn rest(old: &Plan, new: &Plan, phases_reported: bool) -> Vec<String> {
    let (a, b) = (old.cuda.as_ref().map(|c| &c.program), new.cuda.as_ref().map(|c| &c.program));
    let both = a.zip(b);
    let parts = [
        (old.model.files != new.model.files, "where the model's files lie"),
        (old.weights != new.weights, "the table of weights"),
        (old.program != new.program, "the unfused program"),
        (old.vocab != new.vocab, "the vocabulary"),
        (old.sampling != new.sampling, "how it samples"),
        (old.report != new.report, "the declared graph"),
        (both.is_some_and(|(a, b)| a.places != b.places), "where host and device meet"),
        (both.is_some_and(|(a, b)| (&a.loads, &a.prepare) != (&b.loads, &b.prepare)), "how weights are loaded"),
        (both.is_some_and(|(a, b)| a.constants != b.constants), "tables the compiler computed"),
        (both.is_some_and(|(a, b)| a.kv_layout != b.kv_layout), "how keys and values are divided"),
        (both.is_some_and(|(a, b)| picks(a) != picks(b)), "the pick of a token"),
        (!phases_reported && both.is_some_and(|(a, b)| a.phases != b.phases), "arguments and grids of launches"),
    ];
    parts.into_iter().filter(|(differs, _)| *differs).map(|(_, what)| what.to_owned()).collect()
}
