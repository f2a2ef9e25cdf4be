//! A plan's drafter on a backend: guesses what follows a token, and leaves it where the rows that verify it find it.
//!
//! One sequence goes on in rounds, each a single replay: the device decides which drafts were right, and the next round
//! finds where to begin. Sequences of a batch are drafted for one after the other, before the decode of all; there the
//! host reads the drafts with what was picked, and decides.

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaDrafter, CudaProgram, RECORD_WORDS, record};

use super::super::device::{Picking, Row};
use super::super::inspect::DraftFrom;
use super::{Awaited, BackendDevice, arena};
use crate::RuntimeError;
use crate::backend::{Pick, Run};
use crate::runs::{Round, rounds};

/// The drafter of a plan, as its launches are queued.
pub(super) struct DrafterShape {
    phase: usize,
    of_plan: CudaDrafter,
    rounds: Vec<Round>,
    /// Tokens of a group are beside each other; empty where every token has a score.
    pub(super) token_order: Vec<u32>,
}

impl DrafterShape {
    pub fn of(plan: &Plan, program: &CudaProgram) -> Option<DrafterShape> {
        let (of_plan, token_order) = (program.drafter.clone()?, plan.drafter.as_ref()?.token_order.clone());
        Some(DrafterShape { phase: program.drafter_phase(), of_plan, rounds: rounds(program), token_order })
    }
}

impl BackendDevice {
    pub(super) fn drafter(&self) -> Result<&DrafterShape, RuntimeError> {
        self.drafter.as_ref().ok_or(RuntimeError::NoDrafter)
    }

    /// The row of the latest passes that has the state of the position before this one.
    pub(super) fn entered_row(&self, slot: u32, position: u32) -> Option<u32> {
        let before = (slot, position.checked_sub(1)?);
        self.entered.iter().position(|entered| *entered == Some(before)).map(|row| row as u32)
    }

    /// `first` is the row of the token that is to be followed in the decode that verifies the drafts: they are counted
    /// from there.
    fn write_draft_records(&mut self, from: DraftFrom, first: u32) -> Result<(), RuntimeError> {
        let at = self.drafter()?.of_plan.places.record;
        let DraftFrom { slot, token, position } = from;
        let row = self.entered_row(slot, position).ok_or(RuntimeError::NothingToDraftFrom)?;
        let of = |position: u32, token: u32| {
            let mut words = [0; RECORD_WORDS as usize];
            (words[record::POSITION], words[record::ROWS]) = (position, 1);
            (words[record::TOKEN], words[record::SLOT]) = (token, slot);
            words[record::TICK] = first;
            words
        };
        self.write(at, &[of(position, token), of(position - 1, row)].concat())
    }

    /// The launches between two drafts.
    fn draft_run(&self, first: u32, end: u32) -> Result<Run, RuntimeError> {
        let DrafterShape { phase, of_plan, .. } = self.drafter()?;
        let behind = |drafts: u32| match drafts.checked_sub(1) {
            None => Some(0),
            Some(last) => of_plan.ends.get(last as usize).map(|end| *end as usize),
        };
        let steps = behind(first).zip(behind(end));
        let steps = steps.ok_or_else(|| RuntimeError::Backend(format!("the plan cannot draft {end} tokens")))?;
        Ok(Run { phase: *phase, steps, pick: Pick::None })
    }

    /// Runs one step of the drafter and reads what it left: its token, its scores, the groups that they are of, and the
    /// hidden state of the next step.
    pub(super) fn draft_step(&mut self, from: DraftFrom, step: u32) -> Result<DraftedStep, RuntimeError> {
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

    /// Says where the rounds of one sequence begin, and how its rows are picked.
    pub(super) fn write_round_records(&mut self, first: &Row) -> Result<(), RuntimeError> {
        let Row { slot, position, token, picking } = *first;
        self.write_draft_records(DraftFrom { slot, token, position }, 0)?;
        let mut words = Vec::new();
        for row in 0..self.limits.verified_rows {
            // A row is in use once its draft is there.
            let (in_use, token) = if row == 0 { (1, token) } else { (0, 0) };
            let mut record = self.record(position + row, in_use, token, slot);
            self.settings(&mut record, &picking);
            words.extend(record);
        }
        let phase = self.decode_phase(self.limits.verified_rows)?;
        words.resize((self.phases[phase].rows * RECORD_WORDS) as usize, 0);
        self.write(self.places.rows, &words)?;
        self.write_row_seats(0, self.phases[phase].rows, (0..self.limits.verified_rows).map(|_| slot))?;
        (self.latest, self.waiting) = (None, None);
        self.entered.fill(None);
        Ok(())
    }

    /// A round as one replay.
    pub(super) fn queue_round(&mut self, drafts: u32, given: &[u32], picking: &Picking) -> Result<(), RuntimeError> {
        let (pick, shape) = (self.pick_for(&[*picking]), self.drafter()?);
        let round = shape.rounds.iter().find(|round| (round.drafts, round.pick) == (drafts, pick));
        let round = round.ok_or_else(|| RuntimeError::Backend(format!("the plan has no round of {drafts} drafts")))?;
        let (runs, at) = (round.runs.clone(), shape.of_plan.places.given);
        if !given.is_empty() {
            let words: Vec<u32> = given.iter().map(|token| token + 1).collect();
            self.write(at, &words)?;
        }
        self.backend.run_all(&runs)?;
        self.send_back(drafts + 1, true)?;
        self.results.push_back(Awaited::Kept(drafts + 1));
        Ok(())
    }

    /// Queues drafts of what follows the first row of each sequence that has several, one sequence after the other, and
    /// a decode of all rows.
    pub(super) fn draft_sequences(&mut self, rows: &[Row], given: bool) -> Result<(), RuntimeError> {
        let phase = self.decode_phase(rows.len() as u32)?;
        self.write_rows(phase, rows)?;
        let mut guessed = Vec::new();
        for sequence in Row::sequences(rows).filter(|rows| rows.len() > 1) {
            let Row { slot, token, position, .. } = rows[sequence.start];
            let run = self.draft_run(0, sequence.len() as u32 - 1)?;
            self.write_draft_records(DraftFrom { slot, token, position }, sequence.start as u32)?;
            self.backend.run(run)?;
            guessed.extend(sequence.start as u32..sequence.end as u32 - 1);
        }
        // A draft lies in the word of the row before its own; words between are nobody's.
        let at = self.drafter()?.of_plan.places.drafts;
        let words = guessed.last().map_or(1, |last| last + 1);
        self.backend.send_back(arena(at, 4 * u64::from(words)))?;
        self.results.push_back(Awaited::Some(guessed));
        if given {
            self.write_rows(phase, rows)?;
        }
        self.run_decode(phase, rows)
    }
}

/// What a step of a drafter left.
#[derive(Clone, Debug)]
pub(super) struct DraftedStep {
    pub token: u32,
    pub scores: Vec<f32>,
    pub groups: Vec<u32>,
    pub hidden: Vec<f32>,
}
