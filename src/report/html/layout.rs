//! Where the nodes of a layer's drawing go, and which way its edges take.
//!
//! Bands go from left to right and lie in the order they run; within a band a node lies below what it reads. From side
//! to side a node lies below the middle of its inputs, as far as its neighbours let it. An edge that would run through
//! another node takes a lane beside them all.

use super::layer::{Layer, Role};

pub const NODE_WIDTH: f64 = 146.0;
pub const NODE_HEIGHT: f64 = 32.0;
const COLUMN: f64 = NODE_WIDTH + 14.0;
const RANK: f64 = NODE_HEIGHT + 20.0;
const BAND_PADDING: f64 = 14.0;
/// So that a card fits beside its band.
const BAND_LEAST: f64 = 112.0;
const LANE: f64 = 10.0;

/// A drawing's measures.
pub struct Layout {
    pub width: f64,
    pub height: f64,
    /// Centre and top of each node.
    pub nodes: Vec<(f64, f64)>,
    /// Top and height of each band.
    pub bands: Vec<(f64, f64)>,
    pub edges: Vec<Edge>,
}

/// From a node to one that reads it.
pub struct Edge {
    pub from: usize,
    pub to: usize,
    /// Where it runs beside the nodes.
    pub lane: Option<f64>,
}

impl Layout {
    pub fn of(layer: &Layer) -> Layout {
        let ranks = ranks(layer);
        let mut bands = Vec::new();
        let mut top = 0.0;
        for band in 0..layer.bands {
            let in_band = layer.nodes.iter().zip(&ranks).filter(|(node, _)| node.band == band);
            let rows = in_band.map(|(_, rank)| rank + 1).max().unwrap_or(1) as f64;
            let needed = rows * RANK - (RANK - NODE_HEIGHT) + 2.0 * BAND_PADDING;
            bands.push((top, needed.max(BAND_LEAST)));
            top += needed.max(BAND_LEAST);
        }
        let y = |at: usize| {
            let (top, height) = bands[layer.nodes[at].band];
            let in_band = layer.nodes.iter().zip(&ranks).filter(|(node, _)| node.band == layer.nodes[at].band);
            let rows = in_band.map(|(_, rank)| rank + 1).max().unwrap_or(1) as f64;
            let slack = height - (rows * RANK - (RANK - NODE_HEIGHT));
            top + slack / 2.0 + ranks[at] as f64 * RANK
        };
        let x = columns(layer, &ranks);
        let mut nodes: Vec<(f64, f64)> = (0..layer.nodes.len()).map(|at| (x[at], y(at))).collect();
        let (edges, left, right) = edges(layer, &nodes);
        let least = nodes.iter().map(|(x, _)| *x).fold(f64::MAX, f64::min) - NODE_WIDTH / 2.0;
        let most = nodes.iter().map(|(x, _)| *x).fold(f64::MIN, f64::max) + NODE_WIDTH / 2.0;
        let shift = 10.0 + left as f64 * LANE - least;
        nodes.iter_mut().for_each(|(x, _)| *x += shift);
        let lane = |side: Side| match side {
            Side::Left(lane) => least - (lane as f64 + 0.8) * LANE + shift,
            Side::Right(lane) => most + (lane as f64 + 0.8) * LANE + shift,
        };
        let edges = edges.into_iter().map(|(from, to, side)| Edge { from, to, lane: side.map(lane) }).collect();
        Layout { width: most + shift + right as f64 * LANE + 10.0, height: top, nodes, bands, edges }
    }
}

