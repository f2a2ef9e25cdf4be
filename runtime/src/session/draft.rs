//! Drafts of the plan's drafter: tokens that may follow one that was chosen and not yet run.

use std::ops::Range;

use super::{On, Session};
use crate::cpu::{Executor, Pass, Span, Tap};
use crate::{RuntimeError, argmax};

/// Drafts in a row, at most: with the token before them as many rows as a decode of several verifies well.
pub const MOST_DRAFTS: u32 = 7;

/// What one step of the drafter made.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// The likeliest token.
    pub token: u32,
    pub logits: &'a [f32],
    /// The next step's hidden state.
    pub hidden: &'a [f32],
}

/// What a session knows for its drafter.
#[derive(Default)]
pub(super) struct Drafting {
    executor: Option<Executor>,
    /// Positions whose rows the LM head has read in the last pass that asked for any, and what it read.
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
    /// Drafts `steps` tokens that may follow `token`, the one that comes next and has not been fed. The last token that was fed must have been asked for. Every
    /// value of the drafter is shown to `tap`.
    pub fn draft(
        &mut self,
        token: u32,
        steps: u32,
        tap: &mut Tap<'_>,
        each: &mut dyn FnMut(Draft<'_>),
    ) -> Result<(), RuntimeError> {
        self.check(&[token])?;
        let drafter = self.plan.drafter.as_ref().ok_or(RuntimeError::NoDrafter)?;
        let On::Cpu(text) = &self.on else { return Err(RuntimeError::DraftsOnCpu) };
        let (position, width) = (self.seen.len(), self.plan.model.hidden as usize);
        let before = position.checked_sub(1).and_then(|before| self.drafting.hidden_at(before, width));
        let mut hidden = before.ok_or(RuntimeError::NothingToDraftFrom)?.to_vec();
        if self.drafting.executor.is_none() {
            self.drafting.executor = text.drafter();
        }
        let Some(executor) = &mut self.drafting.executor else { return Err(RuntimeError::NoDrafter) };
        let mut token = token;
        for _ in 0..steps {
            // Every step looks from the position of the first: nothing is appended, so no other has more to see.
            let span = Span { slot: 0, first_position: position, rows: 1 };
            let pass = Pass { tokens: &[token], spans: &[span], hidden: &hidden, ..Pass::default() };
            executor.run_beside(text, &pass, tap);
            let logits = executor.value(drafter.program.output, &pass);
            let next = executor.value(drafter.hidden, &pass);
            token = argmax(logits).ok_or(RuntimeError::NoPick)?;
            each(Draft { token, logits, hidden: next });
            hidden = next.to_vec();
        }
        Ok(())
    }
}
