//! A layer's drawing as SVG: on the left what was declared, in bands from top to bottom; on the right a card for each
//! band.

use std::fmt::Write;

use super::layer::{Layer, Role};
use super::layout::{Layout, NODE_HEIGHT, NODE_WIDTH};
use super::{escape, shorten};

const CARD_WIDTH: f64 = 340.0;
const CARD_HEIGHT: f64 = 88.0;
const GAP: f64 = 44.0;
const HEAD: f64 = 30.0;
/// Room for edges that pass cards by.
const SIDE: f64 = 46.0;

/// What is said of a band.
pub struct Card {
    /// The number of its colour's class.
    pub hue: usize,
    /// Shown where the mouse rests.
    pub hover: String,
    pub title: String,
    /// From [`super::floor_mark`].
    pub floor: Option<String>,
    pub lines: [String; 3],
}

/// One card a band. The captions stand above the two sides.
pub fn layer(layer: &Layer, label: &str, captions: [&str; 2], cards: &[Card]) -> String {
    let layout = Layout::of(layer);
    let card_left = layout.width + GAP;
    let (width, height) = (card_left + CARD_WIDTH + SIDE, layout.height + HEAD + 6.0);
    let mut out = format!(
        "<svg class=\"layer\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\" aria-label=\"{}\">",
        escape(label)
    );
    let _ = write!(
        out,
        "<text class=\"cap\" x=\"{:.0}\" y=\"18\">{}</text><text class=\"cap\" x=\"{:.0}\" y=\"18\">{}</text>",
        layout.width / 2.0,
        captions[0],
        card_left + CARD_WIDTH / 2.0,
        captions[1]
    );
    let _ = write!(out, "<g transform=\"translate(0 {HEAD})\">");
    for (card, (top, band)) in cards.iter().zip(&layout.bands) {
        let _ = write!(
            out,
            "<rect class=\"band h{}\" x=\"0\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\"/>",
            card.hue,
            top + 2.0,
            card_left + CARD_WIDTH + 8.0,
            band - 4.0
        );
    }
    out += &edges(layer, &layout, |band| cards[band].hue);
    for (node, (x, y)) in layer.nodes.iter().zip(&layout.nodes) {
        let hue = cards[node.band].hue;
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
    let card_top = |band: usize| layout.bands[band].0 + (layout.bands[band].1 - CARD_HEIGHT) / 2.0;
    out += &card_edges(layer, card_left, card_top);
    for (at, (card, (top, band))) in cards.iter().zip(&layout.bands).enumerate() {
        let _ = write!(
            out,
            "<path class=\"link h{}\" d=\"M{:.1} {:.1}H{:.1}\"/>",
            card.hue,
            layout.width + 4.0,
            top + band / 2.0,
            card_left - 3.0
        );
        out += &draw_card(card, at + 1, (card_left, card_top(at)));
    }
    out + "</g></svg>"
}

/// Edges inside a band have its colour.
fn edges(layer: &Layer, layout: &Layout, hue: impl Fn(usize) -> usize) -> String {
    let mut out = String::new();
    for edge in &layout.edges {
        let (from, to) = (&layer.nodes[edge.from], &layer.nodes[edge.to]);
        let inside = from.band == to.band && from.role != Role::Input;
        let class = if inside { format!("edge in h{}", hue(from.band)) } else { "edge".to_owned() };
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

/// Which band reads what another one computes.
fn card_edges(layer: &Layer, card_left: f64, top: impl Fn(usize) -> f64) -> String {
    let mut out = String::new();
    let mut beside = 0;
    for to in 0..layer.bands {
        for from in layer.reads(to) {
            let (sy, ty) = (top(from) + CARD_HEIGHT, top(to));
            if from + 1 == to {
                let x = card_left + CARD_WIDTH / 2.0;
                let _ = write!(
                    out,
                    "<path class=\"edge\" d=\"M{x:.1} {sy:.1}V{:.1}\"/><path class=\"edge tip\" d=\"M{:.1} {:.1}h7l-3.5 5z\"/>",
                    ty - 2.0,
                    x - 3.5,
                    ty - 6.0
                );
            } else {
                let x = card_left + CARD_WIDTH;
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

fn draw_card(card: &Card, number: usize, (x, y): (f64, f64)) -> String {
    let text = |class: &str, dx: f64, dy: f64, text: &str| {
        format!("<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + dx, y + dy, escape(text))
    };
    let mut out = format!(
        "<g class=\"card h{}\"><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{CARD_WIDTH}\" height=\"{CARD_HEIGHT}\" rx=\"8\"/>",
        card.hue,
        escape(&card.hover)
    );
    let _ = write!(
        out,
        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"10\"/><text class=\"no\" x=\"{:.1}\" y=\"{:.1}\">{number}</text>",
        x + 20.0,
        y + 20.0,
        x + 20.0,
        y + 24.0
    );
    out += &text("kernel", 38.0, 25.0, &card.title);
    if let Some(floor) = &card.floor {
        let (x, y) = (x + CARD_WIDTH - 14.0, y + 25.0);
        let _ = write!(out, "<text class=\"floor\" x=\"{x:.1}\" y=\"{y:.1}\" {floor}</text>");
    }
    let [first, work, last] = &card.lines;
    out += &text("small", 14.0, 45.0, &shorten(first, 53));
    out += &text("work", 14.0, 62.0, work);
    out += &text("small", 14.0, 78.0, &shorten(last, 53));
    out + "</g>"
}
