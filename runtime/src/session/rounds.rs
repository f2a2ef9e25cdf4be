//! The plan's drafter on a device that picks tokens itself: rounds of drafts, their verification and what is kept of them, each a single replay.
//!
//! The device decides how many drafts were right and where the next round begins, so the host can queue a round before it has heard of the one before. It does so
//! where it need not know the text to choose, and reads of each round no more than the tokens that were kept. A round that was queued in vain has written rows
//! behind the text's end, as rejected drafts do; rings have room for them.

use std::collections::VecDeque;
use std::time::Instant;

use super::generate::picking_of;
use super::{End, On, Request, Session, Source, Speculation, collect_beyond};
use crate::engine::{BackendDevice, Device, Picking};
use crate::{RuntimeError, Sampler};

/// Rounds on their way, at most: one runs, the next is ready.
const AHEAD: usize = 2;

/// A sequence that goes on in rounds.
struct Rounds<'a> {
    request: Request<'a>,
    picking: Picking,
    /// Tokens before the first that is generated, which the host knows, and then all that were fed.
    seen: Vec<u32>,
    /// The latest token, which was not fed when the host last heard.
    pending: u32,
    /// Tokens given out.
    given: u32,
    /// Drafts of the rounds on their way.
    queued: VecDeque<u32>,
    /// How many of them there may be.
    ahead: usize,
    /// Positions that were written, at most.
    written: u32,
    context: u32,
    /// When the latest result was here, or the oldest round on its way was queued.
    since: Instant,
}

impl Session {
    /// Whether drafts of this source are verified without the host.
    pub(super) fn goes_in_rounds(&self, source: &Source, sampler: &Sampler) -> bool {
        let is_drafter = matches!(source, Source::Drafter | Source::Replaced(_));
        let has_drafter = matches!(&self.on, On::Device(device) if device.most_drafts() > 0);
        is_drafter && has_drafter && !sampler.recites() && self.device_picks(sampler).is_ok()
    }

    pub(super) fn generate_in_rounds<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        speculation: &mut Speculation,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        let token = self.first_token(request.prompt, sampler)?;
        if request.stop.contains(&token) {
            return Ok(End::Stop);
        }
        each(token)?;
        let (position, context) = (self.position(), self.plan.program.context);
        if request.most == 1 || position == context {
            return Ok(if request.most == 1 { End::Most } else { End::Context });
        }
        let (from, picking) = (self.draft_from(token)?, picking_of(sampler));
        self.drafting.forget();
        let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoProgram.into()) };
        device.begin_rounds(from, &picking)?;
        // Rounds in vain overwrite the oldest rows of a ring.
        let fitting = device.limits().spare_rows / (device.most_drafts() + 1);
        let mut rounds = Rounds {
            request,
            picking,
            seen: std::mem::take(&mut self.seen),
            pending: token,
            given: 1,
            queued: VecDeque::new(),
            ahead: AHEAD.min(fitting.max(1) as usize),
            written: position,
            context,
            since: Instant::now(),
        };
        let outcome = loop {
            match rounds.go_on(device, speculation, each) {
                Ok(None) => {}
                Ok(Some(end)) => break Ok(end),
                Err(error) => break Err(error),
            }
        };
        let late = collect_beyond(device, 0);
        self.seen = rounds.seen;
        self.written = self.written.max(rounds.written);
        if outcome.is_ok() {
            late?;
        }
        outcome
    }
}

impl Rounds<'_> {
    /// Queues what can be queued and waits for a round; says whether that was the end.
    fn go_on<E: From<RuntimeError>>(
        &mut self,
        device: &mut BackendDevice,
        speculation: &mut Speculation,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<Option<End>, E> {
        while let Some((drafts, given)) = self.next(device, speculation) {
            if self.queued.is_empty() {
                self.since = Instant::now();
            }
            device.round(drafts, &given, &self.picking)?;
            speculation.depth.begin(drafts);
            self.written = self.reached() + drafts + 1;
            self.queued.push_back(drafts);
        }
        let Some(drafts) = self.queued.pop_front() else { return Ok(Some(End::Context)) };
        let kept = device.collect()?;
        let now = Instant::now();
        let seconds = now.duration_since(std::mem::replace(&mut self.since, now)).as_secs_f64();
        let accepted = kept.len().checked_sub(1).ok_or(RuntimeError::NoPick)?;
        speculation.learn(0, drafts, accepted as u32, seconds);
        for token in kept.iter().map(|picked| picked.token) {
            self.seen.push(self.pending);
            if self.request.stop.contains(&token) {
                return Ok(Some(End::Stop));
            }
            each(token)?;
            (self.pending, self.given) = (token, self.given + 1);
            if self.given == self.request.most {
                return Ok(Some(End::Most));
            }
        }
        Ok(None)
    }

    /// The position that the rounds on their way may have come to.
    fn reached(&self) -> u32 {
        self.seen.len() as u32 + self.queued.iter().map(|drafts| drafts + 1).sum::<u32>()
    }

    /// The drafts of the next round, and what takes their places, if it can be queued now.
    fn next(&self, device: &BackendDevice, speculation: &mut Speculation) -> Option<(u32, Vec<u32>)> {
        // Each round on its way brings a token at least.
        let wanted = self.request.most.saturating_sub(self.given + self.queued.len() as u32);
        let left = self.context.saturating_sub(self.reached());
        if self.queued.len() == self.ahead || wanted == 0 || left == 0 {
            return None;
        }
        // No row beyond the context, and none that nobody wants.
        let room = (left - 1).min(wanted - 1).min(device.most_drafts());
        let drafts = speculation.depth.next(0).min(room);
        let is_known = self.queued.is_empty();
        match &mut speculation.source {
            // What a number of drafts takes is seen by itself before more are queued.
            _ if !is_known && !speculation.depth.knows(drafts) => None,
            Source::Replaced(guess) if drafts > 0 => is_known.then(|| {
                let mut given = guess(&[&self.seen[..], &[self.pending]].concat(), drafts as usize);
                given.truncate(drafts as usize);
                (given.len() as u32, given)
            }),
            _ => Some((drafts, Vec::new())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma4c_plan::Sampling;

    fn rounds(seen: usize, queued: &[u32]) -> Rounds<'static> {
        let request = Request { prompt: &[1], most: 10, stop: &[] };
        let sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 };
        let picking = Picking { sampling, seed: 0, token: true, logits: false, masked: false };
        let queued = queued.iter().copied().collect();
        let since = Instant::now();
        let seen = vec![0; seen];
        Rounds { request, picking, seen, pending: 0, given: 1, queued, ahead: AHEAD, written: 0, context: 64, since }
    }

    #[test]
    fn rounds_on_their_way_may_have_come_as_far_as_all_their_rows() {
        assert_eq!(rounds(5, &[]).reached(), 5);
        assert_eq!(rounds(5, &[7, 0]).reached(), 5 + 8 + 1);
    }
}