/// How far below the top of its band each node lies, in rows.
fn ranks(layer: &Layer) -> Vec<usize> {
    let mut ranks = vec![0_usize; layer.nodes.len()];
    for (at, node) in layer.nodes.iter().enumerate() {
        let above = node.inputs.iter().filter(|input| layer.nodes[**input].band == node.band);
        ranks[at] = above.map(|input| ranks[*input] + 1).max().unwrap_or(0);
    }
    // An input of a band lies right above what reads it, not at the band's top.
    for at in 0..ranks.len() {
        if layer.nodes[at].role == Role::Input {
            let readers = (0..ranks.len()).filter(|reader| {
                layer.nodes[*reader].band == layer.nodes[at].band && layer.nodes[*reader].inputs.contains(&at)
            });
            ranks[at] = readers.map(|reader| ranks[reader]).min().map_or(0, |rank| rank.saturating_sub(1));
        }
    }
    ranks
}

/// The centres of the nodes, from side to side.
fn columns(layer: &Layer, ranks: &[usize]) -> Vec<f64> {
    let mut x = vec![0.0; layer.nodes.len()];
    let mut placed = vec![false; layer.nodes.len()];
    for band in 0..layer.bands {
        let last = (0..ranks.len()).filter(|at| layer.nodes[*at].band == band).map(|at| ranks[at]).max().unwrap_or(0);
        for rank in 0..=last {
            let row: Vec<usize> =
                (0..ranks.len()).filter(|at| layer.nodes[*at].band == band && ranks[*at] == rank).collect();
            let mut wanted: Vec<(f64, usize)> = row
                .iter()
                .map(|at| {
                    // The residual comes from far away and would pull everything to itself.
                    let node = &layer.nodes[*at];
                    let placed_inputs: Vec<usize> =
                        node.inputs.iter().copied().filter(|input| placed[*input]).collect();
                    let is_near = |input: &usize| band - layer.nodes[*input].band <= 1;
                    let near: Vec<f64> =
                        placed_inputs.iter().filter(|input| is_near(input)).map(|input| x[*input]).collect();
                    let pulls =
                        if near.is_empty() { placed_inputs.iter().map(|input| x[*input]).collect() } else { near };
                    let middle = pulls.iter().sum::<f64>() / pulls.len().max(1) as f64;
                    // What nothing above leads to stands aside.
                    (if node.role == Role::Input { middle + COLUMN * 1.5 } else { middle }, *at)
                })
                .collect();
            wanted.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let mut at_least = f64::MIN;
            let mut off = 0.0;
            for (wish, at) in &wanted {
                x[*at] = wish.max(at_least);
                at_least = x[*at] + COLUMN;
                off += wish - x[*at];
                placed[*at] = true;
            }
            let off = off / wanted.len().max(1) as f64;
            wanted.iter().for_each(|(_, at)| x[*at] += off);
        }
    }
    x
}

/// A lane beside the nodes, counted outwards.
#[derive(Clone, Copy)]
enum Side {
    Left(usize),
    Right(usize),
}

/// From where to where, and beside what.
type Way = (usize, usize, Option<Side>);

/// The edges, and how many lanes there are on both sides.
fn edges(layer: &Layer, nodes: &[(f64, f64)]) -> (Vec<Way>, usize, usize) {
    let mut edges = Vec::new();
    let mut lanes: [Vec<Vec<(f64, f64)>>; 2] = [Vec::new(), Vec::new()];
    let middle = nodes.iter().map(|(x, _)| x).sum::<f64>() / nodes.len().max(1) as f64;
    for (to, node) in layer.nodes.iter().enumerate() {
        for &from in &node.inputs {
            let side = if is_free(nodes, from, to) {
                None
            } else {
                let (top, end) = (nodes[from].1, nodes[to].1);
                let is_left = (nodes[from].0 + nodes[to].0) / 2.0 <= middle;
                let taken = &mut lanes[usize::from(!is_left)];
                let overlaps = |lane: &Vec<(f64, f64)>| lane.iter().any(|(a, b)| top < *b && *a < end);
                let lane = taken.iter().position(|lane| !overlaps(lane)).unwrap_or_else(|| {
                    taken.push(Vec::new());
                    taken.len() - 1
                });
                taken[lane].push((top, end));
                Some(if is_left { Side::Left(lane) } else { Side::Right(lane) })
            };
            edges.push((from, to, side));
        }
    }
    (edges, lanes[0].len(), lanes[1].len())
}

