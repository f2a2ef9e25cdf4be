//! What must hold of a tower: its program reads patches and makes soft tokens that fit the text's rows.

use crate::Plan;
use crate::program::{Kind, Op, RowCount};
use crate::tower::{MOST_TOWERS, Stage, Tower};
use crate::validate_program::{check_name, check_program};

/// Beyond any patch; its square fits 32 bits with room to spare.
const LONGEST_PATCH: u32 = 1 << 10;

pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    if plan.towers.len() > MOST_TOWERS {
        return Err(format!("{} towers, {MOST_TOWERS} at most", plan.towers.len()));
    }
    for (index, tower) in plan.towers.iter().enumerate() {
        check_name("tower", index, &tower.name)?;
        check_tower(plan, tower).map_err(|why| format!("tower {}: {why}", tower.name))?;
    }
    Ok(())
}

fn check_tower(plan: &Plan, tower: &Tower) -> Result<(), String> {
    let (program, pool) = (&tower.program, tower.pool);
    if tower.patch == 0 || tower.patch > LONGEST_PATCH || pool == 0 || pool > LONGEST_PATCH {
        return Err(format!("patches of {} pixels, pooled by {pool}", tower.patch));
    }
    let ids = [tower.tokens.begin, tower.tokens.placeholder, tower.tokens.end];
    if let Some(id) = ids.iter().find(|id| **id >= plan.model.vocab_size) {
        return Err(format!("refers to token {id} of {}", plan.model.vocab_size));
    }
    let made = check_program(plan, program)?;
    if plan.program.sees_ahead() && plan.program.chunk < program.asked {
        return Err(format!("a picture has {} soft tokens, a pass {} rows", program.asked, plan.program.chunk));
    }
    if program.chunk as u64 != program.asked as u64 * (pool as u64 * pool as u64) {
        return Err(format!("{} patches are not {} soft tokens of {pool}x{pool}", program.chunk, program.asked));
    }
    if !program.caches.is_empty() {
        return Err(format!("has {} caches", program.caches.len()));
    }
    let of_picture = |rows| matches!(rows, RowCount::Patches | RowCount::Soft);
    if let Some(value) = program.values.iter().find(|v| !of_picture(v.rows)) {
        return Err(format!("value {} has rows of tokens", value.name));
    }
    for step in &program.steps {
        let fits = match step.op {
            Op::Patches { width } => width == tower.patch_width(),
            Op::GridMean { side } => side == pool,
            _ => true,
        };
        if !fits {
            return Err(format!("{:?} does not fit patches of {} pixels, pooled by {pool}", step.op, tower.patch));
        }
    }
    if let Some(Stage { name, value }) = tower.stages.iter().find(|stage| !made.contains(&stage.value)) {
        return Err(format!("stage {name} is value {value}, which no step makes"));
    }
    for (index, stage) in tower.stages.iter().enumerate() {
        check_name("stage", index, &stage.name)?;
    }
    let output = program.values.get(program.output as usize).filter(|_| made.contains(&program.output));
    match output {
        Some(v) if matches!(v.kind, Kind::Floats { .. }) && v.rows == RowCount::Soft => match v.width {
            width if width == plan.model.hidden => Ok(()),
            width => Err(format!("soft tokens of {width} for a model {} wide", plan.model.hidden)),
        },
        _ => Err(format!("output {} is not a value of soft tokens that a step makes", program.output)),
    }
}
