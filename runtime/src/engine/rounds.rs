//! A single sequence on a device that closes rounds by itself: drafts, their verification and what is kept of them,
//! each round a single replay.
//!
//! The device decides how many drafts were right and where the next round begins, so the host can queue a round before
//! it has heard of the one before. It does so where it need not know the text to choose, and reads of each round no
//! more than the tokens that were kept. A round that was queued in vain has written rows behind the text's end, as
//! rejected drafts do; pages have room for them. Whoever joins the sequence ends its rounds: what is in flight is
//! collected, and the next decode is that of a batch.

use super::depths;
use super::device::{Device, Picked, Row};
use super::drafts::DraftSource;
use super::pace::Work;
use super::request::{Event, Id};
use super::sequence::{Sequence, Stage};
use super::state::{Engine, InFlight, Rounds};
use crate::RuntimeError;

/// Rounds in flight, at most: one runs, the next is ready.
const AHEAD: usize = 2;

impl<D: Device> Engine<D> {
    /// The sequence that may go on in rounds: the only one, whose tokens the device picks from the model's own logits.
    /// A rule may demand something from one token to the next, and the host must know.
    fn alone(&self) -> Option<(Id, &Sequence)> {
        if !self.speculation.has_drafter() || self.sequences.len() != 1 || self.recited.is_some() {
            return None;
        }
        let (id, sequence) = self.sequences.first_key_value()?;
        let is_plain = sequence.request.rule.is_none() && !sequence.request.logits;
        let picks = is_plain && !sequence.is_picked_on_host(&self.device) && self.device.has_rounds();
        picks.then_some((*id, sequence))
    }

    /// Begins rounds, if they are possible. All tokens are known before.
    pub(super) fn begin_rounds(&mut self) -> Result<bool, RuntimeError> {
        let Some((id, sequence)) = self.alone() else { return Ok(false) };
        let Stage::Generating { pending, position } = sequence.stage else { return Ok(false) };
        let (slot, picking) = (sequence.slot, sequence.picking(&self.device));
        if !self.device.can_draft(slot, position) {
            return Ok(false);
        }
        self.device.begin_rounds(&Row { slot, position, token: pending, picking })?;
        // Rounds in vain overwrite the oldest rows of a window's pages.
        let fitting = self.limits.spare_rows / (self.limits.drafts + 1);
        self.rounds = Some(Rounds { id, picking, ahead: AHEAD.min(fitting.max(1) as usize) });
        self.leave_batch();
        self.go_on_in_rounds()
    }

    /// Queues the rounds that can be queued and waits for the oldest; `false` where the sequence is not, or no longer,
    /// in rounds.
    pub(super) fn go_on_in_rounds(&mut self) -> Result<bool, RuntimeError> {
        let Some(Rounds { id, picking, .. }) = self.rounds else { return Ok(false) };
        if self.alone().is_none_or(|(alone, _)| alone != id) {
            return Ok(false);
        }
        while let Some((drafts, given)) = self.next_round() {
            if self.in_flight.is_empty() {
                self.began = (self.clock)();
            }
            self.device.round(drafts, &given, &picking)?;
            let is_trial = drafts > 0 && self.speculation.trials.begin();
            if drafts == 0 {
                self.speculation.trials.pass_by();
            }
            let (rows, work) = ([id].into(), Work::Closed { drafts, is_trial });
            self.in_flight.push_back(InFlight { rows, work, waits: false, read: None });
        }
        self.collect()?;
        Ok(true)
    }

    /// The drafts of the next round, and what takes their places, if it can be queued now.
    fn next_round(&mut self) -> Option<(u32, Vec<u32>)> {
        let Rounds { id, ahead, .. } = self.rounds.as_ref()?;
        let (sequence, queued) = (self.sequences.get(id)?, self.in_flight.len());
        // Each round in flight brings a token at least, and may have come as far as all its rows.
        let wanted = sequence.left.saturating_sub(queued as u32);
        let left = sequence.positions.saturating_sub(sequence.position() + self.rows_in_flight(*id));
        if queued >= *ahead || wanted == 0 || left == 0 {
            return None;
        }
        // No row beyond the sequence's memory, and none that nobody wants.
        let room = (left - 1).min(wanted - 1).min(self.limits.drafts);
        let speculation = &mut self.speculation;
        let odds = sequence.drafting.acceptance.as_ref().unwrap_or(&speculation.usual).odds(0);
        let times = &self.pace.closed;
        let drafts = match speculation.drafts.steps {
            Some(steps) => steps,
            None => depths::of_closed_round(odds, self.limits.drafts, times, speculation.trials.is_due()),
        };
        let (drafts, is_known) = (drafts.min(room), queued == 0);
        match (&mut speculation.drafts.source, &sequence.drafting.text) {
            // What a number of drafts takes is seen by itself before more are queued.
            _ if !is_known && speculation.drafts.steps.is_none() && !times.knows(drafts) => None,
            (DraftSource::Replaced(guess), Some(text)) if drafts > 0 => is_known.then(|| {
                let mut given = guess(text.text(), drafts as usize);
                given.truncate(drafts as usize);
                (given.len() as u32, given)
            }),
            _ => Some((drafts, Vec::new())),
        }
    }

    /// A round has come back with what was kept: drafts that were right, and the token behind them.
    pub(super) fn close_round(&mut self, id: Id, drafts: u32, is_trial: bool, kept: Vec<Picked>) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.written = sequence.written.max(sequence.position() + drafts + 1);
        let Some(accepted) = kept.len().checked_sub(1) else {
            self.remove(id);
            self.events.push(Event::Failed { id, error: RuntimeError::NoPick });
            return;
        };
        let accepted = accepted as u32;
        self.speculation.learn(Some(sequence), 0, drafts, accepted);
        if drafts > 0 {
            self.speculation.trials.learn(is_trial, accepted == 0);
            self.events.push(Event::Drafted { id, drafted: drafts, accepted });
        }
        // What was kept behind the end is no part of the text: the sequence is gone then.
        kept.into_iter().for_each(|picked| self.take_token(id, picked));
    }
}
