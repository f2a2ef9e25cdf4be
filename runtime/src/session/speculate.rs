//! Speculation: several tokens are guessed, one pass computes the rows of all of them, and those are kept that the sampler itself picks.
//!
//! A row of a pass has the bits that it has alone, and the sampler's choice depends on a row and its position. So the text is that of decoding
//! one by one, whatever was guessed. Rejected rows have been written to the caches; the sequence goes back over them, which rings allow as long
//! as a round is not longer than a chunk.
//!
//! Here the host decides what is kept, whatever runs the plan and wherever drafts come from. The plan's drafter on a device that picks needs no host for that:
//! it goes on in [rounds](super::rounds).

use std::time::Instant;

use super::depth::Depth;
use super::generate::picking_of;
use super::{Asked, End, On, Request, SLOT, Session, collect_beyond, oldest_of};
use crate::acceptance::{Acceptance, MOST_DRAFTS, MOST_LOOKED_UP};
use crate::engine::{Device, Guess, Picked, Picking, Row};
use crate::{RuntimeError, Sampler};

/// Where drafts come from.
pub enum Source {
    /// The plan's drafter.
    Drafter,
    /// The text so far: what followed its last tokens where they stood before.
    Lookup,
    /// Somebody else.
    Given(Box<Guess>),
    /// Somebody else, while the plan's drafter runs too: what a round takes, whatever its drafter is worth.
    Replaced(Box<Guess>),
}

/// How a sequence is speculated on, and how that went.
pub struct Speculation {
    pub(super) source: Source,
    pub(super) depth: Depth,
    pub counts: Counts,
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passes after the prompt's.
    pub rounds: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// The rounds by the number of their drafts.
    pub rounds_of: [u64; MOST_LOOKED_UP as usize + 1],
}

impl Speculation {
    /// Drafts a fixed number of tokens in each round, or with `None` as many as pay.
    pub fn new(source: Source, steps: Option<u32>) -> Speculation {
        let (most, acceptance) = match source {
            Source::Drafter | Source::Replaced(_) => (MOST_DRAFTS, Acceptance::DRAFTED),
            Source::Given(_) => (MOST_LOOKED_UP, Acceptance::DRAFTED),
            Source::Lookup => (MOST_LOOKED_UP, Acceptance::LOOKED_UP),
        };
        let depth = match steps {
            Some(steps) => Depth::fixed(steps.min(most)),
            None => Depth::learned(most, acceptance),
        };
        Speculation { source, depth, counts: Counts::default() }
    }

    /// Says how a round went, whose drafts were looked up by so many tokens.
    pub(super) fn learn(&mut self, matched: u32, drafted: u32, accepted: u32, seconds: f64) {
        self.depth.learn(matched, drafted, accepted, seconds);
        self.counts.rounds += 1;
        self.counts.rounds_of[drafted as usize] += 1;
        self.counts.drafted += u64::from(drafted);
        self.counts.accepted += u64::from(accepted);
    }
}

/// What a round brought: drafts that were right, and the token after them.
struct Round {
    accepted: Vec<u32>,
    next: u32,
}

