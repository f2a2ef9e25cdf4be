//! Where host and device meet: the words they exchange, and how keys and values are divided among sequences.
//!
//! A row of a launch is told by its record, or by its segment's, which sequence it is of, and where it stands in it.
//! Nothing of this is in a launch's arguments: a graph is built once, and the records change.

use serde::{Deserialize, Serialize};

use crate::list::at_most;

/// How keys and values lie in [`Region::Kv`](crate::cuda::Region::Kv): rings, then blocks. A ring holds the sliding
/// layers of one sequence, a block holds [`BLOCK_ROWS`] positions of all global layers. Either is contiguous, so that
/// it can be copied as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Sequences at once: rings that rows may name. Those beyond hold snapshots.
    pub slots: u32,
    /// Rings; the first starts at 0, each `ring_bytes` after the one before. A row's slot is the number of its ring.
    pub rings: u32,
    pub ring_bytes: u64,
    /// Blocks; the first starts at `blocks_at`, each `block_bytes` after the one before.
    pub blocks: u32,
    pub block_bytes: u64,
    pub blocks_at: u64,
    /// [`BLOCK_ROWS`].
    pub block_rows: u32,
    /// In the order of the caches of the CPU's program.
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub caches: Vec<KvCache>,
}

/// Keys and values of one layer within a ring or a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvCache {
    /// Offsets from the start of a ring, or of a block.
    pub keys: u64,
    pub values: u64,
    /// Rows of one ring, or of one block: position p lies in row p % `rows`.
    pub rows: u32,
    /// `None`: a global layer, in blocks.
    pub window: Option<u32>,
}

/// Positions of a block of global layers.
pub const BLOCK_ROWS: u32 = 256;

impl KvLayout {
    /// Bytes of all rings.
    pub const fn rings_bytes(&self) -> u64 {
        self.ring_bytes.saturating_mul(self.rings as u64)
    }

    /// Bytes of all blocks.
    pub const fn blocks_bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(self.blocks as u64)
    }

    /// How many sequences of so many positions there is room for at once.
    pub const fn sequences_of(&self, positions: u32) -> u32 {
        let each = positions.div_ceil(BLOCK_ROWS);
        match self.blocks.checked_div(each) {
            Some(fitting) if self.block_bytes > 0 && fitting < self.slots => fitting,
            _ => self.slots,
        }
    }

    /// How many positions each of all sequences may have at once, up to `context`.
    pub const fn positions_each(&self, context: u32) -> u32 {
        match self.blocks.checked_div(self.slots) {
            Some(blocks) if self.block_bytes > 0 && blocks < context.div_ceil(BLOCK_ROWS) => blocks * BLOCK_ROWS,
            _ => context,
        }
    }

    /// The cache, and whether it is its values, whose pages a range is, from the first to the last: it has bytes of
    /// other caches between them.
    pub fn whole_pages(&self, offset: u64, bytes: u64) -> Option<(usize, bool)> {
        let sides = self
            .caches
            .iter()
            .enumerate()
            .flat_map(|(index, cache)| [(index, cache, false, cache.keys), (index, cache, true, cache.values)]);
        let is_it = |cache: &KvCache, from: u64| {
            let (start, count, stride) = self.pages(cache);
            // Keys and values have pages of one size.
            let most = (count as u64).saturating_sub(1).saturating_mul(stride);
            let most = most.saturating_add(cache.values.abs_diff(cache.keys));
            Some(offset) == start.checked_add(from) && bytes <= most
        };
        sides.into_iter().find(|(_, cache, _, from)| is_it(cache, *from)).map(|(index, _, values, _)| (index, values))
    }

    /// Where the pages of a cache start, their number, and the bytes from one to the next.
    pub const fn pages(&self, cache: &KvCache) -> (u64, u32, u64) {
        match cache.window {
            Some(_) => (0, self.rings, self.ring_bytes),
            None => (self.blocks_at, self.blocks, self.block_bytes),
        }
    }
}

/// Words of a [record](Places).
pub const RECORD_WORDS: u32 = 16;

/// Words of a record by name.
pub mod record {
    /// Of the row. Of a chunk nobody asks.
    pub const POSITION: usize = 0;
    /// Rows in use: 1 or, of a row that is free, 0; of a chunk, all its rows.
    pub const ROWS: usize = 1;
    /// The row's token; of the asked record, the index of the asked row in the chunk, until the pick puts its token
    /// there.
    pub const TOKEN: usize = 2;
    /// Ring of the sequence, and its row of the page table.
    pub const SLOT: usize = 3;
    /// Counts the picks of the row: the next goes to this entry of the history, modulo its length.
    pub const TICK: usize = 4;
    /// Bits of an f32; 0 takes the largest logit.
    pub const TEMPERATURE: usize = 5;
    pub const TOP_K: usize = 6;
    /// Bits of an f32.
    pub const TOP_P: usize = 7;
    /// The seed's lower half, then its upper half.
    pub const SEED: usize = 8;
    /// Whether the row's bits of [`masks`](super::Places::masks) say what may be picked; 0: anything.
    pub const MASKED: usize = 10;
    /// Which word of its entry of the history the pick writes, counted from the row's own: the asked rows of a chunk,
    /// each a row 0, share an entry.
    pub const COLUMN: usize = 11;
}

/// A segment of a chunk starts at a multiple of so many rows, so that no tile of an attention kernel has rows of two.
pub const SEGMENT_ROWS: u32 = 64;

/// Words of a segment's record: the position of its first row, its rows, its first row in the chunk, its slot.
pub const SEGMENT_WORDS: u32 = 4;

