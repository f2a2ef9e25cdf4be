//! What a backend's memory shows: logits row by row, and a drafter's scores.

use std::ops::Range;

use super::draft::DraftedStep;
use super::{BackendDevice, Picks};
use crate::RuntimeError;
use crate::backend::Backend;
use crate::cpu::Tap;
use crate::cpu::drafting::Draft;
use crate::engine::device::{AskedRow, Chunk, Device, Picked, Picking, Row};
use crate::engine::inspect::{DraftFrom, Inspect, Logits};
use crate::soft::Patches;

impl BackendDevice {
    fn collect_beyond(&mut self, in_flight: usize) -> Result<(), RuntimeError> {
        while self.results.len() > in_flight {
            self.collect()?;
        }
        Ok(())
    }

    /// The one row of the latest result; those before it are nobody's.
    fn latest_row(&mut self) -> Result<Picked, RuntimeError> {
        self.collect_beyond(1)?;
        self.collect()?.pop().ok_or_else(|| RuntimeError::Backend("no row was asked for".into()))
    }
}

impl Inspect for BackendDevice {
    fn suppress(&mut self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let mut words = vec![u32::MAX; self.places.suppress_len as usize];
        let Some(first) = words.get_mut(..tokens.len()) else {
            self.picks = Picks { largest: false, sampled: false };
            return Ok(());
        };
        first.copy_from_slice(tokens);
        self.picks = self.plan_picks;
        self.write(self.places.suppress, &words)
    }

    /// Rows that are asked for one by one look at a window's pages when all of the chunk is on them.
    fn asked_rows(&self) -> u32 {
        self.limits.chunk().min(self.limits.spare_rows)
    }

    fn read(
        &mut self,
        chunk: &Chunk<'_>,
        asked: Range<usize>,
        tap: Option<&mut Tap<'_>>,
        logits: &mut Logits<'_>,
    ) -> Result<(), RuntimeError> {
        if tap.is_some() {
            return Err(RuntimeError::NoTaps);
        }
        self.entered.iter_mut().filter(|of| of.is_some_and(|(slot, _)| slot == chunk.slot)).for_each(|of| *of = None);
        if self.limits.chunks.is_empty() {
            // A plan without a phase for prompts decodes them.
            for ((row, token), position) in chunk.tokens.iter().enumerate().zip(chunk.position..) {
                let picking = Picking { logits: asked.contains(&row), ..Picking::LOGITS };
                self.decode(&[Row { slot: chunk.slot, position, token: *token, picking }])?;
                let picked = self.latest_row()?;
                if picking.logits {
                    logits(row, &picked.logits);
                }
            }
            return Ok(());
        }
        let row = |row: usize| AskedRow { chunk: 0, row: row as u32, picking: Picking::LOGITS };
        let only = (asked.len() == 1).then(|| row(asked.start));
        self.prefill(std::slice::from_ref(chunk), only.as_slice())?;
        if only.is_some() {
            logits(asked.start, &self.latest_row()?.logits);
            return Ok(());
        }
        for at in asked {
            self.ask(&[row(at)])?;
            logits(at, &self.latest_row()?.logits);
        }
        self.collect_beyond(self.limits.ahead as usize)
    }

    fn look(
        &mut self,
        tower: usize,
        patches: Patches<'_>,
        tap: Option<&mut Tap<'_>>,
    ) -> Result<Vec<f32>, RuntimeError> {
        self.towers.limits.get(tower).ok_or(RuntimeError::NoTower)?.soft_tokens(patches)?;
        self.run_tower(tower, patches, tap)
    }

    fn draft(
        &mut self,
        from: DraftFrom,
        steps: u32,
        _: &mut Tap<'_>,
        each: &mut dyn FnMut(Draft<'_>),
    ) -> Result<(), RuntimeError> {
        for step in 0..steps {
            let DraftedStep { token, scores, groups, hidden } = self.draft_step(from, step)?;
            let logits = match groups.is_empty() {
                true => scores,
                false => spread(&scores, &groups, &self.drafter()?.token_order),
            };
            if token >= self.limits.vocab {
                return Err(RuntimeError::NoPick);
            }
            each(Draft { token, logits: &logits, hidden: &hidden });
        }
        Ok(())
    }

    fn uncollected(&self) -> usize {
        self.results.len()
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        self.collect_beyond(0)?;
        self.backend.wait()
    }

    fn backend(&mut self) -> Option<&mut dyn Backend> {
        Some(self.backend.as_mut())
    }
}

/// Scores of the tokens in some groups as a row of logits: other tokens have the least of them less 1. The tokens of a
/// group are beside each other in `order`.
fn spread(scores: &[f32], groups: &[u32], order: &[u32]) -> Vec<f32> {
    let each = scores.len() / groups.len();
    let least = scores.iter().copied().fold(f32::INFINITY, f32::min);
    let mut logits = vec![least - 1.0; order.len()];
    let tokens = groups.iter().flat_map(|group| &order[*group as usize * each..][..each]);
    tokens.zip(scores).for_each(|(token, score)| logits[*token as usize] = *score);
    logits
}
