//! Attention for many rows on tensor cores: a block takes a tile of rows of one query head, and passes over the keys
//! once, tile by tile, with an online softmax in f32.
//!
//! Queries and weights are rounded to the cache's 16-bit type, which the tensor cores multiply; sums are f32. Tiles of
//! keys start at multiples of their length, so that a row's sums are the same in every chunk: a tile that a row does
//! not see changes nothing of it. A warp has 16 rows; a head too wide for its registers is shared out among teams of
//! warps, which add up their parts of the scores.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{SEGMENT_ROWS, first_visible, record_of, row_of_record};
use super::chunk::{RowLimits, RowSums, TileSource, base_of, chunk_of, keys_of, no_sums, row_sum, values_of};
use super::narrow::{head_len, widen_slot, widen_tile};
use super::plain::reach;
use super::split::{head_of, page_of};
use super::tensor::{pack_pair, tensor_product};
use super::view::{CacheFormat, KvView, StageView};

/// Values of a head that a warp sums: 128 registers a lane.
const WARP_COLUMNS: u32 = 256;

/// Rows and keys of a tile, largest first: the first that fits in a block's shared memory is taken.
const TILES: [(u32, u32); 2] = [(64, 32), (32, 16)];

// A tile has rows of one segment.
const _: () = {
    let mut at = 0;
    while at < TILES.len() {
        assert!(SEGMENT_ROWS.is_multiple_of(TILES[at].0));
        at += 1;
    }
};

/// The tile of a block.
#[config]
pub struct FlashTile {
    pub ROWS: u32,
    pub KEYS: u32,
    /// Values of a head that a warp sums. Teams of warps share out a wider head.
    pub COLUMNS: u32,
    pub THREADS: u32,
}

/// Issues the copies of the keys (or values) of KEYS positions from `at` on. Positions that no row sees are read as the
/// nearest that one does: a page may hold anything there. Rows are eight elements apart more than they are long, so
/// that the rows of a matrix load are in different banks.
#[device]
pub fn copy_padded_tile<const D: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    tile: Shared<KV>,
    source: TileSource<KV>,
    at: u32,
) {
    let from = at.max(source.first);
    let start = from % source.capacity;
    for i in (thread_idx() * 8..KEYS * D).by(THREADS * 8) {
        let position = (at + i / D).max(source.first).min(source.last);
        let in_stage = position >= source.stage_from;
        let memory = if in_stage { source.stage } else { source.page };
        let of_memory = if in_stage { position - source.stage_from } else { start + (position - from) };
        cp_async16(tile, i / D * (D + 8) + i % D, memory, of_memory * source.row_len + i % D);
    }
}

/// The same of codes in 8 bits, which are in shared memory as they are in the cache.
#[device]
pub fn copy_padded_codes<const D: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    codes: Shared<KV>,
    source: TileSource<KV>,
    at: u32,
) {
    let len = head_len(D);
    let from = at.max(source.first);
    let start = from % source.capacity;
    for i in (thread_idx() * 8..KEYS * len).by(THREADS * 8) {
        let position = (at + i / len).max(source.first).min(source.last);
        let in_stage = position >= source.stage_from;
        let memory = if in_stage { source.stage } else { source.page };
        let of_memory = if in_stage { position - source.stage_from } else { start + (position - from) };
        cp_async16(codes, i, memory, of_memory * source.row_len + i % len);
    }
}

/// Issues the copies of the tile at `at`, if any row sees it, as a group: an empty one too, because the waits count
/// groups.
#[device]
pub fn issue_tile<const D: u32, const KEYS: u32, const THREADS: u32, const NARROW: bool, KV: Float>(
    to: Shared<KV>,
    source: TileSource<KV>,
    at: u32,
) {
    if at <= source.last {
        if NARROW {
            copy_padded_codes(to, source, at);
        } else {
            copy_padded_tile(to, source, at);
        }
    }
    cp_async_commit();
}

#[device]
pub fn masked(score: f32, position: u32, first: u32, last: u32) -> f32 {
    if position >= first && position <= last { score } else { f32::NEG_INFINITY }
}

/// The larger of `before` and the largest of a row's scores, which four lanes hold.
#[device]
pub fn row_max(score: f32, before: f32) -> f32 {
    let pair = score.max(shfl_xor(score, 1));
    pair.max(shfl_xor(pair, 2)).max(before)
}

/// Stores two neighbouring values of the output. ROUNDED: it is bf16, else f32.
#[device]
pub fn store_pair<const ROUNDED: bool, O: Float>(out: Output<O>, at: u32, a: f32, b: f32) {
    if ROUNDED {
        store(out, at, pack_bf16(a, b));
    } else {
        store(out, at, f32x2(a, b));
    }
}

