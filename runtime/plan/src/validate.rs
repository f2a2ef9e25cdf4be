//! What must hold of a decoded plan, whoever wrote it: every index exists, every shape fits, every byte lies in its file.
//!
//! An executor indexes slices by what a plan says. This is the one place that makes sure it may.

use std::collections::HashSet;

use crate::program::{Kind, Op, RowCount, Step, Value};
use crate::{Plan, Program, Target, Weight, validate_cuda};

/// Far beyond any model; below it no product of two sizes used here overflows 64 bits.
const MOST: u32 = 1 << 28;
/// Bytes of a name.
const LONGEST_NAME: usize = 200;

/// The first contradiction, as a sentence.
pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    check_weights(plan)?;
    let program = &plan.program;
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
        check_step(plan, step, &mut made)?;
        if let Op::KvAppend { cache } = step.op
            && !appended.insert(cache)
        {
            return Err(format!("two steps append to cache {cache}"));
        }
    }
    match program.values.get(program.output as usize) {
        Some(v) if made[program.output as usize] && is_floats(v) && v.rows == RowCount::Asked => {
            match v.width == plan.model.vocab_size {
                true => check_vocab(plan)?,
                false => return Err(format!("{} logits for a vocabulary of {}", v.width, plan.model.vocab_size)),
            }
        }
        _ => return Err(format!("output {} is not a value of asked f32 rows that a step makes", program.output)),
    }
    match (plan.target, &plan.cuda) {
        (Target::Cuda, Some(_)) => validate_cuda::check_all(plan)?,
        (Target::Cpu, None) if plan.others.is_empty() => {}
        (target, program) => {
            let what = if program.is_some() { "a" } else { "no" };
            return Err(format!("the target is {}, and there is {what} program for GPUs", target.name()));
        }
    }
    plan.embedded.as_ref().map_or(Ok(()), |weights| weights.check(plan))
}

/// Names end up in errors and on terminals.
fn check_name(what: &str, index: usize, name: &str) -> Result<(), String> {
    match name.len() <= LONGEST_NAME && !name.contains(char::is_control) {
        true => Ok(()),
        false => Err(format!("{what} {index} has a name of {} bytes that cannot be shown", name.len())),
    }
}

fn check_weights(plan: &Plan) -> Result<(), String> {
    let mut total = 0u64;
    for (i, w) in plan.weights.iter().enumerate() {
        check_name("weight", i, &w.name)?;
        let file = plan.model.files.get(w.file as usize).ok_or(format!("{} lies in file {}", w.name, w.file))?;
        if w.dims.is_empty() || w.dims.len() > 4 || w.dims.iter().any(|d| *d == 0 || *d > MOST as u64) {
            return Err(format!("{} has dimensions {:?}", w.name, w.dims));
        }
        if w.expected_bytes() != Some(w.bytes) {
            return Err(format!("{} {}{:?} has {} bytes", w.name, w.dtype, w.dims, w.bytes));
        }
        let elsewhere = plan.embedded.as_ref().is_some_and(|weights| weights.has_tensors());
        if !elsewhere && w.offset.checked_add(w.bytes).is_none_or(|end| end > file.bytes) {
            return Err(format!("{} ends beyond file {} of {} bytes", w.name, w.file, file.bytes));
        }
        total = total.checked_add(w.bytes).ok_or("the weights are larger than any machine")?;
    }
    Ok(())
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
        Kind::Kv { cache } if program.caches.get(cache as usize).is_none() => {
            Err(format!("value {} is cache {cache}, which does not exist", v.name))
        }
        _ => Ok(()),
    }
}

fn is_floats(v: &Value) -> bool {
    matches!(v.kind, Kind::Floats { .. })
}

/// Checks one step against the shape rules, and marks its output as made.
fn check_step(plan: &Plan, step: &Step, made: &mut [bool]) -> Result<(), String> {
    let program = &plan.program;
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
    if !shape_fits(plan, &step.op, &inputs, out).unwrap_or(false) {
        return fail("does not fit its inputs, its weight or its output");
    }
    if std::mem::replace(&mut made[step.output as usize], true) {
        return Err(format!("value {} is made twice", out.name));
    }
    Ok(())
}

