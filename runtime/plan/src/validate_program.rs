//! What must hold of a program, the text's, a tower's or a drafter's: its values lie in the arena, and every step fits
//! what it reads and makes.

use std::collections::HashSet;

use gemma4c_blocks::DType;
use gemma4c_ops::{CacheId, Declared, Op, Tensor, Type, WeightId, infer};

use crate::program::{Cache, Kind, Step, Value};
use crate::{Plan, Program, Weight};

/// Far beyond any model; below it no product of two sizes used here overflows 64 bits.
pub(crate) const MOST: u32 = 1 << 28;
/// Rows that attention of a tower looks back on, at most.
const MOST_REACH: u32 = 1 << 10;
/// Bytes of a name.
const LONGEST_NAME: usize = 200;

/// Checks the steps of the text, a tower or a drafter, and returns the values they make.
pub(crate) fn check_program(plan: &Plan, program: &Program) -> Result<HashSet<u32>, String> {
    let limits = [program.context, program.chunk, program.asked];
    if limits.iter().any(|n| *n == 0 || *n > MOST) || program.asked > program.chunk {
        return Err(format!("context, chunk and asked rows are {limits:?}"));
    }
    if program.kv != program.kv.on_cpu() {
        return Err(format!("the CPU's keys and values are {}, which it does not round to", program.kv.name()));
    }
    for cache in &program.caches {
        if program.kv.is_narrow() && !cache.head_dim.is_multiple_of(32) {
            return Err(format!("keys and values in {} come in groups of 32, and not as {cache:?}", program.kv.name()));
        }
        let wanted = cache.window.map_or(program.context, |w| w.saturating_add(program.chunk));
        let sane = cache.kv_heads.checked_mul(cache.head_dim).is_some_and(|w| w > 0 && w <= MOST);
        if !sane || cache.window == Some(0) || cache.capacity < wanted.min(program.context) || cache.capacity > MOST {
            let (context, chunk) = (program.context, program.chunk);
            return Err(format!("a context of {context} in chunks of {chunk} does not fit {cache:?}"));
        }
    }
    for (i, value) in program.values.iter().enumerate() {
        check_name("value", i, &value.name)?;
        check_value(program, value)?;
    }
    let mut made = vec![false; program.values.len()];
    let mut appended = HashSet::new();
    for step in &program.steps {
        check_step(plan, program, step, &mut made)?;
        if let Op::KvAppend { cache } = step.op
            && !appended.insert(cache)
        {
            return Err(format!("two steps append to cache {cache:?}"));
        }
    }
    Ok((0..).zip(made).filter(|(_, made)| *made).map(|(index, _)| index).collect())
}

/// Names end up in errors and on terminals.
pub(crate) fn check_name(what: &str, index: usize, name: &str) -> Result<(), String> {
    match name.len() <= LONGEST_NAME && !name.contains(char::is_control) {
        true => Ok(()),
        false => Err(format!("{what} {index} has a name of {} bytes that cannot be shown", name.len())),
    }
}

fn check_value(program: &Program, v: &Value) -> Result<(), String> {
    if v.width == 0 || v.width > MOST {
        return Err(format!("value {} is {} wide", v.name, v.width));
    }
    match v.kind {
        Kind::Floats { offset } => {
            let bytes = program.max_rows(v.rows) as u64 * v.width as u64 * 4;
            let end = offset.checked_add(bytes);
            match end.is_some_and(|end| end <= program.arena_bytes) && offset.is_multiple_of(4) {
                true => Ok(()),
                false => Err(format!("value {} lies at {offset}+{bytes} of {} bytes", v.name, program.arena_bytes)),
            }
        }
        Kind::Kv { cache } if program.caches.get(cache.index()).is_none() => {
            Err(format!("value {} is cache {cache:?}, which does not exist", v.name))
        }
        _ => Ok(()),
    }
}

pub(crate) fn is_floats(v: &Value) -> bool {
    matches!(v.kind, Kind::Floats { .. })
}

