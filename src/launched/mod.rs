//! What plans launch: the full sizes lowered without weights, without a GPU and without NVRTC, and every kernel
//! instance that occurs in them, under the place where it is launched first.
//!
//! This list, and no other, is what is snapshotted, compiled for every architecture, checked for spills, shown by
//! `gemma4c kernels` and timed by `gemma4c kernels --bench`. Kernels that no plan launches (the probe of a GPU's
//! memory) are listed from their cases, and say so.

pub mod recipes;

use std::collections::{BTreeSet, HashMap, HashSet};

use anyhow::{Context, Result};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cuda::Lowered;
use gemma4c_codegen::families::{FAMILIES, Family, NamedInstance};
use gemma4c_codegen::kernels::probe;
use gemma4c_codegen::kernels::product::tiles::product_tiles;
use gemma4c_codegen::kernels::product::wgmma::product_wgmma;
use gemma4c_dsl::{Instance, KernelDef};
use gemma4c_graph::{Graph, Op, Weight, WeightId};
use gemma4c_plan::Program;
use gemma4c_plan::cuda::{Argument, CudaStep, LoadPart, Phase, Range};
use rayon::prelude::*;

use crate::pipeline::Declared;
use recipes::Recipe;

/// A plan without machine code, of a model without weights.
pub struct Plan {
    pub recipe: Recipe,
    pub graph: Graph,
    /// Its weights, and behind them those of its drafter.
    weights: Vec<Weight>,
    /// The names of the drafter's values.
    drafters_values: Vec<String>,
    /// Those of each tower's.
    towers_values: Vec<Vec<String>>,
    /// What each of the plan's values is computed by, if that reads a matrix or a table.
    matrices: Vec<Option<WeightId>>,
    pub meaning: Program,
    pub lowered: Lowered,
}

impl Plan {
    pub fn lower(recipe: Recipe) -> Result<Plan> {
        let files = recipe.files()?;
        let declared = Declared::new(&files, &recipe.options).with_context(|| recipe.name())?;
        let lowered = declared.lower(&recipe.options.gpus[0]).with_context(|| recipe.name())?;
        let Declared { graph, program: meaning, weights, towers, drafter, .. } = declared;
        let by_name: HashMap<String, WeightId> =
            graph.iter().filter_map(|(id, node)| Some((graph.full_name(id), matrix(node.op)?))).collect();
        let matrices = meaning.values.iter().map(|value| by_name.get(&value.name).copied()).collect();
        let names = |program: &Program| program.values.iter().map(|value| value.name.clone()).collect();
        let drafters_values = drafter.map_or(Vec::new(), |drafter| names(&drafter.of_plan.program));
        let towers_values = towers.iter().map(|tower| names(&tower.program)).collect();
        Ok(Plan { recipe, graph, weights, drafters_values, towers_values, matrices, meaning, lowered })
    }

    /// The matrices that a step multiplies by, and the tables it gathers from.
    pub fn matrices_of(&self, step: &CudaStep) -> Vec<&Weight> {
        let mut ids: Vec<WeightId> = Vec::new();
        for id in step.nodes.iter().filter_map(|index| self.matrices[*index as usize]) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids.into_iter().map(|id| self.graph.weight(id)).collect()
    }

    /// `decode, layer 1, attn_q + attn_k + attn_v`: where a step of a phase stands.
    pub fn place(&self, phase: &Phase, at: usize) -> String {
        let role = self.role(&phase.steps[at]).unwrap_or_else(|| {
            let next = phase.steps[at..].iter().find_map(|step| self.role(step));
            next.map_or("a conversion".into(), |role| format!("before {role}"))
        });
        format!("{}, {role}", phase.name)
    }

    /// What a step is, in the words of the model's file: its layer, and the matrices it multiplies by or the table it
    /// gathers from, else the last value it computes. `None` for a conversion, which stands for no value of its own.
    fn role(&self, step: &CudaStep) -> Option<String> {
        let last = *step.nodes.last()?;
        let names: Vec<&str> = self.matrices_of(step).iter().map(|weight| without_layer(&weight.name)).collect();
        // The layer of what it ends in: it may begin with what the layer before has left to it.
        let value = self.meaning.values[last as usize].name.as_str();
        let layer = value.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.map_or(String::new(), |(layer, _)| format!("layer {layer}, "));
        Some(layer + &if names.is_empty() { without_layer(value).to_owned() } else { names.join(" + ") })
    }

