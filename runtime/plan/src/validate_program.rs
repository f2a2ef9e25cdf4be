//! What must hold of a program, the text's, a tower's or a drafter's: its values lie in the arena, and every step fits what it reads and makes.

use std::collections::HashSet;

use crate::program::{Kind, Op, RowCount, Step, Value};
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
            return Err(format!("two steps append to cache {cache}"));
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
        Kind::Kv { cache } if program.caches.get(cache as usize).is_none() => {
            Err(format!("value {} is cache {cache}, which does not exist", v.name))
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
    if !shape_fits(plan, program, &step.op, &inputs, out).unwrap_or(false) {
        return fail("does not fit its inputs, its weight or its output");
    }
    if std::mem::replace(&mut made[step.output as usize], true) {
        return Err(format!("value {} is made twice", out.name));
    }
    Ok(())
}

/// The shape rules; `None` where a weight or cache does not exist.
fn shape_fits(plan: &Plan, program: &Program, op: &Op, inputs: &[&Value], out: &Value) -> Option<bool> {
    let weight = |i: u32| plan.weights.get(i as usize);
    let is_vector = |w: &Weight, len: u64| w.dims == [len] && w.dtype == gemma4c_blocks::DType::F32;
    let same_rows = inputs.iter().all(|i| i.rows == out.rows || matches!(i.kind, Kind::Kv { .. }));
    let floats = |same_width: bool| {
        is_floats(out) && inputs.iter().all(|i| is_floats(i) && (!same_width || i.width == out.width)) && same_rows
    };
    let (x, wide) = (inputs.first(), |v: &&Value| v.width as u64);
    // Tokens, as many as the other value has numbers.
    let is_tokens = |tokens: &Value, of: &Value| tokens.kind == Kind::Tokens && tokens.width == of.width;
    Some(match *op {
        Op::Tokens => out.kind == Kind::Tokens && out.rows == RowCount::Chunk && out.width == 1,
        Op::Gather { table } => {
            let w = weight(table)?;
            let tokens = x?.kind == Kind::Tokens && x?.width == 1 && x?.rows == out.rows;
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
        Op::Add | Op::Mul | Op::Gelu | Op::Sigmoid | Op::Relu => floats(true),
        Op::SubMean { group } => floats(true) && group > 0 && out.width.is_multiple_of(group),
        Op::Scale { .. } | Op::AddConstant { .. } | Op::Softcap { .. } => floats(true),
        Op::MulWeight { weight: w } => {
            let w = weight(w)?;
            floats(true) && w.dims.len() == 1 && is_vector(w, w.dim(0)) && wide(&out).checked_rem(w.dim(0)) == Some(0)
        }
        Op::HalvingConv { weight: w, channels } => {
            let (w, x) = (weight(w)?, x?);
            let rows = match x.rows {
                RowCount::Patches => out.rows == RowCount::Halves,
                RowCount::Halves => out.rows == RowCount::Soft,
                _ => false,
            };
            let columns = channels > 0 && x.width.is_multiple_of(channels);
            let taps = w.dims.len() == 2 && w.dim(0) == 9 * channels as u64;
            let fits = |columns: u32| w.dim(1).checked_mul(columns as u64) == Some(wide(&out));
            is_floats(x) && is_floats(out) && rows && columns && taps && fits((x.width / channels).div_ceil(2))
        }
        Op::CausalConv { weight: w } => {
            let w = weight(w)?;
            let taps = w.dims.len() == 2 && (1..=MOST as u64).contains(&w.dim(0)) && w.dim(1) == wide(&out);
            floats(true) && taps && out.rows == RowCount::Soft
        }
        Op::NearAttention { heads, reach, cap, weight: w } => {
            let heads = heads > 0 && out.width.is_multiple_of(heads) && out.width.is_multiple_of(2) && out.width >= 4;
            let sees = (1..=MOST_REACH).contains(&reach) && cap > 0.0;
            floats(true) && heads && sees && weight(w)?.dims == [wide(&out); 2] && out.rows == RowCount::Soft
        }
        Op::AddWeight { weight: w } | Op::AtLeast { weight: w } | Op::AtMost { weight: w } => {
            let w = weight(w)?;
            floats(true) && (is_vector(w, wide(&out)) || is_vector(w, 1))
        }
        Op::Rope { head_dim, factors, .. } => {
            let vector = match factors {
                Some(w) => is_vector(weight(w)?, head_dim as u64 / 2),
                None => true,
            };
            let heads = head_dim > 0 && head_dim.is_multiple_of(2) && out.width.is_multiple_of(head_dim);
            // Patches have no position in a sequence.
            floats(true) && heads && vector && matches!(out.rows, RowCount::Chunk | RowCount::Asked)
        }
        Op::KvAppend { cache } => {
            let c = program.caches.get(cache as usize)?;
            let rows = |v: &&Value| is_floats(v) && v.rows == RowCount::Chunk && v.width == c.kv_heads * c.head_dim;
            out.kind == Kind::Kv { cache } && out.rows == RowCount::Chunk && inputs.iter().all(rows)
        }
        Op::Attention { heads } | Op::AttentionAhead { heads } | Op::AttentionBefore { heads } => {
            let Kind::Kv { cache } = inputs.get(1)?.kind else { return Some(false) };
            let c = program.caches.get(cache as usize)?;
            // Before its own position a row with a window of 1 sees nothing.
            let sees = !matches!(op, Op::AttentionBefore { .. }) || c.window != Some(1);
            let shared = heads > 0 && heads.is_multiple_of(c.kv_heads) && sees;
            let width = heads as u64 * c.head_dim as u64;
            is_floats(x?) && is_floats(out) && same_rows && shared && wide(x?) == width && wide(&out) == width
        }
        Op::Hidden { width } => is_floats(out) && out.rows == RowCount::Chunk && out.width == width,
        Op::BorrowKv { cache } => {
            let c = program.caches.get(cache as usize)?;
            out.kind == Kind::Kv { cache } && out.rows == RowCount::Chunk && out.width == c.kv_heads * c.head_dim
        }
        Op::Concat => floats(false) && inputs.iter().map(wide).sum::<u64>() == wide(&out),
        Op::Candidates { each } => {
            let (x, order) = (x?, plan.drafter.as_ref()?.token_order.len() as u64);
            let Kind::Routing { experts } = x.kind else { return Some(false) };
            let groups = experts as u64 * each as u64 == order && x.width as u64 * each as u64 == wide(&out);
            out.kind == Kind::Tokens && same_rows && each > 0 && groups
        }
        Op::SpreadTokens => {
            let tokens = is_tokens(inputs.get(1)?, x?);
            is_floats(x?) && tokens && is_floats(out) && same_rows && out.width == plan.model.vocab_size
        }
        Op::TokenMatMul { weight: w } => {
            let fits = weight(w)?.dims == [wide(x?), plan.model.vocab_size as u64];
            is_floats(x?) && is_tokens(inputs.get(1)?, out) && is_floats(out) && same_rows && fits
        }
        Op::Patches { width } => is_floats(out) && out.rows == RowCount::Patches && out.width == width,
        Op::GatherText { table, pad } => {
            let (w, vocab_size) = (weight(table)?, plan.model.vocab_size);
            let tokens = x?.kind == Kind::Tokens && x?.width == 1 && x?.rows == out.rows;
            tokens && is_floats(out) && w.dims == [wide(&out), vocab_size as u64] && pad < vocab_size
        }
        Op::PlaceSoft => floats(true) && out.rows == RowCount::Chunk && out.width == plan.model.hidden,
        Op::AxisRows { table, axis } => {
            let w = weight(table)?;
            let has_axis = w.dims.len() == 3 && w.dim(0) == wide(&out) && (axis as u64) < w.dim(2) && axis < 2;
            is_floats(out) && out.rows == RowCount::Patches && has_axis
        }
        Op::GridMean { side } => {
            let x = x?;
            let rows = (x.rows, out.rows) == (RowCount::Patches, RowCount::Soft);
            is_floats(x) && is_floats(out) && x.width == out.width && rows && side > 0
        }
        Op::GridRope { head_dim, .. } => {
            let heads = head_dim > 0 && head_dim.is_multiple_of(4) && out.width.is_multiple_of(head_dim);
            floats(true) && heads && out.rows == RowCount::Patches
        }
        Op::FullAttention { heads } => {
            floats(true) && heads > 0 && out.width.is_multiple_of(heads) && out.rows == RowCount::Patches
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
