//! Tokens that follow a prompt, by the engine: a request goes on from what the session has seen, and each of its tokens
//! is told.

use gemma4c_plan::cuda::{Launch, Phase};

use super::Session;
use crate::acceptance::MOST_LOOKED_UP;
use crate::engine::{self, BoxedRule, Demand, DraftSource, Drafts, Event, Finish, Mask, Rule};
use crate::penalties::Penalised;
use crate::{RuntimeError, Sampler};

/// What is to be generated.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// What is fed first; at least one token.
    pub prompt: &'a [u32],
    /// Tokens to generate, at most.
    pub most: u32,
    /// Tokens that end it; they are not given out.
    pub stop: &'a [u32],
}

/// How a sequence is speculated on, and how that went. What was learned is kept from one text to the next.
pub struct Speculation {
    of: engine::Speculation,
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
    pub fn new(source: DraftSource, steps: Option<u32>) -> Speculation {
        Speculation { of: engine::Speculation::new(Drafts { source, steps }), counts: Counts::default() }
    }
}

/// Counts the passes of a text by its events.
#[derive(Default)]
struct Passes {
    counts: Counts,
    /// Tokens of the latest pass that are still to come; the first token is the prompt's.
    coming: u32,
    has_first: bool,
}

impl Passes {
    fn drafted(&mut self, drafted: u32, accepted: u32) {
        self.coming = accepted + 1;
        self.counts.rounds += 1;
        self.counts.rounds_of[drafted as usize] += 1;
        self.counts.drafted += u64::from(drafted);
        self.counts.accepted += u64::from(accepted);
    }

    /// A token came, or one that ends the text.
    fn token(&mut self) {
        if self.coming == 0 && self.has_first {
            self.drafted(0, 0);
        }
        self.has_first = true;
        self.coming = self.coming.saturating_sub(1);
    }
}

/// A sampler's penalties.
#[derive(Clone)]
struct Penalty(Penalised);

impl Rule for Penalty {
    fn demand(&self) -> Demand {
        Demand::Logits
    }

    fn restrict(&mut self, _: &mut Mask) {}

    fn apply(&mut self, logits: &mut [f32]) {
        self.0.penalise(logits);
        self.0.leave_out_unlikely(logits);
    }

    fn picked(&mut self, token: u32) {
        self.0.picked(token);
    }

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}

impl Session {
    /// Feeds a prompt and calls `each` with every token generated after it. Of those the session has then seen all but
    /// the last, or all if a stop token came after them: as many as the next pass would need.
    pub fn generate<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<Finish, E> {
        self.generate_speculating(request, sampler, &mut Speculation::new(DraftSource::Nowhere, None), each)
    }

    /// [`Session::generate`] with drafts: the same tokens, in fewer passes where drafts are right.
    pub fn generate_speculating<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        speculation: &mut Speculation,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<Finish, E> {
        speculation.of.check(self.engine.limits())?;
        if request.most == 0 {
            self.feed(request.prompt, super::Asked::None, None, |_, _| {})?;
            return Ok(Finish::Length);
        }
        self.check(request.prompt)?;
        self.engine.exchange(&mut speculation.of, sampler.recited());
        let mut passes = Passes::default();
        let outcome = self.answer(request, sampler, &mut passes, each);
        self.engine.exchange(&mut speculation.of, sampler.recited());
        speculation.counts.add(&passes.counts);
        outcome
    }

    fn answer<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &Sampler,
        passes: &mut Passes,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<Finish, E> {
        let id = self.begin(request, sampler)?;
        // The latest token, which was not fed.
        let mut pending = None;
        let outcome = 'text: loop {
            let events = match self.engine.go_on() {
                Ok(events) => events,
                Err(error) => break Err(error.into()),
            };
            for event in events {
                match event {
                    Event::Drafted { drafted, accepted, .. } => passes.drafted(drafted, accepted),
                    Event::Token { token, .. } => {
                        passes.token();
                        self.seen.extend(pending.take());
                        if let Err(error) = each(token) {
                            break 'text Err(error);
                        }
                        pending = Some(token);
                    }
                    Event::Finished { reason, .. } => {
                        if reason == Finish::Stop {
                            passes.token();
                            self.seen.extend(pending.take());
                        }
                        break 'text Ok(reason);
                    }
                    Event::Failed { error, .. } => break 'text Err(error.into()),
                    Event::Admitted { .. } | Event::Prompt { .. } => {}
                }
            }
        };
        let left = self.engine.leave(id);
        self.written = self.written.max(left.as_ref().copied().unwrap_or(self.written));
        if outcome.is_ok() {
            left?;
        }
        outcome
    }

    /// Hands a request to the engine.
    fn begin(&mut self, request: Request<'_>, sampler: &Sampler) -> Result<engine::Id, RuntimeError> {
        let Request { mut prompt, most, stop } = request;
        if self.engine.limits().chunks.is_empty()
            && let Some((_, before)) = prompt.split_last().filter(|(_, before)| !before.is_empty())
        {
            self.feed(before, super::Asked::None, None, |_, _| {})?;
            prompt = &prompt[before.len()..];
        }
        self.engine.suppress(sampler.suppress())?;
        self.device().suppress(sampler.suppress())?;
        let read = self.position();
        self.seen.extend_from_slice(prompt);
        let unread = self.placed.iter().filter(|placed| placed.positions.end > read as usize);
        let (soft, owed) = (unread.cloned().collect(), self.device().uncollected());
        let request = engine::Request {
            sampling: sampler.sampling(),
            seed: sampler.seed(),
            stop: stop.into(),
            adapter: self.adapter,
            rule: sampler.penalised().map(|penalised| BoxedRule(Box::new(Penalty(penalised.clone())))),
            ..engine::Request::greedy(&self.seen[..], most)
        };
        self.engine.resume(request, read, soft, owed)
    }

    /// Why tokens would be picked on the host although there is a device; that costs a copy of the logits and a wait
    /// for each.
    pub fn picks_on_host(&self, sampler: &Sampler) -> Option<&'static str> {
        let program = &self.plan.cuda.as_ref().filter(|_| self.has_backend)?.program;
        let can = |pick: fn(&Phase) -> &Vec<Launch>| program.phases.iter().all(|phase| !pick(phase).is_empty());
        let sampling = sampler.sampling();
        if sampler.penalised().is_some() {
            return Some("penalties and min-p change the logits");
        }
        if sampler.suppress().len() > program.places.suppress_len as usize {
            return Some("the plan takes a shorter list of tokens that are never picked");
        }
        match sampling.temperature == 0.0 {
            true if !can(|phase| &phase.pick_largest) => Some("the plan cannot pick the largest logit"),
            true => None,
            false if !can(|phase| &phase.pick_sampled) => Some("the plan cannot sample"),
            false if sampling.top_k == 0 || sampling.top_k > program.most_candidates => {
                Some("the plan considers fewer candidates than this top-k asks for")
            }
            false => None,
        }
    }
}

impl Counts {
    fn add(&mut self, more: &Counts) {
        self.rounds += more.rounds;
        self.drafted += more.drafted;
        self.accepted += more.accepted;
        self.rounds_of.iter_mut().zip(more.rounds_of).for_each(|(count, more)| *count += more);
    }
}
