//! What must hold of keys and values and of the words that host and device exchange: pages and records lie where there
//! is memory for them.

use crate::Plan;
use crate::cuda::{CudaProgram, PAGE_UNIT, Paging, Places, RECORD_WORDS, Range, Region, SEGMENT_ROWS, SEGMENT_WORDS};
use crate::validate_range::check_range;

/// Pages fill their region, and every cache lies within a page, apart from the others of its kind.
pub(crate) fn check_kv(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    let layout = &program.kv_layout;
    let caches = &plan.program.caches;
    if layout.caches.len() != caches.len() {
        return Err(format!("places for {} caches of {}", layout.caches.len(), caches.len()));
    }
    let bytes = layout.page_bytes.checked_mul(layout.pages.into()).ok_or("pages that are too large")?;
    if bytes != program.memory.kv {
        return Err(format!("{} pages of {} bytes in {}", layout.pages, layout.page_bytes, program.memory.kv));
    }
    if layout.slots == 0 {
        return Err("no sequences".into());
    }
    let context = plan.program.context;
    let kinds = [(layout.sliding, true), (layout.full, false)];
    for (paging, slides) in kinds {
        let are_there = caches.iter().any(|cache| cache.window.is_some() == slides);
        let has_pages = are_there || !slides;
        if has_pages != (paging.entries > 0) || paging.rows == 0 || !paging.rows.is_multiple_of(PAGE_UNIT) {
            return Err(format!("{} pages of {} positions for a sequence", paging.entries, paging.rows));
        }
        let most = context.div_ceil(paging.rows);
        if paging.entries > most || !slides && paging.entries != most {
            return Err(format!("{} pages for a sequence of {context}", paging.entries));
        }
    }
    if layout.pages_for(context) > layout.pages {
        return Err(format!("{} pages, of which one sequence takes {}", layout.pages, layout.pages_for(context)));
    }
    // The ranges of keys and values on a page: of sliding layers, and of full ones.
    let mut taken = [Vec::new(), Vec::new()];
    for (index, (place, cache)) in layout.caches.iter().zip(caches).enumerate() {
        let row = program.kv.row_bytes(cache.kv_heads, cache.head_dim);
        let paging = layout.paging(place);
        if place.window != cache.window || cache.window.is_some_and(|window| paging.kept() < window.min(context)) {
            return Err(format!("cache {index} has pages of {} rows", paging.kept()));
        }
        let bytes = row.checked_mul(paging.rows.into()).ok_or("a cache that is too large")?;
        for start in [place.keys, place.values] {
            let end = start.checked_add(bytes).ok_or("a cache that is too large")?;
            taken[usize::from(cache.window.is_none())].push((start, end));
        }
    }
    for ranges in &mut taken {
        ranges.sort_unstable();
        let apart = ranges.windows(2).all(|two| two[0].1 <= two[1].0);
        if !apart || ranges.last().is_some_and(|last| last.1 > layout.page_bytes) {
            return Err(format!("keys and values do not fit in {} bytes", layout.page_bytes));
        }
    }
    Ok(())
}

/// What host and device exchange lies in the arena.
pub(crate) fn check_places(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    let places = &program.places;
    let chunk = program.phases.iter().map(|phase| phase.rows as u64).max().unwrap_or(1);
    let (rows, record) = (program.decode_rows() as u64, RECORD_WORDS as u64);
    let table = |of: Paging| u64::from(program.kv_layout.slots) * u64::from(of.entries);
    let words = [
        ("tokens", places.tokens, chunk),
        ("rows", places.rows, rows * record),
        ("chunk", places.chunk, record),
        ("segments", places.segments, chunk.div_ceil(SEGMENT_ROWS as u64) * SEGMENT_WORDS as u64),
        ("asked", places.asked, record),
        ("pages", places.pages, table(program.kv_layout.full)),
        ("pages of windows", places.windows, table(program.kv_layout.sliding)),
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
