//! What must hold of a drafter: it reads the text's hidden state and caches, appends nothing, and scores the text's
//! vocabulary.

use gemma4c_ops::{Op, RowCount};

use crate::program::{Value, ValueIndex};
use crate::validate_program::{check_program, is_floats};
use crate::{Drafter, Plan, Program};

pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    let others = std::iter::once(&plan.program).chain(plan.towers.iter().map(|tower| &tower.program));
    if let Some(step) = others.flat_map(|program| &program.steps).find(|step| is_drafters(step.op)) {
        return Err(format!("{:?} is a drafter's alone", step.op));
    }
    match &plan.drafter {
        None => Ok(()),
        Some(drafter) => check_drafter(plan, drafter).map_err(|why| format!("drafter: {why}")),
    }
}

/// Whether only a drafter's program has it.
const fn is_drafters(op: Op) -> bool {
    matches!(
        op,
        Op::Hidden { .. }
            | Op::BorrowKv { .. }
            | Op::Concat
            | Op::Candidates { .. }
            | Op::SpreadTokens { .. }
            | Op::TokenMatMul { .. }
            | Op::AttentionBefore { .. }
    )
}

fn check_drafter(plan: &Plan, drafter: &Drafter) -> Result<(), String> {
    let (program, vocab_size) = (&drafter.program, plan.model.vocab_size);
    // Before the steps are checked, which index by it.
    check_order(&drafter.token_order, vocab_size)?;
    let made = check_program(plan, program)?;
    if program.kv != plan.program.kv || program.context != plan.program.context {
        return Err("context or type of keys and values are not the text's".into());
    }
    if let Some(cache) = program.caches.iter().find(|cache| !plan.program.caches.contains(cache)) {
        return Err(format!("the text has no {cache:?}"));
    }
    if let Some(value) = program.values.iter().find(|value| value.rows != RowCount::Chunk) {
        return Err(format!("value {} is not a row for every token", value.name));
    }
    for step in &program.steps {
        let fits = match step.op {
            Op::KvAppend { .. } | Op::Attention { .. } | Op::AttentionAhead { .. } => false,
            Op::GatherText { .. } | Op::PlaceSoft => false,
            Op::Hidden { width } => width == plan.model.hidden,
            _ => true,
        };
        if !fits {
            return Err(format!("{:?} is not a step of a drafter for a model {} wide", step.op, plan.model.hidden));
        }
    }
    let find = |program: &Program, index: ValueIndex, what: &str, is_right: &dyn Fn(&Value) -> bool| {
        let value = program.values.get(index as usize).filter(|value| is_floats(value) && is_right(value));
        value.map(drop).ok_or(format!("value {index} is not {what}"))
    };
    let is_made = |index: ValueIndex| match made.contains(&index) {
        true => Ok(()),
        false => Err(format!("no step makes value {index}")),
    };
    let hidden = plan.model.hidden;
    find(program, program.output, "its logits", &|value| value.width == vocab_size)?;
    find(program, drafter.hidden, "its hidden state", &|value| value.width == hidden)?;
    is_made(program.output)?;
    is_made(drafter.hidden)?;
    let of_text = |value: &Value| value.width == hidden && value.rows == RowCount::Asked;
    find(&plan.program, drafter.reads, "the text's hidden state", &of_text)
}

/// Each token is there once, or there is no order.
fn check_order(order: &[u32], vocab_size: u32) -> Result<(), String> {
    if !order.is_empty() && order.len() != vocab_size as usize {
        return Err(format!("{} tokens in order, of a vocabulary of {vocab_size}", order.len()));
    }
    let mut seen = vec![false; order.len()];
    let mut is_new = |token: u32| seen.get_mut(token as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    match order.iter().find(|token| !is_new(**token)) {
        Some(token) => Err(format!("token {token} is in the order twice, or does not exist")),
        None => Ok(()),
    }
}
