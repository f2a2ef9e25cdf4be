//! Where host and device meet: the words they exchange, and how keys and values are divided among sequences.
//!
//! A row of a launch is told by its record, or by its segment's, which sequence it is of, and where it stands in it.
//! Nothing of this is in a launch's arguments: a graph is built once, and the records change.

use serde::{Deserialize, Serialize};

use crate::list::at_most;
/// Positions of a page are a multiple of this: a tile of keys is on two pages at most.
pub const PAGE_UNIT: u32 = 64;

/// How keys and values lie in [`Region::Kv`](crate::cuda::Region::Kv): pages of one size, one behind the other. A page
/// holds some positions of one sequence: of all sliding layers, or of all full ones. Which of them is whose is decided
/// while the plan runs, by one allocator for both kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Sequences at once.
    pub slots: u32,
    /// Pages; a plan may be opened with [others](crate::cuda::CudaProgram::set_pages).
    pub pages: u32,
    pub page_bytes: u64,
    pub sliding: Paging,
    pub full: Paging,
    /// In the order of the caches of the CPU's program.
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub caches: Vec<KvCache>,
}

/// The pages of a sequence in layers of one kind: a position is in row `position % rows` of the page that entry
/// `position / rows % entries` of the sequence's table names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paging {
    /// Positions of a page.
    pub rows: u32,
    /// Pages of a sequence, at most: those of the context or, of sliding layers, of a window and what may be written
    /// ahead of it. 0 where there are no sliding layers.
    pub entries: u32,
}

impl Paging {
    /// Pages of a sequence of so many positions.
    pub const fn pages_for(&self, positions: u32) -> u32 {
        if self.entries == 0 {
            return 0;
        }
        let pages = positions.div_ceil(self.rows);
        if pages < self.entries { pages } else { self.entries }
    }

    /// Positions that are there at once.
    pub const fn kept(&self) -> u32 {
        self.rows.saturating_mul(self.entries)
    }
}

/// Keys and values of one layer within a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvCache {
    /// Offsets from the start of a page.
    pub keys: u64,
    pub values: u64,
    /// `None`: a full layer.
    pub window: Option<u32>,
}

/// What a layer keeps of a position, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub window: Option<u32>,
    /// Positions that are there at once.
    pub kept: u32,
    /// Bytes of the keys, or of the values, of a position.
    pub row_bytes: u64,
}

/// Positions of a page of sliding layers: few enough that a sequence takes little more than it has rows, enough that
/// most tiles of keys are on one page.
const SLIDING_ROWS: u32 = 128;
/// Positions of a page of full layers where there are no sliding ones.
const FULL_ROWS: u32 = 256;
/// Where the keys or values of a layer may begin on a page.
const PAGE_ALIGNMENT: u64 = 256;

