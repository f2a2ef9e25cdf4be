//! What an engine drives: a loaded model with memory for many sequences.
//!
//! Work is queued in order, as on a CUDA stream: a call returns when the work is queued, and what comes of it is
//! collected later, in the same order. A copy that is queued after a pass sees what the pass wrote, and memory that is
//! given to another sequence is overwritten only after everything that was queued for the one before. Who owns which
//! slot and which page is the engine's business alone.
//!
//! Keys and values are on pages of one size. A page has some positions of one sequence, of all sliding layers or of all
//! full ones, and is found through the slot's table for layers of that kind.

use gemma4c_plan::cuda::Paging;
use gemma4c_plan::{Sampling, SeatWeights, Seats};

use super::seated::Seated;
use crate::RuntimeError;
use crate::backend::MemoryUse;
use crate::soft::{Patches, SoftRows, TowerLimits};

/// What a device has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences at once: each has a row of the page tables.
    pub slots: u32,
    /// Pages, all sequences together.
    pub pages: u32,
    /// Those of a sequence in sliding layers, and in full ones.
    pub sliding: Paging,
    pub full: Paging,
    /// Sequences of one decode, at most.
    pub rows: u32,
    /// Rows of one decode where sequences have several, at most: all of them, and those of one sequence. Of one
    /// sequence they stand at consecutive positions. 1 where no sequence may have a second row.
    pub decode_rows: u32,
    pub verified_rows: u32,
    /// Tokens that the device's own drafter guesses in a row, at most; 0 where it has none.
    pub drafts: u32,
    /// Sizes of chunk that prefill is made for, ascending; the last is the most that goes in at once.
    pub chunks: Vec<u32>,
    /// Rows of a chunk at whose multiples another sequence's may start; those between are computed for nobody.
    pub alignment: u32,
    /// Positions a sequence may have.
    pub context: u32,
    pub vocab: u32,
    /// Results worth having in flight before the first of them is read; 0 where work is done when it is queued. The
    /// pages of a window have room for as many rows beyond it: a sequence whose rule changes goes back over what was
    /// queued.
    pub ahead: u32,
    /// Rows that the pages of every window have beyond it. A row of a prompt may be asked for with fewer rows than that
    /// behind it in its chunk: more would have written over what it looks back on.
    pub spare_rows: u32,
    /// The second tier, in host memory: pages that it has room for.
    pub host_units: u32,
    /// Room for adapters that come and go.
    pub seats: Option<Seats>,
}

impl Limits {
    /// The most tokens of a prompt that go in at once.
    pub fn chunk(&self) -> u32 {
        self.chunks.last().copied().unwrap_or(1)
    }

    /// Pages that so many positions take, in sliding layers and in full ones.
    pub fn pages_for(&self, positions: u32) -> [u32; 2] {
        [self.sliding, self.full].map(|paging| paging.pages_for(positions))
    }
}

/// Consecutive tokens of one prompt: a segment of what is computed at once.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    pub slot: u32,
    /// Of the first token.
    pub position: u32,
    pub tokens: &'a [u32],
    /// The rows among these that are soft tokens. Of a picture whose rows see each other a chunk has all.
    pub soft: &'a [SoftRows<'a>],
}

/// A token of a chunk whose successor is picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AskedRow {
    /// Which of the chunks it is in.
    pub chunk: usize,
    /// Which of its tokens.
    pub row: u32,
    pub picking: Picking,
}

/// How a row's next token is picked. The random number is a function of the seed and the token's position alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Picking {
    pub sampling: Sampling,
    pub seed: u64,
    /// Whether a token is wanted of the device; else only the row's logits are.
    pub token: bool,
    /// The row's logits are wanted too, or instead.
    pub logits: bool,
    /// Not every token may be picked, and which may is said by [`Device::pick`], for which the whole pass waits.
    pub masked: bool,
}

impl Picking {
    /// Logits alone: whoever asks picks, or wants no token.
    pub const LOGITS: Picking = Picking {
        sampling: Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 },
        seed: 0,
        token: false,
        logits: true,
        masked: false,
    };
}

/// Which tokens may be picked: a bit for every token, of which token 0 is the lowest of the first word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(Vec<u32>);

