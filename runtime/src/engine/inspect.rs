//! What a device shows besides picked tokens: the logits of any row, values on the way, the steps of a drafter and of a
//! tower.
//!
//! A [`Session`](crate::Session) is asked for these by whoever compares numbers. Scheduling needs none of them, so they
//! are apart from [`Device`].

use std::ops::Range;

use super::device::{Chunk, Device};
use crate::RuntimeError;
use crate::backend::Backend;
use crate::cpu::Tap;
use crate::cpu::drafting::Draft;
use crate::soft::Patches;

/// Is shown the asked rows of a chunk in order: the row, and its logits.
pub(crate) type Logits<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// From where a drafter guesses: the token that is to be followed, which was not decoded yet, and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DraftFrom {
    pub slot: u32,
    pub token: u32,
    pub position: u32,
}

/// A device whose numbers can be looked at.
pub(crate) trait Inspect: Device {
    /// Sets the tokens that are never picked. Where the device has no room for all of them it [cannot
    /// pick](Device::can_pick).
    fn suppress(&mut self, tokens: &[u32]) -> Result<(), RuntimeError>;

    /// Rows that may be asked for in one chunk.
    fn asked_rows(&self) -> u32;

    /// Computes a chunk and shows the logits of consecutive rows of it, each before the next is computed where a device
    /// has room for one: a row may be a megabyte. Without any the chunk may still be in flight afterwards. A tap is
    /// shown every value, where the device can show them.
    fn read(
        &mut self,
        chunk: &Chunk<'_>,
        asked: Range<usize>,
        tap: Option<&mut Tap<'_>>,
        logits: &mut Logits<'_>,
    ) -> Result<(), RuntimeError>;

    /// The soft tokens that a tower makes of a medium within its limits, as [`Device::soft_tokens`] has them. A tap is
    /// shown those values that are in memory.
    fn look(&mut self, tower: usize, patches: Patches<'_>, tap: Option<&mut Tap<'_>>)
    -> Result<Vec<f32>, RuntimeError>;

    /// Runs the drafter step by step, so that everything can be read. The latest passes must have left the hidden state
    /// of the position before.
    fn draft(
        &mut self,
        from: DraftFrom,
        steps: u32,
        tap: &mut Tap<'_>,
        each: &mut dyn FnMut(Draft<'_>),
    ) -> Result<(), RuntimeError>;

    /// Results that were not collected.
    fn uncollected(&self) -> usize;

    /// Waits until everything queued is done. Results that were not collected are dropped.
    fn wait(&mut self) -> Result<(), RuntimeError>;

    /// The launches under it, where it has any.
    fn backend(&mut self) -> Option<&mut dyn Backend>;
}
