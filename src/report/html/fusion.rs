//! What the passes made of the declared graph: layers drawn, groups by layer, and what was refused and why.

use std::fmt::Write;

use super::layer::{Layer, kinds};
use super::{Hues, draw, escape};
use crate::report::facts::{Facts, PhaseFacts};
use crate::report::fold::{fold, layer_of, local_name};
use crate::report::gpus::Gpu;

/// A layer of each kind, as decode computes it, one shown at a time.
pub fn layers(facts: &Facts<'_>, hues: &Hues, gpu: &Gpu) -> String {
    let Some(decode) = facts.phases.first() else { return String::new() };
    let found: Vec<(String, Layer)> = kinds(facts.plan)
        .into_iter()
        .filter_map(|(word, index)| Some((word, Layer::of(facts.plan, decode, index)?)))
        .collect();
    let mut out =
        "<p>On the left, what the model declares: every box is an operation and would be a launch. On the right, what \
                   a decoded token launches. A coloured edge is a value that never reaches memory, a grey one a value \
                   that does; dashed boxes are of other layers.</p><div class=\"tabs\">"
            .to_owned();
    for (at, (word, layer)) in found.iter().enumerate() {
        let own = layer.launches.iter().filter(|step| decode.steps[**step].layer == Some(layer.index)).count();
        let _ = write!(
            out,
            "<input type=\"radio\" name=\"layer\" id=\"tab{at}\"{}><label for=\"tab{at}\"><b>Layer {}</b> {}<small>{} operations → {own} launches</small></label>",
            if at == 0 { " checked" } else { "" },
            layer.index,
            escape(word),
            layer.declared,
        );
    }
    for (_, layer) in &found {
        let _ = write!(out, "<div class=\"pane scroll\">{}</div>", draw::layer(facts, decode, layer, hues, gpu));
    }
    out + "</div>"
}

pub fn section(facts: &Facts<'_>, hues: &Hues) -> String {
    let mut out = String::new();
    if let Some(decode) = facts.phases.first() {
        out += "<h3>One launch each, in decode</h3>";
        out += &groups(decode, hues);
    }
    if let Some(prefill) = facts.phases.last().filter(|phase| phase.phase.rows > 1) {
        let _ = write!(out, "<details><summary>One launch each, in {}</summary>", escape(&prefill.phase.name));
        out += &groups(prefill, hues);
        out += "</details>";
    }
    out + "<h3>Passes</h3>" + &passes(facts)
}

/// Launches that compute several values, equal layers folded.
fn groups(phase: &PhaseFacts<'_>, hues: &Hues) -> String {
    let several = phase.steps.iter().filter(|step| step.nodes.len() > 1);
    let told = fold(several.map(|step| {
        let names = step.nodes.iter().map(|name| match (layer_of(name), step.layer) {
            (Some(layer), Some(own)) if layer != own => (true, local_name(name)),
            (Some(_), None) => (true, local_name(name)),
            _ => (false, local_name(name)),
        });
        (step.layer, (step.kernel.name.as_str(), hues.of(step), names.collect::<Vec<_>>()))
    }));
    let mut out = "<div class=\"scroll\"><table class=\"groups\"><tbody>".to_owned();
    for group in told {
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
