//! Pictures and sound in a sequence: a tower makes soft tokens of each, which stand at their positions in place of embeddings.

use std::collections::BTreeMap;
use std::ops::Range;

use gemma4c_plan::{Medium, Op, Program, Tower};

use super::{On, Session};
use crate::RuntimeError;
use crate::cpu::{Executor, Grid, Pass, Picture, SoftRows, Tap};
use crate::engine::SoftAhead;

/// A picture cut into patches, or a sound cut into frames (one row of them), as a tower reads it.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a> {
    /// Patches of the grid, row by row, each of the tower's width.
    pub values: &'a [f32],
    pub columns: u32,
    pub rows: u32,
}

/// What a tower made of one picture.
#[derive(Clone, Debug)]
pub struct Soft {
    /// Index of the tower in the plan.
    pub tower: usize,
    /// Rows as wide as the model, one for each soft token.
    pub rows: Vec<f32>,
}

/// What a session knows of pictures.
#[derive(Default)]
pub(super) struct Media {
    /// Of those towers that were used.
    towers: BTreeMap<usize, Executor>,
    placed: Vec<Placed>,
}

/// Soft tokens at consecutive positions.
struct Placed {
    positions: Range<usize>,
    rows: Vec<f32>,
    /// Of a picture: its rows may see each other.
    is_picture: bool,
}

impl Media {
    /// Cuts the tokens from `position` on into pieces of at most `chunk`. A picture whose rows see each other is not cut: a piece ends before it,
    /// or is it.
    pub(super) fn pieces(&self, program: &Program, position: usize, tokens: usize, chunk: usize) -> Vec<Range<usize>> {
        let (mut pieces, mut start) = (Vec::new(), 0);
        while start < tokens {
            let mut end = (start + chunk).min(tokens);
            if let Some(cut) = self
                .placed
                .iter()
                .filter(|placed| placed.is_picture && program.sees_ahead())
                .map(|placed| &placed.positions)
                .find(|range| range.contains(&(position + end)) && range.start < position + end)
            {
                end =
                    if cut.start > position + start { cut.start - position } else { (cut.end - position).min(tokens) };
            }
            pieces.push(start..end);
            start = end;
        }
        pieces
    }

    /// The rows of a pass over `positions`, each `width` wide, that are soft tokens.
    pub(super) fn within(&self, positions: Range<usize>, width: usize) -> Vec<SoftRows<'_>> {
        self.placed.iter().filter_map(|placed| placed.within(&positions, width)).collect()
    }

    /// The same for a device, which wants to know how far each picture goes.
    pub(super) fn ahead(&self, positions: Range<usize>, width: usize) -> Vec<SoftAhead> {
        let of = |placed: &Placed| {
            let first = placed.positions.start.max(positions.start);
            let SoftRows { first: row, values, sees_ahead } = placed.within(&positions, width)?;
            // A row of a sound sees itself and those before it, as a token does.
            let ahead = if sees_ahead { (placed.positions.end - first) as u32 } else { 1 };
            Some(SoftAhead { first: row, values: values.to_vec(), ahead })
        };
        self.placed.iter().filter_map(of).collect()
    }
}

impl Placed {
    /// What lies in a pass over `positions`.
    fn within(&self, positions: &Range<usize>, width: usize) -> Option<SoftRows<'_>> {
        let all = &self.positions;
        let (start, end) = (all.start.max(positions.start), all.end.min(positions.end));
        (start < end).then(|| SoftRows {
            first: start - positions.start,
            values: &self.rows[(start - all.start) * width..(end - all.start) * width],
            sees_ahead: self.is_picture,
        })
    }
}

impl Session {
    /// The soft tokens of a picture or a sound. Every value of the tower is shown to `tap`; on a device, those that its launches leave in memory.
    pub fn look(&mut self, tower: usize, patches: Patches<'_>, tap: &mut Tap<'_>) -> Result<Soft, RuntimeError> {
        self.look_at(tower, patches, Some(tap))
    }

    /// The same without showing anything.
    pub fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Soft, RuntimeError> {
        self.look_at(tower, patches, None)
    }

    fn look_at(&mut self, tower: usize, patches: Patches<'_>, tap: Option<&mut Tap<'_>>) -> Result<Soft, RuntimeError> {
        let plan = &self.plan;
        let of = plan.towers.get(tower).ok_or(RuntimeError::NoTower)?;
        let longest = longest_side(of, |table| plan.weights[table as usize].dim(1));
        let soft = check(of, patches, longest)?;
        let text = match &mut self.on {
            On::Cpu(text) => text,
            On::Device(device) => {
                let Patches { values, columns, rows } = patches;
                let rows = match tap {
                    None => device.look(tower, values, columns, rows, None)?,
                    Some(tap) => device.look(
                        tower,
                        values,
                        columns,
                        rows,
                        Some(&mut |name, width, rows| tap(name, width, rows)),
                    )?,
                };
                return Ok(Soft { tower, rows });
            }
        };
        let executor = self.media.towers.entry(tower).or_insert_with(|| text.tower(tower));
        let grid = Grid { columns: patches.columns as usize, rows: patches.rows as usize };
        let picture = Picture { grid, patches: patches.values, soft };
        let pass = Pass { picture: Some(picture), ..Pass::default() };
        let rows = match tap {
            Some(tap) => executor.run(&pass, tap),
            None => executor.run(&pass, &mut |_, _, _| {}),
        };
        Ok(Soft { tower, rows: rows.to_vec() })
    }

