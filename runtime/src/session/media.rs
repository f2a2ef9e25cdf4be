//! Pictures and sound in a sequence: a tower makes soft tokens of each, which stand at their positions in place of embeddings.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{On, Session};
use crate::RuntimeError;
use crate::cpu::{Executor, Grid, Pass, Picture, Tap};
use crate::soft::{Patches, Placed, SoftRows, TowerLimits, uncut};

/// What a tower made of one picture.
#[derive(Clone, Debug)]
pub struct Soft {
    /// Index of the tower in the plan.
    pub tower: usize,
    /// Rows as wide as the model, one for each soft token.
    pub rows: Vec<f32>,
}

/// What a session knows of pictures.
pub(super) struct Media {
    limits: Vec<TowerLimits>,
    /// Of those towers that were used.
    towers: BTreeMap<usize, Executor>,
    placed: Vec<Placed>,
}

impl Media {
    pub(super) fn new(limits: Vec<TowerLimits>) -> Media {
        Media { limits, towers: BTreeMap::new(), placed: Vec::new() }
    }

    /// Cuts the tokens from `position` on into pieces of at most `chunk`. A picture whose rows see each other is not cut: a piece ends before it,
    /// or is it.
    pub(super) fn pieces(&self, position: usize, tokens: usize, chunk: usize) -> Vec<Range<usize>> {
        let (mut pieces, mut start, all) = (Vec::new(), position, position + tokens);
        while start < all {
            let whole = self.placed.iter().filter(|placed| placed.is_whole).map(|placed| placed.positions.clone());
            let end = uncut(whole, start, (start + chunk).min(all)).min(all);
            pieces.push(start - position..end - position);
            start = end;
        }
        pieces
    }

    /// The rows of a pass over `positions` that are soft tokens.
    pub(super) fn within(&self, positions: Range<usize>) -> Vec<SoftRows<'_>> {
        self.placed.iter().filter_map(|placed| placed.within(&positions)).collect()
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
        let soft = self.media.limits.get(tower).ok_or(RuntimeError::NoTower)?.soft_tokens(patches)?;
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
    /// the order of its placeholders. Replaces those of before; the sequence goes back to the first place where they differ, since its ids do not tell.
    pub fn set_soft(&mut self, prompt: &[u32], media: &[Soft]) -> Result<(), RuntimeError> {
        let width = self.plan.model.hidden as usize;
        let mut placed = Vec::new();
        for (index, tower) in self.plan.towers.iter().enumerate() {
            let (token, is_whole) = (tower.tokens.placeholder, self.media.limits[index].is_whole);
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
                    placed.push(Placed { positions: first_position..first_position + run.len(), rows, is_whole });
                }
                first_position += run.len();
            }
        }
        if media.iter().any(|soft| soft.tower >= self.plan.towers.len()) {
            return Err(RuntimeError::NoTower);
        }
        let before = std::mem::replace(&mut self.media.placed, placed);
        if let Some(first) = first_difference(&before, &self.media.placed)
            && first < self.seen.len()
            && self.truncate(first as u32).is_err()
        {
            self.reset();
        }
        Ok(())
    }
}

/// The first position that soft tokens of only one of two lists have.
fn first_difference(one: &[Placed], other: &[Placed]) -> Option<usize> {
    let alone = |of: &[Placed], not_of: &[Placed]| {
        of.iter().filter(|placed| !not_of.contains(placed)).map(|placed| placed.positions.start).min()
    };
    alone(one, other).into_iter().chain(alone(other, one)).min()
}
