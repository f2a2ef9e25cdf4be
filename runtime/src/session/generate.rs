//! Tokens that follow a prompt: picked on the device where that can be done, so that it never waits for the host.

use gemma4c_plan::cuda::{Launch, Phase};

use super::{Asked, Engine, Session};
use crate::backend::Pick;
use crate::feed::Want;
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

/// Why it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// There are as many as were asked for.
    Most,
    /// A stop token came.
    Stop,
    /// The context is full.
    Context,
}

impl Session {
    /// Feeds a prompt and calls `each` with every token generated after it. Of those the session has then seen all but the
    /// last, or all if a stop token came after them: as many as the next pass would need.
    pub fn generate<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        if request.most == 0 {
            self.feed(request.prompt, Asked::None, None, |_, _| {})?;
            return Ok(End::Most);
        }
        match self.device_pick(sampler) {
            Ok(pick) => self.generate_on_device(request, sampler, pick, each),
            Err(_) => self.generate_from_logits(request, sampler, each),
        }
    }

    /// Why tokens would be picked on the host although there is a device; that costs a copy of the logits and a wait for each.
    pub fn picks_on_host(&self, sampler: &Sampler) -> Option<&'static str> {
        self.device_pick(sampler).err().flatten()
    }

    fn device_pick(&self, sampler: &Sampler) -> Result<Pick, Option<&'static str>> {
        let (program, feeder) = match (&self.plan.cuda, &self.engine) {
            (None, _) | (_, Engine::Cpu(_)) => return Err(None),
            (Some(cuda), Engine::Cuda(feeder, _) | Engine::Other(feeder, _)) => (&cuda.program, feeder),
        };
        let can = |pick: fn(&Phase) -> &Vec<Launch>| program.phases.iter().all(|phase| !pick(phase).is_empty());
        if sampler.suppress().len() > feeder.most_suppressed() {
            return Err(Some("the plan takes a shorter list of tokens that are never picked"));
        }
        let sampling = sampler.sampling();
        match sampling.temperature == 0.0 {
            true if !can(|phase| &phase.pick_largest) => Err(Some("the plan cannot pick the largest logit")),
            true => Ok(Pick::Largest),
            false if !can(|phase| &phase.pick_sampled) => Err(Some("the plan cannot sample")),
            false if sampling.top_k == 0 || sampling.top_k > program.most_candidates => {
                Err(Some("the plan considers fewer candidates than this top-k asks for"))
            }
            false => Ok(Pick::Sampled),
        }
    }

    fn generate_on_device<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &Sampler,
        pick: Pick,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        self.check(request.prompt)?;
        let position = self.position();
        let (feeder, backend) = self.engine.device().expect("asked for where there is one");
        feeder.set(backend, sampler)?;
        feeder.feed(backend, request.prompt, position, None, Want::Token(pick))?;
        self.seen.extend_from_slice(request.prompt);

        let (first, context, vocab_size) = (self.position(), self.plan.program.context, self.plan.model.vocab_size);
        // The last position's token is not fed, so it may be one beyond the context.
        let most = request.most.min(context - first + 1);
        let (feeder, backend) = self.engine.device().expect("asked for where there is one");
        let ahead = feeder.ahead();
        let (mut queued, mut received) = (1, 0);
        let mut go_on = || -> Result<Option<End>, E> {
            // The prompt's pick is the asked row's; the host makes it the decoded row.
            while received > 0 && queued < most && queued - received < ahead {
                feeder.decode_picked(backend, first + queued - 1, pick)?;
                queued += 1;
            }
            let token = backend.receive()?.first().copied().unwrap_or(u32::MAX);
            received += 1;
            if token >= vocab_size {
                return Err(RuntimeError::NoPick.into());
            }
            if received == 1 {
                feeder.place_row(backend, token, first)?;
            }
            if request.stop.contains(&token) {
                return Ok(Some(End::Stop));
            }
            each(token)?;
            if received == most {
                return Ok(Some(if most == request.most { End::Most } else { End::Context }));
            }
            self.seen.push(token);
            Ok(None)
        };
        let outcome = loop {
            if let Some(outcome) = go_on().transpose() {
                break outcome;
            }
        };
        // Tokens past the end: their rows are written over by whatever is fed next.
        for _ in received..queued {
            let late = backend.receive();
            if outcome.is_ok() {
                late?;
            }
        }
        self.written = self.written.max(first + queued - 1);
        outcome
    }

    fn generate_from_logits<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        let mut picked = None;
        let position = self.position() as u64 + request.prompt.len() as u64;
        self.feed(request.prompt, Asked::Last, None, |_, row| picked = sampler.pick(row, position))?;
        let mut given = 0;
        loop {
            let token = picked.ok_or(RuntimeError::NoPick)?;
            if request.stop.contains(&token) {
                return Ok(End::Stop);
            }
            each(token)?;
            given += 1;
            if given == request.most {
                return Ok(End::Most);
            }
            if self.position() == self.plan.program.context {
                return Ok(End::Context);
            }
            let position = self.position() as u64 + 1;
            self.decode(token, |row| picked = sampler.pick(row, position))?;
        }
    }
}
