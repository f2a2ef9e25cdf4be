//! Pictures and sound in a sequence: a tower makes soft tokens of each, which stand at their positions in place of
//! embeddings.

use std::ops::Range;

use super::Session;
use crate::RuntimeError;
use crate::cpu::Tap;
use crate::engine::Device;
use crate::soft::{Patches, Placed, uncut};

/// What a tower made of one picture.
#[derive(Clone, Debug)]
pub struct Soft {
    /// Index of the tower in the plan.
    pub tower: usize,
    /// Rows as wide as the model, one for each soft token.
    pub rows: Vec<f32>,
}

/// Cuts the tokens from `position` on into pieces of at most `chunk`. A picture whose rows see each other is not cut: a
/// piece ends before it, or is it.
pub(super) fn pieces(placed: &[Placed], position: usize, tokens: usize, chunk: usize) -> Vec<Range<usize>> {
    let (mut pieces, mut start, all) = (Vec::new(), position, position + tokens);
    while start < all {
        let whole = placed.iter().filter(|placed| placed.is_whole).map(|placed| placed.positions.clone());
        let end = uncut(whole, start, (start + chunk).min(all)).min(all);
        pieces.push(start - position..end - position);
        start = end;
    }
    pieces
}

impl Session {
    /// The soft tokens of a picture or a sound. Every value of the tower is shown to `tap`; on a device, those that its
    /// launches leave in memory.
    pub fn look(&mut self, tower: usize, patches: Patches<'_>, tap: &mut Tap<'_>) -> Result<Soft, RuntimeError> {
        Ok(Soft { tower, rows: self.device().look(tower, patches, Some(tap))? })
    }

    /// The same without showing anything.
    pub fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Soft, RuntimeError> {
        Ok(Soft { tower, rows: self.device().look(tower, patches, None)? })
    }

    /// Puts soft tokens in the places that `prompt`, the sequence from its first token on, holds for them: each tower's
    /// in the order of its placeholders. Replaces those of before; the sequence goes back to the first place where they
    /// differ, since its ids do not tell.
    pub fn set_soft(&mut self, prompt: &[u32], media: &[Soft]) -> Result<(), RuntimeError> {
        let width = self.plan.model.hidden as usize;
        let mut placed = Vec::new();
        for (index, (tower, limits)) in self.plan.towers.iter().zip(self.engine.device().towers()).enumerate() {
            let (token, is_whole) = (tower.tokens.placeholder, limits.is_whole);
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
        let before = std::mem::replace(&mut self.placed, placed);
        if let Some(first) = first_difference(&before, &self.placed)
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
