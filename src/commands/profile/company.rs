//! Rows for a profile of decode of several: sequences that stand where the first does, each with keys and values of its
//! own. Where a plan verifies drafts of fewer sequences, the other rows follow the first sequence's.

use anyhow::{Result, ensure};
use gemma4c_plan::cuda::{CudaProgram, KvLayout, RECORD_WORDS, Range, Region, record};
use gemma4c_runtime::Backend;

/// Positions beyond the depth that a profile may decode.
const AHEAD: u32 = 16;

/// Copies the keys and values of the first sequence, which has `depth` tokens, to as many others as a decode of `rows`
/// may have, and lets each decode another token. Rows beyond them are the next of the first sequence, as far as the
/// plan verifies drafts.
pub fn join(backend: &mut dyn Backend, program: &CudaProgram, rows: u32, depth: u32, vocab_size: u32) -> Result<()> {
    let (layout, places) = (&program.kv_layout, &program.places);
    let sequences = rows.min(layout.slots);
    let kinds = [(places.windows, layout.sliding), (places.pages, layout.full)];
    let each = layout.pages_for(depth + AHEAD);
    ensure!(
        sequences * each <= layout.pages,
        "{sequences} sequences at depth {depth} take {} pages of keys and values: there are {}",
        sequences * each,
        layout.pages
    );
    let of_first: Vec<u32> = first_tables(layout).concat();
    // The first sequence has all pages of a context, and the others those behind them.
    let mut free = of_first.len() as u32..layout.pages;
    let page = |page: u32| kv(u64::from(page) * layout.page_bytes, layout.page_bytes);
    let mut records = vec![0u32; (rows * RECORD_WORDS) as usize];
    for slot in 0..sequences {
        for ((table, paging), first) in kinds.into_iter().zip(first_tables(layout)).filter(|_| slot > 0) {
            let own: Vec<u32> = free.by_ref().take(paging.pages_for(depth + AHEAD) as usize).collect();
            let room = "all pages of a context are the first sequence's: compile with more --sequences";
            ensure!(own.len() as u32 == paging.pages_for(depth + AHEAD), "{room}");
            first.iter().zip(&own).try_for_each(|(from, to)| backend.copy(page(*from), page(*to)))?;
            write(backend, table + u64::from(slot) * u64::from(paging.entries) * 4, &own)?;
        }
        let words = &mut records[(slot * RECORD_WORDS) as usize..];
        (words[record::POSITION], words[record::ROWS], words[record::SLOT]) = (depth, 1, slot);
        words[record::TOKEN] = ((depth + slot) as u64 * 7919 % vocab_size as u64) as u32;
    }
    let used = rows.min(sequences.max(program.verified_rows));
    for (row, position) in (sequences..used).zip(depth + 1..) {
        let words = &mut records[(row * RECORD_WORDS) as usize..];
        (words[record::POSITION], words[record::ROWS]) = (position, 1);
        words[record::TOKEN] = (position as u64 * 7919 % vocab_size as u64) as u32;
    }
    write(backend, places.rows, &records)
}

/// The pages of a session's only sequence, in sliding layers and in full ones: the first ones, in order.
fn first_tables(layout: &KvLayout) -> [Vec<u32>; 2] {
    let windows = layout.sliding.entries;
    [(0..windows).collect(), (windows..windows + layout.full.entries).collect()]
}

fn kv(offset: u64, bytes: u64) -> Range {
    Range { region: Region::Kv, offset, bytes }
}

fn write(backend: &mut dyn Backend, offset: u64, words: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Ok(backend.write(Range { region: Region::Arena, offset, bytes: bytes.len() as u64 }, &bytes)?)
}
