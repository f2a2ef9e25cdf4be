//! The page of a CPU plan: a layer of each kind, the steps by what they take, the graph, and the memory.
//!
//! A CPU plan has no fusion and no kernels: a step is an operation of the declared graph, so the page shows the model
//! itself and where its bytes go. Colours tell the parts of the model apart.

use std::fmt::Write;

use gemma4c_plan::{Plan, Step, Tower};

use super::draw::{self, Card};
use super::layer::{Layer, Node, Role, kinds, part};
use super::memory::{Piece, bar};
use super::{HUES, arena, described, document, escape, memory, tabs, tile, vocabulary};
use crate::output;
use crate::report::cpu::{self, Cost};
use crate::report::fold::{fold, layer_of, local_name};
use crate::report::text::by_type;
use crate::report::units::flops;
use crate::report::weights;

pub fn page(plan: &Plan) -> String {
    let name = escape(plan.model.name.as_deref().unwrap_or("(unnamed)"));
    let parts = Parts::of(plan);
    let sections = [
        ("layer", "A layer of each kind", layers(plan, &parts)),
        ("steps", "What a token takes", steps(plan, &parts)),
        ("memory", "Memory, to the byte", memory_section(plan, &parts)),
        ("graph", "The graph", graph(plan)),
    ];
    document(&name, "", &header(plan, &name), &sections, "")
}

fn header(plan: &Plan, name: &str) -> String {
    let files: Vec<String> = plan.model.files.iter().map(|file| escape(&file.path)).collect();
    let program = &plan.program;
    let token: Cost = program.steps.iter().map(|step| Cost::of(plan, step)).sum();
    let mut out = format!(
        "<header><h1>{name}</h1><p class=\"lead\">Compiled for the CPU from <code>{}</code>, fingerprint <code>{:016x}</code>. \
         The same model compiled for a GPU (<code>gemma4c compile --target cuda</code>) is fused into a few launches a layer, \
         and its page shows how.</p><div class=\"tiles\">",
        files.join("</code>, <code>"),
        plan.model.fingerprint
    );
    out += &tile(&plan.model.layers.to_string(), "layers");
    out += &tile(&program.steps.len().to_string(), "steps, one an operation");
    out += &tile(&output::bytes(token.bytes), "of weights read for a token");
    out += &tile(&flops(token.flops), "in a token's products");
    out += &tile(&output::bytes(cpu::total_bytes(plan)), "of memory, weights mapped");
    out += "</div>";
    let mut facts = vec![
        ("layers", format!("{}, {} with keys of their own", plan.model.layers, program.caches.len())),
        ("hidden", plan.model.hidden.to_string()),
        ("vocabulary", vocabulary(plan)),
        ("context", format!("{} of {} trained", program.context, plan.model.trained_context)),
        ("chunk", format!("{} tokens a pass, logits for {}", program.chunk, program.asked)),
        ("arithmetic", "f32; weights are decoded on the way".to_owned()),
        (
            "keys and values",
            if program.kv.is_narrow() { format!("f32, rounded to {}", program.kv.name()) } else { "f32".into() },
        ),
        ("weights", by_type(plan.stored().map(|w| (w.dtype, w.bytes)))),
    ];
    let tower = |tower: &Tower| {
        let (steps, soft) = (tower.program.steps.len(), tower.program.asked);
        let (what, one) = if tower.medium.is_picture() { ("pictures", "a picture") } else { ("sound", "a sound") };
        (what, format!("a tower of {steps} steps, {soft} soft tokens of {one} at most"))
    };
    facts.extend(plan.towers.iter().map(tower));
    facts.extend(plan.drafter.iter().map(|drafter| ("drafter", cpu::describe_drafter(drafter))));
    out += &described(&facts);
    out + "</header>"
}

