//! Speculation: tokens are guessed for several sequences, one decode computes the rows of all of them, and those are kept that are picked.
//!
//! A row of a decode has the bits that it has alone, and its pick depends on the row, its position and what the request's rule says there. So the text
//! is that of decoding one by one, whatever was guessed. Rejected rows stay in the caches until they are written over: rings have room for them.
//!
//! A round is not queued ahead: which rows the next one has depends on what is accepted. That is a part of what it costs.

use rayon::prelude::*;

use super::depths::{self, Candidate, Costs};
use super::device::{Device, Mask, Picked, Row};
use super::pace::Work;
use super::sequence::{Sequence, Stage};
use super::{BoxedRule, Demand, Engine, Event, Id};
use crate::RuntimeError;
use crate::acceptance::{Acceptance, MOST_LOOKED_UP};

/// Decodes without drafts after which some are tried again: at first, and at most.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 256;

/// Guesses what follows: of the sequence so far, so many tokens at most.
pub type Guess = dyn FnMut(&[u32], usize) -> Vec<u32> + Send;

/// Where an engine's drafts come from.
#[derive(Default)]
pub enum DraftSource {
    /// Tokens are decoded one by one.
    #[default]
    Nowhere,
    /// The device's drafter.
    Drafter,
    /// The text so far: what followed its last tokens where they stood before.
    Lookup,
    /// Somebody else.
    Given(Box<Guess>),
}

/// How an engine speculates.
#[derive(Default)]
pub struct Drafts {
    pub source: DraftSource,
    /// Tokens to guess in a round; `None` for as many as pay.
    pub steps: Option<u32>,
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// How often tokens were guessed for a sequence.
    pub rounds: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Of the first draft of a round, of the second, and so on.
    pub accepted_at: [u64; MOST_LOOKED_UP as usize],
}

/// How an engine's speculation goes.
pub(super) struct Speculation {
    drafts: Drafts,
    /// Of all sequences: what is expected of the next one.
    usual: Acceptance,
    /// Decodes without drafts since the last with some, and how many there are to be before some are tried.
    idle: u32,
    pause: u32,
    pub counts: DraftCounts,
}

impl Speculation {
    pub fn new(drafts: Drafts, device: &impl Device) -> Result<Speculation, RuntimeError> {
        let limits = device.limits();
        match drafts.source {
            DraftSource::Nowhere => {}
            DraftSource::Drafter if limits.drafts == 0 => return Err(RuntimeError::NoDrafter),
            _ if limits.verified_rows < 2 => return Err(RuntimeError::NoRoomToVerify),
            _ => {}
        }
        let usual = match drafts.source {
            DraftSource::Lookup => Acceptance::LOOKED_UP,
            _ => Acceptance::DRAFTED,
        };
        Ok(Speculation { drafts, usual, idle: 0, pause: FIRST_PAUSE, counts: DraftCounts::default() })
    }

    /// A decode without drafts is queued.
    pub fn pass_by(&mut self) {
        self.idle = self.idle.saturating_add(1);
    }

    /// Whether drafts are looked up in the text so far.
    pub fn reads_text(&self) -> bool {
        matches!(self.drafts.source, DraftSource::Lookup | DraftSource::Given(_))
    }

