//! Prompts on their way in: whose tokens go before the next decode, and which of them together.
//!
//! A chunk reads all weights, however few rows it has, so that short prompts share one. Nobody overtakes: a chunk takes
//! the next piece of the oldest prompt, and then of those behind it in order of arrival, as long as each fits whole, up
//! to its end or to the place of a snapshot. Prompts whose first token is picked by a mask, those whose logits are read
//! token by token, and chunks with soft tokens are for themselves.

use super::device::{AskedRow, Chunk, Device, Picking};
use super::pace::{Budget, Share, Work};
use super::prefix::Prompt;
use super::request::{Finish, Id};
use super::sequence::Sequence;
use super::state::{Engine, InFlight};
use crate::RuntimeError;
use crate::soft::SoftRows;

/// Tokens of a prompt in one turn, where each has its logits read: a row of them may be a megabyte.
const READ_AT_ONCE: u32 = 8;

/// Tokens of one prompt in a chunk.
struct Piece {
    id: Id,
    from: u32,
    end: u32,
    /// Its prompt ends with it.
    is_last: bool,
    /// The logits of its tokens are wanted, but for that after which a token is picked.
    reads: bool,
    /// Some of its tokens are places of soft tokens.
    has_soft: bool,
    /// Of the token after it, where there is to be one.
    picking: Option<Picking>,
}

impl Piece {
    fn of(id: Id, sequence: &Sequence, most: u32, device: &impl Device) -> Piece {
        let reads = sequence.request.prompt_logits;
        let read_at_once = READ_AT_ONCE.min(device.limits().spare_rows).max(1);
        let towers = device.towers();
        let (from, mut end) =
            (sequence.position(), sequence.next_end(if reads { most.min(read_at_once) } else { most }, towers));
        let mut is_last = end as usize == sequence.request.prompt.len();
        let mut picking = (is_last && sequence.request.most > 0).then(|| sequence.picking(device));
        // A mask is for the only row that is asked for.
        if reads && end - from > 1 && picking.is_some_and(|picking| picking.masked) {
            (end, is_last, picking) = (end - 1, false, None);
        }
        let has_soft = sequence.has_soft(from, end, towers);
        Piece { id, from, end, is_last, reads, has_soft, picking }
    }

    /// How many of its tokens have their logits read. The last of a prompt has a token, or nothing, after it.
    fn read(&self) -> u32 {
        if self.reads { self.tokens() - u32::from(self.is_last) } else { 0 }
    }

    /// Rows of it that are asked for.
    fn asked(&self) -> u32 {
        self.read() + u32::from(self.picking.is_some())
    }

    fn tokens(&self) -> u32 {
        self.end - self.from
    }

    fn may_share(&self) -> bool {
        !self.reads && !self.has_soft && !self.picking.is_some_and(|picking| picking.masked)
    }
}

impl<D: Device> Engine<D> {
    /// Queues chunks of prompts, the oldest request's first, as many as may go before the next decode.
    pub(super) fn queue_prompts(&mut self) -> Result<(), RuntimeError> {
        let reading = |(id, sequence): (&Id, &Sequence)| (!sequence.has_read_all()).then_some(*id);
        let mut unread: Vec<Id> = self.sequences.iter().filter_map(reading).collect();
        // Whose prompt ends is decoded with the others.
        let running = (self.sequences.len() - unread.len()) as u32;
        let mut budget = self.pace.budget(&self.limits, if running == 0 { 0 } else { running + 1 });
        while !unread.is_empty()
            && let Some(most) = self.pace.next_chunk(&budget, &self.limits)
        {
            let pieces = self.pieces(&unread, most, &budget);
            let first = &pieces[0];
            // The rest of a long prompt waits for the decode, however little of it would still fit.
            let waits = first.tokens() >= most || first.reads || first.has_soft;
            self.queue_pieces(&pieces, &mut budget)?;
            if waits {
                unread.remove(0);
            }
            unread.retain(|id| self.sequences.get(id).is_some_and(|sequence| !sequence.has_read_all()));
        }
        Ok(())
    }