    /// Every launch with the place where it stands: decode first, then the ladder of prefill, then what is launched
    /// while loading and after the logits.
    fn launches(&self) -> Vec<(String, &Instance)> {
        let program = &self.lowered.program;
        let instance = |kernel: u32| &self.lowered.instances[kernel as usize];
        let mut all = Vec::new();
        for phase in &program.phases {
            for (at, step) in phase.steps.iter().enumerate() {
                all.push((self.place(phase, at), instance(step.launch.kernel)));
            }
        }
        for step in program.drafter.iter().flat_map(|drafter| &drafter.phase.steps) {
            let value = step.nodes.last().map_or("the hidden state, the choice, or the end of a round", |at| {
                &self.drafters_values[*at as usize]
            });
            all.push((format!("draft, {value}"), instance(step.launch.kernel)));
        }
        for (tower, values) in program.towers.iter().zip(&self.towers_values) {
            for (phase, step) in tower.phases.iter().flat_map(|phase| phase.steps.iter().map(move |step| (phase, step)))
            {
                let value = step.nodes.last().map_or("a conversion", |at| &values[*at as usize]);
                all.push((format!("{}, {value}", phase.name), instance(step.launch.kernel)));
            }
        }
        for load in &program.loads {
            let name = &self.weights[load.weight.index()].name;
            for part in &load.parts {
                if let LoadPart::Kernel { kernel, .. } = part {
                    all.push((format!("load of {name}"), instance(*kernel)));
                }
            }
        }
        for launch in &program.prepare {
            let copied = launch.arguments.first().and_then(|codes| self.loaded_to(codes)).unwrap_or("a matrix");
            all.push((format!("bf16 copy of {copied}"), instance(launch.kernel)));
        }
        // The picks of all phases are the same kernels.
        if let Some(phase) = program.phases.first() {
            let largest = phase.pick_largest.iter().map(|launch| ("the largest logit".to_owned(), launch));
            let sampled = phase.pick_sampled.iter().map(|launch| ("sampling".to_owned(), launch));
            all.extend(largest.chain(sampled).map(|(what, launch)| (what, instance(launch.kernel))));
        }
        all
    }

    /// The tensor that is loaded to where an argument starts.
    fn loaded_to(&self, argument: &Argument) -> Option<&str> {
        let Argument::Memory(Range { region, offset, .. }) = argument else { return None };
        let starts = |part: &LoadPart| match part {
            LoadPart::Copy { to } | LoadPart::Kernel { to, .. } => (to.region, to.offset) == (*region, *offset),
        };
        let load = self.lowered.program.loads.iter().find(|load| load.parts.iter().any(starts))?;
        Some(&self.weights[load.weight.index()].name)
    }

    /// The instances of the plan, each once, under the place of its first launch.
    pub fn instances(&self) -> Vec<NamedInstance> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for (place, instance) in self.launches() {
            if seen.insert(std::ptr::from_ref(instance)) {
                let label = format!("{}, {place}", self.recipe.name());
                found.push(NamedInstance { label, instance: instance.clone(), plans: 1 });
            }
        }
        found
    }
}

/// The matrix or table that an operation reads.
fn matrix(op: Op) -> Option<WeightId> {
    match op {
        Op::MatMul { weight } | Op::ExpertMatMul { weight, .. } | Op::Gather { table: weight } => Some(weight),
        _ => None,
    }
}

/// `attn_q` of `blk.0.attn_q.weight`.
fn without_layer(name: &str) -> &str {
    let rest = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, rest)| rest);
    rest.strip_suffix(".weight").unwrap_or(rest)
}

/// Kernels that no plan of the five sizes launches: `read_all` is the probe of a GPU's memory; `quantise` is for
/// activations that no producer leaves as int8, of which these plans have none.
pub const WITHOUT_PLAN: [&str; 2] = ["read_all", "quantise"];

