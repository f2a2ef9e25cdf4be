//! One admitted sequence: how far its prompt is read, and what comes next.

use gemma4c_plan::Sampling;

use super::device::{Device, Limits, Mask, Picking};
use super::pool::Pages;
use super::prefix::Chain;
use super::request::{Demand, Finish, Fork, LONGEST_SALT, Request, RequestError};
use crate::Sampler;
use crate::acceptance::Acceptance;
use crate::lookup::Lookup;
use crate::sampler::effective;
use crate::soft::{Placed, TowerLimits};

/// What a sequence is about to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// So many tokens of its prompt are read, or queued; its first own token may be in flight.
    Reading { read: u32 },
    /// `pending` is its latest token, which belongs at `position` and has not been fed.
    Generating { pending: u32, position: u32 },
}

/// A sequence with its memory.
#[derive(Debug)]
pub(super) struct Sequence {
    pub request: Request,
    pub chain: Chain,
    pub slot: u32,
    pub pages: Pages,
    pub stage: Stage,
    /// Positions it may write, at most.
    pub positions: u32,
    /// Tokens it may still generate.
    pub left: u32,
    /// Why it ends when it has generated all of them.
    pub end: Finish,
    /// Results in flight that were queued before its rule became active: their tokens are dropped, and computed again.
    pub stale: u32,
    /// Soft tokens that were made and not read yet.
    pub soft: Vec<Placed>,
    pub drafting: Drafting,
    /// Positions that passes whose results are here have written: beyond its own where drafts were rejected.
    pub written: u32,
    /// Picks its tokens, where the host does.
    pub sampler: Option<Sampler>,
}

/// What is known of a sequence's drafts.
#[derive(Clone, Debug, Default)]
pub(super) struct Drafting {
    /// How often they were right; none were made yet.
    pub acceptance: Option<Acceptance>,
    /// Prompt and tokens so far, where drafts are looked up in them.
    pub text: Option<Lookup>,
}

impl Drafting {
    /// Tokens that its next drafts are looked up by; 0 where there is nothing to look up.
    pub fn matched(&self) -> u32 {
        self.text.as_ref().map_or(0, Lookup::matched)
    }
}

/// Whether a request could be served if it were alone.
pub(super) fn check(request: &Request, limits: &Limits) -> Result<(), RequestError> {
    let tokens = request.prompt.len();
    if tokens == 0 {
        return Err(RequestError::NoTokens);
    }
    if tokens > limits.context as usize {
        return Err(RequestError::PromptTooLong { tokens, context: limits.context });
    }
    if let Some(&token) = request.prompt.iter().find(|token| **token >= limits.vocab) {
        return Err(RequestError::TokenOutOfRange { token, vocab: limits.vocab });
    }
    if request.salt.len() > LONGEST_SALT {
        return Err(RequestError::SaltTooLong { bytes: request.salt.len() });
    }
    if let Some(&position) = request.snapshot_at.iter().find(|at| **at == 0 || **at as usize > tokens) {
        return Err(RequestError::SnapshotOutOfRange { position, tokens });
    }
    check_sampling(&request.sampling)?;
    let positions = positions(request, limits);
    let (needed, pages) = (limits.pages_for(positions).iter().sum(), limits.pages);
    match needed > pages {
        true => Err(RequestError::NeverFits { positions, needed, pages }),
        false => Ok(()),
    }
}

pub(super) fn check_sampling(sampling: &Sampling) -> Result<(), RequestError> {
    Sampler::new(*sampling, 0, Vec::new())?;
    Ok(())
}

/// Positions that a request may write. The last token is given out and not fed.
pub(super) fn positions(request: &Request, limits: &Limits) -> u32 {
    let prompt = request.prompt.len() as u32;
    prompt.saturating_add(request.most.saturating_sub(1)).min(limits.context)
}

impl Sequence {
    pub fn new(request: Request, chain: Chain, slot: u32, pages: Pages, cached: u32, limits: &Limits) -> Sequence {
        let request = Request { sampling: effective(request.sampling), ..request };
        let prompt = request.prompt.len() as u32;
        let (left, end) = room(request.most, limits.context - prompt + 1);
        let positions = positions(&request, limits);
        Sequence {
            request,
            chain,
            slot,
            pages,
            stage: Stage::Reading { read: cached },
            positions,
            left,
            end,
            stale: 0,
            soft: Vec::new(),
            drafting: Drafting::default(),
            written: cached,
            sampler: None,
        }
    }

