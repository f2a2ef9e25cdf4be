//! A plan's drafter on a backend: guesses what follows a token, and leaves it where the rows that verify it find it.
//!
//! Drafts and their verification are queued behind each other. The host needs the drafts to know which were right, and reads them with what was picked.

use gemma4c_plan::cuda::{CudaDrafter, RECORD_WORDS, record};

use super::super::device::{Device, Row};
use super::{Awaited, BackendDevice, arena};
use crate::RuntimeError;
use crate::backend::{Pick, Run};

/// From where a drafter guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DraftFrom {
    pub slot: u32,
    /// The token that is to be followed, which was not decoded yet, and its position: at least 1.
    pub token: u32,
    pub position: u32,
    /// The row of the latest decode, or of the latest asked row of a chunk (0), that the token was picked from.
    pub row: u32,
}

/// Whose tokens are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verified {
    /// The drafter's.
    Drafted,
    /// Those of the rows; the drafter runs all the same.
    Given,
}

/// The drafter of a plan, as its launches are queued.
pub(super) struct DrafterShape {
    pub phase: usize,
    pub of_plan: CudaDrafter,
}

impl BackendDevice {
    fn drafter(&self) -> Result<&DrafterShape, RuntimeError> {
        self.drafter.as_ref().ok_or(RuntimeError::NoDrafter)
    }

    /// Drafts that can be made at once; 0 without a drafter.
    pub(crate) fn most_drafts(&self) -> u32 {
        self.drafter.as_ref().map_or(0, |drafter| drafter.of_plan.ends.len() as u32)
    }

    /// The row of the latest passes that has the state of the position before this one.
    pub(super) fn entered_row(&self, slot: u32, position: u32) -> Option<u32> {
        let before = (slot, position.checked_sub(1)?);
        self.entered.iter().position(|entered| *entered == Some(before)).map(|row| row as u32)
    }

    /// `first` is the row of the token that is to be followed in the decode that verifies the drafts: they are counted from there.
    fn write_draft_records(&mut self, from: DraftFrom, first: u32) -> Result<(), RuntimeError> {
        let at = self.drafter()?.of_plan.places.record;
        let of = |position: u32, token: u32| {
            let mut words = [0; RECORD_WORDS as usize];
            (words[record::POSITION], words[record::ROWS]) = (position, 1);
            (words[record::TOKEN], words[record::SLOT]) = (token, from.slot);
            words[record::TICK] = first;
            words
        };
        let before = from.position.checked_sub(1).ok_or(RuntimeError::NothingToDraftFrom)?;
        self.write(at, &[of(from.position, from.token), of(before, from.row)].concat())
    }

    /// The launches between two drafts.
    fn draft_run(&self, first: u32, end: u32) -> Result<Run, RuntimeError> {
        let DrafterShape { phase, of_plan } = self.drafter()?;
        let behind = |drafts: u32| match drafts.checked_sub(1) {
            None => Some(0),
            Some(last) => of_plan.ends.get(last as usize).map(|end| *end as usize),
        };
        let steps = behind(first).zip(behind(end));
        let steps = steps.ok_or_else(|| RuntimeError::Backend(format!("the plan cannot draft {end} tokens")))?;
        Ok(Run { phase: *phase, steps, pick: Pick::None })
    }

    /// Runs one step of the drafter and reads what it left: its token, its scores, the groups that they are of, and the hidden state of the next step.
    pub(crate) fn draft_step(&mut self, from: DraftFrom, step: u32) -> Result<DraftedStep, RuntimeError> {
        if step == 0 {
            self.write_draft_records(from, 0)?;
        }
        let run = self.draft_run(step, step + 1)?;
        self.backend.run(run)?;
        let places = self.drafter()?.of_plan.places;
        let mut words = |offset: u64, count: u64| -> Result<Vec<u32>, RuntimeError> {
            let mut bytes = vec![0; 4 * count as usize];
            self.backend.read(arena(offset, 4 * count), &mut bytes)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
        };
        let floats = |words: Vec<u32>| words.into_iter().map(f32::from_bits).collect();
        Ok(DraftedStep {
            token: words(places.drafts + 4 * u64::from(step), 1)?[0],
            scores: floats(words(places.scores, places.score_count.into())?),
            groups: words(places.groups, places.group_count.into())?,
            hidden: floats(words(places.hidden, self.hidden_width.into())?),
        })
    }

    /// Queues drafts of what follows the first of these rows, which are of one sequence, and a decode of all of them. The results on their way are then the
    /// drafts, and what the decode picks.
    pub(crate) fn draft_and_decode(
        &mut self,
        from: DraftFrom,
        rows: &[Row],
        verified: Verified,
    ) -> Result<(), RuntimeError> {
        let drafts = rows.len() as u32 - 1;
        let run = self.draft_run(0, drafts)?;
        let phase = self.decode_phase(rows.len() as u32)?;
        self.write_draft_records(from, 0)?;
        if verified == Verified::Drafted {
            self.write_rows(phase, rows)?;
        }
        self.backend.run(run)?;
        let at = self.drafter()?.of_plan.places.drafts;
        self.backend.send_back(arena(at, 4 * u64::from(drafts)))?;
        self.results.push_back(Awaited::Tokens(drafts));
        match verified {
            Verified::Drafted => self.run_decode(phase, rows),
            Verified::Given => self.decode(rows),
        }
    }

    /// Queues drafts of what follows the first row of each sequence that has several, one sequence after the other, and a decode of all rows.
    pub(super) fn draft_sequences(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        let phase = self.decode_phase(rows.len() as u32)?;
        self.write_rows(phase, rows)?;
        let mut guessed = Vec::new();
        for sequence in Row::sequences(rows).filter(|rows| rows.len() > 1) {
            let Row { slot, token, position, .. } = rows[sequence.start];
            let row = self.entered_row(slot, position).ok_or(RuntimeError::NothingToDraftFrom)?;
            let run = self.draft_run(0, sequence.len() as u32 - 1)?;
            self.write_draft_records(DraftFrom { slot, token, position, row }, sequence.start as u32)?;
            self.backend.run(run)?;
            guessed.extend(sequence.start as u32..sequence.end as u32 - 1);
        }
        // A draft lies in the word of the row before its own; words between are nobody's.
        let at = self.drafter()?.of_plan.places.drafts;
        let words = guessed.last().map_or(1, |last| last + 1);
        self.backend.send_back(arena(at, 4 * u64::from(words)))?;
        self.results.push_back(Awaited::Some(guessed));
        self.run_decode(phase, rows)
    }
}

/// What a step of a drafter left.
#[derive(Clone, Debug)]
pub(crate) struct DraftedStep {
    pub token: u32,
    pub scores: Vec<f32>,
    pub groups: Vec<u32>,
    pub hidden: Vec<f32>,
}