impl Mask {
    /// Everything.
    pub fn all(vocab: u32) -> Mask {
        Mask(vec![u32::MAX; vocab.div_ceil(u32::BITS) as usize])
    }

    pub fn words(&self) -> &[u32] {
        &self.0
    }

    pub fn allows(&self, token: u32) -> bool {
        self.0.get((token / u32::BITS) as usize).is_some_and(|word| word >> (token % u32::BITS) & 1 == 1)
    }

    /// A token beyond the vocabulary is nobody.
    pub fn allow(&mut self, token: u32) {
        if let Some(word) = self.0.get_mut((token / u32::BITS) as usize) {
            *word |= 1 << (token % u32::BITS);
        }
    }

    pub fn forbid(&mut self, token: u32) {
        if let Some(word) = self.0.get_mut((token / u32::BITS) as usize) {
            *word &= !(1 << (token % u32::BITS));
        }
    }

    /// Nothing is allowed any more.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Only what these words allow; words that are missing allow nothing.
    pub fn set(&mut self, words: &[u32]) {
        let words = words.iter().copied().chain(std::iter::repeat(0));
        self.0.iter_mut().zip(words).for_each(|(to, from)| *to = from);
    }

    /// Makes the logits of what is not allowed NaN.
    pub fn apply(&self, logits: &mut [f32]) {
        for (group, &word) in logits.chunks_mut(u32::BITS as usize).zip(&self.0) {
            // Most words are all zeros or all ones.
            match word {
                0 => group.fill(f32::NAN),
                u32::MAX => {}
                _ => {
                    let denied = group.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                    denied.for_each(|(_, logit)| *logit = f32::NAN);
                }
            }
        }
    }
}

/// One row of a decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub slot: u32,
    pub position: u32,
    pub token: u32,
    pub picking: Picking,
}

impl Row {
    /// The rows of each sequence, as ranges.
    pub fn sequences(rows: &[Row]) -> impl Iterator<Item = std::ops::Range<usize>> {
        let mut end = 0;
        rows.chunk_by(|one, next| one.slot == next.slot).map(move |run| {
            end += run.len();
            end - run.len()..end
        })
    }
}

/// What came of one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Picked {
    /// Beyond the vocabulary where nothing could be picked, or nothing was wanted.
    pub token: u32,
    /// Empty unless they were wanted.
    pub logits: Vec<f32>,
}

/// A loaded model that computes rows of many sequences.
pub trait Device {
    fn limits(&self) -> &Limits;

    /// The device's name, for a person.
    fn name(&self) -> String;

    /// What it has taken of the device's memory; `None` where that is not a device's own.
    fn memory(&self) -> Result<Option<MemoryUse>, RuntimeError> {
        Ok(None)
    }

    /// The same for two devices only where keys and values of the one would do for the other.
    fn identity(&self) -> u128;

    /// Whether [`Picked::token`] follows this rule; else the caller asks for logits and picks.
    fn can_pick(&self, sampling: &Sampling) -> bool;

    /// What it reads besides tokens: pictures and sounds, by the tower of each.
    fn towers(&self) -> &[TowerLimits] {
        &[]
    }

    /// The soft tokens that a tower makes of a medium within its limits. It waits for everything that was queued
    /// before.
    fn soft_tokens(&mut self, _tower: usize, _patches: Patches<'_>) -> Result<Vec<f32>, RuntimeError> {
        Err(RuntimeError::NoTower)
    }

    /// The pages that hold a slot's positions, in sliding layers and in full ones.
    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError>;

