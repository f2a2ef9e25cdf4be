//! Pictures and sounds of a prompt: what a request attaches, and when a device looks at it.
//!
//! A tower runs when the prompt has been read up to its medium, and not at all where a kept prefix has it. A chunk
//! brings one new medium at most, so that running sequences get their tokens between two towers. What stands for a
//! medium among the keys of a prefix is its hash: a picture has the same tokens as any other of its size.

use std::ops::Range;

use super::attachment::Attachment;
use super::device::Device;
use super::request::{Id, Request, RequestError};
use super::sequence::Sequence;
use super::state::Engine;
use crate::RuntimeError;
use crate::soft::{Placed, TowerLimits};

/// Sets the keys of soft tokens apart from those of tokens.
const SOFT: u64 = 1 << 63;

/// What tells the prompts of requests apart, a word for each position: its token, or part of the hash of the medium
/// that stands there.
pub(super) fn keys(request: &Request, towers: &[TowerLimits]) -> Vec<u64> {
    let mut keys: Vec<u64> = request.prompt.iter().map(|token| u64::from(*token)).collect();
    for attachment in &*request.media {
        for (index, key) in keys[attachment.positions(towers)].iter_mut().enumerate() {
            *key = SOFT | (attachment.hash[index % 4] ^ index as u64);
        }
    }
    keys
}

/// Whether a device can read what a request attaches.
pub(super) fn check(request: &Request, towers: &[TowerLimits], chunk: u32) -> Result<(), RequestError> {
    if request.media.is_empty() {
        return Ok(());
    }
    if request.prompt_logits {
        return Err(RequestError::LogitsOfMedia);
    }
    let mut read = 0;
    for (index, attachment) in request.media.iter().enumerate() {
        let tower = towers.get(attachment.tower).ok_or(RuntimeError::NoTower)?;
        let soft = tower.soft_tokens(attachment.patches())?;
        let positions = attachment.positions(towers);
        let places = request.prompt.get(positions.clone());
        let has_places = places.is_some_and(|tokens| tokens.iter().all(|token| *token == tower.placeholder));
        if positions.start < read || !has_places {
            let position = attachment.position;
            return Err(RequestError::NoPlace { index, soft, position, token: tower.placeholder });
        }
        if tower.is_whole && soft as u32 > chunk {
            return Err(RequestError::NeverWhole { soft, chunk });
        }
        let inside = |at: &&u32| positions.start < **at as usize && (**at as usize) < positions.end;
        if let Some(&position) = request.snapshot_at.iter().find(inside) {
            return Err(RequestError::SnapshotWithin { position });
        }
        read = positions.end;
    }
    Ok(())
}

impl Sequence {
    /// Where a chunk of its prompt ends that begins at `from` and is to end at `end`: with one medium at most whose
    /// soft tokens are still to be made, and with all rows of a picture whose rows see each other.
    pub(super) fn end_by_media(&self, from: u32, end: u32, towers: &[TowerLimits]) -> u32 {
        let media = || self.request.media.iter();
        let unseen =
            media().map(|attachment| attachment.positions(towers)).filter(|positions| self.is_unseen(positions));
        let second = unseen.filter(|positions| positions.end > from as usize).nth(1);
        let end = second.map_or(end as usize, |positions| positions.start.min(end as usize));
        let whole = media().filter(|attachment| towers[attachment.tower].is_whole);
        let made = self.soft.iter().filter(|placed| placed.is_whole).map(|placed| placed.positions.clone());
        let whole = whole.map(|attachment| attachment.positions(towers)).chain(made);
        crate::soft::uncut(whole, from as usize, end) as u32
    }

    fn is_unseen(&self, positions: &Range<usize>) -> bool {
        self.soft.iter().all(|placed| placed.positions != *positions)
    }

    /// Whether some of these positions are soft tokens'.
    pub(super) fn has_soft(&self, from: u32, end: u32, towers: &[TowerLimits]) -> bool {
        let within = |positions: Range<usize>| positions.start < end as usize && (from as usize) < positions.end;
        let mut media = self.request.media.iter().map(|attachment| attachment.positions(towers));
        media.any(within) || self.soft.iter().any(|placed| within(placed.positions.clone()))
    }
}

impl<D: Device> Engine<D> {
    /// Makes the soft tokens of a sequence that stand at these positions, as far as they are not there. All results in
    /// flight are collected first: the time that a tower takes is nobody's.
    pub(super) fn look(&mut self, id: Id, from: u32, end: u32) -> Result<(), RuntimeError> {
        let Some(sequence) = self.sequences.get(&id) else { return Ok(()) };
        let towers = self.device.towers();
        let is_next = |attachment: &&Attachment| {
            let positions = attachment.positions(towers);
            positions.start < end as usize && positions.end > from as usize && sequence.is_unseen(&positions)
        };
        let next: Vec<Attachment> = sequence.request.media.iter().filter(is_next).cloned().collect();
        for attachment in next {
            self.drain()?;
            let rows = self.device.soft_tokens(attachment.tower, attachment.patches())?;
            self.began = (self.clock)();
            let towers = self.device.towers();
            let (positions, is_whole) = (attachment.positions(towers), towers[attachment.tower].is_whole);
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.soft.push(Placed { positions, rows, is_whole });
            }
        }
        Ok(())
    }
}