/// The queries of rows of a segment from `first_row` on, in the cache's type. Rows past the segment's end are copies of
/// its last.
#[device]
pub fn load_rows<const D: u32, const T: FlashTile, const BF: bool, KV: Float>(
    queries: Shared<KV>,
    q: Input<f32>,
    record: U32x4,
    first_row: u32,
) {
    for i in (thread_idx() * 4..T.ROWS * D).by(T.THREADS * 4) {
        let row = record.z + (first_row + i / D).min(record.y - 1);
        let four = load::<F32x4>(q, (row * grid_dim() + block_idx()) * D + i % D);
        store(queries, i / D * (D + 8) + i % D, u32x2(pack_pair(four.x, four.y), pack_pair(four.z, four.w)));
    }
}

/// Scores of a tile's keys with 16 rows from `tile_row` on, over the warp's columns from `column` on.
#[device]
pub fn score_rows<const D: u32, const T: FlashTile, const BF: bool, KV: Float>(
    queries: Shared<KV>,
    keys: Shared<KV>,
    tile_row: u32,
    column: u32,
    scores: &mut Regs<F32x4>,
) {
    let lane = lane_id();
    #[unroll(2)]
    for depth in (column..column + T.COLUMNS).by(16) {
        let a = ldmatrix_x4(queries, (tile_row + lane % 16) * (D + 8) + depth + lane / 16 * 8);
        #[unroll]
        for n in 0u32..T.KEYS / 16 {
            let key = n * 16 + lane / 16 * 8 + lane % 8;
            let b = ldmatrix_x4(keys, key * (D + 8) + depth + lane / 8 % 2 * 8);
            scores[2 * n] = tensor_product(a, u32x2(b.x, b.y), scores[2 * n]);
            scores[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), scores[2 * n + 1]);
        }
    }
}

/// Parts of scores that the warp's team has, for the others.
#[device]
pub fn store_parts<const KEYS: u32>(parts: Shared<f32>, scores: &mut Regs<F32x4>) {
    #[unroll]
    for n in 0..KEYS / 8 {
        store(parts, (warp_id() * (KEYS / 8) + n) * 128 + lane_id() * 4, scores[n]);
    }
}

/// The sums of all teams' parts.
#[device]
pub fn add_parts<const D: u32, const T: FlashTile>(parts: Shared<f32>, tile_row: u32, scores: &mut Regs<F32x4>) {
    #[unroll]
    for n in 0u32..T.KEYS / 8 {
        let mut score = F32x4::ZERO;
        #[unroll]
        for other in 0..D / T.COLUMNS {
            let warp = other * (T.ROWS / 16) + tile_row / 16;
            let part = load::<F32x4>(parts, (warp * (T.KEYS / 8) + n) * 128 + lane_id() * 4);
            score = f32x4(score.x + part.x, score.y + part.y, score.z + part.z, score.w + part.w);
        }
        scores[n] = score;
    }
}

/// Scores become weights relative to the largest score so far. `at` is the tile's first position. The result has what
/// brings earlier sums of the two rows to that score.
#[device]
pub fn weigh_rows<const KEYS: u32>(
    scores: &mut Regs<F32x4>,
    at: u32,
    limits: RowLimits,
    is_seen_by_all: bool,
    rows: &mut RowSums,
) -> F32x2 {
    let mut upper_now = f32::NEG_INFINITY;
    let mut lower_now = f32::NEG_INFINITY;
    #[unroll]
    for n in 0..KEYS / 8 {
        let key = at + n * 8 + lane_id() % 4 * 2;
        let mut seen = scores[n];
        if !is_seen_by_all {
            seen = f32x4(
                masked(seen.x, key, limits.upper_first, limits.upper_last),
                masked(seen.y, key + 1, limits.upper_first, limits.upper_last),
                masked(seen.z, key, limits.lower_first, limits.lower_last),
                masked(seen.w, key + 1, limits.lower_first, limits.lower_last),
            );
        }
        upper_now = upper_now.max(seen.x.max(seen.y));
        lower_now = lower_now.max(seen.z.max(seen.w));
        scores[n] = seen;
    }
    upper_now = row_max(upper_now, rows.upper_max);
    lower_now = row_max(lower_now, rows.lower_max);
    let upper_base = base_of(upper_now);
    let lower_base = base_of(lower_now);
    let upper_factor = exp_fast(rows.upper_max - upper_base);
    let lower_factor = exp_fast(rows.lower_max - lower_base);
    let mut upper_total = rows.upper_total * upper_factor;
    let mut lower_total = rows.lower_total * lower_factor;
    #[unroll]
    for n in 0..KEYS / 8 {
        let score = scores[n];
        let weight = f32x4(
            exp_fast(score.x - upper_base),
            exp_fast(score.y - upper_base),
            exp_fast(score.z - lower_base),
            exp_fast(score.w - lower_base),
        );
        upper_total = upper_total + (weight.x + weight.y);
        lower_total = lower_total + (weight.z + weight.w);
        scores[n] = weight;
    }
    *rows = RowSums { upper_max: upper_now, lower_max: lower_now, upper_total, lower_total };
    f32x2(upper_factor, lower_factor)
}

