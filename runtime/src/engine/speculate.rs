//! Speculation: tokens are guessed for several sequences, one decode computes the rows of all of them, and those are
//! kept that are picked.
//!
//! A row of a decode has the bits that it has alone, and its pick depends on the row, its position and what the
//! request's rule says there. So the text is that of decoding one by one, whatever was guessed. Rejected rows stay in
//! the caches until they are written over: pages have room for them.
//!
//! Here the host decides what is kept, wherever drafts come from. So a round is not queued ahead: which rows the next
//! one has depends on what is accepted. That is a part of what it costs. A single sequence whose device closes rounds
//! by itself goes on in [those](super::rounds).

use rayon::prelude::*;

use super::depths::{self, Candidate, Costs};
use super::device::{Device, Mask, Picked, Row};
use super::drafts::{DraftCounts, DraftSource, Speculation};
use super::pace::Work;
use super::request::{BoxedRule, Demand, Event, Id};
use super::sequence::{Sequence, Stage};
use super::state::Engine;
use crate::RuntimeError;
use crate::acceptance::MOST_LOOKED_UP;

/// A sequence in a round.
struct Member {
    id: Id,
    /// Its first row.
    first: usize,
    drafts: Vec<u32>,
    /// Tokens that they were looked up by.
    matched: u32,
    accepted: u32,
}

