//! Soft tokens: what a plan's towers take and make, and where it stands in a sequence.
//!
//! A tower reads the patches of a picture or the frames of a sound and makes rows as wide as the model. These rows
//! stand at consecutive positions, in place of the embeddings of their placeholders. Where a model lets the rows of a
//! picture see each other, the picture goes through the model in one piece.

use std::ops::Range;

use gemma4c_plan::{Medium, Op, Plan};

use crate::RuntimeError;

/// A picture cut into patches, or a sound cut into frames (one row of them), as a tower reads it.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a> {
    /// Patches of the grid, row by row, each of the tower's width.
    pub values: &'a [f32],
    pub columns: u32,
    pub rows: u32,
}

/// What a tower takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerLimits {
    pub medium: Medium,
    /// The token that holds the place of one of its soft tokens.
    pub placeholder: u32,
    /// Patches or frames of a medium, at most.
    pub patches: u32,
    /// Soft tokens of a medium, at most.
    pub soft: u32,
    /// Patches along a side, at most: as many as the tables of positions have rows for.
    pub side: u64,
    /// Whether the rows of a medium see each other, so that one chunk must have all of them.
    pub is_whole: bool,
}

impl TowerLimits {
    /// Those of each of a plan's towers.
    pub fn of(plan: &Plan) -> Vec<TowerLimits> {
        let side = |op: &Op| match op {
            Op::AxisRows { table, .. } => Some(plan.weights[table.index()].dim(1)),
            _ => None,
        };
        let of = |tower: &gemma4c_plan::Tower| TowerLimits {
            medium: tower.medium,
            placeholder: tower.tokens.placeholder,
            patches: tower.program.chunk,
            soft: tower.program.asked,
            side: tower.program.steps.iter().filter_map(|step| side(&step.op)).min().unwrap_or(u64::MAX),
            is_whole: tower.medium.is_picture() && plan.program.sees_ahead(),
        };
        plan.towers.iter().map(of).collect()
    }

    /// How many soft tokens become of a picture or a sound, if the tower can read it.
    pub fn soft_tokens(&self, patches: Patches<'_>) -> Result<usize, RuntimeError> {
        let Patches { values, columns, rows } = patches;
        let pool = if let Medium::Picture { pool, .. } = self.medium { pool } else { 1 };
        let whole = columns > 0 && rows > 0 && columns.is_multiple_of(pool) && rows.is_multiple_of(pool);
        let whole = whole && (self.medium.is_picture() || rows == 1);
        let count = u64::from(columns) * u64::from(rows);
        if !whole || count.checked_mul(self.medium.row_width().into()) != Some(values.len() as u64) {
            return Err(RuntimeError::Patches { columns, rows, pool, values: values.len() });
        }
        let soft = self.medium.soft(count);
        if count > u64::from(self.patches) {
            return Err(RuntimeError::PictureTooLarge { soft, most: self.soft });
        }
        let longest = columns.max(rows);
        if u64::from(longest) > self.side {
            return Err(RuntimeError::PictureTooLong { patches: longest, longest: self.side });
        }
        Ok(soft as usize)
    }
}

/// Soft tokens in place of the rows of their placeholders.
#[derive(Clone, Copy, Debug)]
pub struct SoftRows<'a> {
    /// The row of the chunk that the first one takes.
    pub first: usize,
    /// Whole rows, one after the other.
    pub values: &'a [f32],
    /// How many rows, counted from the first on, the first one sees where the graph lets a picture's rows see each
    /// other: 1 where it sees no further than itself, as a token does.
    pub ahead: u32,
}

/// Soft tokens at consecutive positions of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placed {
    pub positions: Range<usize>,
    pub rows: Vec<f32>,
    /// They see each other.
    pub is_whole: bool,
}

impl Placed {
    /// What lies in a chunk at `positions`.
    pub fn within(&self, positions: &Range<usize>) -> Option<SoftRows<'_>> {
        let all = &self.positions;
        let width = self.rows.len() / all.len();
        let (start, end) = (all.start.max(positions.start), all.end.min(positions.end));
        (start < end).then(|| SoftRows {
            first: start - positions.start,
            values: &self.rows[(start - all.start) * width..(end - all.start) * width],
            ahead: if self.is_whole { (all.end - start) as u32 } else { 1 },
        })
    }
}

/// Where a chunk ends that begins at `start` and is to end at `end`, so that none of these ranges is cut: before the
/// one that it would cut, or behind it where it begins with it.
pub(crate) fn uncut(mut whole: impl Iterator<Item = Range<usize>>, start: usize, end: usize) -> usize {
    match whole.find(|range| range.start < end && end < range.end) {
        Some(range) if range.start > start => range.start,
        Some(range) => range.end,
        None => end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_whose_rows_see_each_other_is_not_cut() {
        let ends = |chunk: usize, from: usize, to: usize| {
            let (mut start, mut ends) = (from, vec![]);
            while start < to {
                start = uncut([5..12, 14..16].into_iter(), start, (start + chunk).min(to));
                ends.push(start);
            }
            ends
        };
        assert_eq!(ends(8, 0, 20), [5, 13, 20]);
        assert_eq!(ends(4, 0, 20), [4, 5, 12, 16, 20]);
        assert_eq!(ends(100, 0, 20), [20]);
        assert_eq!(ends(3, 5, 15), [12, 14, 16]);
    }

    #[test]
    fn a_chunk_has_the_rows_at_its_positions() {
        let placed = Placed { positions: 5..12, rows: (0..14).map(|i| i as f32).collect(), is_whole: true };
        let within = |from, to| placed.within(&(from..to)).map(|rows| (rows.first, rows.values.to_vec(), rows.ahead));
        assert_eq!(within(0, 20), Some((5, placed.rows.clone(), 7)));
        assert_eq!(within(7, 9), Some((0, vec![4.0, 5.0, 6.0, 7.0], 5)));
        assert_eq!(within(12, 14), None);
        let sound = Placed { is_whole: false, ..placed.clone() };
        assert_eq!(sound.within(&(7..9)).unwrap().ahead, 1);
    }
}
