//! A layer's drawing as SVG: on the left what was declared, on the right what is launched, one band for each launch.

use std::fmt::Write;

use super::layer::{Layer, Role};
use super::layout::{Layout, NODE_HEIGHT, NODE_WIDTH};
use super::{Hues, compact, escape, floor_mark, shorten};
use crate::output;
use crate::report::facts::{Facts, PhaseFacts};
use crate::report::fold::local_name;
use crate::report::gpus::{Gpu, flops};

const CARD_WIDTH: f64 = 340.0;
const CARD_HEIGHT: f64 = 88.0;
const GAP: f64 = 44.0;
const HEAD: f64 = 30.0;
/// Room for edges that pass cards by.
const SIDE: f64 = 46.0;

pub fn layer(facts: &Facts<'_>, phase: &PhaseFacts<'_>, layer: &Layer, hues: &Hues, gpu: &Gpu) -> String {
    let layout = Layout::of(layer);
    let cards = layout.width + GAP;
    let (width, height) = (cards + CARD_WIDTH + SIDE, layout.height + HEAD + 6.0);
    let mut out = String::new();
    let _ = write!(
        out,
        "<svg class=\"layer\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\" \
         aria-label=\"Layer {} before and after fusion\">",
        layer.index
    );
    let _ = write!(
        out,
        "<text class=\"cap\" x=\"{:.0}\" y=\"18\">declared</text><text class=\"cap\" x=\"{:.0}\" y=\"18\">launched</text>",
        layout.width / 2.0,
        cards + CARD_WIDTH / 2.0
    );
    let _ = write!(out, "<g transform=\"translate(0 {HEAD})\">");
    for (launch, (top, band)) in layout.bands.iter().enumerate() {
        let hue = hues.of(&phase.steps[layer.launches[launch]]);
        let _ = write!(
            out,
            "<rect class=\"band h{hue}\" x=\"0\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\"/>",
            top + 2.0,
            cards + CARD_WIDTH + 8.0,
            band - 4.0
        );
    }
    out += &edges(layer, &layout, |launch| hues.of(&phase.steps[layer.launches[launch]]));
    for (node, (x, y)) in layer.nodes.iter().zip(&layout.nodes) {
        let hue = hues.of(&phase.steps[layer.launches[node.launch]]);
        let class = match node.role {
            Role::Own => "own",
            Role::Neighbour => "other",
            Role::Input => "input",
        };
        let (module, name) = node.name.rsplit_once('.').unwrap_or(("", &node.name));
        let below = match (node.role, node.layer) {
            (Role::Own, _) | (_, None) => format!("{} · {module}", node.op),
            (_, Some(other)) => format!("layer {other} · {module}"),
        };
        let _ = write!(
            out,
            "<g class=\"node {class} h{hue}\"><title>{} = {}, {} wide</title>\
             <rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{NODE_WIDTH}\" height=\"{NODE_HEIGHT}\" rx=\"6\"/>\
             <text class=\"name\" x=\"{x:.1}\" y=\"{:.1}\">{}</text><text class=\"op\" x=\"{x:.1}\" y=\"{:.1}\">{}</text></g>",
            escape(&node.name),
            node.op,
            node.width,
            x - NODE_WIDTH / 2.0,
            y + 14.0,
            escape(&shorten(name, 21)),
            y + 26.0,
            escape(&shorten(&below, 26)),
        );
    }
    let card_top = |launch: usize| layout.bands[launch].0 + (layout.bands[launch].1 - CARD_HEIGHT) / 2.0;
    out += &card_edges(layer, cards, card_top);
    for launch in 0..layer.launches.len() {
        let band = layout.bands[launch];
        let link = band.0 + band.1 / 2.0;
        let _ = write!(
            out,
            "<path class=\"link h{}\" d=\"M{:.1} {link:.1}H{:.1}\"/>",
            hues.of(&phase.steps[layer.launches[launch]]),
            layout.width + 4.0,
            cards - 3.0
        );
        out += &card(facts, phase, layer, launch, (cards, card_top(launch)), hues, gpu);
    }
    out + "</g></svg>"
}

/// Edges inside a launch have its colour: what they carry never reaches memory.
fn edges(layer: &Layer, layout: &Layout, hue: impl Fn(usize) -> usize) -> String {
    let mut out = String::new();
    for edge in &layout.edges {
        let (from, to) = (&layer.nodes[edge.from], &layer.nodes[edge.to]);
        let inside = from.launch == to.launch && from.role != Role::Input;
        let class = if inside { format!("edge in h{}", hue(from.launch)) } else { "edge".to_owned() };
        let ((sx, sy), (tx, ty)) = (layout.nodes[edge.from], layout.nodes[edge.to]);
        let (sy, ty) = (sy + NODE_HEIGHT, ty - 1.0);
        let path = match edge.lane {
            None => {
                let bend = ((ty - sy) / 2.0).max(9.0);
                format!("M{sx:.1} {sy:.1}C{sx:.1} {:.1} {tx:.1} {:.1} {tx:.1} {ty:.1}", sy + bend, ty - bend)
            }
            Some(x) => format!(
                "M{sx:.1} {sy:.1}C{sx:.1} {a:.1} {x:.1} {a:.1} {x:.1} {b:.1}V{c:.1}C{x:.1} {d:.1} {tx:.1} {d:.1} {tx:.1} {ty:.1}",
                a = sy + 10.0,
                b = sy + 20.0,
                c = ty - 20.0,
                d = ty - 10.0
            ),
        };
        let _ = write!(
            out,
            "<path class=\"{class}\" d=\"{path}\"/><path class=\"{class} tip\" d=\"M{:.1} {:.1}h7l-3.5 5z\"/>",
            tx - 3.5,
            ty - 5.0
        );
    }
    out
}