impl<D: Device> Engine<D> {
    /// What became of drafts so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.speculation.counts
    }

    /// Whether drafts may pay, by what is known while tokens are in flight.
    pub(super) fn wants_round(&self) -> bool {
        self.depths(false).1.iter().any(|depth| *depth > 0)
    }

    /// Sequences that generate, and how many tokens to guess for each. With tokens in flight the states that a drafter
    /// needs are not there yet, but will be.
    fn depths(&self, all_known: bool) -> (Vec<Id>, Vec<u32>) {
        let Speculation { drafts, usual, .. } = &self.speculation;
        let (mut ids, mut candidates) = (Vec::new(), Vec::new());
        if matches!(drafts.source, DraftSource::Nowhere) {
            return (ids, Vec::new());
        }
        for (id, sequence) in &self.sequences {
            let Stage::Generating { position, .. } = sequence.stage else { continue };
            let matched = sequence.drafting.matched();
            let can = match drafts.source {
                DraftSource::Nowhere => 0,
                DraftSource::Drafter | DraftSource::Replaced(_)
                    if all_known && !self.device.can_draft(sequence.slot, position) =>
                {
                    0
                }
                DraftSource::Drafter | DraftSource::Replaced(_) => self.limits.drafts,
                DraftSource::Lookup if matched == 0 => 0,
                DraftSource::Lookup | DraftSource::Given(_) => MOST_LOOKED_UP,
            };
            // No row that nobody wants, and none that a window's pages have no room for.
            let most = can.min(sequence.left - 1).min(self.limits.verified_rows - 1);
            let odds = sequence.drafting.acceptance.as_ref().unwrap_or(usual).odds(matched);
            ids.push(*id);
            candidates.push(Candidate { odds, most });
        }
        let depths = self.depths_of(&candidates);
        (ids, depths)
    }

    fn depths_of(&self, candidates: &[Candidate]) -> Vec<u32> {
        let Speculation { drafts, trials, .. } = &self.speculation;
        let (rows, count) = (self.limits.decode_rows, candidates.len() as u32);
        if let Some(steps) = drafts.steps {
            return depths::even(candidates, steps, rows);
        }
        // What a batch of this size takes without drafts comes first.
        let Some(plain) = self.pace.plain_seconds(count) else { return vec![0; candidates.len()] };
        let round = |rows: u32| self.pace.round_seconds(rows);
        let draft = if self.speculation.has_drafter() { self.pace.draft_seconds() } else { 0.0 };
        let depths = depths::best(candidates, rows, &Costs { plain, round: &round, draft });
        let is_trial = trials.is_due() && depths.iter().all(|depth| *depth == 0);
        if is_trial { depths::even(candidates, 1, rows) } else { depths }
    }

    /// One decode with drafts, if they pay. All tokens are known before, and after.
    pub(super) fn round(&mut self) -> Result<bool, RuntimeError> {
        let (ids, depths) = self.depths(true);
        if depths.iter().all(|depth| *depth == 0) {
            return Ok(false);
        }
        let (mut members, rows) = self.members(&ids, &depths);
        if members.iter().all(|member| member.drafts.is_empty()) {
            return Ok(false);
        }
        let is_trial = self.speculation.trials.begin();
        self.began = (self.clock)();
        if self.speculation.has_drafter() {
            let given = matches!(self.speculation.drafts.source, DraftSource::Replaced(_));
            self.device.decode_drafting(&rows, given)?;
            self.take_drafts(&mut members)?;
        } else {
            self.device.decode(&rows)?;
        }
        let is_guided = rows.iter().any(|row| row.picking.masked);
        if is_guided {
            let masks = self.masks_of_round(&members, rows.len());
            self.device.pick(&masks)?;
        }
        let picked = self.device.collect()?;
        self.measure(Work::Round(rows.len() as u32));
        self.leave_batch();
        self.judge(&mut members, picked, is_guided);
        self.learn(&members, is_trial);
        Ok(true)
    }

    /// The sequences of a round with their drafts, and the rows of all. A drafter's tokens are not known yet.
    fn members(&mut self, ids: &[Id], depths: &[u32]) -> (Vec<Member>, Vec<Row>) {
        let (mut members, mut rows) = (Vec::new(), Vec::new());
        for (id, depth) in ids.iter().zip(depths) {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            let Stage::Generating { pending, position } = sequence.stage else { continue };
            sequence.written = sequence.written.max(position + 1 + depth);
            let (text, most) = (&sequence.drafting.text, *depth as usize);
            let mut drafts = match (&mut self.speculation.drafts.source, text) {
                _ if most == 0 => Vec::new(),
                (DraftSource::Drafter, _) => vec![0; most],
                (DraftSource::Lookup, Some(text)) => text.guess(most),
                (DraftSource::Given(guess) | DraftSource::Replaced(guess), Some(text)) => guess(text.text(), most),
                _ => Vec::new(),
            };
            // Whatever was guessed, a row is computed only for what can be a token.
            let known = drafts.iter().take_while(|draft| **draft < self.limits.vocab).count();
            drafts.truncate(known.min(most));
            let picking = sequence.picking(&self.device);
            let tokens = std::iter::once(pending).chain(drafts.iter().copied());
            let first = rows.len();
            rows.extend(tokens.zip(position..).map(|(token, position)| Row {
                slot: sequence.slot,
                position,
                token,
                picking,
            }));
            members.push(Member { id: *id, first, drafts, matched: sequence.drafting.matched(), accepted: 0 });
        }
        (members, rows)
    }

    /// Waits for what the device's drafter has guessed.
    fn take_drafts(&mut self, members: &mut [Member]) -> Result<(), RuntimeError> {
        let drafted = self.device.collect()?;
        self.measure(Work::Drafts(drafted.len() as u32));
        if self.speculation.reads_text() {
            return Ok(());
        }
        let places = members.iter_mut().flat_map(|member| &mut member.drafts);
        places.zip(drafted).for_each(|(draft, drafted)| *draft = drafted.token);
        Ok(())
    }

    fn measure(&mut self, work: Work) {
        let now = (self.clock)();
        self.pace.measured(now.saturating_sub(self.began), work, &self.limits);
        self.began = now;
    }

    /// What may be picked in each row, if the drafts before it are right.
    fn masks_of_round(&mut self, members: &[Member], rows: usize) -> Vec<Option<Mask>> {
        let (vocab, device) = (self.limits.vocab, &self.device);
        let mut guided: Vec<(&Member, BoxedRule, &[u32])> = Vec::new();
        for member in members {
            let sequence = &self.sequences[&member.id];
            if let Some(rule) = sequence.request.rule.as_ref().filter(|_| !sequence.is_picked_on_host(device)) {
                guided.push((member, rule.clone(), &sequence.request.stop));
            }
        }
        let along = |(member, rule, stop): (&Member, BoxedRule, &[u32])| {
            (member.first, masks_along(rule, &member.drafts, stop, vocab))
        };
        let of_members: Vec<(usize, Vec<Option<Mask>>)> = guided.into_par_iter().map(along).collect();
        let mut masks = vec![None; rows];
        for (first, along) in of_members {
            masks[first..].iter_mut().zip(along).for_each(|(mask, along)| *mask = along);
        }
        masks
    }

    /// Gives out what was picked, row by row: a sequence goes on with its next row while its drafts are right.
    fn judge(&mut self, members: &mut [Member], mut picked: Vec<Picked>, is_guided: bool) {
        let before = self.events.len();
        let mut going: Vec<&mut Member> = members.iter_mut().collect();
        for row in 0.. {
            let ids: Vec<Id> = going.iter().map(|member| member.id).collect();
            let take = |member: &&mut Member| std::mem::take(&mut picked[member.first + row]);
            let mut of_row: Vec<Picked> = going.iter().map(take).collect();
            self.pick_on_host(&ids, &mut of_row);
            self.recite(&ids, &mut of_row);
            let mut others = Vec::new();
            for (member, picked) in going.into_iter().zip(of_row) {
                let is_right = member.drafts.get(row) == Some(&picked.token);
                let Some(sequence) = self.sequences.get(&member.id) else { continue };
                let was_on_host = sequence.is_picked_on_host(&self.device);
                member.accepted += u32::from(is_right && !sequence.request.stop.contains(&picked.token));
                self.take_token(member.id, picked);
                // The next row was picked as this one, or by the mask that belongs to it.
                let goes_on = |sequence: &Sequence| {
                    let is_free = is_guided || sequence.request.demand() == Demand::Nothing;
                    sequence.is_picked_on_host(&self.device) == was_on_host && (was_on_host || is_free)
                };
                if is_right && self.sequences.get(&member.id).is_some_and(goes_on) {
                    others.push(member);
                }
            }
            going = others;
            if going.is_empty() {
                break;
            }
        }
        let told = members.iter().filter(|member| !member.drafts.is_empty());
        let told: Vec<Event> = told.map(Member::event).collect();
        self.events.splice(before..before, told);
    }

    fn learn(&mut self, members: &[Member], is_trial: bool) {
        for Member { id, drafts, matched, accepted, .. } in members {
            self.speculation.learn(self.sequences.get_mut(id), *matched, drafts.len() as u32, *accepted);
        }
        self.speculation.trials.learn(is_trial, members.iter().all(|member| member.accepted == 0));
        if is_trial {
            self.pace.doubt_rounds();
        }
    }
}

impl Member {
    fn event(&self) -> Event {
        Event::Drafted { id: self.id, drafted: self.drafts.len() as u32, accepted: self.accepted }
    }
}

/// What a rule lets come before each draft, and after the last. Rows behind a draft that it forbids are nobody's, as
/// are those that it wants picked from other logits.
fn masks_along(mut rule: BoxedRule, drafts: &[u32], stop: &[u32], vocab: u32) -> Vec<Option<Mask>> {
    let mut masks = Vec::with_capacity(drafts.len() + 1);
    for row in 0..=drafts.len() {
        let mask = match rule.0.demand() {
            Demand::Nothing => None,
            Demand::Mask => {
                let mut mask = Mask::all(vocab);
                rule.0.restrict(&mut mask);
                Some(mask)
            }
            Demand::Logits => break,
        };
        let next = drafts.get(row).copied().filter(|draft| mask.as_ref().is_none_or(|mask| mask.allows(*draft)));
        masks.push(mask);
        match next {
            Some(draft) if !stop.contains(&draft) => rule.0.picked(draft),
            _ => break,
        }
    }
    masks.resize(drafts.len() + 1, None);
    masks
}