    fn has_drafter(&self) -> bool {
        matches!(self.drafts.source, DraftSource::Drafter)
    }
}

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

    /// Whether drafts may pay, by what is known while tokens are on their way.
    pub(super) fn wants_round(&self) -> bool {
        self.depths(false).1.iter().any(|depth| *depth > 0)
    }

    /// Sequences that generate, and how many tokens to guess for each. With tokens on their way the states that a drafter needs are not there yet, but will be.
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
                DraftSource::Drafter if all_known && !self.device.can_draft(sequence.slot, position) => 0,
                DraftSource::Drafter => self.limits.drafts,
                DraftSource::Lookup if matched == 0 => 0,
                DraftSource::Lookup | DraftSource::Given(_) => MOST_LOOKED_UP,
            };
            // No row that nobody wants, and none that a ring has no room for.
            let most = can.min(sequence.left - 1).min(self.limits.verified_rows - 1);
            let odds = sequence.drafting.acceptance.as_ref().unwrap_or(usual).odds(matched);
            ids.push(*id);
            candidates.push(Candidate { odds, most });
        }
        let depths = self.depths_of(&candidates);
        (ids, depths)
    }

    fn depths_of(&self, candidates: &[Candidate]) -> Vec<u32> {
        let Speculation { drafts, idle, pause, .. } = &self.speculation;
        let (rows, count) = (self.limits.decode_rows, candidates.len() as u32);
        if let Some(steps) = drafts.steps {
            return depths::even(candidates, steps, rows);
        }
        // What a batch of this size takes without drafts comes first.
        let Some(plain) = self.pace.plain_seconds(count) else { return vec![0; candidates.len()] };
        let round = |rows: u32| self.pace.round_seconds(rows);
        let draft = if self.speculation.has_drafter() { self.pace.draft_seconds() } else { 0.0 };
        let depths = depths::best(candidates, rows, &Costs { plain, round: &round, draft });
        let is_trial = idle >= pause && depths.iter().all(|depth| *depth == 0);
        if is_trial { depths::even(candidates, 1, rows) } else { depths }
    }

    /// One decode with drafts, if they pay. All tokens are known before, and after.
    pub(super) fn round(&mut self) -> Result<bool, RuntimeError> {
        let (ids, depths) = self.depths(true);
        if depths.iter().all(|depth| *depth == 0) {
            return Ok(false);
        }
        let is_trial = self.speculation.idle >= self.speculation.pause;
        let (mut members, rows) = self.members(&ids, &depths);
        if members.iter().all(|member| member.drafts.is_empty()) {
            return Ok(false);
        }
        self.began = (self.clock)();
        if self.speculation.has_drafter() {
            self.device.decode_drafting(&rows)?;
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
        (self.steady, self.guided) = (false, false);
        self.batch.clear();
        self.judge(&mut members, picked, is_guided);
        self.learn(&members, is_trial);
        Ok(true)
    }

    /// The sequences of a round with their drafts, and the rows of all. A drafter's tokens are not known yet.
    fn members(&mut self, ids: &[Id], depths: &[u32]) -> (Vec<Member>, Vec<Row>) {
        let (mut members, mut rows) = (Vec::new(), Vec::new());
        for (id, depth) in ids.iter().zip(depths) {
            let sequence = &self.sequences[id];
            let Stage::Generating { pending, position } = sequence.stage else { continue };
            let (text, most) = (&sequence.drafting.text, *depth as usize);
            let mut drafts = match (&mut self.speculation.drafts.source, text) {
                _ if most == 0 => Vec::new(),
                (DraftSource::Drafter, _) => vec![0; most],
                (DraftSource::Lookup, Some(text)) => text.guess(most),
                (DraftSource::Given(guess), Some(text)) => guess(text.text(), most),
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
        let Speculation { usual, idle, pause, counts, .. } = &mut self.speculation;
        let before = *usual;
        for Member { id, drafts, matched, accepted, .. } in members {
            let drafted = drafts.len() as u32;
            usual.learn(*matched, drafted, *accepted);
            if let Some(sequence) = self.sequences.get_mut(id).filter(|_| drafted > 0) {
                let acceptance = sequence.drafting.acceptance.get_or_insert(before.of_another());
                acceptance.learn(*matched, drafted, *accepted);
            }
            counts.rounds += u64::from(drafted > 0);
            counts.drafted += u64::from(drafted);
            counts.accepted += u64::from(*accepted);
            counts.accepted_at.iter_mut().take(*accepted as usize).for_each(|count| *count += 1);
        }
        let is_vain = members.iter().all(|member| member.accepted == 0);
        // A trial that was in vain makes the next one later.
        *pause = match is_trial {
            true if is_vain => (2 * *pause).min(LONGEST_PAUSE),
            true => (*pause / 2).max(FIRST_PAUSE),
            false => FIRST_PAUSE,
        };
        *idle = 0;
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

/// What a rule lets come before each draft, and after the last. Rows behind a draft that it forbids are nobody's, as are those that it wants picked from other logits.
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