/// The parts of the model in the order they first run; each has a colour.
struct Parts<'a> {
    names: Vec<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(plan: &'a Plan) -> Parts<'a> {
        let mut names = Vec::new();
        for step in &plan.program.steps {
            let name = part(plan, step);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Parts { names }
    }

    fn hue(&self, name: &str) -> usize {
        self.names.iter().position(|known| *known == name).unwrap_or(0) % HUES
    }
}

fn layers(plan: &Plan, parts: &Parts<'_>) -> String {
    let mut panes = Vec::new();
    for (word, index) in kinds(plan) {
        let Some((layer, names)) = Layer::declared(plan, index) else { continue };
        let cards: Vec<Card> =
            names.iter().enumerate().map(|(band, name)| card(plan, &layer, band, name, parts)).collect();
        let label = format!("Layer {index}, operation by operation");
        let drawing = draw::layer(&layer, &label, ["operations", "parts"], &cards);
        let title = format!("<b>Layer {index}</b> {}", escape(&word));
        panes.push((title, format!("{} operations", layer.declared), drawing));
    }
    "<p>Every box is an operation of the model and a step of the plan; every edge is a value in memory, coloured within a part of \
     the model. Dashed boxes are values of other layers.</p>"
        .to_owned()
        + &tabs(&panes)
}

fn card(plan: &Plan, layer: &Layer, band: usize, name: &str, parts: &Parts<'_>) -> Card {
    let is_here = |step: &&Step| {
        let output = &plan.program.values[step.output as usize].name;
        let is_it = |node: &Node| node.role == Role::Own && node.band == band && node.name == local_name(output);
        layer_of(output) == Some(layer.index) && layer.nodes.iter().any(is_it)
    };
    let steps: Vec<&Step> = plan.program.steps.iter().filter(is_here).collect();
    let cost: Cost = steps.iter().map(|step| Cost::of(plan, step)).sum();
    let work = match cost.flops {
        0 => format!("{} of weights", output::bytes(cost.bytes)),
        flop => format!("{} of weights · {} a token", output::bytes(cost.bytes), flops(flop)),
    };
    let last = steps.last().map_or("", |step| plan.program.values[step.output as usize].name.as_str());
    let mut kinds: Vec<(usize, &str)> = Vec::new();
    for name in steps.iter().map(|step| step.op.name()) {
        match kinds.iter_mut().find(|(_, known)| *known == name) {
            Some((count, _)) => *count += 1,
            None => kinds.push((1, name)),
        }
    }
    kinds.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let kinds: Vec<String> = kinds.iter().map(|(count, name)| format!("{count} {name}")).collect();
    Card {
        hue: parts.hue(name),
        hover: kinds.join(", "),
        title: name.to_owned(),
        floor: None,
        lines: [kinds.join(", "), work, format!("gives {last}")],
    }
}

fn steps(plan: &Plan, parts: &Parts<'_>) -> String {
    let has_product = |cost: &Cost| cost.flops > 0;
    let products = plan.program.steps.iter().filter(|step| has_product(&Cost::of(plan, step))).count();
    let others = plan.program.steps.len() - products;
    let mut out = "<p>Nearly all of a token's bytes and arithmetic are those of matrix products. Decode is bound by the bytes, prefill \
                   by the arithmetic. The strip is drawn to the bytes, layer by layer.</p>"
        .to_owned();
    out += &strip(plan, parts);
    out += &table(plan, parts, has_product);
    let _ = write!(out, "<details><summary>The other {others} steps</summary>");
    out += &table(plan, parts, |cost| !has_product(cost));
    out + "</details>"
}

/// The steps side by side, as long as their weights are large.
fn strip(plan: &Plan, parts: &Parts<'_>) -> String {
    let of_layer = |step: &Step| layer_of(&plan.program.values[step.output as usize].name);
    let bytes = |step: &Step| Cost::of(plan, step).bytes;
    let mut out = "<div class=\"strip\">".to_owned();
    for run in plan.program.steps.chunk_by(|a, b| of_layer(a) == of_layer(b)) {
        let sum: u64 = run.iter().map(bytes).sum();
        let _ = write!(out, "<div class=\"run\" style=\"flex-grow:{sum}\"><div>");
        for step in run.iter().filter(|step| bytes(step) > 0) {
            let _ = write!(
                out,
                "<i class=\"h{}\" style=\"flex-grow:{}\" title=\"{}: {}\"></i>",
                parts.hue(part(plan, step)),
                bytes(step),
                escape(&plan.program.values[step.output as usize].name),
                output::bytes(bytes(step))
            );
        }
        let word = of_layer(&run[0]).map_or("·".to_owned(), |layer| layer.to_string());
        let _ = write!(out, "</div><small>{word}</small></div>");
    }
    out + "</div>"
}

/// Steps that cost as asked; those that differ in nothing but their layer are one row.
fn table(plan: &Plan, parts: &Parts<'_>, is_shown: impl Fn(&Cost) -> bool) -> String {
    let costs: Vec<Cost> = plan.program.steps.iter().map(|step| Cost::of(plan, step)).collect();
    let total: Cost = costs.iter().copied().sum();
    let mut out = "<div class=\"scroll\"><table class=\"alike\"><thead><tr><th>operation</th><th>computes</th><th class=\"n\">width</th>\
                   <th class=\"n\">weights</th><th class=\"n\">FLOPs</th><th class=\"n\">times</th><th class=\"n\">share of bytes</th>\
                   </tr></thead><tbody>"
        .to_owned();
    let shown = plan.program.steps.iter().zip(&costs).filter(|(_, cost)| is_shown(cost));
    let entries = shown.map(|(step, cost)| {
        let value = &plan.program.values[step.output as usize];
        let hue = parts.hue(part(plan, step));
        (layer_of(&value.name), (step.op.name(), local_name(&value.name), value.width, *cost, hue))
    });
    for entry in fold(entries) {
        let (op, value, width, cost, hue) = entry.what;
        let place = if entry.layers.is_empty() { "outside the layers".to_owned() } else { entry.place() };
        let share = cost.bytes as f64 * entry.count as f64 / (total.bytes.max(1) as f64) * 100.0;
        let or_nothing = |n: u64, text: String| if n > 0 { text } else { String::new() };
        let _ = write!(
            out,
            "<tr><td class=\"which\"><i class=\"dot h{hue}\"></i><code>{op}</code><small>{place}</small></td><td class=\"does\">{}</td>\
             <td class=\"n\">{width}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n share\"><b style=\"width:{share:.1}%\"></b><span>{}</span></td></tr>",
            escape(value),
            or_nothing(cost.bytes, output::bytes(cost.bytes)),
            or_nothing(cost.flops, flops(cost.flops)),
            entry.count,
            or_nothing(cost.bytes, format!("{share:.1} %")),
        );
    }
    out + "</tbody></table></div>"
}

fn memory_section(plan: &Plan, parts: &Parts<'_>) -> String {
    let (weights, kv, arena) = cpu::memory(plan);
    let towers = cpu::tower_arenas(plan);
    let drafter = cpu::drafter_arena(plan);
    let piece = |what: &str, bytes: u64, hue: usize| Piece { what: what.into(), bytes, class: format!("h{hue}") };
    let mut out = format!("<h3>{} in all</h3>", output::bytes(cpu::total_bytes(plan)));
    let mut pieces = vec![
        piece("weights, mapped from the file", weights, 0),
        piece("keys and values", kv, 1),
        piece("activations", arena, 2),
    ];
    let seats = plan.reserved_bytes();
    pieces.extend((seats > 0).then(|| piece("seats for adapters", seats, 5)));
    pieces.extend((towers > 0).then(|| piece("activations of towers", towers, 3)));
    pieces.extend((drafter > 0).then(|| piece("activations of the drafter", drafter, 4)));
    out += &bar(&pieces);
    out += "<h3>Weights</h3>";
    let groups = weights::in_file(plan);
    let pieces: Vec<Piece> = groups.iter().map(|(group, bytes)| piece(group.name(), *bytes, *group as usize)).collect();
    out += &bar(&pieces);
    out += "<h3>Keys and values, layer by layer</h3>";
    out += &memory::caches(plan, &cpu::caches(plan));
    out += "<h3>Activations, step by step</h3>";
    out + &arena::of_steps(plan, |at| parts.hue(part(plan, &plan.program.steps[at])))
}

fn graph(plan: &Plan) -> String {
    format!(
        "<p>As the model declares it, equal layers once; <code>gemma4c inspect PLAN.bin --graph</code> prints it.</p><pre>{}</pre>",
        escape(&plan.report)
    )
}
