//! Where the rows of a launch belong: the record that says which sequence a row is of, and the page that holds a
//! position's keys and values. Every kernel that touches the cache asks here, and only here.
//!
//! A cache is pages of as many positions each, a multiple of [`PAGE_UNIT`]. A slot has a table of its pages, and a
//! position is on `pages[slot][position / rows % entries]`. The table of a full layer has an entry for every page of
//! the context; that of a sliding layer only for those that a window touches, so that a page is used again when the
//! window has left it. Pages of one cache are `page_stride` elements apart, which may be beyond 32 bits in all: what a
//! page starts with is a u64, what follows within it is not.
//!
//! In prefill a sliding layer's own rows of the chunk are in a stage first, [row of the chunk][key-value head][value]:
//! its pages are not as long as a chunk, and the chunk's first rows still look at what they hold.
//!
//! A chunk is segments, each of one sequence. They start at multiples of [`SEGMENT_ROWS`] rows, and each
//! [`SEGMENT_ROWS`] rows have a record of their segment: the position of its first row, its rows, its first row in the
//! chunk, its slot. Rows between two segments are free.

use gemma4c_dsl::prelude::*;
use gemma4c_plan::cuda;

/// Words of a row's record: position, rows in use, token, slot, and what the pick needs.
pub const RECORD_WORDS: u32 = 16;

/// Positions of a page are a multiple of this: a tile of keys that starts at a multiple of its own length is on one
/// page, and any other on two at most.
pub const PAGE_UNIT: u32 = 64;

/// Rows of a chunk that have a segment's record together.
pub const SEGMENT_ROWS: u32 = 64;

// The device functions below say them as numbers.
const _: () = assert!(SEGMENT_ROWS == cuda::SEGMENT_ROWS && SEGMENT_ROWS == 64 && cuda::SEGMENT_WORDS == 4);
const _: () = assert!(PAGE_UNIT == cuda::PAGE_UNIT && RECORD_WORDS == cuda::RECORD_WORDS);

/// The first words of a row's record: position, rows in use, token and slot. Decoded rows have a record each,
/// `record_stride` words apart. Rows of a chunk, whose stride is 0, have that of their segment, with its first row in
/// the token's place.
#[device]
pub fn record_of(state: Input<u32>, row: u32, record_stride: u32) -> U32x4 {
    load::<U32x4>(state, if record_stride == 0 { row / 64 * 4 } else { row * record_stride })
}

/// Which of its record's rows a row is: of a segment they are counted, a decoded row is its record's only one. A row is
/// free if its record has not that many.
#[device]
pub fn row_of_record(record: U32x4, row: u32, record_stride: u32) -> u32 {
    if record_stride == 0 { row - record.z } else { 0 }
}

/// The row of its page that has a position. A stage, whose `capacity` is 0, has the rows of a chunk one after the
/// other, of which this is number `row`.
#[device]
pub fn row_of_page(position: u32, row: u32, capacity: u32) -> u32 {
    if capacity == 0 { row } else { position % capacity }
}

/// The first position that the query at `position` sees. `window` counts the query's own position.
#[device]
pub fn first_visible(position: u32, window: u32) -> u32 {
    if position >= window { position + 1 - window } else { 0 }
}

/// The number of the page that has a position.
#[device]
pub fn page_number(pages: Weights<u32>, slot: u32, position: u32, capacity: u32, max_pages: u32) -> u32 {
    pages[slot * max_pages + position / capacity % max_pages]
}

/// The element with which the page of a position starts; 0 in a stage, whose `capacity` is 0.
#[device]
pub fn page_start(
    pages: Weights<u32>,
    slot: u32,
    position: u32,
    capacity: u32,
    max_pages: u32,
    page_stride: u32,
) -> u64 {
    if capacity == 0 {
        0u64
    } else {
        page_number(pages, slot, position, capacity, max_pages) as u64 * page_stride as u64
    }
}
