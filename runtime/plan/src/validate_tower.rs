//! What must hold of a tower: its program reads patches or frames and makes soft tokens that fit the text's rows.

use gemma4c_ops::{Op, RowCount};

use crate::Plan;
use crate::program::Kind;
use crate::tower::{MOST_TOWERS, Medium, Stage, Tower};
use crate::validate_program::{check_name, check_program};

/// Beyond any patch; its square fits 32 bits with room to spare.
const LONGEST_PATCH: u32 = 1 << 10;
/// Numbers of a frame of sound, at most.
const LONGEST_FRAME: u32 = 1 << 16;

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
    let (program, medium) = (&tower.program, tower.medium);
    let sane = match medium {
        Medium::Picture { patch, pool } => (1..=LONGEST_PATCH).contains(&patch) && (1..=LONGEST_PATCH).contains(&pool),
        Medium::Mel { bins: width } | Medium::Samples { frame: width } => (1..=LONGEST_FRAME).contains(&width),
    };
    if !sane {
        return Err(format!("reads {medium:?}"));
    }
    let ids = [tower.tokens.begin, tower.tokens.placeholder, tower.tokens.end];
    if let Some(id) = ids.iter().find(|id| **id >= plan.model.vocab_size) {
        return Err(format!("refers to token {id} of {}", plan.model.vocab_size));
    }
    let made = check_program(plan, program)?;
    if medium.is_picture() && plan.program.sees_ahead() && plan.program.chunk < program.asked {
        return Err(format!("a picture has {} soft tokens, a pass {} rows", program.asked, plan.program.chunk));
    }
    // Patches that are not whole squares would be lost.
    let whole = match medium {
        Medium::Picture { pool, .. } => program.chunk as u64 == program.asked as u64 * (pool as u64 * pool as u64),
        _ => medium.soft(program.chunk as u64) == program.asked as u64,
    };
    if !whole {
        return Err(format!("{} rows of {medium:?} are not {} soft tokens", program.chunk, program.asked));
    }
    if !program.caches.is_empty() {
        return Err(format!("has {} caches", program.caches.len()));
    }
    let of_medium = |rows| matches!(rows, RowCount::Patches | RowCount::Halves | RowCount::Soft);
    if let Some(value) = program.values.iter().find(|v| !of_medium(v.rows)) {
        return Err(format!("value {} has rows of tokens", value.name));
    }
    for step in &program.steps {
        let fits = match step.op {
            Op::Patches { width } => width == medium.row_width(),
            Op::GridMean { side } => match medium {
                Medium::Picture { pool, .. } => side == pool,
                Medium::Samples { .. } => side == 1,
                Medium::Mel { .. } => false,
            },
            // Only pictures have two axes, and only features are halved: the numbers of rows depend on it.
            Op::AxisRows { .. } | Op::GridRope { .. } => medium.is_picture(),
            Op::HalvingConv { .. } => matches!(medium, Medium::Mel { .. }),
            _ => true,
        };
        if !fits {
            return Err(format!("{:?} does not fit {medium:?}", step.op));
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
