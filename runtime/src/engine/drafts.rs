//! Drafts: where they come from, how many are made, and what became of them. What is done with a round of them is
//! speculation's.

use super::depths::Trials;
use super::device::Limits;
use super::sequence::Sequence;
use crate::RuntimeError;
use crate::acceptance::{Acceptance, MOST_LOOKED_UP};

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
    /// Somebody else, while the device's drafter runs too: what a round takes, whatever its drafter is worth.
    Replaced(Box<Guess>),
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

/// How speculation goes: of an engine, or of one [`Session`](crate::Session) after another.
#[derive(Default)]
pub(crate) struct Speculation {
    pub(super) drafts: Drafts,
    /// Of all sequences: what is expected of the next one.
    pub(super) usual: Acceptance,
    pub(super) trials: Trials,
    pub(super) counts: DraftCounts,
}

impl Speculation {
    pub(crate) fn new(drafts: Drafts) -> Speculation {
        let usual = match drafts.source {
            DraftSource::Lookup => Acceptance::LOOKED_UP,
            _ => Acceptance::DRAFTED,
        };
        Speculation { drafts, usual, ..Speculation::default() }
    }

    /// Whether a device can do that.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), RuntimeError> {
        match self.drafts.source {
            DraftSource::Nowhere => Ok(()),
            _ if self.has_drafter() && limits.drafts == 0 => Err(RuntimeError::NoDrafter),
            _ if limits.verified_rows < 2 => Err(RuntimeError::NoRoomToVerify),
            _ => Ok(()),
        }
    }

    /// Whether drafts are made from the text so far.
    pub(super) fn reads_text(&self) -> bool {
        matches!(self.drafts.source, DraftSource::Lookup | DraftSource::Given(_) | DraftSource::Replaced(_))
    }

    pub(super) fn has_drafter(&self) -> bool {
        matches!(self.drafts.source, DraftSource::Drafter | DraftSource::Replaced(_))
    }

    /// How the drafts of a sequence went, which were looked up by so many tokens. Of the sequence, if it still goes on,
    /// too.
    pub(super) fn learn(&mut self, sequence: Option<&mut Sequence>, matched: u32, drafted: u32, accepted: u32) {
        let (before, counts) = (self.usual, &mut self.counts);
        self.usual.learn(matched, drafted, accepted);
        if let Some(sequence) = sequence.filter(|_| drafted > 0) {
            let acceptance = sequence.drafting.acceptance.get_or_insert(before.of_another());
            acceptance.learn(matched, drafted, accepted);
        }
        counts.rounds += u64::from(drafted > 0);
        counts.drafted += u64::from(drafted);
        counts.accepted += u64::from(accepted);
        counts.accepted_at.iter_mut().take(accepted as usize).for_each(|count| *count += 1);
    }
}
