//! What must hold of a decoded plan, whoever wrote it: every index exists, every shape fits, every byte lies in its
//! file.
//!
//! An executor indexes slices by what a plan says. This is the one place that makes sure it may.

use gemma4c_ops::RowCount;

use crate::validate_program::{MOST, check_name, check_program, is_floats};
use crate::{Plan, Span, Target, Weight, validate_cuda, validate_drafter, validate_seats, validate_tower};

/// The first contradiction, as a sentence.
pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    check_weights(plan)?;
    for adapter in &plan.model.adapters {
        if adapter.file as usize >= plan.model.files.len() || !adapter.scale.is_finite() {
            let (file, scale) = (adapter.file, adapter.scale);
            return Err(format!("an adapter is in file {file} of {}, times {scale}", plan.model.files.len()));
        }
    }
    let program = &plan.program;
    let made = check_program(plan, program)?;
    if let Some(value) = program.values.iter().find(|v| !matches!(v.rows, RowCount::Chunk | RowCount::Asked)) {
        return Err(format!("value {} of the text has rows of a picture", value.name));
    }
    match program.values.get(program.output as usize) {
        Some(v) if made.contains(&program.output) && is_floats(v) && v.rows == RowCount::Asked => {
            match v.width == plan.model.vocab_size {
                true => check_vocab(plan)?,
                false => return Err(format!("{} logits for a vocabulary of {}", v.width, plan.model.vocab_size)),
            }
        }
        _ => return Err(format!("output {} is not a value of asked f32 rows that a step makes", program.output)),
    }
    validate_tower::check(plan)?;
    validate_drafter::check(plan)?;
    validate_seats::check(plan)?;
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

fn check_weights(plan: &Plan) -> Result<(), String> {
    let mut total = 0u64;
    for (i, w) in plan.weights.iter().enumerate() {
        check_name("weight", i, &w.name)?;
        if w.dims.is_empty() || w.dims.len() > 4 || w.dims.iter().any(|d| *d == 0 || *d > MOST as u64) {
            return Err(format!("{} has dimensions {:?}", w.name, w.dims));
        }
        if w.expected_bytes() != Some(w.bytes) {
            return Err(format!("{} {}{:?} has {} bytes", w.name, w.dtype, w.dims, w.bytes));
        }
        let elsewhere = plan.embedded.as_ref().is_some_and(|weights| weights.has_tensors());
        if !elsewhere {
            w.spans().try_for_each(|span| check_span(plan, &w.name, span))?;
        }
        check_pieces(w, elsewhere)?;
        total = total.checked_add(w.bytes).ok_or("the weights are larger than any machine")?;
    }
    Ok(())
}

fn check_span(plan: &Plan, name: &str, span: Span) -> Result<(), String> {
    let file = plan.model.files.get(span.file as usize).ok_or(format!("{name} lies in file {}", span.file))?;
    match span.offset.checked_add(span.bytes).is_some_and(|end| end <= file.bytes) {
        true => Ok(()),
        false => Err(format!("{name} ends beyond file {} of {} bytes", span.file, file.bytes)),
    }
}

/// Pieces make all rows of their tensor, each of what it needs.
fn check_pieces(w: &Weight, elsewhere: bool) -> Result<(), String> {
    if w.pieces.is_empty() {
        return Ok(());
    }
    if elsewhere && !w.is_reserved() || (w.file, w.offset) != (0, 0) {
        return Err(format!("{} is in a file, and made of pieces", w.name));
    }
    if let Some(at) = w.pieces.iter().position(|piece| piece.rows == 0 || !piece.makes(w.dtype, w.dim(0))) {
        return Err(format!("piece {at} of {} does not make rows of it", w.name));
    }
    let made = w.pieces.iter().try_fold(0u64, |rows, piece| rows.checked_add(piece.rows));
    match made == w.rows() {
        true => Ok(()),
        false => Err(format!("the pieces of {} do not make its rows", w.name)),
    }
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
