//! What the CPU computes of the same tokens: every value that a device's step leaves somewhere.

use std::collections::HashMap;

use anyhow::{Context, Result};
use gemma4c_plan::{Kind, Op, Plan, Program, ValueIndex};
use gemma4c_runtime::cpu::ops::moe;
use gemma4c_runtime::{Asked, Session};

/// One pass over the model: some tokens, and the CPU's values for them.
pub struct Reference {
    pub tokens: Vec<u32>,
    pub position: u32,
    values: HashMap<ValueIndex, Vec<f32>>,
}

/// The rows that a step works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All of the pass.
    All,
    /// The last of the pass, whose logits are asked for.
    Asked,
}

/// The experts of some rows, and the scores they were chosen by.
pub struct Routing<'a> {
    pub experts: usize,
    /// Experts a row.
    pub top: usize,
    /// Best first.
    pub ids: Vec<u32>,
    pub logits: &'a [f32],
}

impl Reference {
    /// Feeds tokens to the CPU.
    pub fn compute(cpu: &mut Session, tokens: &[u32], recorded: &Recorded) -> Result<Reference> {
        let position = cpu.position();
        let mut values: HashMap<ValueIndex, Vec<f32>> = HashMap::new();
        let mut tap = |name: &str, _: usize, rows: &mut [f32]| {
            if let Some(value) = recorded.0.get(name) {
                values.entry(*value).or_default().extend_from_slice(rows);
            }
        };
        cpu.feed_tapped(tokens, Asked::Last, None, &mut tap, &mut |_, _| {})?;
        Ok(Reference { tokens: tokens.to_vec(), position, values })
    }

    pub fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.tokens.len(),
            Rows::Asked => 1,
        }
    }

    /// The position of the first of these rows.
    pub fn position(&self, rows: Rows) -> u32 {
        self.position + (self.tokens.len() - self.count(rows)) as u32
    }

    /// A value as far as it was computed.
    pub fn all(&self, value: ValueIndex) -> &[f32] {
        self.values.get(&value).map_or(&[], Vec::as_slice)
    }

    /// Rows of a value.
    pub fn rows(&self, program: &Program, value: ValueIndex, rows: Rows) -> Result<&[f32]> {
        let described = &program.values[value as usize];
        let all = self.values.get(&value).with_context(|| format!("the CPU does not compute {}", described.name))?;
        let wanted = self.count(rows) * described.width as usize;
        let first = all.len().checked_sub(wanted);
        first.map(|first| &all[first..]).with_context(|| format!("the CPU has fewer rows of {}", described.name))
    }

    /// The routing that a value stands for.
    pub fn routing(&self, plan: &Plan, value: ValueIndex, rows: Rows) -> Result<Routing<'_>> {
        let program = &plan.program;
        let step = program.steps.iter().find(|step| step.output == value);
        let (Some(step), Kind::Routing { experts }) = (step, program.values[value as usize].kind) else {
            anyhow::bail!("{} is no routing", program.values[value as usize].name)
        };
        let top = program.values[value as usize].width as usize;
        let logits = self.rows(program, step.inputs[0], rows)?;
        let ids = moe::route(logits, experts as usize, top).ids;
        Ok(Routing { experts: experts as usize, top, ids, logits })
    }
}

/// The values that are recorded of a pass, by name: the others would only take memory.
pub struct Recorded(HashMap<String, ValueIndex>);

impl Recorded {
    /// Everything that a step of the plan writes, to memory or to a KV cache, and the logits of routers.
    pub fn of(plan: &Plan) -> Recorded {
        let phases = plan.cuda.iter().flat_map(|cuda| &cuda.program.phases);
        let left = phases.flat_map(|phase| &phase.steps).flat_map(|step| &step.outputs).map(|output| output.value);
        let inputs = plan.program.steps.iter().filter(|s| matches!(s.op, Op::KvAppend { .. } | Op::Route { .. }));
        let values = left.chain(inputs.flat_map(|step| step.inputs.iter().copied()));
        let named = values.chain([plan.program.output]).map(|value| {
            let name = plan.program.values[value as usize].name.clone();
            (name, value)
        });
        Recorded(named.collect())
    }
}
