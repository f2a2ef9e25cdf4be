//! What only a drafter needs: the hidden state that it starts from, the groups of tokens that it looks at, their
//! scores, and its choice.
//!
//! A drafter guesses several tokens one after the other without the host: a choice goes into the drafter's own record,
//! which its next step reads, and into the records of the rows that will verify it. Its products, norms and attention
//! are those of any decoded row. Which drafts of a round are kept is decided here too, so that the next round can begin
//! before the host has read this one.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::sample::{LargestScratch, RowSlices, TokenHistory, keep_largest, key_of, largest_key, token_of};
use super::values::value;

/// Groups of `each` tokens. `order` lists all tokens group by group, `ids` are the groups that are looked at.
#[view]
pub struct TokenGroups {
    ids: Input<u32>,
    order: Weights<u32>,
    each: u32,
}

/// Where a draft is written: the drafter's own `record`, `drafts`, and the records `rows` of those that verify it,
/// `most` after the first. `given[d]`, where not 0, is one more than the token that is verified in the place of draft
/// d.
#[view]
pub struct DraftRound {
    record: InOut<u32>,
    rows: InOut<u32>,
    drafts: InOut<u32>,
    given: Input<u32>,
    most: u32,
}

/// The token of score `at`: scores are those of the groups `ids`, one group after the other.
#[device]
pub fn token_of_group(groups: TokenGroups, at: u32) -> u32 {
    groups.order[groups.ids[at / groups.each] * groups.each + at % groups.each]
}

/// `out` = the RMS norm of one of the rows `x`, by `weight`: what the LM head read there. Word 2 of `record` is the
/// row's number. One block.
#[kernel(block = 256, dependent)]
pub fn enter_draft(
    x: Input<f32>,
    weight: Weights<f32>,
    record: Input<u32>,
    out: Output<f32>,
    width: u32,
    epsilon: f32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = x.offset(record[2u32] * width);
    let mut squares = 0.0f32;
    for i in (thread_idx()..width).by(256) {
        squares += row[i] * row[i];
    }
    let factor = rsqrt(block_sum(squares) / width as f32 + epsilon);
    for i in (thread_idx()..width).by(256) {
        out[i] = row[i] * factor * weight[i];
    }
}

/// `ids` = the KEPT groups with the largest scores, the largest first, of equal ones the lower group. One block has all
/// scores, PER to a thread.
#[kernel(block = THREADS, dependent)]
pub fn closest_groups<const THREADS: u32, const PER: u32, const KEPT: u32>(
    scores: Input<f32>,
    ids: Output<u32>,
    groups: u32,
) {
    require!(KEPT <= THREADS && THREADS >= 64);
    let kept = shared::<u64>(KEPT);
    let found = shared::<u64>(KEPT * PER);
    let count = shared::<u32>(1);
    let counts = shared::<u32>(32);
    grid_launch_dependents();
    grid_dependency_wait();
    let me = thread_idx();
    let mut keys = regs(0u64, PER);
    #[unroll]
    for i in 0..PER {
        let group = i * THREADS + me;
        if group < groups {
            keys[i] = key_of(scores[group], group);
        }
    }
    keep_largest(&keys, kept, LargestScratch { found, count, counts });
    if me < KEPT {
        // Key 0 is no group's: it stands for the last one.
        ids[me] = token_of(kept[me]).min(groups - 1);
    }
}

/// `out[i] = W[token i] · x`, of `count` tokens in groups. A warp takes a token.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn token_scores(x: Input<f32>, groups: TokenGroups, out: Output<f32>, k: u32, count: u32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let at = block_idx() * 8 + warp_id();
    if at < count {
        let token = token_of_group(groups, at);
        let start = token as u64 * k as u64;
        let mut sum = 0.0f32;
        for i in (lane_id()..k).by(32) {
            sum = value(start + i as u64).mul_add(x[i], sum);
        }
        let sum = warp_sum(sum);
        if lane_id() == 0 {
            out[at] = sum;
        }
    }
}

/// The token with the largest of `count` scores, of equal ones the lower token: `u32::MAX` where none is a number.
/// Scores are those of all tokens in turn or, where they are GROUPED, those that [`token_scores`] writes. A block takes
/// a slice of THREADS * PER scores; the last one of the grid goes on.
///
/// Word 2 of the drafter's record becomes the token, and word 4, the number of tokens drafted so far, is incremented:
/// from d, say. `drafts[d]` = token, and so is word 2 of record d + 1 of `rows`, whose word 1 says that it is now in
/// use.
#[kernel(block = THREADS, dependent)]
pub fn draft_token<const THREADS: u32, const PER: u32, const GROUPED: bool>(
    scores: Input<f32>,
    count: u32,
    groups: TokenGroups,
    slices: RowSlices,
    round: DraftRound,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let me = thread_idx();
    let mut keys = regs(0u64, PER);
    #[unroll]
    for i in 0..PER {
        let at = (block_idx() * PER + i) * THREADS + me;
        if at < count {
            let mut token = at;
            if GROUPED {
                token = token_of_group(groups, at);
            }
            keys[i] = key_of(scores[at], token);
        }
    }
    let of_slice = largest_key(&keys);
    if me == 0 {
        slices.largest[block_idx()] = of_slice;
    }
    // The whole block returns: another one will finish.
    if !last_block_of(slices.counters, 0u32, grid_dim()) {
        return;
    }
    #[unroll]
    for i in 0..PER {
        let at = i * THREADS + me;
        keys[i] = 0;
        if at < grid_dim() {
            keys[i] = slices.largest[at];
        }
    }
    let of_all = largest_key(&keys);
    if me == 0 {
        let token = token_of(of_all);
        let drafted = round.record[4u32];
        round.record[2u32] = token;
        round.record[4u32] = drafted + 1;
        if drafted < round.most {
            let verified = if round.given[drafted] == 0 { token } else { round.given[drafted] - 1 };
            round.drafts[drafted] = verified;
            round.rows[(drafted + 1) * 16 + 1] = 1;
            round.rows[(drafted + 1) * 16 + 2] = verified;
        }
    }
}

