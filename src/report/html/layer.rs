//! One layer as data for a drawing: the operations that were declared, in bands.
//!
//! On a GPU a band is a launch, and an operation belongs to the one that computes it. Launches run across layers: what
//! belongs to a neighbour is shown as such, and what comes from further away is an input. On a CPU, where every
//! operation is a step of its own, a band is a part of the model.

use std::collections::BTreeMap;

use gemma4c_plan::{Kind, Plan, Step, ValueIndex};

use crate::report::facts::PhaseFacts;
use crate::report::fold::{layer_of, local_name};

/// What a node of the drawing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operation of the layer.
    Own,
    /// An operation of another layer, or of none, in a band that the layer shares with it.
    Neighbour,
    /// A value that no band computes.
    Input,
}

/// A value and the operation that gives it.
#[derive(Clone, Debug)]
pub struct Node {
    /// Without its layer.
    pub name: String,
    pub layer: Option<u32>,
    pub op: &'static str,
    pub width: u32,
    pub role: Role,
    /// Which band it lies in.
    pub band: usize,
    /// Indices into [`Layer::nodes`].
    pub inputs: Vec<usize>,
}

/// A layer's drawing.
#[derive(Clone, Debug)]
pub struct Layer {
    pub index: u32,
    /// In the order of the program, inputs first.
    pub nodes: Vec<Node>,
    pub bands: usize,
    /// Operations that were declared for it.
    pub declared: usize,
}

impl Layer {
    /// The layer as a phase computes it, one band a launch, and which of the phase's steps these are; `None` where the
    /// phase does not compute it.
    pub fn launched(plan: &Plan, phase: &PhaseFacts<'_>, index: u32) -> Option<(Layer, Vec<usize>)> {
        let is_own = |value: &ValueIndex| is_of_layer(plan, *value, index);
        let launches: Vec<usize> =
            (0..phase.steps.len()).filter(|at| phase.steps[*at].step.nodes.iter().any(is_own)).collect();
        if launches.is_empty() {
            return None;
        }
        let mut bands: BTreeMap<ValueIndex, usize> = BTreeMap::new();
        for (band, at) in launches.iter().enumerate() {
            for value in &phase.steps[*at].step.nodes {
                bands.entry(*value).or_insert(band);
            }
        }
        // What no launch computes is a view, or was folded away: it goes where it is used first.
        let made_by = made_by(plan);
        for value in (0..plan.program.values.len() as ValueIndex).rev().filter(is_own) {
            if !bands.contains_key(&value) {
                let users = bands.iter().filter(|(user, _)| inputs_of(&made_by, user).contains(&value));
                let band = users.map(|(_, band)| *band).min().unwrap_or(launches.len() - 1);
                bands.insert(value, band);
            }
        }
        Some((Layer::in_bands(plan, index, &bands, launches.len()), launches))
    }

    /// The layer as it is declared, one band a part of the model, and the names of these; `None` where there is none.
    ///
    /// A part that runs in the midst of another belongs to it: the norms of an MLP enclose its products.
    pub fn declared(plan: &Plan, index: u32) -> Option<(Layer, Vec<String>)> {
        let steps: Vec<&Step> = plan.program.steps.iter().filter(|s| is_of_layer(plan, s.output, index)).collect();
        let parts: Vec<&str> = steps.iter().map(|step| part(plan, step)).collect();
        let mut names: Vec<String> = Vec::new();
        let mut bands = BTreeMap::new();
        let mut end = 0;
        for (at, step) in steps.iter().enumerate() {
            if at >= end {
                names.push(parts[at].to_owned());
            }
            let last = parts.iter().rposition(|other| *other == parts[at]).unwrap_or(at);
            end = end.max(last + 1);
            bands.insert(step.output, names.len() - 1);
        }
        (!names.is_empty()).then(|| (Layer::in_bands(plan, index, &bands, names.len()), names))
    }