/// Checks one step against the shape rules, and marks its output as made.
fn check_step(plan: &Plan, program: &Program, step: &Step, made: &mut [bool]) -> Result<(), String> {
    let value = |i: u32| program.values.get(i as usize).ok_or(format!("a step names value {i}, which does not exist"));
    let out = value(step.output)?;
    let fail = |why: &str| Err(format!("step {}: {:?} {why}", out.name, step.op));
    if step.inputs.len() != step.op.arity() {
        return fail(&format!("takes {} inputs, not {}", step.op.arity(), step.inputs.len()));
    }
    let mut inputs = Vec::with_capacity(2);
    for &i in &step.inputs {
        let input = value(i)?;
        if !made[i as usize] {
            return Err(format!("step {} reads {} before it is made", out.name, input.name));
        }
        let apart = |a: &Value, b: &Value| match (a.kind, b.kind) {
            (Kind::Floats { offset: x }, Kind::Floats { offset: y }) => {
                let size = |v: &Value| program.max_rows(v.rows) as u64 * v.width as u64 * 4;
                x + size(a) <= y || y + size(b) <= x
            }
            _ => true,
        };
        if !apart(input, out) {
            return Err(format!("step {} writes over its input {}", out.name, input.name));
        }
        inputs.push(input);
    }
    if !fits(plan, program, step.op, &inputs, out) {
        return fail("does not fit its inputs, its weight or its output");
    }
    if std::mem::replace(&mut made[step.output as usize], true) {
        return Err(format!("value {} is made twice", out.name));
    }
    Ok(())
}

/// Whether a step keeps the shape rules and what the executor relies on beyond them.
fn fits(plan: &Plan, program: &Program, op: Op, inputs: &[&Value], out: &Value) -> bool {
    let has_weight = op.weight().is_none_or(|id| id.index() < plan.weights.len());
    let has_cache = op.cache().is_none_or(|id| id.index() < program.caches.len());
    let types: Vec<Type> = inputs.iter().map(|value| value.ty()).collect();
    let tables = Tables { weights: &plan.weights, caches: &program.caches };
    has_weight && has_cache && infer(&tables, &op, &types) == Ok(out.ty()) && is_runnable(plan, op, inputs, out)
}

/// What the ids of a program's operations are places of.
struct Tables<'a> {
    weights: &'a [Weight],
    caches: &'a [Cache],
}

impl Declared for Tables<'_> {
    fn weight(&self, id: WeightId) -> Tensor<'_> {
        let Weight { name, dims, .. } = &self.weights[id.index()];
        Tensor { name, dims }
    }

    fn cache(&self, id: CacheId) -> gemma4c_ops::Cache {
        self.caches[id.index()].shape()
    }
}

/// What holds of an operation in this model, and on a CPU: tables for its vocabulary, vectors in f32, and bounds on
/// what takes time.
fn is_runnable(plan: &Plan, op: Op, inputs: &[&Value], out: &Value) -> bool {
    let (weight, vocab_size) = (|id: WeightId| &plan.weights[id.index()], plan.model.vocab_size);
    match op {
        Op::Gather { table: w } | Op::GatherText { table: w, .. } | Op::TokenMatMul { weight: w } => {
            weight(w).dim(1) == vocab_size as u64
        }
        Op::SpreadTokens { width } => width == vocab_size,
        Op::Candidates { each } => {
            let order = plan.drafter.as_ref().map(|drafter| drafter.token_order.len() as u64);
            matches!(inputs[0].kind, Kind::Routing { experts } if Some(experts as u64 * each as u64) == order)
        }
        // Of three dimensions are the matrices of all seats.
        Op::Narrow { weight: w, .. } | Op::Widen { weight: w } => weight(w).dims.len() == 2 || weight(w).is_reserved(),
        Op::PlaceSoft => out.width == plan.model.hidden,
        Op::AxisRows { axis, .. } => axis < 2,
        Op::CausalConv { weight: w } => weight(w).dim(0) <= MOST as u64,
        Op::NearAttention { reach, .. } => reach <= MOST_REACH,
        Op::RmsNorm { weight: Some(w), .. }
        | Op::ExpertSum { scale: Some(w) }
        | Op::Rope { factors: Some(w), .. }
        | Op::MulWeight { weight: w }
        | Op::AddWeight { weight: w }
        | Op::AtLeast { weight: w }
        | Op::AtMost { weight: w } => weight(w).dtype == DType::F32,
        _ => true,
    }
}
