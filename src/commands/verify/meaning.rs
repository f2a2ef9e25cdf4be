//! The meaning of a step of the GPU program: which values it writes, where, and how they have been rounded.

use std::collections::HashSet;

use anyhow::{Result, bail, ensure};
use gemma4c_plan::cuda::{Argument, CudaProgram, CudaStep, Form, KvType, Phase, PhaseKind, Range, Region, StepOutput};
use gemma4c_plan::{self as plan, Kind, Op, Plan, Step, ValueIndex};

use super::numbers::Numbers;
use super::reference::{Reference, Rows};

/// A value that a step writes to memory.
#[derive(Clone, Debug)]
pub struct Left {
    pub value: ValueIndex,
    pub content: Content,
    /// Its live rows, one after the other.
    pub parts: Vec<Range>,
    pub rows: Rows,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Numbers(Numbers),
    Experts,
}

/// Where a value's rounding comes from, from the finest to the coarsest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rounding {
    /// f32 all the way.
    None,
    /// Activations of a matrix product, in 8 bits or in bf16.
    Product,
    /// Queries, keys, values and their weights in 16 bits, under an exponential.
    Attention,
    /// The product of two such values, whose errors multiply: large values are the noisy ones.
    Gated,
}

/// A plan's two programs: what runs, and what it means.
pub struct Meaning<'a> {
    pub plan: &'a Plan,
    pub program: &'a CudaProgram,
    /// The step of the meaning that makes each value.
    made_by: Vec<Option<&'a Step>>,
    /// No pass rounds activations.
    pub is_exact: bool,
}