    /// Values with their bands, and what these read as inputs.
    fn in_bands(plan: &Plan, index: u32, bands: &BTreeMap<ValueIndex, usize>, count: usize) -> Layer {
        let program = &plan.program;
        let made_by = made_by(plan);
        let mut all = bands.clone();
        for (value, band) in bands {
            for input in inputs_of(&made_by, value).iter().filter(|input| !bands.contains_key(input)) {
                let first = all.entry(*input).or_insert(*band);
                *first = (*first).min(*band);
            }
        }
        let position: BTreeMap<ValueIndex, usize> = all.keys().enumerate().map(|(at, value)| (*value, at)).collect();
        let node = |(value, band): (&ValueIndex, &usize)| {
            let v = &program.values[*value as usize];
            let role = match (bands.contains_key(value), is_of_layer(plan, *value, index)) {
                (false, _) => Role::Input,
                (true, true) => Role::Own,
                (true, false) => Role::Neighbour,
            };
            let inputs = if role == Role::Input { &[][..] } else { inputs_of(&made_by, value) };
            Node {
                name: local_name(&v.name).to_owned(),
                layer: layer_of(&v.name),
                op: made_by.get(value).map_or("", |step| step.op.name()),
                width: v.width,
                role,
                band: *band,
                inputs: inputs.iter().filter_map(|input| position.get(input).copied()).collect(),
            }
        };
        let declared = program.steps.iter().filter(|step| is_of_layer(plan, step.output, index)).count();
        Layer { index, nodes: all.iter().map(node).collect(), bands: count, declared }
    }

    /// Bands whose values a band reads, each once, before it.
    pub fn reads(&self, band: usize) -> Vec<usize> {
        let nodes = self.nodes.iter().filter(|node| node.band == band && node.role != Role::Input);
        let inputs = nodes.flat_map(|node| &node.inputs).map(|at| &self.nodes[*at]);
        let mut found: Vec<usize> =
            inputs.filter(|node| node.role != Role::Input && node.band < band).map(|node| node.band).collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

fn is_of_layer(plan: &Plan, value: ValueIndex, index: u32) -> bool {
    layer_of(&plan.program.values[value as usize].name) == Some(index)
}

/// The step that computes each value.
fn made_by(plan: &Plan) -> BTreeMap<ValueIndex, &Step> {
    plan.program.steps.iter().map(|step| (step.output, step)).collect()
}

fn inputs_of<'a>(made_by: &BTreeMap<ValueIndex, &'a Step>, value: &ValueIndex) -> &'a [ValueIndex] {
    made_by.get(value).map_or(&[], |step| &step.inputs)
}

/// The part of the model that a step belongs to, by the name of its value: `attention`, `head`.
pub fn part<'a>(plan: &'a Plan, step: &Step) -> &'a str {
    let name = local_name(&plan.program.values[step.output as usize].name);
    name.rsplit_once('.').map_or(name, |(part, _)| part)
}

/// A layer of each kind there is, with a word for it. The second of a kind shows it better than the first: it has a
/// neighbour before it.
pub fn kinds(plan: &Plan) -> Vec<(String, u32)> {
    let program = &plan.program;
    let mut kinds: Vec<(String, Vec<u32>)> = Vec::new();
    for step in &program.steps {
        let Some(layer) = layer_of(&program.values[step.output as usize].name) else { continue };
        let cache = step.inputs.iter().find_map(|input| match program.values[*input as usize].kind {
            Kind::Kv { cache } => program.caches.get(cache.index()),
            _ => None,
        });
        let Some(cache) = cache else { continue };
        let reach = cache.window.map_or("global".to_owned(), |window| format!("sliding, window {window}"));
        let keys = if cache.layer == layer { "own keys" } else { "shared keys" };
        let word = format!("{reach}, {keys}");
        match kinds.iter_mut().find(|(known, _)| *known == word) {
            Some((_, layers)) => layers.push(layer),
            None => kinds.push((word, vec![layer])),
        }
    }
    kinds.into_iter().map(|(word, layers)| (word, *layers.get(1).unwrap_or(&layers[0]))).collect()
}
