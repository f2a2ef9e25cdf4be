//! Rows for a profile of decode of several: sequences that stand where the first does, each with keys and values of its
//! own. Where a plan verifies drafts of fewer sequences, the other rows follow the first sequence's.

use anyhow::{Result, ensure};
use gemma4c_plan::cuda::{CudaProgram, RECORD_WORDS, Range, Region, record};
use gemma4c_runtime::Backend;

/// Positions beyond the depth that a profile may decode.
const AHEAD: u32 = 16;

/// Copies the keys and values of the first sequence, which has `depth` tokens, to as many others as a decode of `rows`
/// may have, and lets each decode another token. Rows beyond them are the next of the first sequence, as far as the
/// plan verifies drafts.
pub fn join(backend: &mut dyn Backend, program: &CudaProgram, rows: u32, depth: u32, vocab_size: u32) -> Result<()> {
    let (layout, places) = (&program.kv_layout, &program.places);
    let sequences = rows.min(layout.slots);
    let has_blocks = layout.block_bytes > 0;
    let pages = (depth + AHEAD).div_ceil(layout.block_rows).min(places.max_pages);
    ensure!(
        !has_blocks || sequences * pages <= layout.blocks,
        "{sequences} sequences at depth {depth} take {} blocks of keys and values: the plan has {}",
        sequences * pages,
        layout.blocks
    );
    let ring = |slot: u32| kv(slot as u64 * layout.ring_bytes, layout.ring_bytes);
    let block = |block: u32| kv(layout.blocks_at + block as u64 * layout.block_bytes, layout.block_bytes);
    let mut records = vec![0u32; (rows * RECORD_WORDS) as usize];
    for slot in 0..sequences {
        let table: Vec<u32> = (0..pages).map(|page| slot * pages + page).collect();
        if slot > 0 && layout.ring_bytes > 0 {
            backend.copy(ring(0), ring(slot))?;
        }
        if slot > 0 && has_blocks {
            table.iter().zip(0..).try_for_each(|(to, from)| backend.copy(block(from), block(*to)))?;
        }
        write(backend, places.pages + slot as u64 * places.max_pages as u64 * 4, &table)?;
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

fn kv(offset: u64, bytes: u64) -> Range {
    Range { region: Region::Kv, offset, bytes }
}

fn write(backend: &mut dyn Backend, offset: u64, words: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Ok(backend.write(Range { region: Region::Arena, offset, bytes: bytes.len() as u64 }, &bytes)?)
}