/// Which launch reads what another left in memory.
fn card_edges(layer: &Layer, cards: f64, top: impl Fn(usize) -> f64) -> String {
    let mut out = String::new();
    let mut beside = 0;
    for to in 0..layer.launches.len() {
        for from in layer.reads(to) {
            let (sy, ty) = (top(from) + CARD_HEIGHT, top(to));
            if from + 1 == to {
                let x = cards + CARD_WIDTH / 2.0;
                let _ = write!(
                    out,
                    "<path class=\"edge\" d=\"M{x:.1} {sy:.1}V{:.1}\"/><path class=\"edge tip\" d=\"M{:.1} {:.1}h7l-3.5 5z\"/>",
                    ty - 2.0,
                    x - 3.5,
                    ty - 6.0
                );
            } else {
                let x = cards + CARD_WIDTH;
                let far = x + 14.0 + (beside % 4) as f64 * 7.0;
                beside += 1;
                let (sy, ty) = (sy - 18.0, ty + 16.0 + (beside % 3) as f64 * 8.0);
                let _ = write!(
                    out,
                    "<path class=\"edge\" d=\"M{x:.1} {sy:.1}C{far:.1} {sy:.1} {far:.1} {sy:.1} {far:.1} {:.1}V{:.1}C{far:.1} {ty:.1} {far:.1} {ty:.1} {:.1} {ty:.1}\"/>\
                     <path class=\"edge tip\" d=\"M{:.1} {:.1}v7l-5 -3.5z\"/>",
                    sy + 14.0,
                    ty - 14.0,
                    x + 5.0,
                    x + 6.0,
                    ty - 3.5
                );
            }
        }
    }
    out
}

fn card(
    facts: &Facts<'_>,
    phase: &PhaseFacts<'_>,
    layer: &Layer,
    launch: usize,
    (x, y): (f64, f64),
    hues: &Hues,
    gpu: &Gpu,
) -> String {
    let step = &phase.steps[layer.launches[launch]];
    let values = &facts.plan.program.values;
    let mut leaves: Vec<&str> =
        step.step.outputs.iter().map(|output| local_name(&values[output.value as usize].name)).collect();
    leaves.dedup();
    // A router's choice has no form of its own.
    let made = step.nodes.last().map_or("nothing new", |name| local_name(name));
    let leaves = if leaves.is_empty() { format!("makes {made}") } else { format!("leaves {}", compact(&leaves, ", ")) };
    let whose = match step.layer {
        Some(own) if own == layer.index => String::new(),
        Some(other) => format!("layer {other}"),
        None => "the head".to_owned(),
    };
    let text = |class: &str, dx: f64, dy: f64, text: &str| {
        format!("<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + dx, y + dy, escape(text))
    };
    let mut out = format!(
        "<g class=\"card h{}\"><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{CARD_WIDTH}\" height=\"{CARD_HEIGHT}\" rx=\"8\"/>",
        hues.of(step),
        escape(&step.choice())
    );
    let _ = write!(
        out,
        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"10\"/><text class=\"no\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        x + 20.0,
        y + 20.0,
        x + 20.0,
        y + 24.0,
        launch + 1
    );
    out += &text("kernel", 38.0, 25.0, &step.kernel.name);
    let (bytes, flop) = (step.step.bytes, step.step.flops);
    let _ = write!(
        out,
        "<text class=\"floor\" x=\"{:.1}\" y=\"{:.1}\" {}</text>",
        x + CARD_WIDTH - 14.0,
        y + 25.0,
        floor_mark(gpu, bytes, flop)
    );
    let label = facts.label(step).strip_prefix(step.kernel.name.as_str()).unwrap_or("").trim_start_matches('-');
    let label = match (label.is_empty(), whose.is_empty()) {
        (_, false) => format!("counted for {whose}"),
        (true, _) => "the only one of its name".to_owned(),
        (false, true) => label.replace('-', " · "),
    };
    out += &text("small", 14.0, 45.0, &shorten(&label, 53));
    let grid = step.grid().replace('x', "×");
    let work = format!("{grid} blocks × {} threads · {} · {}", step.kernel.block, output::bytes(bytes), flops(flop));
    out += &text("work", 14.0, 62.0, &work);
    out += &text("small", 14.0, 78.0, &shorten(&leaves, 53));
    out + "</g>"
}
