//! What comes back of a device: masks in flight to its picks, tokens that the host picks, and what each token means to
//! its sequence.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::device::{Device, Mask, Picked};
use super::pace::Work;
use super::request::{Demand, Event, Finish, Id, Request};
use super::sequence::Sequence;
use super::state::{Engine, InFlight};
use crate::RuntimeError;

impl<D: Device> Engine<D> {
    /// A decode of the batch is queued. Where its picks wait for masks, these follow from the tokens before: they are
    /// collected, and the masks computed, while the device computes the logits.
    pub(super) fn await_decode(&mut self) -> Result<(), RuntimeError> {
        self.in_flight.push_back(InFlight {
            rows: Arc::clone(&self.batch),
            work: Work::Decode(self.batch.len() as u32),
            waits: self.guided,
            read: None,
        });
        self.speculation.trials.pass_by();
        if !self.guided {
            return Ok(());
        }
        self.collect_beyond(1)?;
        let masks = self.masks();
        self.device.pick(&masks)?;
        if let Some(latest) = self.in_flight.back_mut() {
            latest.waits = false;
        }
        // Once nobody has a mask, tokens may be queued ahead again.
        self.steady &= masks.iter().any(Option::is_some);
        Ok(())
    }

    /// What may come next in each row of the batch. A grammar takes microseconds, and some take milliseconds: several
    /// go to several cores.
    fn masks(&mut self) -> Vec<Option<Mask>> {
        let rows: BTreeMap<Id, usize> = self.batch.iter().copied().zip(0..).collect();
        let mut masks = vec![None; self.batch.len()];
        let mut guided: Vec<(&mut Sequence, usize)> = Vec::new();
        for (id, sequence) in &mut self.sequences {
            if let Some(row) = rows.get(id).filter(|_| sequence.request.demand() == Demand::Mask) {
                guided.push((sequence, *row));
            }
        }
        let (vocab, device) = (self.limits.vocab, &self.device);
        guided.retain(|(sequence, _)| !sequence.is_picked_on_host(device));
        let of_rows: Vec<(usize, Option<Mask>)> =
            guided.into_par_iter().map(|(sequence, row)| (row, sequence.mask(vocab))).collect();
        of_rows.into_iter().for_each(|(row, mask)| masks[row] = mask);
        masks
    }

    /// Waits until every token is known.
    pub(super) fn drain(&mut self) -> Result<(), RuntimeError> {
        self.collect_beyond(0)
    }

    /// Waits until no more results than that are in flight.
    pub(super) fn collect_beyond(&mut self, on_their_way: usize) -> Result<(), RuntimeError> {
        while self.in_flight.len() > on_their_way {
            self.collect()?;
        }
        Ok(())
    }

    pub(super) fn collect(&mut self) -> Result<(), RuntimeError> {
        let Some(InFlight { rows, work, read, .. }) = self.in_flight.pop_front() else { return Ok(()) };
        let mut picked = self.device.collect()?;
        let now = (self.clock)();
        self.pace.measured(now.saturating_sub(self.began), work, &self.limits);
        self.began = now;
        if let Some((id, from, count)) = read {
            let of_prompt = picked.drain(..count).zip(from..).filter(|_| self.sequences.contains_key(&id));
            let events = of_prompt.map(|(picked, position)| Event::Prompt { id, position, logits: picked.logits });
            self.events.extend(events);
        }
        if let Work::Closed { drafts, is_trial } = work {
            self.close_round(rows[0], drafts, is_trial, picked);
            return Ok(());
        }
        self.pick_on_host(&rows, &mut picked);
        self.recite(&rows, &mut picked);
        for (id, picked) in rows.iter().zip(picked) {
            self.take_token(*id, picked);
        }
        Ok(())
    }

    /// Says a text in place of what was picked, where one is to be said.
    pub(super) fn recite(&mut self, rows: &[Id], picked: &mut [Picked]) {
        let Some(recited) = &mut self.recited else { return };
        for (id, picked) in rows.iter().zip(picked) {
            let Some(sequence) = self.sequences.get(id) else { continue };
            let own = Some(picked.token).filter(|token| *token < self.limits.vocab);
            picked.token = recited.say(sequence.position_of_next_token().into(), own).unwrap_or(u32::MAX);
        }
    }

    /// The tokens that the device did not pick. Each takes a pass over the vocabulary, so that several go to several
    /// cores.
    pub(super) fn pick_on_host(&mut self, rows: &[Id], picked: &mut [Picked]) {
        if picked.iter().all(|picked| picked.logits.is_empty()) {
            return;
        }
        let mut of: BTreeMap<Id, &mut Picked> = rows.iter().copied().zip(picked).collect();
        let mut work: Vec<(&mut Sequence, &mut Picked)> = Vec::new();
        for (id, sequence) in &mut self.sequences {
            let is_ours = sequence.is_picked_on_host(&self.device);
            if let Some(picked) = of.remove(id).filter(|_| is_ours && sequence.stale == 0) {
                work.push((sequence, picked));
            }
        }
        let sampler = &self.host_sampler;
        work.par_iter_mut().for_each(|(sequence, picked)| {
            let position = sequence.position_of_next_token() as u64;
            let Request { sampling, seed, rule, logits: wants_logits, .. } = &mut sequence.request;
            let sampler = sequence.sampler.get_or_insert_with(|| sampler.by(*sampling, *seed));
            let rule = rule.as_mut().filter(|rule| rule.0.demand() != Demand::Nothing);
            let token = match rule {
                None => sampler.pick(&picked.logits, position),
                // Whoever wants the logits wants the model's own.
                Some(rule) if *wants_logits => {
                    let mut changed = picked.logits.clone();
                    rule.0.apply(&mut changed);
                    sampler.pick(&changed, position)
                }
                Some(rule) => {
                    rule.0.apply(&mut picked.logits);
                    sampler.pick(&picked.logits, position)
                }
            };
            picked.token = token.unwrap_or(u32::MAX);
        });
    }

    /// One token of a sequence that may have ended in the meantime.
    pub(super) fn take_token(&mut self, id: Id, picked: Picked) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if sequence.stale > 0 {
            sequence.stale -= 1;
            return;
        }
        sequence.written = sequence.written.max(sequence.position_of_next_token());
        let Picked { token, logits } = picked;
        let demanded = sequence.request.demand();
        if token >= self.limits.vocab {
            self.remove(id);
            self.events.push(Event::Failed { id, error: RuntimeError::NoPick });
            return;
        }
        if sequence.request.stop.contains(&token) {
            self.finish(id, Finish::Stop);
            return;
        }
        let logits = if sequence.request.logits { logits } else { Vec::new() };
        self.events.push(Event::Token { id, token, logits });
        sequence.push(token);
        if let Some(rule) = &mut sequence.request.rule {
            rule.0.picked(token);
        }
        if sequence.left == 0 {
            let reason = sequence.end;
            self.finish(id, reason);
        } else if demanded != sequence.request.demand() {
            // The next token is picked otherwise. What is in flight was picked by the rule before, unless it waits for
            // masks and the rule has one, or none.
            let may_wait = sequence.request.demand() != Demand::Logits;
            let is_stale = |result: &&InFlight| result.rows.contains(&id) && !(result.waits && may_wait);
            sequence.stale = self.in_flight.iter().filter(is_stale).count() as u32;
            self.steady &= self.guided && may_wait;
        }
    }
}