/// Adds a tile's values times their weights to the warp's columns of the sums.
#[device]
pub fn mix_rows<const D: u32, const T: FlashTile, const BF: bool, KV: Float>(
    weights: &mut Regs<F32x4>,
    values: Shared<KV>,
    column: u32,
    sums: &mut Regs<F32x4>,
) {
    let lane = lane_id();
    #[unroll]
    for step in 0u32..T.KEYS / 16 {
        let near = weights[2 * step];
        let far = weights[2 * step + 1];
        let a = u32x4(
            pack_pair(near.x, near.y),
            pack_pair(near.z, near.w),
            pack_pair(far.x, far.y),
            pack_pair(far.z, far.w),
        );
        let key = step * 16 + lane % 16;
        #[unroll]
        for n in 0u32..T.COLUMNS / 16 {
            let b = ldmatrix_x4_trans(values, key * (D + 8) + column + n * 16 + lane / 16 * 8);
            sums[2 * n] = tensor_product(a, u32x2(b.x, b.y), sums[2 * n]);
            sums[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), sums[2 * n + 1]);
        }
    }
}

/// `out = softmax(q · kᵀ) · v` for a tile of ROWS rows of one query head. The grid is (query heads, tiles of rows);
/// `group` query heads share a key-value head.
#[kernel(block = T.THREADS, dynamic_shared, slots(
    widen(eight: U32x4, scale: u32) -> U32x4,
    reach(last: u32, row: u32) -> u32
))]
pub fn attention_flash<
    const D: u32,
    const C: CacheFormat,
    const T: FlashTile,
    const ROUNDED: bool,
    KV: Float,
    O: Float,