    /// The same sequence going on by other rules; slot and pages are still its parent's.
    pub fn forked(&self, fork: &Fork, limits: &Limits) -> Sequence {
        let position = self.position();
        let (left, end) = room(fork.most, limits.context - position);
        let request = Request {
            most: fork.most,
            sampling: effective(fork.sampling),
            seed: fork.seed,
            snapshot_at: Vec::new(),
            ..self.request.clone()
        };
        let positions = position.saturating_add(fork.most).min(limits.context);
        let (chain, stage) = (self.chain.clone(), self.stage);
        let (slot, pages, soft, drafting) = (self.slot, Pages::default(), Vec::new(), self.drafting.clone());
        let written = position;
        let (stale, sampler) = (0, None);
        Sequence { request, chain, slot, pages, stage, positions, left, end, stale, soft, drafting, written, sampler }
    }

    /// The position that is fed next.
    pub fn position(&self) -> u32 {
        match self.stage {
            Stage::Reading { read } => read,
            Stage::Generating { position, .. } => position,
        }
    }

    /// Where the token that is picked next belongs.
    pub fn position_of_next_token(&self) -> u32 {
        match self.stage {
            Stage::Reading { .. } => self.request.prompt.len() as u32,
            Stage::Generating { position, .. } => position + 1,
        }
    }

    /// Begins to keep the text, where drafts are looked up in it.
    pub fn keep_text(&mut self) {
        let mut text = Lookup::default();
        text.read(&self.request.prompt);
        self.drafting.text = Some(text);
    }

    pub fn has_read_all(&self) -> bool {
        match self.stage {
            Stage::Reading { read } => read as usize == self.request.prompt.len(),
            Stage::Generating { .. } => true,
        }
    }

    /// Where the next tokens of the prompt end: `most` at most, but for a picture that must not be cut, and not beyond
    /// a place where a snapshot is wanted.
    pub fn next_end(&self, most: u32, towers: &[TowerLimits]) -> u32 {
        let from = self.position();
        let end = (from + most).min(self.request.prompt.len() as u32);
        let stops = self.request.snapshot_at.iter().copied().filter(|at| *at > from);
        self.end_by_media(from, stops.fold(end, u32::min), towers)
    }

    pub fn advance(&mut self, read: u32) {
        self.stage = Stage::Reading { read };
        self.written = self.written.max(read);
        self.soft.retain(|placed| placed.positions.end > read as usize);
    }

    /// How a device picks its next token, if the host does not.
    pub fn picking(&self, device: &impl Device) -> Picking {
        let Request { sampling, seed, logits, .. } = self.request;
        let on_host = self.is_picked_on_host(device);
        let masked = !on_host && self.request.demand() == Demand::Mask;
        Picking { sampling, seed, token: !on_host, logits: logits || on_host, masked }
    }

    pub fn is_picked_on_host(&self, device: &impl Device) -> bool {
        self.request.demand() == Demand::Logits || !device.can_pick(&self.request.sampling)
    }

    /// What its next token may be, where the device picks it by a mask.
    pub fn mask(&mut self, vocab: u32) -> Option<Mask> {
        let rule = self.request.rule.as_mut().filter(|rule| rule.0.demand() == Demand::Mask)?;
        let mut mask = Mask::all(vocab);
        rule.0.restrict(&mut mask);
        Some(mask)
    }

    /// Its next token, to be fed in the next decode.
    pub fn push(&mut self, token: u32) {
        self.stage = Stage::Generating { pending: token, position: self.position_of_next_token() };
        self.left -= 1;
        if let Some(text) = &mut self.drafting.text {
            text.push(token);
        }
    }
}

/// Tokens that may be generated, and why that is the end.
fn room(wanted: u32, context_allows: u32) -> (u32, Finish) {
    match wanted > context_allows {
        true => (context_allows, Finish::Context),
        false => (wanted, Finish::Length),
    }
}