    /// What goes into the next chunk, of at most so many rows.
    fn pieces(&self, unread: &[Id], most: u32, budget: &Budget) -> Vec<Piece> {
        let (mut pieces, mut shares, mut rows) = (Vec::new(), Vec::new(), 0);
        for id in unread {
            let start = u32::next_multiple_of(rows, self.limits.alignment);
            let room = if pieces.is_empty() { most } else { self.limits.context };
            let piece = Piece::of(*id, &self.sequences[id], room, &self.device);
            let joins = piece.may_share() && start.saturating_add(piece.tokens()) <= most;
            if !pieces.is_empty() && !joins {
                break;
            }
            rows = start + piece.tokens();
            shares.push(Share { alone: piece.tokens(), end: rows, asked: piece.asked() });
            let is_alone = !piece.may_share();
            pieces.push(piece);
            if is_alone {
                break;
            }
        }
        pieces.truncate(self.pace.together(&shares, budget, &self.limits));
        pieces
    }

    fn queue_pieces(&mut self, pieces: &[Piece], budget: &mut Budget) -> Result<(), RuntimeError> {
        for piece in pieces.iter().filter(|piece| piece.has_soft) {
            self.look(piece.id, piece.from, piece.end)?;
        }
        if self.in_flight.is_empty() {
            self.began = (self.clock)();
        }
        let soft = |piece: &Piece| {
            let positions = piece.from as usize..piece.end as usize;
            let placed = self.sequences[&piece.id].soft.iter();
            placed.filter_map(|placed| placed.within(&positions)).collect::<Vec<_>>()
        };
        let soft: Vec<Vec<SoftRows<'_>>> = pieces.iter().map(soft).collect();
        let (mut chunks, mut asked, mut rows) = (Vec::new(), Vec::new(), 0);
        for (chunk, piece) in pieces.iter().enumerate() {
            let Sequence { slot, request, .. } = &self.sequences[&piece.id];
            let tokens = &request.prompt[piece.from as usize..piece.end as usize];
            chunks.push(Chunk { slot: *slot, position: piece.from, tokens, soft: &soft[chunk] });
            let row = |row| AskedRow { chunk, row, picking: Picking::LOGITS };
            asked.extend((0..piece.read()).map(row));
            asked.extend(piece.picking.map(|picking| AskedRow { chunk, row: piece.tokens() - 1, picking }));
            rows = u32::next_multiple_of(rows, self.limits.alignment) + piece.tokens();
        }
        self.device.prefill(&chunks, &asked)?;
        // A pass between two rounds takes the places that the next would begin with.
        self.rounds = None;
        self.shared_chunks += u64::from(pieces.len() > 1);
        if asked.iter().any(|row| row.picking.masked)
            && let Some(sequence) = self.sequences.get_mut(&pieces[0].id)
        {
            self.device.pick(&[sequence.mask(self.limits.vocab)])?;
        }
        let ids = pieces.iter().filter(|piece| piece.picking.is_some()).map(|piece| piece.id).collect();
        let read = pieces.iter().find(|piece| piece.read() > 0);
        let read = read.map(|piece| (piece.id, piece.from, piece.read() as usize));
        let work = Work::Prompt { rows, asked: asked.len() as u32 };
        self.in_flight.push_back(InFlight { rows: ids, work, waits: false, read });
        self.pace.spend(budget, rows, asked.len() as u32, &self.limits);
        for piece in pieces {
            self.advance(piece)?;
        }
        for piece in pieces.iter().filter(|piece| piece.is_last) {
            if piece.picking.is_some() {
                self.steady = false;
            } else {
                // Nothing is to be generated.
                self.collect_beyond(if piece.reads { 0 } else { self.ahead })?;
                self.finish(piece.id, Finish::Length);
            }
        }
        self.collect_beyond(self.ahead)
    }

    /// A piece is queued: what comes after it is next, and where a snapshot is wanted, it is taken.
    fn advance(&mut self, piece: &Piece) -> Result<(), RuntimeError> {
        let Some(sequence) = self.sequences.get_mut(&piece.id) else { return Ok(()) };
        sequence.advance(piece.end);
        if sequence.request.snapshot_at.contains(&piece.end) {
            let Sequence { chain, pages, .. } = &*sequence;
            let prompt = Prompt { chain, pages };
            self.prefixes.keep(piece.end, prompt, &mut self.pool, &mut self.device)?;
        }
        Ok(())
    }
}