impl<'a> Meaning<'a> {
    pub fn new(plan: &'a Plan, program: &'a CudaProgram) -> Meaning<'a> {
        let mut made_by = vec![None; plan.program.values.len()];
        for step in &plan.program.steps {
            made_by[step.output as usize] = Some(step);
        }
        let is_exact = program.passes.iter().any(|pass| pass.name == "int8" && !pass.enabled);
        Meaning { plan, program, made_by, is_exact }
    }

    pub fn name(&self, value: ValueIndex) -> &'a str {
        &self.plan.program.values[value as usize].name
    }

    pub fn width(&self, value: ValueIndex) -> usize {
        self.plan.program.values[value as usize].width as usize
    }

    /// Everything that a step of a phase writes for the rows of a pass: its outputs, and the rows it stores into a KV
    /// cache.
    pub fn left(&self, phase: &Phase, index: usize, pass: &Reference) -> Result<Vec<Left>> {
        let step = &phase.steps[index];
        let asked = phase.kind == PhaseKind::Prefill && index >= phase.asked_from as usize;
        let rows = if asked { Rows::Asked } else { Rows::All };
        let capacity = if rows == Rows::Asked { 1 } else { phase.rows };
        let mut left = Vec::new();
        for output in &step.outputs {
            let (content, parts) = self.place(output, capacity as u64, pass.count(rows) as u64)?;
            left.push(Left { value: output.value, content, parts, rows });
        }
        for node in &step.nodes {
            if let Some(Step { op: Op::KvAppend { cache }, inputs, .. }) = self.made_by[*node as usize] {
                left.extend(self.stored(step, cache.index(), inputs, pass));
            }
        }
        Ok(left)
    }

    /// Where the first `live` rows of an output lie, in memory for `capacity`.
    fn place(&self, output: &StepOutput, capacity: u64, live: u64) -> Result<(Content, Vec<Range>)> {
        let (place, width) = (output.place, self.width(output.value) as u64);
        let part = |offset: u64, bytes: u64| Range { offset: place.offset + offset, bytes, ..place };
        let (content, parts) = match output.form {
            Form::F32 => (Content::Numbers(Numbers::F32), self.spaced(place, Numbers::F32, width, capacity, live)),
            Form::BF16 => (Content::Numbers(Numbers::BF16), self.spaced(place, Numbers::BF16, width, capacity, live)),
            Form::F16 => (Content::Numbers(Numbers::F16), self.spaced(place, Numbers::F16, width, capacity, live)),
            Form::Int8 => {
                let (all, groups) = (capacity * width, live * width / 32 * 4);
                let parts =
                    [part(0, live * width), part(all, groups), part(all + all / 32 * 4, groups)].into_iter().collect();
                (Content::Numbers(Numbers::Int8), parts)
            }
            // One row alone is left so, its parts one behind the other.
            Form::Mixed { loose } => (Content::Numbers(Numbers::Mixed { loose }), vec![place]),
            Form::Kv => {
                let appended =
                    |step: &&Step| matches!(step.op, Op::KvAppend { .. }) && step.inputs.contains(&output.value);
                let append = self.plan.program.steps.iter().find(appended);
                let Some(Step { op: Op::KvAppend { cache }, .. }) = append else {
                    bail!("{} is no key or value", self.name(output.value))
                };
                let plan::Cache { kv_heads, head_dim, .. } = self.plan.program.caches[cache.index()];
                let numbers = Numbers::of_cache(self.program.kv, head_dim);
                let bytes = self.program.kv.row_bytes(kv_heads, head_dim);
                (Content::Numbers(numbers), vec![part(0, live * bytes)])
            }
            Form::Experts => (Content::Experts, vec![part(0, live * width * 4)]),
        };
        let end = place.offset + place.bytes;
        let fits = width > 0 && parts.iter().all(|part| part.offset + part.bytes <= end);
        ensure!(fits, "the plan has too little room for {}", self.name(output.value));
        Ok((content, parts))
    }

    /// Rows from the first value of the first to the last value of the last, evenly spaced: a part of wider rows has
    /// gaps.
    fn spaced(&self, place: Range, numbers: Numbers, width: u64, capacity: u64, live: u64) -> Vec<Range> {
        let bytes = numbers.bytes();
        let stride = match capacity {
            1 => width,
            _ => ((place.bytes / bytes).saturating_sub(width) / (capacity - 1)).max(width),
        };
        match stride == width {
            true => vec![Range { bytes: live * width * bytes, ..place }],
            false => (0..live)
                .map(|row| Range { offset: place.offset + row * stride * bytes, bytes: width * bytes, ..place })
                .collect(),
        }
    }

    /// Keys and values that a step appends to a cache of the first slot, whose pages are the first, in order: those of
    /// sliding layers, then those of full ones.
    fn stored(&self, step: &CudaStep, cache: usize, inputs: &[ValueIndex], pass: &Reference) -> Vec<Left> {
        let plan::Cache { kv_heads, head_dim, .. } = self.plan.program.caches[cache];
        let numbers = Numbers::of_cache(self.program.kv, head_dim);
        let row_bytes = self.program.kv.row_bytes(kv_heads, head_dim);
        let touches = |argument: &Argument| matches!(argument, Argument::Memory(range) if range.region == Region::Kv);
        if !step.launch.arguments.iter().any(touches) {
            return Vec::new();
        }
        let layout = &self.program.kv_layout;
        let place = layout.caches[cache];
        let paging = layout.paging(&place);
        let (rows, entries) = (u64::from(paging.rows), u64::from(paging.entries));
        let first = if place.window.is_some() { 0 } else { u64::from(layout.sliding.entries) };
        let mut left = Vec::new();
        for (offset, value) in [place.keys, place.values].into_iter().zip(inputs) {
            let row = |at: u64| {
                let position = pass.position as u64 + at;
                let page = first + position / rows % entries;
                let within = offset + position % rows * row_bytes;
                Range { region: Region::Kv, offset: page * layout.page_bytes + within, bytes: row_bytes }
            };
            let parts = (0..pass.tokens.len() as u64).map(row).collect();
            left.push(Left { value: *value, content: Content::Numbers(numbers), parts, rows: Rows::All });
        }
        left
    }

    /// What rounding a value has gone through since the values that are known to be `right`.
    pub fn rounding(&self, value: ValueIndex, right: &HashSet<ValueIndex>) -> Rounding {
        let (mut rounding, mut is_gated, mut seen, mut open) = (Rounding::None, false, HashSet::new(), vec![value]);
        while let Some(value) = open.pop() {
            let Some(step) = self.made_by[value as usize] else { continue };
            rounding = rounding.max(match step.op {
                Op::MatMul { .. } | Op::ExpertMatMul { .. } | Op::Narrow { .. } | Op::Widen { .. }
                    if !self.is_exact =>
                {
                    Rounding::Product
                }
                Op::Attention { .. } if self.program.kv != KvType::F32 => Rounding::Attention,
                _ => Rounding::None,
            });
            is_gated |= step.op == Op::Mul;
            open.extend(step.inputs.iter().filter(|input| !right.contains(*input) && seen.insert(**input)));
        }
        if is_gated && rounding != Rounding::None { Rounding::Gated } else { rounding }
    }

    /// The layers' outputs, and the logits.
    pub fn depths(&self) -> impl Iterator<Item = ValueIndex> {
        let values = 0..self.plan.program.values.len() as ValueIndex;
        values.filter(|value| *value == self.plan.program.output || self.layer_output(*value).is_some())
    }

    /// The results of products whose activations are rounded, and of attention over rounded keys and values. Routers
    /// work in f32.
    pub fn rounded(&self) -> impl Iterator<Item = ValueIndex> {
        let steps = &self.plan.program.steps;
        let routers: HashSet<ValueIndex> =
            steps.iter().filter(|s| matches!(s.op, Op::Route { .. })).flat_map(|s| s.inputs.iter().copied()).collect();
        let rounds = |op: Op| match op {
            Op::MatMul { .. } | Op::ExpertMatMul { .. } | Op::Narrow { .. } | Op::Widen { .. } => !self.is_exact,
            Op::Attention { .. } => true,
            _ => false,
        };
        let made = steps.iter().filter(move |step| rounds(step.op)).map(|step| step.output);
        made.filter(move |value| !routers.contains(value))
    }

    /// The layer whose output a value is.
    pub fn layer_output(&self, value: ValueIndex) -> Option<u32> {
        self.name(value).strip_prefix("blk.")?.strip_suffix(".layer.out")?.parse().ok()
    }

    pub fn is_cache(&self, value: ValueIndex) -> bool {
        matches!(self.plan.program.values[value as usize].kind, Kind::Kv { .. })
    }
}

/// Decode of several rows has the bits of decode of one: it is judged by them, not by the CPU.
pub fn is_decode_of_several(phase: &Phase) -> bool {
    phase.kind == PhaseKind::Decode && phase.rows > 1
}