/// Everything that an architecture's plans launch of these kernels, in their order; of those that no plan launches,
/// what their cases and `gemma4c kernels --bench` do.
pub fn instances(arch: Arch, kernels: &[&'static KernelDef]) -> Result<Vec<NamedInstance>> {
    let is_without = |kernel: &&'static KernelDef| WITHOUT_PLAN.contains(&kernel.name);
    let mut all = if kernels.iter().all(is_without) { Vec::new() } else { launched(arch)? };
    let has_such = |family: &&Family| family.kernels.iter().any(|own| is_without(own) && kernels.contains(own));
    for family in FAMILIES.iter().filter(has_such) {
        let own = family.instances_of_cases().into_iter().filter(|named| is_without(&named.instance.def));
        let label = |choice: &str| match choice {
            "" => "no plan, every case".to_owned(),
            choice => format!("no plan, a case: {choice}"),
        };
        all.extend(own.map(|named| NamedInstance { label: label(&named.label), ..named }));
    }
    for (at, instance) in probe::tried()?.into_iter().enumerate() {
        all.push(NamedInstance { label: format!("no plan, probe {} of --bench", at + 1), instance, plans: 0 });
    }
    let of = |kernel: &&'static KernelDef| {
        let kernel = *kernel;
        all.iter().filter(move |named| named.instance.def == kernel && arch.has_all_of(&named.instance)).cloned()
    };
    Ok(kernels.iter().flat_map(of).collect())
}

/// Every instance that an architecture's plans launch, under its first place.
pub fn launched(arch: Arch) -> Result<Vec<NamedInstance>> {
    let mut found = Collected::default();
    found.add(recipes::ordinary(arch), |_| true)?;
    let kernels = |found: &Collected| -> BTreeSet<&'static str> {
        found.instances.iter().map(|named| named.instance.def.name).collect()
    };
    let ordinary = kernels(&found);
    for recipe in recipes::with_sequences(arch) {
        let known = kernels(&found);
        found.add(vec![recipe], |instance| !known.contains(instance.def.name))?;
    }
    found.add(recipes::with_seats(arch), |_| true)?;
    let (fast, plain): (Vec<Recipe>, Vec<Recipe>) =
        recipes::with_towers(arch).into_iter().partition(|recipe| recipe.options.disabled.is_empty());
    let known = kernels(&found);
    let by_warpgroups = [product_wgmma::DEF.name, product_tiles::DEF.name];
    let of_tower = |instance: &Instance| arch.has_wgmma() && by_warpgroups.contains(&instance.def.name);
    found.add(fast, |instance| !known.contains(instance.def.name) || of_tower(instance))?;
    let known = kernels(&found);
    found.add(plain, |instance| !known.contains(instance.def.name))?;
    found.add(recipes::with_passes_off(arch), |instance| !ordinary.contains(instance.def.name))?;
    Ok(found.instances)
}

/// Instances by their text, each under its first label.
#[derive(Default)]
struct Collected {
    instances: Vec<NamedInstance>,
    /// Where each is.
    texts: HashMap<String, usize>,
    labels: HashSet<(&'static str, String)>,
}

impl Collected {
    /// Adds what plans launch, in the order of the recipes.
    fn add(&mut self, recipes: Vec<Recipe>, wanted: impl Fn(&Instance) -> bool) -> Result<()> {
        for instances in lower_all(recipes)? {
            for NamedInstance { label, instance, plans } in instances {
                if !wanted(&instance) {
                    continue;
                }
                let at = self.instances.len();
                let known = *self.texts.entry(instance.to_string()).or_insert(at);
                if known < at {
                    self.instances[known].plans += plans;
                    continue;
                }
                // One place may launch a kernel twice, for two matrices or two planes of one.
                let mut unique = label.clone();
                let mut count = 1;
                while !self.labels.insert((instance.def.name, unique.clone())) {
                    count += 1;
                    unique = format!("{label}, {count}");
                }
                self.instances.push(NamedInstance { label: unique, instance, plans });
            }
        }
        Ok(())
    }
}

/// The instances of each recipe's plan, lowered on all cores.
fn lower_all(recipes: Vec<Recipe>) -> Result<Vec<Vec<NamedInstance>>> {
    recipes.into_par_iter().map(|recipe| Ok(Plan::lower(recipe)?.instances())).collect()
}
