//! Tokens that follow a prompt: picked on the device where that can be done, so that it never waits for the host.

use gemma4c_plan::cuda::{Launch, Phase, PhaseKind};

use super::{Asked, On, SLOT, Session, collect_beyond, oldest_of};
use crate::engine::{AskedRow, BackendDevice, Chunk, Device, Picking, Row};
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

/// A sampler's rule, for a device.
pub(super) fn picking_of(sampler: &Sampler) -> Picking {
    let (sampling, seed) = (sampler.sampling(), sampler.seed());
    Picking { sampling, seed, token: true, logits: false, masked: false }
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
        match self.device_picks(sampler) {
            Ok(()) => self.generate_on_device(request, sampler, each),
            Err(_) => self.generate_from_logits(request, sampler, each),
        }
    }

    /// Why tokens would be picked on the host although there is a device; that costs a copy of the logits and a wait for each.
    pub fn picks_on_host(&self, sampler: &Sampler) -> Option<&'static str> {
        self.device_picks(sampler).err().flatten()
    }

    pub(super) fn device_picks(&self, sampler: &Sampler) -> Result<(), Option<&'static str>> {
        let program = match (&self.plan.cuda, &self.on) {
            (None, _) | (_, On::Cpu(_)) => return Err(None),
            (Some(cuda), On::Device(_)) => &cuda.program,
        };
        if sampler.has_penalties() {
            return Err(Some("penalties and min-p change the logits"));
        }
        let can = |pick: fn(&Phase) -> &Vec<Launch>| program.phases.iter().all(|phase| !pick(phase).is_empty());
        if sampler.suppress().len() > program.places.suppress_len as usize {
            return Err(Some("the plan takes a shorter list of tokens that are never picked"));
        }
        if program.phases.iter().all(|phase| phase.kind == PhaseKind::Decode) {
            return Err(Some("the plan has no phase that reads prompts"));
        }
        let sampling = sampler.sampling();
        match sampling.temperature == 0.0 {
            true if !can(|phase| &phase.pick_largest) => Err(Some("the plan cannot pick the largest logit")),
            true => Ok(()),
            false if !can(|phase| &phase.pick_sampled) => Err(Some("the plan cannot sample")),
            false if sampling.top_k == 0 || sampling.top_k > program.most_candidates => {
                Err(Some("the plan considers fewer candidates than this top-k asks for"))
            }
            false => Ok(()),
        }
    }

    /// Queues a prompt on a device, whose last result on its way is then the token after it.
    pub(super) fn queue_first(&mut self, prompt: &[u32], sampler: &Sampler) -> Result<(), RuntimeError> {
        self.check(prompt)?;
        let start = self.pieces(prompt.len()).last().map_or(0, |piece| piece.start);
        let (others, last) = prompt.split_at(start);
        self.queue_prompt(others, Asked::None, None, &mut |_, _| {})?;
        let position = self.position() + others.len() as u32;
        let positions = position as usize..position as usize + last.len();
        let soft = self.media.within(positions);
        let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoProgram) };
        device.suppress(sampler.suppress())?;
        let asked = AskedRow { chunk: 0, row: last.len() as u32 - 1, picking: picking_of(sampler) };
        device.prefill(&[Chunk { slot: SLOT, position, tokens: last, soft: &soft }], &[asked])?;
        self.drafting.keep_on_device(position + asked.row, 1);
        self.append(prompt);
        Ok(())
    }

    fn generate_on_device<E: From<RuntimeError>>(
        &mut self,
        request: Request<'_>,
        sampler: &Sampler,
        each: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<End, E> {
        let picking = picking_of(sampler);
        let (context, vocab_size) = (self.plan.program.context, self.plan.model.vocab_size);
        self.queue_first(request.prompt, sampler)?;
        self.drafting.forget();
        let first = self.position();
        let On::Device(device) = &mut self.on else { return Err(RuntimeError::NoProgram.into()) };

        // The last position's token is not fed, so it may be one beyond the context.
        let most = request.most.min(context - first + 1);
        // A token decoded in vain overwrites the oldest row of a ring.
        let ahead = device.limits().ahead.min(device.limits().spare_rows);
        let (mut queued, mut received, mut seen) = (1, 0, Vec::new());
        let mut go_on = |device: &mut BackendDevice| -> Result<Option<End>, E> {
            let token = oldest_of(queued - received, device)?.token;
            received += 1;
            if token >= vocab_size {
                return Err(RuntimeError::NoPick.into());
            }
            if request.stop.contains(&token) {
                return Ok(Some(End::Stop));
            }
            each(token)?;
            if received == most {
                return Ok(Some(if most == request.most { End::Most } else { End::Context }));
            }
            seen.push(token);
            while queued < most && queued - received < ahead {
                match queued {
                    1 => device.decode(&[Row { slot: SLOT, position: first, token, picking }])?,
                    _ => device.decode_again()?,
                }
                queued += 1;
            }
            Ok(None)
        };
        let outcome = loop {
            if let Some(outcome) = go_on(device).transpose() {
                break outcome;
            }
        };
        // Tokens past the end: their rows are written over by whatever is fed next.
        let late = collect_beyond(device, 0);
        self.seen.extend(seen);
        self.written = self.written.max(first + queued - 1);
        if outcome.is_ok() {
            late?;
        }
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
