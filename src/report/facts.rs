//! What a GPU plan amounts to: its launches by layer, the bytes they read, and where its memory goes.

use std::collections::BTreeMap;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target;
use gemma4c_plan::cuda::{Cuda, CudaProgram, CudaStep, Kernel, KvCache, Phase, PhaseKind};
use gemma4c_plan::{Cache, Plan, Program};

use super::fold::{layer_of, local_name};
use super::labels::labels;

/// A GPU plan, counted.
pub struct Facts<'a> {
    pub plan: &'a Plan,
    pub cuda: &'a Cuda,
    /// Of the kernels, in their order.
    pub labels: Vec<String>,
    pub phases: Vec<PhaseFacts<'a>>,
}

/// One phase.
pub struct PhaseFacts<'a> {
    pub phase: &'a Phase,
    /// Whose values its steps compute: the text's program, or a tower's.
    pub meaning: &'a Program,
    pub steps: Vec<StepFacts<'a>>,
    /// Launches of a greedy pick after it.
    pub picks: usize,
}

/// One launch.
pub struct StepFacts<'a> {
    pub step: &'a CudaStep,
    pub kernel: &'a Kernel,
    /// The layer it is counted for: that of the last value it computes. A launch that ends one layer and begins the
    /// next is the next one's; one that only converts belongs to its reader.
    pub layer: Option<u32>,
    /// The names of the values it computes.
    pub nodes: Vec<&'a str>,
}

impl<'a> Facts<'a> {
    /// `None` for a plan without a GPU's program.
    pub fn of(plan: &'a Plan) -> Option<Facts<'a>> {
        let cuda = plan.cuda.as_ref()?;
        let program = &cuda.program;
        let of_text = program.phases.iter().map(|phase| PhaseFacts::of(&plan.program, program, phase));
        let towers = plan.towers.iter().zip(&program.towers);
        let of_towers = towers.flat_map(|(tower, own)| own.phases.iter().map(move |phase| (&tower.program, phase)));
        let of_towers = of_towers.map(|(meaning, phase)| PhaseFacts::of(meaning, program, phase));
        let drafter = program.drafter.as_ref().zip(plan.drafter.as_ref());
        let of_drafter = drafter.map(|(on_gpu, drafter)| PhaseFacts::of(&drafter.program, program, &on_gpu.phase));
        let phases = of_text.chain(of_towers).chain(of_drafter).collect();
        Some(Facts { plan, cuda, labels: labels(&cuda.program.kernels), phases })
    }

    pub fn program(&self) -> &'a CudaProgram {
        &self.cuda.program
    }

    /// The GPU that its launches are shaped for.
    pub fn target(&self) -> Target {
        Target::of_program(&self.program().gpu).unwrap_or_else(|| Target::of_arch(Arch::Sm90a))
    }

    pub fn label(&self, step: &StepFacts<'_>) -> &str {
        &self.labels[step.step.launch.kernel as usize]
    }

    /// Bytes of the device and of the host together.
    pub fn total_bytes(&self) -> u64 {
        let memory = &self.program().memory;
        memory.device().unwrap_or(u64::MAX).saturating_add(memory.host)
    }

    /// Bytes of keys and values by the layer that owns them, of a sequence as long as the context, and whether it sees a
    /// window only.
    pub fn caches(&self) -> Vec<CacheFacts> {
        let (layout, kv) = (&self.program().kv_layout, self.program().kv);
        let of = |(place, cache): (&KvCache, &Cache)| {
            let row = kv.row_bytes(cache.kv_heads, cache.head_dim);
            let bytes = 2 * row * u64::from(layout.paging(place).kept());
            CacheFacts { layer: cache.layer, window: cache.window, bytes }
        };
        layout.caches.iter().zip(&self.plan.program.caches).map(of).collect()
    }

    /// How many sequences of how many tokens there is room for.
    pub fn sequences(&self) -> String {
        let (layout, context) = (&self.program().kv_layout, self.plan.program.context);
        let (slots, whole) = (layout.slots, layout.sequences_of(context));
        let many = |count: u32| if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") };
        if whole == slots {
            return format!("{} of {context} tokens", many(slots));
        }
        let each = layout.positions_each(context);
        format!("{} of {context} tokens, or {} of {each}", many(whole), many(slots))
    }
}