/// The shape rules; `None` where a weight or cache does not exist.
fn shape_fits(plan: &Plan, op: &Op, inputs: &[&Value], out: &Value) -> Option<bool> {
    let weight = |i: u32| plan.weights.get(i as usize);
    let is_vector = |w: &Weight, len: u64| w.dims == [len] && w.dtype == gemma4c_blocks::DType::F32;
    let same_rows = inputs.iter().all(|i| i.rows == out.rows || matches!(i.kind, Kind::Kv { .. }));
    let floats = |same_width: bool| {
        is_floats(out) && inputs.iter().all(|i| is_floats(i) && (!same_width || i.width == out.width)) && same_rows
    };
    let (x, wide) = (inputs.first(), |v: &&Value| v.width as u64);
    Some(match *op {
        Op::Tokens => out.kind == Kind::Tokens && out.rows == RowCount::Chunk && out.width == 1,
        Op::Gather { table } => {
            let w = weight(table)?;
            let tokens = x?.kind == Kind::Tokens && x?.rows == out.rows;
            tokens && is_floats(out) && w.dims == [wide(&out), plan.model.vocab_size as u64]
        }
        Op::TakeAsked => {
            let x = x?;
            is_floats(x)
                && is_floats(out)
                && x.width == out.width
                && (x.rows, out.rows) == (RowCount::Chunk, RowCount::Asked)
        }
        Op::Columns { first, len } => {
            floats(false) && out.width == len && first.checked_add(len).is_some_and(|end| end <= inputs[0].width)
        }
        Op::MatMul { weight: w } => floats(false) && weight(w)?.dims == [wide(x?), wide(&out)],
        Op::ExpertMatMul { weight: w, first, len } => {
            let (w, (slots, experts)) = (weight(w)?, routing(inputs, out)?);
            let rows_fit = first.checked_add(len).is_some_and(|end| end as u64 <= w.dim(1)) && len > 0;
            let x_fits = wide(x?) == w.dim(0) || wide(x?) == w.dim(0) * slots;
            w.dims.len() == 3 && w.dim(2) == experts && rows_fit && x_fits && wide(&out) == len as u64 * slots
        }
        Op::RmsNorm { weight: w, group, .. } => {
            let vector = match w {
                Some(w) => is_vector(weight(w)?, group as u64),
                None => true,
            };
            floats(true) && group > 0 && out.width.is_multiple_of(group) && vector
        }
        Op::Route { top_k } => {
            let sized = out.width == top_k && top_k > 0 && top_k <= x?.width;
            sized && out.kind == Kind::Routing { experts: x?.width } && is_floats(x?) && same_rows
        }
        Op::ExpertSum { scale } => {
            let (slots, experts) = routing(inputs, out)?;
            let vector = match scale {
                Some(w) => is_vector(weight(w)?, experts),
                None => true,
            };
            wide(x?) == wide(&out) * slots && vector
        }
        Op::Add | Op::Mul | Op::Scale { .. } | Op::Gelu | Op::Softcap { .. } => floats(true),
        Op::MulWeight { weight: w } => {
            let w = weight(w)?;
            floats(true) && (is_vector(w, wide(&out)) || is_vector(w, 1))
        }
        Op::Rope { head_dim, factors, .. } => {
            let vector = match factors {
                Some(w) => is_vector(weight(w)?, head_dim as u64 / 2),
                None => true,
            };
            let heads = head_dim > 0 && head_dim.is_multiple_of(2) && out.width.is_multiple_of(head_dim);
            floats(true) && heads && vector
        }
        Op::KvAppend { cache } => {
            let c = plan.program.caches.get(cache as usize)?;
            let rows = |v: &&Value| is_floats(v) && v.rows == RowCount::Chunk && v.width == c.kv_heads * c.head_dim;
            out.kind == Kind::Kv { cache } && out.rows == RowCount::Chunk && inputs.iter().all(rows)
        }
        Op::Attention { heads } => {
            let Kind::Kv { cache } = inputs.get(1)?.kind else { return Some(false) };
            let c = plan.program.caches.get(cache as usize)?;
            let shared = heads > 0 && heads.is_multiple_of(c.kv_heads);
            let width = heads as u64 * c.head_dim as u64;
            is_floats(x?) && is_floats(out) && same_rows && shared && wide(x?) == width && wide(&out) == width
        }
    })
}

/// How many experts a row goes to, and of how many, if an expert operation's inputs are of the right kinds.
fn routing(inputs: &[&Value], out: &Value) -> Option<(u64, u64)> {
    let [x, routing] = inputs else { return None };
    let Kind::Routing { experts } = routing.kind else { return None };
    let fits = is_floats(x) && is_floats(out) && x.rows == out.rows && routing.rows == out.rows;
    fits.then_some((routing.width as u64, experts as u64))
}

fn check_vocab(plan: &Plan) -> Result<(), String> {
    let Some(vocab) = &plan.vocab else { return Ok(()) };
    let tokens = vocab.tokens.len();
    if !vocab.tokens.is_consistent() || vocab.kinds.len() != tokens {
        return Err("the vocabulary's tables differ in length".into());
    }
    let ids = [vocab.bos, vocab.eos, vocab.unknown].into_iter().flatten();
    let ids = ids.chain(vocab.stop.iter().copied()).chain(vocab.suppress.iter().copied());
    let merges = vocab.merges.iter().flat_map(|m| [m.left, m.right, m.result]);
    match ids.chain(merges).find(|id| *id as usize >= tokens) {
        Some(id) => Err(format!("the vocabulary refers to token {id} of {tokens}")),
        None => Ok(()),
    }
}
