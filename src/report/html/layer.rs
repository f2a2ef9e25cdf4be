//! One layer before and after fusion, as data: the operations that were declared, and the launches that compute them.
//!
//! An operation belongs to the launch that computes it. Launches run across layers: what belongs to a neighbour is shown as
//! such, and what comes from further away is an input.

use std::collections::BTreeMap;

use gemma4c_plan::{Kind, Plan, ValueIndex};

use crate::report::facts::PhaseFacts;
use crate::report::fold::{layer_of, local_name};

/// What a node of the drawing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operation of the layer.
    Own,
    /// An operation of another layer, or of none, in a launch that the layer shares with it.
    Neighbour,
    /// A value that no launch of the layer computes.
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
    /// Index into [`Layer::launches`].
    pub launch: usize,
    /// Indices into [`Layer::nodes`].
    pub inputs: Vec<usize>,
}

/// A layer's drawing.
#[derive(Clone, Debug)]
pub struct Layer {
    pub index: u32,
    /// In the order of the program, inputs first.
    pub nodes: Vec<Node>,
    /// Indices into the phase's steps.
    pub launches: Vec<usize>,
    /// Operations that were declared for it.
    pub declared: usize,
}

impl Layer {
    /// The layer as a phase computes it; `None` where the phase does not.
    pub fn of(plan: &Plan, phase: &PhaseFacts<'_>, index: u32) -> Option<Layer> {
        let program = &plan.program;
        let is_own = |value: ValueIndex| layer_of(&program.values[value as usize].name) == Some(index);
        let launches: Vec<usize> = (0..phase.steps.len())
            .filter(|at| phase.steps[*at].step.nodes.iter().any(|value| is_own(*value)))
            .collect();
        if launches.is_empty() {
            return None;
        }
        let mut owner: BTreeMap<ValueIndex, usize> = BTreeMap::new();
        for (launch, at) in launches.iter().enumerate() {
            for value in &phase.steps[*at].step.nodes {
                owner.entry(*value).or_insert(launch);
            }
        }
        let steps = program.steps.iter();
        let made_by: BTreeMap<ValueIndex, &gemma4c_plan::Step> = steps.map(|step| (step.output, step)).collect();
        // What no launch computes is a view, or was folded away: it goes where it is used first.
        let inputs_of = |value: &ValueIndex| made_by.get(value).map_or(&[][..], |step| &step.inputs[..]);
        for value in (0..program.values.len() as ValueIndex).rev().filter(|value| is_own(*value)) {
            if !owner.contains_key(&value) {
                let users =
                    owner.iter().filter(|(user, _)| inputs_of(user).contains(&value)).map(|(_, launch)| *launch);
                let launch = users.min().unwrap_or(launches.len() - 1);
                owner.insert(value, launch);
            }
        }
        let mut all = owner.clone();
        for (value, launch) in &owner {
            for input in inputs_of(value).iter().filter(|input| !owner.contains_key(input)) {
                let first = all.entry(*input).or_insert(*launch);
                *first = (*first).min(*launch);
            }
        }
        let position: BTreeMap<ValueIndex, usize> = all.keys().enumerate().map(|(at, value)| (*value, at)).collect();
        let node = |(value, launch): (&ValueIndex, &usize)| {
            let v = &program.values[*value as usize];
            let role = match (owner.contains_key(value), is_own(*value)) {
                (false, _) => Role::Input,
                (true, true) => Role::Own,
                (true, false) => Role::Neighbour,
            };
            let inputs = if role == Role::Input { &[][..] } else { inputs_of(value) };
            Node {
                name: local_name(&v.name).to_owned(),
                layer: layer_of(&v.name),
                op: made_by.get(value).map_or("", |step| step.op.name()),
                width: v.width,
                role,
                launch: *launch,
                inputs: inputs.iter().filter_map(|input| position.get(input).copied()).collect(),
            }
        };
        let declared = program.steps.iter().filter(|step| is_own(step.output)).count();
        Some(Layer { index, nodes: all.iter().map(node).collect(), launches, declared })
    }

    /// Launches whose values a launch reads, each once, before it.
    pub fn reads(&self, launch: usize) -> Vec<usize> {
        let nodes = self.nodes.iter().filter(|node| node.launch == launch && node.role != Role::Input);
        let inputs = nodes.flat_map(|node| &node.inputs).map(|at| &self.nodes[*at]);
        let mut found: Vec<usize> =
            inputs.filter(|node| node.role != Role::Input && node.launch < launch).map(|node| node.launch).collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// A layer of each kind there is, with a word for it. The second of a kind shows it better than the first: it has a neighbour
/// before it.
pub fn kinds(plan: &Plan) -> Vec<(String, u32)> {
    let program = &plan.program;
    let mut kinds: Vec<(String, Vec<u32>)> = Vec::new();
    for step in &program.steps {
        let Some(layer) = layer_of(&program.values[step.output as usize].name) else { continue };
        let cache = step.inputs.iter().find_map(|input| match program.values[*input as usize].kind {
            Kind::Kv { cache } => program.caches.get(cache as usize),
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