/// Whether the straight way between two nodes meets no third one.
fn is_free(nodes: &[(f64, f64)], from: usize, to: usize) -> bool {
    let (start, end) = (nodes[from].1 + NODE_HEIGHT, nodes[to].1);
    nodes.iter().enumerate().all(|(at, (x, y))| {
        let between = *y + NODE_HEIGHT > start && *y < end && at != from && at != to;
        let way = ((y + NODE_HEIGHT / 2.0 - start) / (end - start).max(1.0)).clamp(0.0, 1.0);
        // The curve leaves and arrives upright.
        let eased = way * way * (3.0 - 2.0 * way);
        let passes = nodes[from].0 + (nodes[to].0 - nodes[from].0) * eased;
        !between || (passes - x).abs() > NODE_WIDTH / 2.0 + 4.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::html::layer::Node;

    /// A layer of nodes given as (band, inputs), where a negative band makes an input of it.
    fn layer(nodes: &[(i32, &[usize])]) -> Layer {
        let node = |(band, inputs): &(i32, &[usize])| Node {
            name: "a.b".into(),
            layer: Some(0),
            op: "add",
            width: 1,
            role: if *band < 0 { Role::Input } else { Role::Own },
            band: if *band < 0 { (-band - 1) as usize } else { *band as usize },
            inputs: inputs.to_vec(),
        };
        let bands = nodes.iter().map(|(band, _)| *band + 1).max().unwrap_or(0) as usize;
        Layer { index: 0, nodes: nodes.iter().map(node).collect(), bands, declared: 0 }
    }

    #[test]
    fn nodes_keep_apart_and_lie_below_what_they_read() {
        let fan: &[(i32, &[usize])] = &[
            (-1, &[]),
            (0, &[0]),
            (0, &[1]),
            (0, &[1]),
            (0, &[1]),
            (1, &[2]),
            (1, &[3, 4]),
            (1, &[5, 6]),
            (2, &[1, 7]),
        ];
        let alone: &[(i32, &[usize])] = &[(0, &[]), (-2, &[]), (1, &[0, 1]), (1, &[2]), (3, &[3, 0])];
        for nodes in [fan, alone, &[(0, &[])]] {
            let layer = layer(nodes);
            let layout = Layout::of(&layer);
            let inside = |&(x, y): &(f64, f64)| {
                x >= NODE_WIDTH / 2.0
                    && x + NODE_WIDTH / 2.0 <= layout.width
                    && y >= 0.0
                    && y + NODE_HEIGHT <= layout.height
            };
            assert!(layout.nodes.iter().all(inside), "{:?}", layout.nodes);
            for (at, (x, y)) in layout.nodes.iter().enumerate() {
                let meets = |(other_x, other_y): &(f64, f64)| {
                    (x - other_x).abs() < NODE_WIDTH && (y - other_y).abs() < NODE_HEIGHT
                };
                assert!(!layout.nodes[at + 1..].iter().any(meets), "{at} of {:?}", layout.nodes);
                let (top, height) = layout.bands[layer.nodes[at].band];
                assert!(*y >= top && y + NODE_HEIGHT <= top + height, "{at} is outside its band");
            }
            for edge in &layout.edges {
                assert!(layout.nodes[edge.from].1 + NODE_HEIGHT <= layout.nodes[edge.to].1, "an edge goes up");
            }
        }
    }

    #[test]
    fn an_edge_goes_around_what_is_in_its_way() {
        let layout = Layout::of(&layer(&[(0, &[]), (0, &[0]), (0, &[1, 0])]));
        let lanes: Vec<bool> = layout.edges.iter().map(|edge| edge.lane.is_some()).collect();
        assert_eq!(lanes, [false, false, true]);
    }
}