impl KvLayout {
    /// Pages of one size for layers of both kinds, none of them yet: a page of full layers has as many positions as
    /// take the bytes of a page of sliding ones.
    pub fn divide(shapes: &[KvShape], context: u32) -> KvLayout {
        let whole = context.max(1).next_multiple_of(PAGE_UNIT);
        let of_kind = |slides: bool| shapes.iter().filter(move |shape| shape.window.is_some() == slides);
        let row = |slides: bool| of_kind(slides).map(|shape| 2 * shape.row_bytes).sum::<u64>();
        let rows = SLIDING_ROWS.min(whole);
        let kept = of_kind(true).map(|shape| shape.kept.min(context)).max().unwrap_or(0);
        let sliding = Paging { rows, entries: kept.div_ceil(rows) };
        let fitting = (row(true) * u64::from(rows)).checked_div(row(false)).filter(|rows| *rows > 0);
        let fitting = fitting.map_or(FULL_ROWS, |rows| u32::try_from(rows).unwrap_or(u32::MAX));
        let rows = (fitting.clamp(PAGE_UNIT, whole) / PAGE_UNIT) * PAGE_UNIT;
        let full = Paging { rows, entries: context.div_ceil(rows) };
        let mut ends = [0u64; 2];
        let mut caches = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let slides = shape.window.is_some();
            let rows = if slides { sliding.rows } else { full.rows };
            let bytes = (u64::from(rows) * shape.row_bytes).next_multiple_of(PAGE_ALIGNMENT);
            let end = &mut ends[usize::from(slides)];
            caches.push(KvCache { keys: *end, values: *end + bytes, window: shape.window });
            *end += 2 * bytes;
        }
        KvLayout { slots: 0, pages: 0, page_bytes: ends[0].max(ends[1]), sliding, full, caches }
    }

    /// The pages of a cache.
    pub const fn paging(&self, cache: &KvCache) -> Paging {
        if cache.window.is_some() { self.sliding } else { self.full }
    }

    /// Pages that a sequence of so many positions takes.
    pub const fn pages_for(&self, positions: u32) -> u32 {
        self.sliding.pages_for(positions).saturating_add(self.full.pages_for(positions))
    }

    /// Bytes that it takes.
    pub const fn bytes_for(&self, positions: u32) -> u64 {
        self.page_bytes.saturating_mul(self.pages_for(positions) as u64)
    }

    /// Bytes of all pages.
    pub const fn bytes(&self) -> u64 {
        self.page_bytes.saturating_mul(self.pages as u64)
    }

    /// How many sequences of so many positions there is room for at once.
    pub const fn sequences_of(&self, positions: u32) -> u32 {
        match self.pages.checked_div(self.pages_for(positions)) {
            Some(fitting) if fitting < self.slots => fitting,
            _ => self.slots,
        }
    }

    /// How many positions each of all sequences may have at once, up to `context`.
    pub const fn positions_each(&self, context: u32) -> u32 {
        let (mut fitting, mut over) = (0, context + 1);
        // What is known to fit, and what is known not to.
        while fitting + 1 < over {
            let middle = fitting + (over - fitting) / 2;
            if self.pages_for(middle) as u64 * self.slots as u64 <= self.pages as u64 {
                fitting = middle;
            } else {
                over = middle;
            }
        }
        fitting
    }

    /// The cache, and whether it is its values, whose pages a range is, from the first to the last: it has bytes of
    /// other caches between them. A sliding and a full layer may begin at the same place of a page, and then count as
    /// one: they share no page, but who takes them for the same only waits.
    pub fn whole_pages(&self, offset: u64, bytes: u64) -> Option<(usize, bool)> {
        let sides = self
            .caches
            .iter()
            .enumerate()
            .flat_map(|(index, cache)| [(index, cache, false, cache.keys), (index, cache, true, cache.values)]);
        // Keys and values have parts of one size.
        let before = self.page_bytes.saturating_mul(u64::from(self.pages.saturating_sub(1)));
        let is_it = |cache: &KvCache, from: u64| {
            offset == from && bytes <= before.saturating_add(cache.values.abs_diff(cache.keys))
        };
        sides.into_iter().find(|(_, cache, _, from)| is_it(cache, *from)).map(|(index, _, values, _)| (index, values))
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
    /// The sequence's row of the page tables.
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
    /// Which pages hold a sequence's positions in full layers: as many words for each slot as [`KvLayout::full`] has
    /// entries.
    pub pages: u64,
    /// The same in sliding layers.
    pub windows: u64,
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

    /// 31B: 50 sliding layers of 16 heads of 256 values, 10 full ones of 4 heads of 512, in f16.
    #[test]
    fn a_page_is_as_large_for_both_kinds_of_layers() {
        let sliding = KvShape { window: Some(1024), kept: 1280, row_bytes: 16 * 512 };
        let full = KvShape { window: None, kept: 32768, row_bytes: 4 * 1024 };
        let layout = KvLayout::divide(&[[sliding; 50].as_slice(), &[full; 10]].concat(), 32768);
        assert_eq!(
            (layout.sliding, layout.full),
            (Paging { rows: 128, entries: 10 }, Paging { rows: 1280, entries: 26 })
        );
        assert_eq!(layout.page_bytes, 128 * 50 * 2 * 16 * 512);
        assert_eq!([1, 640, 1024, 32768].map(|positions| layout.pages_for(positions)), [2, 6, 9, 36]);
        assert_eq!(layout.bytes_for(640), 6 * layout.page_bytes);
        let room = KvLayout { slots: 128, pages: 1000, ..layout };
        assert_eq!((room.sequences_of(1024), room.sequences_of(640), room.positions_each(32768)), (111, 128, 768));
        // Each alone, and a context that is shorter than a page.
        let only = KvLayout::divide(&[full; 10], 32768);
        assert_eq!((only.sliding.entries, only.full), (0, Paging { rows: 256, entries: 128 }));
        let short = KvLayout::divide(&[sliding, full], 70);
        let pages = Paging { rows: 128, entries: 1 };
        assert_eq!((short.sliding, short.full), (pages, pages));
    }

    #[test]
    fn every_64_rows_know_their_segment() {
        let two = [Segment::alone(7, 65, 3), Segment { position: 0, rows: 64, first_row: 128, slot: 1 }];
        let (first, second) = ([7, 65, 0, 3], [0, 64, 128, 1]);
        assert_eq!(Segment::words(&two, 300), [first, first, second, [0; 4], [0; 4]].concat());
        assert_eq!(Segment::words(&two[..1], 65), [first, first].concat());
        assert_eq!(Segment::words(&[Segment::alone(9, 2, 0)], 2), [9, 2, 0, 0]);
    }
}
