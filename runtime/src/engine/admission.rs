//! Requests on their way in and out: what is refused, who is admitted next and with which memory, forks, and what is
//! cancelled.

use std::collections::HashMap;
use std::sync::Arc;

use super::device::Device;
use super::media;
use super::pool::Pages;
use super::prefix::{Apart, Chain};
use super::request::{Event, Finish, Fork, Id, Request, RequestError};
use super::sequence::{self, Sequence, Stage};
use super::state::Engine;
use crate::RuntimeError;

impl<D: Device> Engine<D> {
    /// Whether a request can be served at all.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        sequence::check(request, &self.limits)?;
        media::check(request, self.device.towers(), self.limits.chunk())?;
        self.fillings.of(request.adapter)?;
        Ok(())
    }

    /// Queues a request. One that could never be served is refused at once.
    pub fn submit(&mut self, request: Request) -> Result<Id, RequestError> {
        self.check(&request)?;
        let keys = media::keys(&request, self.device.towers());
        let apart = Apart { salt: Arc::clone(&request.salt), adapter: self.fillings.of(request.adapter)? };
        let chain = Chain::new(self.device.identity(), apart, keys, self.limits.full.rows);
        let id = self.new_id();
        self.waiting.push_back((id, request, chain));
        Ok(id)
    }

    /// Ends a sequence wherever it stands; its memory is free for the next step. `false` where it has ended already.
    pub fn cancel(&mut self, id: Id) -> bool {
        let waiting = self.waiting.iter().position(|(other, ..)| *other == id);
        let was_there = match waiting {
            Some(index) => self.waiting.remove(index).is_some(),
            None => self.remove(id),
        };
        if was_there {
            self.events.push(Event::Finished { id, reason: Finish::Cancelled });
        }
        was_there
    }

    /// A second sequence that begins with everything the first has generated so far, its latest token included. It
    /// shares whole pages of full layers and has its own copies of the rest. Among the events of the next step, the
    /// parent's tokens before the fork's admission are those that the two have in common.
    pub fn fork(&mut self, parent: Id, fork: &Fork) -> Result<Id, RequestError> {
        sequence::check_sampling(&fork.sampling)?;
        self.drain()?;
        let generates = |sequence: &&Sequence| matches!(sequence.stage, Stage::Generating { .. });
        let Some(parent) = self.sequences.get(&parent).filter(generates) else {
            return Err(RequestError::NotRunning(parent.0));
        };
        let child = parent.forked(fork, &self.limits);
        if child.left == 0 {
            return Err(RequestError::NothingAsked);
        }
        let written = self.limits.pages_for(child.position()).map(|pages| pages as usize);
        let [sliding, full] = self.limits.pages_for(child.positions).map(|pages| pages as usize);
        let shared = ((child.position() / self.limits.full.rows) as usize).min(full);
        let of_parent = parent.pages.clone();
        let fresh = sliding + full - shared;
        if self.pool.free_slots() == 0 || self.sequences.len() as u32 >= self.limits.rows {
            return Err(RequestError::NoRoom("all slots are taken"));
        }
        if !self.prefixes.make_room(fresh, None, &mut self.pool, &mut self.device)? {
            return Err(RequestError::NoRoom("too few pages are free"));
        }
        let slot = self.pool.take_slot().expect("one is free");
        let mut pages = Pages { full: of_parent.full[..shared].to_vec(), ..Pages::default() };
        pages.full.iter().for_each(|page| self.pool.share(*page));
        pages.full.extend(self.pool.take_pages(full - shared));
        pages.sliding.extend(self.pool.take_pages(sliding));
        let window = of_parent.sliding[..written[0]].iter().zip(&pages.sliding);
        let rest = of_parent.full[..written[1]].iter().zip(&pages.full).skip(shared);
        for (from, to) in window.chain(rest) {
            self.device.copy(*from, *to)?;
        }
        self.device.set_pages(slot, &pages.sliding, &pages.full)?;
        self.take_seat(slot, child.request.adapter)?;
        let id = self.new_id();
        self.steady = false;
        self.events.push(Event::Admitted { id, cached: child.position() });
        self.sequences.insert(id, Sequence { slot, pages, ..child });
        Ok(id)
    }

    /// Admits whom there is room for. Whoever is next and has no room yet keeps the others behind.
    pub(super) fn admit(&mut self) -> Result<(), RuntimeError> {
        while !self.waiting.is_empty() && self.pool.free_slots() > 0 && (self.sequences.len() as u32) < self.limits.rows
        {
            let Some(next) = self.next_waiting() else { break };
            let (id, request, chain) = &self.waiting[next];
            let id = *id;
            let positions = sequence::positions(request, &self.limits);
            let counts = self.limits.pages_for(positions).map(|pages| pages as usize);
            let slot = self.pool.take_slot().expect("one is free");
            let hit = self.prefixes.find(chain).filter(|_| !request.prompt_logits);
            let (pool, device) = (&mut self.pool, &mut self.device);
            let mut admitted = None;
            if let Some(hit) = hit
                && let Some(pages) = self.prefixes.start_from(hit, counts, pool, device)?
            {
                admitted = Some((pages, hit.position));
            }
            // A prefix takes pages besides its sequence's while it is copied. Where these are too many and nobody will
            // ever leave, the prompt is computed as a whole.
            let may_be_alone = hit.is_none() || self.sequences.is_empty();
            if admitted.is_none() && may_be_alone && self.prefixes.make_room(counts.iter().sum(), None, pool, device)? {
                let [sliding, full] = counts.map(|count| pool.take_pages(count).collect());
                admitted = Some((Pages { sliding, full }, 0));
            }
            let Some((pages, cached)) = admitted else {
                pool.release_slot(slot);
                break;
            };
            device.set_pages(slot, &pages.sliding, &pages.full)?;
            let (_, request, chain) = self.waiting.remove(next).expect("it waits");
            self.take_seat(slot, request.adapter)?;
            self.take_turn(request.client);
            self.prefixes.use_named(&request.snapshot_at, &chain);
            let mut sequence = Sequence::new(request, chain, slot, pages, cached, &self.limits);
            if self.speculation.reads_text() {
                sequence.keep_text();
            }
            self.sequences.insert(id, sequence);
            self.events.push(Event::Admitted { id, cached });
        }
        Ok(())
    }

    /// The place of the request that is next: of the client with the fewest sequences, then of the one whose turn was
    /// longest ago, then the first that came. One client's many requests do not keep another's from beginning.
    fn next_waiting(&self) -> Option<usize> {
        let mut running: HashMap<u64, usize> = HashMap::new();
        for sequence in self.sequences.values() {
            *running.entry(sequence.request.client).or_default() += 1;
        }
        let of = |map: &HashMap<u64, usize>, client: u64| map.get(&client).copied().unwrap_or(0);
        let turn = |client: u64| (of(&running, client), of(&self.turns, client));
        let waiting = self.waiting.iter().enumerate();
        waiting.min_by_key(|(_, (_, request, _))| turn(request.client)).map(|(place, _)| place)
    }

    /// Notes that a client had its turn. Those who wait for nothing are forgotten.
    fn take_turn(&mut self, client: u64) {
        let latest = self.turns.values().max().copied().unwrap_or(0);
        self.turns.insert(client, latest + 1);
        let waits = |client: &u64| self.waiting.iter().any(|(_, request, _)| request.client == *client);
        self.turns.retain(|client, _| waits(client));
    }
}