/// Keys and values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFacts {
    pub layer: u32,
    pub window: Option<u32>,
    pub bytes: u64,
}

impl<'a> PhaseFacts<'a> {
    fn of(meaning: &'a Program, program: &'a CudaProgram, phase: &'a Phase) -> PhaseFacts<'a> {
        let mut next_layer = None;
        let mut steps: Vec<StepFacts<'a>> = Vec::new();
        for step in phase.steps.iter().rev() {
            let nodes: Vec<&str> =
                step.nodes.iter().map(|value| meaning.values[*value as usize].name.as_str()).collect();
            let layer = nodes.last().map_or(next_layer, |name| layer_of(name));
            next_layer = layer;
            steps.push(StepFacts { step, kernel: &program.kernels[step.launch.kernel as usize], layer, nodes });
        }
        steps.reverse();
        PhaseFacts { phase, meaning, steps, picks: phase.pick_largest.len() }
    }

    /// Whether this is the step from which on a prefill phase works on the asked row alone.
    pub fn asks_from(&self, step: usize) -> bool {
        self.phase.kind == PhaseKind::Prefill && step == self.phase.asked_from as usize
    }

    /// What a step waits for, where that is not the step before it alone.
    pub fn waits_for(&self, step: usize) -> Option<String> {
        let after = &self.steps[step].step.after;
        let before: Vec<u32> = step.checked_sub(1).map(|before| before as u32).into_iter().collect();
        let names: Vec<String> = after.iter().map(u32::to_string).collect();
        match &names[..] {
            _ if *after == before => None,
            [] => Some("waits for no step".into()),
            [one] => Some(format!("waits for step {one}")),
            several => Some(format!("waits for steps {}", several.join(" and "))),
        }
    }

    pub fn launches(&self) -> usize {
        self.steps.len() + self.picks
    }

    fn launches_by_layer(&self) -> BTreeMap<u32, usize> {
        let mut counts = BTreeMap::new();
        for layer in self.steps.iter().filter_map(|step| step.layer) {
            *counts.entry(layer).or_default() += 1;
        }
        counts
    }

    /// Of the layer that has most.
    pub fn launches_per_layer(&self) -> usize {
        self.launches_by_layer().into_values().max().unwrap_or(0)
    }

    pub fn mean_launches_per_layer(&self) -> f64 {
        let counts = self.launches_by_layer();
        if counts.is_empty() { 0.0 } else { counts.values().sum::<usize>() as f64 / counts.len() as f64 }
    }

    /// Embedding, LM head, pick.
    pub fn launches_outside_layers(&self) -> usize {
        self.launches() - self.launches_by_layer().values().sum::<usize>()
    }

    pub fn bytes(&self) -> u64 {
        self.steps.iter().fold(0, |sum: u64, step| sum.saturating_add(step.step.bytes))
    }

    pub fn flops(&self) -> u64 {
        self.steps.iter().fold(0, |sum: u64, step| sum.saturating_add(step.step.flops))
    }

    /// Seconds that its launches take at least, one after the other.
    pub fn floor(&self, gpu: &Target) -> f64 {
        self.steps.iter().map(|step| gpu.floor(step.step.bytes, step.step.flops)).sum()
    }
}

impl<'a> StepFacts<'a> {
    /// Its purpose, without its layer: its kernel, and the values it computes.
    pub fn pattern(&self) -> (&'a str, Vec<&'a str>) {
        (&self.kernel.name, self.nodes.iter().map(|name| local_name(name)).collect())
    }

    /// The alternative that was not chosen.
    pub fn runner_up(&self) -> Option<&'a str> {
        Some(self.step.runner_up.as_str()).filter(|text| !text.is_empty())
    }

    /// Why this kernel was chosen, and the alternative, as one text.
    pub fn choice(&self) -> String {
        match self.runner_up() {
            Some(other) => format!("{}; instead of: {other}", self.step.reason),
            None => self.step.reason.clone(),
        }
    }

    /// `384`, `2 x 17`.
    pub fn grid(&self) -> String {
        let [x, y, z] = self.step.launch.grid;
        match (y, z) {
            (1, 1) => x.to_string(),
            (_, 1) => format!("{x} x {y}"),
            _ => format!("{x} x {y} x {z}"),
        }
    }
}
