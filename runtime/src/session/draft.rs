//! Drafts of the plan's drafter: tokens that may follow one that was chosen and not yet run.

use std::ops::Range;

use super::{On, SLOT, Session};
use crate::RuntimeError;
use crate::cpu::drafting::{self, Beginning, Draft};
use crate::cpu::{Executor, Tap};
use crate::engine::{DraftFrom, DraftedStep};

/// What a session knows for its drafter.
#[derive(Default)]
pub(super) struct Drafting {
    executor: Option<Executor>,
    /// Positions whose rows the LM head has read in the last pass that asked for any, and what it read; on a device that is where it lies, row by row.
    positions: Range<usize>,
    hidden: Vec<f32>,
}

impl Drafting {
    /// Remembers what the LM head read at consecutive positions.
    pub(super) fn keep(&mut self, first_position: usize, rows: &[f32], width: usize) {
        self.positions = first_position..first_position + rows.len() / width;
        self.hidden.clear();
        self.hidden.extend_from_slice(rows);
    }

    /// Remembers that a device has what the LM head read at so many positions.
    pub(super) fn keep_on_device(&mut self, first_position: u32, rows: usize) {
        self.positions = first_position as usize..first_position as usize + rows;
    }

    /// The row of a device's latest pass that is of a position.
    fn row_of(&self, position: u32) -> Option<u32> {
        let position = position as usize;
        self.positions.contains(&position).then(|| (position - self.positions.start) as u32)
    }

    pub(super) fn forget(&mut self) {
        self.positions = 0..0;
    }

    /// What the LM head read at a position, if that is known.
    fn hidden_at(&self, position: usize, width: usize) -> Option<&[f32]> {
        let row = self.positions.contains(&position).then(|| position - self.positions.start)?;
        self.hidden.get(row * width..(row + 1) * width)
    }
}

impl Session {
    /// From where a device drafts what follows a token that comes next.
    pub(super) fn draft_from(&self, token: u32) -> Result<DraftFrom, RuntimeError> {
        let position = self.position();
        let row = position.checked_sub(1).and_then(|before| self.drafting.row_of(before));
        let row = row.ok_or(RuntimeError::NothingToDraftFrom)?;
        Ok(DraftFrom { slot: SLOT, token, position, row })
    }

    /// The same on a device: step by step, so that everything can be read.
    fn draft_on_device(&mut self, token: u32, steps: u32, each: &mut dyn FnMut(Draft<'_>)) -> Result<(), RuntimeError> {
        let from = self.draft_from(token)?;
        let drafter = self.plan.drafter.as_ref().ok_or(RuntimeError::NoDrafter)?;
        let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoDrafter) };
        for step in 0..steps {
            let DraftedStep { token, scores, groups, hidden } = device.draft_step(from, step)?;
            let logits = match groups.is_empty() {
                true => scores,
                false => spread(&scores, &groups, &drafter.token_order),
            };
            if token >= self.plan.model.vocab_size {
                return Err(RuntimeError::NoPick);
            }
            each(Draft { token, logits: &logits, hidden: &hidden });
        }
        Ok(())
    }

    /// Drafts `steps` tokens that may follow `token`, the one that comes next and has not been fed. The last token that was fed must have been asked for. Every
    /// value of the drafter is shown to `tap` on a CPU.
    pub fn draft(
        &mut self,
        token: u32,
        steps: u32,
        tap: &mut Tap<'_>,
        each: &mut dyn FnMut(Draft<'_>),
    ) -> Result<(), RuntimeError> {
        self.check(&[token])?;
        if matches!(self.on, On::Device(_)) {
            return self.draft_on_device(token, steps, each);
        }
        let drafter = self.plan.drafter.as_ref().ok_or(RuntimeError::NoDrafter)?;
        let On::Cpu(text) = &self.on else { return Err(RuntimeError::NoDrafter) };
        let (position, width) = (self.seen.len(), self.plan.model.hidden as usize);
        let before = position.checked_sub(1).and_then(|before| self.drafting.hidden_at(before, width));
        let hidden = before.ok_or(RuntimeError::NothingToDraftFrom)?.to_vec();
        if self.drafting.executor.is_none() {
            self.drafting.executor = text.drafter();
        }
        let Some(executor) = &mut self.drafting.executor else { return Err(RuntimeError::NoDrafter) };
        let from = Beginning { slot: SLOT, token, position, hidden };
        drafting::draft((executor, drafter), text, from, steps, tap, each)
    }
}

/// Scores of the tokens in some groups as a row of logits: other tokens have the least of them less 1. The tokens of a group are beside each other in `order`.
fn spread(scores: &[f32], groups: &[u32], order: &[u32]) -> Vec<f32> {
    let each = scores.len() / groups.len();
    let least = scores.iter().copied().fold(f32::INFINITY, f32::min);
    let mut logits = vec![least - 1.0; order.len()];
    let tokens = groups.iter().flat_map(|group| &order[*group as usize * each..][..each]);
    tokens.zip(scores).for_each(|(token, score)| logits[*token as usize] = *score);
    logits
}
