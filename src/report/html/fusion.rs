//! What the passes made of the declared graph: layers drawn, groups by layer, and what was refused and why.

use std::fmt::Write;

use gemma4c_codegen::target::Target;
use gemma4c_plan::cuda::PhaseKind;

use super::draw::{self, Card};
use super::layer::{Layer, kinds};
use super::{Hues, compact, escape, floor_mark, tabs};
use crate::output;
use crate::report::facts::{Facts, PhaseFacts, StepFacts};
use crate::report::fold::{fold, layer_of, local_name};
use crate::report::units::flops;

/// A layer of each kind, as decode computes it, one shown at a time.
pub fn layers(facts: &Facts<'_>, hues: &Hues, gpu: &Target) -> String {
    let Some(decode) = facts.phases.first() else { return String::new() };
    let mut panes = Vec::new();
    for (word, index) in kinds(facts.plan) {
        let Some((layer, launches)) = Layer::launched(facts.plan, decode, index) else { continue };
        let steps: Vec<&StepFacts<'_>> = launches.iter().map(|at| &decode.steps[*at]).collect();
        let own = steps.iter().filter(|step| step.layer == Some(index)).count();
        let title = format!("<b>Layer {index}</b> {}", escape(&word));
        let below = format!("{} operations → {own} launches", layer.declared);
        let cards: Vec<Card> = steps.iter().map(|step| card(facts, index, step, hues, gpu)).collect();
        let label = format!("Layer {index} before and after fusion");
        panes.push((title, below, draw::layer(&layer, &label, ["declared", "launched"], &cards)));
    }
    "<p>On the left, what the model declares: every box is an operation and would be a launch. On the right, what a decoded \
     token launches. A coloured edge is a value that never reaches memory, a grey one a value that does; dashed boxes are of \
     other layers.</p>"
        .to_owned()
        + &tabs(&panes)
}

/// A launch, as the drawing of a layer shows it.
fn card(facts: &Facts<'_>, layer: u32, step: &StepFacts<'_>, hues: &Hues, gpu: &Target) -> Card {
    let values = &facts.plan.program.values;
    let mut outputs: Vec<&str> =
        step.step.outputs.iter().map(|output| local_name(&values[output.value as usize].name)).collect();
    outputs.dedup();
    // A router's choice has no form of its own.
    let made = step.nodes.last().map_or("nothing new", |name| local_name(name));
    let outputs = if outputs.is_empty() { made.to_owned() } else { compact(&outputs, ", ") };
    let label = facts.label(step).strip_prefix(step.kernel.name.as_str()).unwrap_or("").trim_start_matches('-');
    let label = match step.layer {
        Some(own) if own == layer && label.is_empty() => "this kernel has a single instance".to_owned(),
        Some(own) if own == layer => label.replace('-', " · "),
        Some(other) => format!("counted for layer {other}"),
        None => "counted for the LM head".to_owned(),
    };
    let (bytes, flop) = (step.step.bytes, step.step.flops);
    let grid = step.grid().replace('x', "×");
    let work = format!("{grid} blocks × {} threads · {} · {}", step.kernel.block, output::bytes(bytes), flops(flop));
    Card {
        hue: hues.of(step),
        hover: step.choice(),
        title: step.kernel.name.clone(),
        floor: Some(floor_mark(gpu, bytes, flop)),
        lines: [label, work, format!("writes {outputs}")],
    }
}

pub fn section(facts: &Facts<'_>, hues: &Hues) -> String {
    let mut out = String::new();
    if let Some(decode) = facts.phases.first() {
        out += "<h3>One launch each, in decode</h3>";
        out += &groups(decode, hues);
    }
    if let Some(prefill) = facts.phases.iter().rfind(|phase| phase.phase.kind == PhaseKind::Prefill) {
        let _ = write!(out, "<details><summary>One launch each, in {}</summary>", escape(&prefill.phase.name));
        out += &groups(prefill, hues);
        out += "</details>";
    }
    out + "<h3>Passes</h3>" + &passes(facts)
}

/// Launches that compute several values, equal layers folded.
fn groups(phase: &PhaseFacts<'_>, hues: &Hues) -> String {
    let several = phase.steps.iter().filter(|step| step.nodes.len() > 1);
    let folded = fold(several.map(|step| {
        let names = step.nodes.iter().map(|name| match (layer_of(name), step.layer) {
            (Some(layer), Some(own)) if layer != own => (true, local_name(name)),
            (Some(_), None) => (true, local_name(name)),
            _ => (false, local_name(name)),
        });
        (step.layer, (step.kernel.name.as_str(), hues.of(step), names.collect::<Vec<_>>()))
    }));
    let mut out = "<div class=\"scroll\"><table class=\"groups\"><tbody>".to_owned();
    for group in folded {
        let (kernel, hue, nodes) = &group.what;
        let place = if group.layers.is_empty() { "outside the layers".to_owned() } else { group.place() };
        let _ = write!(
            out,
            "<tr><td class=\"where\">{place}</td><td class=\"where\"><i class=\"dot h{hue}\"></i><code>{}</code></td><td class=\"chips\">",
            escape(kernel)
        );
        for (before, name) in nodes {
            let class = if *before { "chip before" } else { "chip" };
            let _ = write!(out, "<span class=\"{class} h{hue}\">{}</span>", escape(name));
        }
        out += "</td></tr>";
    }
    out + "</tbody></table></div><p class=\"note\">Dashed: of the layer before.</p>"
}

fn passes(facts: &Facts<'_>) -> String {
    let mut out = "<div class=\"scroll\"><table class=\"passes\"><thead><tr><th>pass</th><th class=\"n\">applied</th>\
                   <th>what it does, and what it left alone</th></tr></thead><tbody>"
        .to_owned();
    for pass in &facts.program().passes {
        let applied = if pass.enabled { pass.applied.to_string() } else { "off".to_owned() };
        let class = match (pass.enabled, pass.applied, pass.refused.is_empty()) {
            (false, ..) => " class=\"off\"",
            (true, 0, true) => " class=\"idle\"",
            _ => "",
        };
        let _ = write!(
            out,
            "<tr{class}><td><code>{}</code></td><td class=\"n\">{applied}</td><td>{}",
            escape(&pass.name),
            escape(&pass.about)
        );
        let refusals = pass.refused.iter().map(|r| (layer_of(&r.node), (local_name(&r.node), r.reason.as_str())));
        for refusal in fold(refusals) {
            let (node, reason) = refusal.what;
            let place = if refusal.layers.is_empty() { String::new() } else { format!("{}: ", refusal.place()) };
            let _ = write!(
                out,
                "<div class=\"refused\">{place}<code>{}</code> refused, {}</div>",
                escape(node),
                escape(reason)
            );
        }
        out += "</td></tr>";
    }
    out + "</tbody></table></div>"
}