impl Session {
    /// [`Session::generate`] with drafts: the same tokens, in fewer passes where drafts are right.
    pub fn generate_speculating<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        speculation: &mut Speculation,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        let (context, pass) = (self.plan.program.context, self.verified_rows());
        if pass < 2 {
            return Err(RuntimeError::NoRoomToVerify.into());
        }
        if request.most == 0 {
            return self.generate(request, sampler, each);
        }
        if self.goes_in_rounds(&speculation.source, sampler) {
            return self.generate_in_rounds(request, sampler, speculation, each);
        }
        let mut token = self.first_token(request.prompt, sampler)?;
        let mut given = 0;
        loop {
            if request.stop.contains(&token) {
                return Ok(End::Stop);
            }
            each(token)?;
            given += 1;
            if given == request.most {
                return Ok(End::Most);
            }
            let left = context - self.position();
            if left == 0 {
                return Ok(End::Context);
            }
            // No row beyond the context, none that nobody wants, and all of them in one pass.
            let room = (left - 1).min(request.most - given - 1).min(pass - 1);
            let started = Instant::now();
            let matched = self.look_up(token, &speculation.source);
            let most = room.min(speculation.depth.next(matched));
            let drafts = self.drafts(token, most, &mut speculation.source)?;
            speculation.depth.begin(drafts.len() as u32);
            let round = self.verify(token, &drafts, sampler)?;
            let (drafted, accepted) = (drafts.len() as u32, round.accepted.len() as u32);
            speculation.learn(matched, drafted, accepted, started.elapsed().as_secs_f64());
            let first = self.position() - accepted;
            for (at, draft) in (first..).zip(&round.accepted) {
                let is_stop = request.stop.contains(draft);
                let told = if is_stop { Ok(()) } else { each(*draft) };
                if is_stop || told.is_err() {
                    // What was accepted behind it is not part of the text.
                    self.truncate(at)?;
                    return told.map(|()| End::Stop);
                }
            }
            given += accepted;
            token = round.next;
        }
    }

    /// Rows of the sequence that a pass can verify.
    fn verified_rows(&self) -> u32 {
        match (&self.on, &self.plan.cuda) {
            (On::Device(_), Some(cuda)) => cuda.program.verified_rows,
            _ => self.plan.program.chunk.min(self.plan.program.asked),
        }
    }

    /// Feeds a prompt and picks the token after it.
    pub(super) fn first_token(&mut self, prompt: &[u32], sampler: &mut Sampler) -> Result<u32, RuntimeError> {
        if self.device_picks(sampler).is_ok() {
            self.queue_first(prompt, sampler)?;
            let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoProgram) };
            let picked = known(oldest_of(1, device)?.token, self.plan.model.vocab_size)?;
            return sampler.say(self.position().into(), Some(picked)).ok_or(RuntimeError::NoPick);
        }
        let mut picked = None;
        let position = self.position() as u64 + prompt.len() as u64;
        self.feed(prompt, Asked::Last, None, |_, row| picked = sampler.pick(row, position))?;
        picked.ok_or(RuntimeError::NoPick)
    }

    /// Looks the text up to `token` up in itself, if that is where drafts come from; returns how many tokens they go by.
    fn look_up(&mut self, token: u32, source: &Source) -> u32 {
        if !matches!(source, Source::Lookup) {
            return 0;
        }
        self.lookup.read(&[&self.seen[..], &[token]].concat());
        self.lookup.matched()
    }

    /// At most `most` tokens that may follow `token`, which has not been fed.
    fn drafts(&mut self, token: u32, most: u32, source: &mut Source) -> Result<Vec<u32>, RuntimeError> {
        let mut drafts = Vec::new();
        if most == 0 {
            return Ok(drafts);
        }
        match source {
            Source::Drafter => self.draft(token, most, &mut |_, _, _| {}, &mut |draft| drafts.push(draft.token))?,
            Source::Replaced(guess) => {
                self.draft(token, most, &mut |_, _, _| {}, &mut |_| {})?;
                drafts = guess(&[&self.seen[..], &[token]].concat(), most as usize);
            }
            Source::Lookup => drafts = self.lookup.guess(most as usize),
            Source::Given(guess) => drafts = guess(&[&self.seen[..], &[token]].concat(), most as usize),
        }
        // Whatever was guessed, a row is computed only for what can be a token.
        let vocab_size = self.plan.model.vocab_size;
        let known = drafts.iter().take_while(|draft| **draft < vocab_size).count();
        drafts.truncate(known.min(most as usize));
        Ok(drafts)
    }

    /// How a device picks, or that it does not.
    fn picking(&self, sampler: &Sampler) -> Picking {
        if self.device_picks(sampler).is_ok() { picking_of(sampler) } else { Picking::LOGITS }
    }

    /// The rows of tokens that come next.
    fn rows(&self, tokens: &[u32], picking: Picking) -> Vec<Row> {
        let rows = tokens.iter().zip(self.position()..);
        rows.map(|(token, position)| Row { slot: SLOT, position, token: *token, picking }).collect()
    }

    /// Decodes tokens of the sequence at once on a device, and waits for what is picked.
    fn decode_rows(&mut self, tokens: &[u32], picking: Picking) -> Result<Vec<Picked>, RuntimeError> {
        self.check(tokens)?;
        let rows = self.rows(tokens, picking);
        let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoProgram) };
        device.decode(&rows)?;
        collect_beyond(device, 1)?;
        let picked = device.collect()?;
        self.drafting.keep_on_device(rows[0].position, rows.len());
        self.append(tokens);
        Ok(picked)
    }

    /// Keeps the drafts that were picked from the rows before them, the first of which stands at `first`.
    fn judge(
        &mut self,
        first: u32,
        drafts: &[u32],
        picked: &[Picked],
        sampler: &mut Sampler,
    ) -> Result<Round, RuntimeError> {
        let (picks, vocab_size) = (self.device_picks(sampler).is_ok(), self.plan.model.vocab_size);
        let mut verdict = Verdict::default();
        for (row, Picked { token, logits }) in picked.iter().enumerate() {
            let at = u64::from(first) + row as u64 + 1;
            let token = match picks {
                true => sampler.say(at, known(*token, vocab_size).ok()),
                false => sampler.pick(logits, at),
            };
            if !verdict.hear(drafts, row, token) {
                break;
            }
        }
        self.close(first, drafts, verdict)
    }

    /// Goes back over what was rejected.
    fn close(&mut self, first: u32, drafts: &[u32], verdict: Verdict) -> Result<Round, RuntimeError> {
        self.truncate(first + 1 + verdict.accepted as u32)?;
        let next = verdict.next.ok_or(RuntimeError::NoPick)?;
        Ok(Round { accepted: drafts[..verdict.accepted].to_vec(), next })
    }

    /// Feeds a token and drafts of what follows it, and keeps those that the sampler picks.
    fn verify(&mut self, token: u32, drafts: &[u32], sampler: &mut Sampler) -> Result<Round, RuntimeError> {
        let first = self.position();
        let rows = [&[token], drafts].concat();
        if matches!(self.on, On::Device(_)) {
            let picked = self.decode_rows(&rows, self.picking(sampler))?;
            return self.judge(first, drafts, &picked, sampler);
        }
        let (mut goes_on, mut verdict) = (true, Verdict::default());
        self.feed(&rows, Asked::All, None, |row, logits| {
            let at = u64::from(first) + row as u64 + 1;
            goes_on = goes_on && verdict.hear(drafts, row, sampler.pick(logits, at));
        })?;
        self.close(first, drafts, verdict)
    }
}

/// How many drafts were right so far, and the token after them once it is known.
#[derive(Default)]
struct Verdict {
    accepted: usize,
    next: Option<u32>,
}

impl Verdict {
    /// Row i picks the token after it; a row behind a wrong draft is of another text. Returns whether the next row is to be heard.
    fn hear(&mut self, drafts: &[u32], row: usize, picked: Option<u32>) -> bool {
        match picked {
            Some(picked) if drafts.get(row) == Some(&picked) => {
                self.accepted += 1;
                true
            }
            picked => {
                self.next = picked;
                false
            }
        }
    }
}

/// A token that a device picked, if it is one: from what are no numbers it picks none.
fn known(token: u32, vocab_size: u32) -> Result<u32, RuntimeError> {
    if token < vocab_size { Ok(token) } else { Err(RuntimeError::NoPick) }
}
