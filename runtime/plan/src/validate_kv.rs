//! What must hold of keys and values and of the words that host and device exchange: rings, blocks and records lie
//! where there is memory for them.

use crate::Plan;
use crate::cuda::{BLOCK_ROWS, CudaProgram, Places, RECORD_WORDS, Range, Region, SEGMENT_ROWS, SEGMENT_WORDS};
use crate::validate_range::check_range;

/// Rings and blocks lie in their region, one kind behind the other, and every cache within its ring or block, apart
/// from the others.
pub(crate) fn check_kv(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    let layout = &program.kv_layout;
    let caches = &plan.program.caches;
    if layout.caches.len() != caches.len() {
        return Err(format!("places for {} caches of {}", layout.caches.len(), caches.len()));
    }
    let all = |count: u32, bytes: u64| bytes.checked_mul(count.into());
    let rings = all(layout.rings, layout.ring_bytes).ok_or("rings that are too large")?;
    let blocks = all(layout.blocks, layout.block_bytes).ok_or("blocks that are too large")?;
    let end = layout.blocks_at.checked_add(blocks).ok_or("blocks that are too large")?;
    if layout.slots == 0 || layout.slots > layout.rings {
        return Err(format!("{} sequences with {} rings", layout.slots, layout.rings));
    }
    if layout.blocks_at < rings || end > program.memory.kv {
        let bytes = program.memory.kv;
        return Err(format!("{rings} bytes of rings, and blocks from {} to {end}, in {bytes}", layout.blocks_at));
    }
    if layout.block_rows != BLOCK_ROWS {
        return Err(format!("blocks of {} positions", layout.block_rows));
    }
    let max_pages = plan.program.context.div_ceil(BLOCK_ROWS);
    if program.places.max_pages != max_pages {
        return Err(format!("{} pages for a sequence of {}", program.places.max_pages, plan.program.context));
    }
    if caches.iter().any(|cache| cache.window.is_none()) && layout.blocks < max_pages {
        return Err(format!("{} blocks, of which one sequence takes {max_pages}", layout.blocks));
    }
    // The ranges of keys and values: of rings, and of blocks.
    let mut taken = [Vec::new(), Vec::new()];
    for (index, (place, cache)) in layout.caches.iter().zip(caches).enumerate() {
        let row = program.kv.row_bytes(cache.kv_heads, cache.head_dim);
        let fitting = match cache.window {
            Some(window) => place.rows >= window.min(plan.program.context),
            None => place.rows == BLOCK_ROWS,
        };
        if place.window != cache.window || !fitting {
            return Err(format!("cache {index} has pages of {} rows", place.rows));
        }
        let bytes = row.checked_mul(place.rows.into()).ok_or("a cache that is too large")?;
        for start in [place.keys, place.values] {
            let end = start.checked_add(bytes).ok_or("a cache that is too large")?;
            taken[usize::from(cache.window.is_none())].push((start, end));
        }
    }
    for (ranges, bytes) in taken.iter_mut().zip([layout.ring_bytes, layout.block_bytes]) {
        ranges.sort_unstable();
        let apart = ranges.windows(2).all(|two| two[0].1 <= two[1].0);
        if !apart || ranges.last().is_some_and(|last| last.1 > bytes) {
            return Err(format!("keys and values do not fit in {bytes} bytes"));
        }
    }
    Ok(())
}

/// What host and device exchange lies in the arena.
pub(crate) fn check_places(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    let places = &program.places;
    let chunk = program.phases.iter().map(|phase| phase.rows as u64).max().unwrap_or(1);
    let (rows, record) = (program.decode_rows() as u64, RECORD_WORDS as u64);
    let words = [
        ("tokens", places.tokens, chunk),
        ("rows", places.rows, rows * record),
        ("chunk", places.chunk, record),
        ("segments", places.segments, chunk.div_ceil(SEGMENT_ROWS as u64) * SEGMENT_WORDS as u64),
        ("asked", places.asked, record),
        ("pages", places.pages, program.kv_layout.rings as u64 * places.max_pages as u64),
        ("suppress", places.suppress, places.suppress_len as u64),
        ("history", places.history, places.history_len as u64 * rows),
        ("logits", places.logits, plan.model.vocab_size as u64 * rows),
        ("masks", places.masks, Places::mask_words(plan.model.vocab_size) as u64 * rows),
    ];
    let soft = places.soft.iter().flat_map(|soft| {
        [("soft tokens", soft.rows, chunk * plan.model.hidden as u64), ("soft rows", soft.ahead, chunk)]
    });
    if places.soft.is_some_and(|soft| soft.pad >= plan.model.vocab_size)
        || places.soft.is_some() == plan.towers.is_empty()
    {
        return Err("places for soft tokens that do not fit the plan's towers".into());
    }
    if places.seats.is_some() != plan.model.seats.is_some() {
        return Err("places for seats that do not fit the plan's".into());
    }
    let seat_words = Places::seat_words(program.kv_layout.slots, program.decode_rows());
    let seats = places.seats.map(|offset| ("seats", offset, seat_words));
    for (name, offset, words) in words.into_iter().chain(soft).chain(seats) {
        // Kernels read the four words of a segment, the first four of a record, and an entry of a seat at once.
        let alignment = if matches!(name, "rows" | "chunk" | "segments" | "asked" | "seats") { 16 } else { 4 };
        if !offset.is_multiple_of(alignment) {
            return Err(format!("{name} lies at {offset}, which is no place for a word"));
        }
        check_range(program, &Range { region: Region::Arena, offset, bytes: words * 4 }, name)?;
    }
    if places.history_len == 0 { Err("a history of no tokens".into()) } else { Ok(()) }
}