>(
    q: Input<f32>,
    kv: KvView<KV>,
    stage: StageView<KV>,
    state: Input<u32>,
    out: Output<O>,
    group: u32,
) {
    require!(T.ROWS % 16 == 0 && T.KEYS % 16 == 0 && T.COLUMNS % 16 == 0);
    // A tile of a full layer is in one page.
    require!(256 % T.KEYS == 0);
    // A tile has rows of one segment.
    require!(64 % T.ROWS == 0);
    require!(D % T.COLUMNS == 0 && T.THREADS == T.ROWS * 2 * (D / T.COLUMNS));
    let queries = shared::<KV>(T.ROWS * (D + 8));
    let keys = shared::<KV>(T.KEYS * (D + 8));
    // Values; of 8 bits, the codes of keys and values, which are widened to `keys` in turn.
    let second = shared::<KV>(if C.NARROW {
        2 * T.KEYS * ((D / 2 + if C.SCALED { D / 32 } else { 0 }).div_ceil(8) * 8)
    } else {
        T.KEYS * (D + 8)
    });
    let parts = shared::<f32>(D / T.COLUMNS * T.ROWS * T.KEYS);

    let heads = grid_dim();
    let tile = block_idx_y() * T.ROWS;
    let record = record_of(state, tile, 0);
    // Rows are the segment's: its own first row is 0.
    let first_row = row_of_record(record, tile, 0);
    let rows = record.y;
    if first_row >= rows {
        return;
    }
    let start = record.x;
    let last_row = (first_row + T.ROWS).min(rows) - 1;
    let head = head_of(kv, record.w, block_idx() / group, heads / group);
    let first = first_visible(start + first_row, kv.window);
    // Of later rows it is no less than of earlier ones.
    let last = reach(start + last_row, record.z + last_row);
    let chunk = chunk_of(head, stage, record, block_idx() / group * head_len(D), first, last);

    let mut at = chunk.first / T.KEYS * T.KEYS;
    let page = page_of(head, at);
    // Where copies of keys and values arrive, and values are multiplied.
    let key_tile = if C.NARROW { second } else { keys };
    let value_tile = second.offset(if C.NARROW { T.KEYS * head_len(D) } else { 0 });
    let values = if C.NARROW { keys } else { second };
    issue_tile(key_tile, keys_of(chunk, page), at);
    issue_tile(value_tile, values_of(chunk, page), at);
    load_rows(queries, q, record, first_row);

    // The warp's rows and columns, and of these the lane's: rows `upper` and `upper + 8`.
    let tile_row = warp_id() % (T.ROWS / 16) * 16;
    let column = warp_id() / (T.ROWS / 16) * T.COLUMNS;
    let upper = first_row + tile_row + lane_id() / 4;
    let upper_row = upper.min(rows - 1);
    let lower_row = (upper + 8).min(rows - 1);
    let limits = RowLimits {
        upper_first: first_visible(start + upper_row, kv.window),
        upper_last: reach(start + upper_row, record.z + upper_row),
        lower_first: first_visible(start + lower_row, kv.window),
        lower_last: reach(start + lower_row, record.z + lower_row),
    };
    let mut of_rows = no_sums();
    let mut sums = regs(F32x4::ZERO, T.COLUMNS / 8);
    while at <= chunk.last {
        let next = at + T.KEYS;
        let next_page = page_of(head, next.min(chunk.last));
        cp_async_wait(1);
        barrier();
        if C.NARROW {
            widen_tile(widen, key_tile, keys);
            barrier();
            issue_tile(key_tile, keys_of(chunk, next_page), next);
        }
        let mut scores = regs(F32x4::ZERO, T.KEYS / 8);
        score_rows(queries, keys, tile_row, column, &mut scores);
        if T.COLUMNS < D {
            store_parts(parts, &mut scores);
        }
        if C.NARROW {
            cp_async_wait(1);
        }
        barrier();
        if C.NARROW {
            widen_tile(widen, value_tile, keys);
        } else {
            issue_tile(key_tile, keys_of(chunk, next_page), next);
        }
        if T.COLUMNS < D {
            add_parts(parts, tile_row, &mut scores);
        }
        // Most tiles of a long context are seen by every row of the block.
        let is_seen_by_all = next <= start + first_row + 1 && at >= first_visible(start + last_row, kv.window);
        let factors = weigh_rows(&mut scores, at, limits, is_seen_by_all, &mut of_rows);
        #[unroll]
        for n in 0u32..T.COLUMNS / 8 {
            let sum = sums[n];
            sums[n] = f32x4(sum.x * factors.x, sum.y * factors.x, sum.z * factors.y, sum.w * factors.y);
        }
        if !C.NARROW {
            cp_async_wait(1);
        }
        barrier();
        if C.NARROW {
            issue_tile(value_tile, values_of(chunk, next_page), next);
        }
        mix_rows(&mut scores, values, column, &mut sums);
        if !C.NARROW {
            barrier();
            issue_tile(value_tile, values_of(chunk, next_page), next);
        }
        at = next;
    }

    let upper_total = row_sum(of_rows.upper_total);
    let lower_total = row_sum(of_rows.lower_total);
    // Of the chunk, from what needs no register until now.
    let row = block_idx_y() * T.ROWS + tile_row + lane_id() / 4;
    let to = (row * heads + block_idx()) * D + column + lane_id() % 4 * 2;
    #[unroll]
    for n in 0u32..T.COLUMNS / 8 {
        let sum = sums[n];
        if upper < rows {
            store_pair(out, to + n * 8, sum.x / upper_total, sum.y / upper_total);
        }
        if upper + 8 < rows {
            store_pair(out, to + 8 * heads * D + n * 8, sum.z / lower_total, sum.w / lower_total);
        }
    }
}

/// An instance and the rows of its tile.
#[derive(Clone, Debug)]
pub struct Flash {
    pub instance: Instance,
    pub rows: u32,
}

impl Flash {
    pub fn grid(&self, layer: &Attention, rows: u32) -> [u32; 3] {
        [layer.heads(), rows.div_ceil(self.rows), 1]
    }
}

impl Attention {
    /// The largest tile that fits in a block's shared memory, with an output of F32, or of BF16 for the product that
    /// reads it. `None`: the cache is f32, or nothing fits. `ahead`: soft tokens see those of their picture that come
    /// after them.
    pub fn flash(&self, out: ElementType, ahead: bool) -> Result<Option<Flash>, InstanceError> {
        if self.kv == KvType::F32 {
            return Ok(None);
        }
        for (rows, keys) in TILES {
            let flash = self.flash_tile(out, rows, keys, WARP_COLUMNS, ahead)?;
            if flash.instance.shared_bytes() <= self.shared_bytes {
                return Ok(Some(flash));
            }
        }
        Ok(None)
    }

    /// Tiles of that many rows and keys; a warp sums that many columns.
    pub fn flash_tile(
        &self,
        out: ElementType,
        rows: u32,
        keys: u32,
        columns: u32,
        ahead: bool,
    ) -> Result<Flash, InstanceError> {
        let columns = columns.min(self.head_dim);
        let instance = attention_flash::Chosen {
            D: self.head_dim,
            C: CacheFormat::of(self.kv),
            T: FlashTile { ROWS: rows, KEYS: keys, COLUMNS: columns, THREADS: rows * 2 * (self.head_dim / columns) },
            ROUNDED: out == ElementType::BF16,
            KV: self.element(),
            O: out,
            widen: widen_slot(self.kv),
            reach: reach(ahead),
        }
        .build()?;
        Ok(Flash { instance, rows })
    }
}