/// Ends a round of one sequence: keeps the drafts that were picked from the rows before them, up to the first that was
/// not, and prepares the records for the next round. One warp; a lane has a row, of which there are MOST after the
/// first.
///
/// The picks have written each row's token to word 2 of its record in `rows`, and advanced its position and its tick.
/// Rows in use behind the first have the drafts before them in `drafts`. Of m drafts that are kept, row m's token comes
/// next. Then the first row is that token's, the others are free, at the positions behind it; of the two records at
/// `record`, which a drafter begins with, the first is of that token, and the second, of the position before, names row
/// m. `given` is cleared.
///
/// The entry of `history` that the picks wrote has the m drafts and the token behind them, then `u32::MAX`; nothing but
/// that where row m picked no token.
#[kernel(block = 32, dependent)]
pub fn accept_drafts<const MOST: u32>(
    drafts: Input<u32>,
    rows: InOut<u32>,
    record: InOut<u32>,
    given: InOut<u32>,
    history: TokenHistory,
) {
    require!(MOST >= 1 && MOST < 32);
    grid_launch_dependents();
    grid_dependency_wait();
    let me = thread_idx();
    let mut is_right = false;
    if me < MOST {
        is_right = rows[(me + 1) * 16 + 1] != 0 && drafts[me] == rows[me * 16 + 2];
    }
    let right = ballot(is_right);
    // Ones below the lowest zero, which there is: the last lane has no draft behind it.
    let accepted = (((right ^ 0xffff_ffff) & (right + 1)) - 1).count_ones();
    let position = rows[0u32] + accepted;
    let tick = rows[4u32];
    let token = rows[accepted * 16 + 2];
    // Every lane has read before any writes.
    warp_barrier();
    if me <= MOST {
        rows[me * 16] = position + me;
        rows[me * 16 + 1] = if me == 0 { 1u32 } else { 0u32 };
        rows[me * 16 + 2] = if me == 0 { token } else { 0u32 };
        rows[me * 16 + 4] = tick;
        if me > accepted || token == 0xffff_ffff {
            history.tokens[(tick + history.len - 1) % history.len * history.rows + me] = 0xffff_ffff;
        }
    }
    if me < MOST {
        given[me] = 0;
    }
    if me == 0 {
        record[0u32] = position;
        record[2u32] = token;
        record[4u32] = 0;
        record[16u32] = position - 1;
        record[18u32] = accepted;
    }
}

/// An [`enter_draft`], of one block.
pub fn enter() -> Result<Instance, InstanceError> {
    enter_draft::Chosen {}.build()
}

/// A [`closest_groups`] of one block: the `kept` best of so many.
pub fn closest(groups: u32, kept: u32) -> Result<Instance, InstanceError> {
    let threads = if groups > 256 { 512 } else { 256 };
    closest_groups::Chosen { THREADS: threads, PER: groups.div_ceil(threads), KEPT: kept }.build()
}

/// The most groups, and the most of them that are kept: what one block holds.
pub const MOST_GROUPS: u32 = 8192;
pub const MOST_KEPT_GROUPS: u32 = 256;

/// A [`token_scores`] of matrices of that type, and its blocks.
pub fn scores(dtype: DType) -> Result<Instance, InstanceError> {
    token_scores::Chosen { value: value(dtype) }.build()
}

/// Blocks of a [`token_scores`].
pub fn scores_grid(count: u32) -> [u32; 3] {
    [count.div_ceil(8), 1, 1]
}

/// Threads of a [`draft_token`], and scores of a thread.
const SLICE_THREADS: u32 = 256;
const SLICE_PER: u32 = 8;

/// A [`draft_token`].
pub fn choice(grouped: bool) -> Result<Instance, InstanceError> {
    draft_token::Chosen { THREADS: SLICE_THREADS, PER: SLICE_PER, GROUPED: grouped }.build()
}

/// An [`accept_drafts`] of rounds of at most so many drafts: fewer than a warp has lanes.
pub fn accept(most: u32) -> Result<Instance, InstanceError> {
    accept_drafts::Chosen { MOST: most }.build()
}

/// Slices of so many scores: blocks of a [`draft_token`], each of which writes a key. One block can read all keys, up
/// to 4 million scores.
pub fn slices(count: u32) -> u32 {
    count.div_ceil(SLICE_THREADS * SLICE_PER)
}