    /// Puts soft tokens in the places that `prompt`, the sequence from its first token on, holds for them: each tower's in
    /// the order of its placeholders. Replaces those of before.
    pub fn set_soft(&mut self, prompt: &[u32], media: &[Soft]) -> Result<(), RuntimeError> {
        let width = self.plan.model.hidden as usize;
        let mut placed = Vec::new();
        for (index, tower) in self.plan.towers.iter().enumerate() {
            let (token, is_picture) = (tower.tokens.placeholder, tower.medium.is_picture());
            let own = || media.iter().filter(|soft| soft.tower == index);
            let mut rows = own().flat_map(|soft| soft.rows.chunks_exact(width));
            let places = prompt.iter().filter(|id| **id == token).count();
            let soft = rows.clone().count();
            if soft != places {
                let name = tower.name.clone();
                return Err(RuntimeError::Placeholders { name, media: own().count(), soft, token, places });
            }
            let mut first_position = 0;
            for run in prompt.chunk_by(|a, b| (*a == token) == (*b == token)) {
                if run[0] == token {
                    let rows: Vec<f32> = rows.by_ref().take(run.len()).flatten().copied().collect();
                    placed.push(Placed { positions: first_position..first_position + run.len(), rows, is_picture });
                }
                first_position += run.len();
            }
        }
        if media.iter().any(|soft| soft.tower >= self.plan.towers.len()) {
            return Err(RuntimeError::NoTower);
        }
        self.media.placed = placed;
        Ok(())
    }
}

/// The longest side of a grid that the tower's tables of positions have rows for.
fn longest_side(tower: &Tower, table_rows: impl Fn(u32) -> u64) -> u64 {
    let tables = tower.program.steps.iter().filter_map(|step| match step.op {
        Op::AxisRows { table, .. } => Some(table_rows(table)),
        _ => None,
    });
    tables.min().unwrap_or(u64::MAX)
}

/// How many soft tokens become of a picture or a sound, if the tower can read it.
fn check(tower: &Tower, patches: Patches<'_>, longest: u64) -> Result<usize, RuntimeError> {
    let Patches { values, columns, rows } = patches;
    let (medium, width) = (tower.medium, tower.medium.row_width() as usize);
    let pool = if let Medium::Picture { pool, .. } = medium { pool } else { 1 };
    let whole = columns > 0 && rows > 0 && columns.is_multiple_of(pool) && rows.is_multiple_of(pool);
    let whole = whole && (medium.is_picture() || rows == 1);
    let count = columns as u64 * rows as u64;
    if !whole || count.checked_mul(width as u64) != Some(values.len() as u64) {
        return Err(RuntimeError::Patches { columns, rows, pool, values: values.len() });
    }
    let soft = medium.soft(count);
    if count > tower.program.chunk as u64 {
        return Err(RuntimeError::PictureTooLarge { soft, most: tower.program.asked });
    }
    if columns.max(rows) as u64 > longest {
        return Err(RuntimeError::PictureTooLong { patches: columns.max(rows), longest });
    }
    Ok(soft as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support;

    #[test]
    fn a_picture_is_cut_only_where_its_rows_do_not_see_each_other() {
        let placed =
            |positions: Range<usize>| Placed { rows: vec![0.0; 2 * positions.len()], positions, is_picture: true };
        let media = Media { placed: vec![placed(5..12), placed(14..16)], ..Media::default() };
        let mut program = support::cpu_plan().program;
        assert_eq!(media.pieces(&program, 0, 20, 8), [0..8, 8..16, 16..20]);
        program.steps[11].op = Op::AttentionAhead { heads: 4 };
        assert_eq!(media.pieces(&program, 0, 20, 8), [0..5, 5..13, 13..20]);
        assert_eq!(media.pieces(&program, 0, 20, 4), [0..4, 4..5, 5..12, 12..16, 16..20]);
        assert_eq!(media.pieces(&program, 0, 20, 100).len(), 1);
        // A sound is cut anywhere.
        let mut sound = placed(5..12);
        sound.is_picture = false;
        let sound = Media { placed: vec![sound], ..Media::default() };
        assert_eq!(sound.pieces(&program, 0, 20, 8), [0..8, 8..16, 16..20]);
        // Positions count from where the sequence stands.
        assert_eq!(media.pieces(&program, 5, 10, 3), [0..7, 7..9, 9..10]);
        assert!(media.pieces(&program, 0, 0, 8).is_empty());

        let rows = |positions| media.within(positions, 2).iter().map(|s| (s.first, s.values.len())).collect::<Vec<_>>();
        assert_eq!(rows(0..20), [(5, 14), (14, 4)]);
        assert_eq!(rows(7..15), [(0, 10), (7, 2)]);
        assert!(rows(12..14).is_empty());
    }
}