    /// Puts an adapter into a seat, counted from 1, after everything that was queued before.
    fn fill_seat(&mut self, _seat: u32, _weights: &SeatWeights) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoSeats)
    }

    /// Which seat the sequence in a slot has, for everything that is queued from here on; `None` for no adapter.
    fn seat(&mut self, _slot: u32, _adapter: Option<Seated>) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoSeats)
    }

    /// Computes chunks of prompts of different sequences in one pass: together no more rows than [`Limits::chunk`],
    /// where each starts at a multiple of [`Limits::alignment`]. Its result has one [`Picked`] for each asked row,
    /// which are in the order of the chunks and their rows.
    ///
    /// Where a row of this or of a decode is [masked](Picking::masked), tokens are not picked yet: [`Device::pick`]
    /// comes next, before anything else is queued. A masked row of a prompt is the only one that is asked for.
    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError>;

    /// Computes one token for each row. Its result has one [`Picked`] a row. Rows of one sequence are beside each
    /// other, at consecutive positions.
    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError>;

    /// Whether the device's drafter can guess what follows the token at a position, which has not been decoded: the
    /// latest passes must have left the hidden state of the position before.
    fn can_draft(&self, _slot: u32, _position: u32) -> bool {
        false
    }

    /// Decodes rows of which the first of each sequence has a token. The device's drafter guesses those of the others
    /// from it, which [it can](Device::can_draft). It has two results: one [`Picked`] with a token for each row that
    /// was guessed for, in their order, and then those of a decode. With `given` the other rows keep their own tokens,
    /// and the drafter runs all the same.
    fn decode_drafting(&mut self, _rows: &[Row], _given: bool) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoDrafter)
    }

    /// Whether one sequence can go on in rounds that the device closes by itself: it drafts, verifies, and decides what
    /// is kept and where the next round begins, so that rounds can be queued behind each other.
    fn has_rounds(&self) -> bool {
        false
    }

    /// Says where such rounds begin: with a row whose token was not decoded yet, and after which [it can
    /// draft](Device::can_draft).
    fn begin_rounds(&mut self, _row: &Row) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoDrafter)
    }

    /// Queues a round behind where rounds have come to: so many drafts, a decode that verifies them, and what is kept
    /// of them. Its result is the drafts that were right and the token behind them; nothing where that could not be
    /// picked. What is `given` takes the places of the first drafts, and the drafter runs all the same.
    fn round(&mut self, _drafts: u32, _given: &[u32], _picking: &Picking) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoDrafter)
    }

    /// Computes the rows of the latest decode once more, each at its next position and with the token it picked there.
    /// Only for rows that the device picks for, and whose logits nobody wants.
    fn decode_again(&mut self) -> Result<(), RuntimeError>;

    /// Picks the tokens of the pass that waits for masks: one a row, `None` where every token may come. The pass does
    /// not wait for it, only its picks do, so that masks are computed while the device computes logits.
    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError>;

    /// Waits for the oldest result that was not collected. Every prefill and every decode has one.
    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError>;

    /// Copies a page over another.
    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError>;

    /// Copies a page to a unit of the second tier.
    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError>;

    /// Copies it back.
    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError>;
}

impl<D: Device + ?Sized> Device for Box<D> {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    fn name(&self) -> String {
        (**self).name()
    }

    fn memory(&self) -> Result<Option<MemoryUse>, RuntimeError> {
        (**self).memory()
    }

    fn identity(&self) -> u128 {
        (**self).identity()
    }

    fn can_pick(&self, sampling: &Sampling) -> bool {
        (**self).can_pick(sampling)
    }

    fn towers(&self) -> &[TowerLimits] {
        (**self).towers()
    }

    fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Vec<f32>, RuntimeError> {
        (**self).soft_tokens(tower, patches)
    }

    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError> {
        (**self).set_pages(slot, sliding, full)
    }

    fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        (**self).fill_seat(seat, weights)
    }

    fn seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        (**self).seat(slot, adapter)
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        (**self).prefill(chunks, asked)
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        (**self).decode(rows)
    }

    fn can_draft(&self, slot: u32, position: u32) -> bool {
        (**self).can_draft(slot, position)
    }

    fn decode_drafting(&mut self, rows: &[Row], given: bool) -> Result<(), RuntimeError> {
        (**self).decode_drafting(rows, given)
    }

    fn has_rounds(&self) -> bool {
        (**self).has_rounds()
    }

    fn begin_rounds(&mut self, row: &Row) -> Result<(), RuntimeError> {
        (**self).begin_rounds(row)
    }

    fn round(&mut self, drafts: u32, given: &[u32], picking: &Picking) -> Result<(), RuntimeError> {
        (**self).round(drafts, given, picking)
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        (**self).decode_again()
    }

    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        (**self).pick(masks)
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        (**self).collect()
    }

    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError> {
        (**self).copy(from, to)
    }

    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError> {
        (**self).save(from, unit)
    }

    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError> {
        (**self).load(unit, to)
    }
}