/// Consecutive rows of a chunk that are of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Of its first row.
    pub position: u32,
    pub rows: u32,
    /// Its first row in the chunk, a multiple of [`SEGMENT_ROWS`].
    pub first_row: u32,
    pub slot: u32,
}

impl Segment {
    /// A chunk that is all of one sequence.
    pub const fn alone(position: u32, rows: u32, slot: u32) -> Segment {
        Segment { position, rows, first_row: 0, slot }
    }

    /// What [`Places::segments`] holds for a phase of so many rows: of every [`SEGMENT_ROWS`] rows the segment that
    /// they belong to; zeros where there is none, which is one of no rows.
    pub fn words(segments: &[Segment], phase_rows: u32) -> Vec<u32> {
        let mut words = vec![0; (phase_rows.div_ceil(SEGMENT_ROWS) * SEGMENT_WORDS) as usize];
        for segment in segments {
            let units = segment.first_row / SEGMENT_ROWS..(segment.first_row + segment.rows).div_ceil(SEGMENT_ROWS);
            let records = words.chunks_exact_mut(SEGMENT_WORDS as usize).take(units.end as usize);
            let record = [segment.position, segment.rows, segment.first_row, segment.slot];
            records.skip(units.start as usize).for_each(|words| words.copy_from_slice(&record));
        }
        words
    }
}

/// Words of an entry of [`Places::seats`].
pub const SEAT_WORDS: u32 = 2;

/// What host and device exchange: offsets in the arena. All words are u32, little-endian. Records have
/// [`RECORD_WORDS`], which [`record`] names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places {
    /// The chunk's token ids: as many as the largest phase has rows. Decode has each row's token in its record.
    pub tokens: u64,
    /// Records of decoded rows, one behind the other: as many as the largest decode phase has rows. The pick brings
    /// each up to date for the next decode; a row that is free is left alone by everybody.
    pub rows: u64,
    /// The record of a prefill chunk, for kernels that know rows by their number alone: how many there are, up to the
    /// end of the last segment.
    pub chunk: u64,
    /// Whose rows those of a prefill chunk are: a record of [`SEGMENT_WORDS`] for every [`SEGMENT_ROWS`] rows of the
    /// largest phase.
    pub segments: u64,
    /// The record of the asked row of a chunk, the one whose logits are wanted; several take turns. The pick after a
    /// prefill works on it as on the first of the decoded rows.
    pub asked: u64,
    /// Which block holds a position of a global layer: [slot][position / [`BLOCK_ROWS`]], `max_pages` words for each
    /// ring.
    pub pages: u64,
    pub max_pages: u32,
    /// Tokens that are never picked; unused entries hold `u32::MAX`.
    pub suppress: u64,
    pub suppress_len: u32,
    /// A ring of `history_len` entries, each with a word for every decoded row: the pick writes the row's token to the
    /// entry of its tick.
    pub history: u64,
    pub history_len: u32,
    /// Logits of the decoded rows, or those of the asked row: f32, as many as the vocabulary has tokens for each row.
    pub logits: u64,
    /// Which tokens may be picked, for each row with logits: a bit for every token, the lowest bit of the first word is
    /// token 0. Only rows whose record says [`record::MASKED`] look there.
    pub masks: u64,
    /// Of a plan with towers.
    pub soft: Option<SoftPlaces>,
    /// Of a plan with seats: which seat a sequence has, and how strong its adapter is. Entries of [`SEAT_WORDS`]: the
    /// seat, 0 for none, and the bits of an f32. First those of all slots, then those of the decoded rows, then that of
    /// the asked row: a row's entry is a copy of its slot's, so that a launch finds it before it knows the row's record.
    pub seats: Option<u64>,
}

/// Where the soft tokens of a chunk are put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoftPlaces {
    /// For each row of the chunk a row of f32 as wide as the model. Only those of soft tokens are read.
    pub rows: u64,
    /// A word for each row of the chunk: 0 for a token, which has its embedding; else how many soft tokens of the same
    /// picture come from this one on.
    pub ahead: u64,
    /// The token that stands in [`Places::tokens`] where a soft token is: its row of the per-layer table counts.
    pub pad: u32,
}

/// Where a picture is put, and what a tower makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TowerPlaces {
    /// Two records: of the grid of patches and, behind it, of the grid of soft tokens. [`record::ROWS`] is how many
    /// there are, [`record::TOKEN`] how many of them a row of the grid has.
    pub grids: u64,
    /// The patches, as f32.
    pub patches: u64,
    /// The soft tokens, as f32.
    pub soft: u64,
}

impl Places {
    /// Words of a row of [`Places::masks`].
    pub const fn mask_words(vocabulary: u32) -> u32 {
        vocabulary.div_ceil(u32::BITS)
    }

    /// Words of [`Places::seats`].
    pub fn seat_words(slots: u32, decode_rows: u32) -> u64 {
        (u64::from(slots) + u64::from(decode_rows) + 1) * u64::from(SEAT_WORDS)
    }

    /// Where an entry of [`Places::seats`] is.
    pub fn seat_entry(&self, entry: u32) -> Option<u64> {
        self.seats.map(|seats| seats + u64::from(entry) * u64::from(SEAT_WORDS) * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_64_rows_know_their_segment() {
        let two = [Segment::alone(7, 65, 3), Segment { position: 0, rows: 64, first_row: 128, slot: 1 }];
        let (first, second) = ([7, 65, 0, 3], [0, 64, 128, 1]);
        assert_eq!(Segment::words(&two, 300), [first, first, second, [0; 4], [0; 4]].concat());
        assert_eq!(Segment::words(&two[..1], 65), [first, first].concat());
        assert_eq!(Segment::words(&[Segment::alone(9, 2, 0)], 2), [9, 2, 0, 0]);
    }
}
