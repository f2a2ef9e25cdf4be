//! Attention for many rows on tensor cores: a block takes a tile of rows of one query head, and passes over the keys once, tile
//! by tile, with an online softmax in f32.
//!
//! Queries and weights are rounded to the cache's 16-bit type, which the tensor cores multiply; sums are f32. Tiles of keys start
//! at multiples of their length, so that a row's sums are the same in every chunk: a tile that a row does not see changes
//! nothing of it. A warp has 16 rows; a head too wide for its registers is shared out among teams of warps, which add up
//! their parts of the scores.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{SEGMENT_ROWS, page_start, record_of, row_of_record};
use super::narrow::{head_len, widen_slot, widen_tile};
use super::plain::{first_visible, reach};

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

/// Starts to copy the keys (or values) of KEYS positions from `at` on, of one head; `cache` is the page that holds them. Positions outside
/// `first..=last` are read as the nearest inside: a page may hold anything there. Those from `stage_from` on are in the stage. Rows are eight elements apart more than they are long, so that
/// the rows of a matrix load lie in different banks.
#[device]
pub fn copy_padded_tile<const D: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    tile: Shared<KV>,
    cache: Input<KV>,
    stage: Input<KV>,
    at: u32,
    first: u32,
    last: u32,
    stage_from: u32,
    kv_row: u32,
    capacity: u32,
) {
    let from = at.max(first);
    let start = from % capacity;
    for i in (thread_idx() * 8..KEYS * D).by(THREADS * 8) {
        let position = (at + i / D).max(first).min(last);
        let row = start + (position - from);
        let wrapped = if row < capacity { row } else { row - capacity };
        let in_stage = position >= stage_from;
        let source = if in_stage { stage } else { cache };
        let of_source = if in_stage { position - stage_from } else { wrapped };
        cp_async16(tile, i / D * (D + 8) + i % D, source, of_source * kv_row + i % D);
    }
}

/// The same of codes in 8 bits, which lie as they do in the cache.
#[device]
pub fn copy_padded_codes<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    codes: Shared<KV>,
    cache: Input<KV>,
    stage: Input<KV>,
    at: u32,
    first: u32,
    last: u32,
    stage_from: u32,
    kv_row: u32,
    capacity: u32,
) {
    let len = head_len(D);
    let from = at.max(first);
    let start = from % capacity;
    for i in (thread_idx() * 8..KEYS * len).by(THREADS * 8) {
        let position = (at + i / len).max(first).min(last);
        let row = start + (position - from);
        let wrapped = if row < capacity { row } else { row - capacity };
        let in_stage = position >= stage_from;
        let source = if in_stage { stage } else { cache };
        let of_source = if in_stage { position - stage_from } else { wrapped };
        cp_async16(codes, i, source, of_source * kv_row + i % len);
    }
}

/// Two floats as a pair of the cache's type.
#[device]
pub fn pack_pair<const BF: bool>(low: f32, high: f32) -> u32 {
    if BF { pack_bf16(low, high) } else { pack_f16(low, high) }
}

#[device]
pub fn tensor_product<const BF: bool>(a: U32x4, b: U32x2, c: F32x4) -> F32x4 {
    if BF { mma_m16n8k16_bf16(a, b, c) } else { mma_m16n8k16_f16(a, b, c) }
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

/// `out = softmax(q · kᵀ) · v` for a tile of ROWS rows of one query head. The grid is (query heads, tiles of rows); `group`
/// query heads share a key-value head; `window` is `u32::MAX` for a full layer. With `staged` the chunk's own rows are in the stage. BF:
/// the cache is bf16, else f16.
#[kernel(block = THREADS, dynamic_shared, slots(
    widen(eight: U32x4, scale: u32) -> U32x4,
    reach(last: u32, row: u32) -> u32
))]
pub fn attention_flash<
    const D: u32,
    const ROWS: u32,
    const KEYS: u32,
    const COLUMNS: u32,
    const THREADS: u32,
    const BF: bool,
    const ROUNDED: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
    O: Float,
>(
    q: Input<f32>,
    k: Input<KV>,
    v: Input<KV>,
    k_stage: Input<KV>,
    v_stage: Input<KV>,
    state: Input<u32>,
    pages: Weights<u32>,
    out: Output<O>,
    group: u32,
    window: u32,
    capacity: u32,
    max_pages: u32,
    page_stride: u32,
    staged: u32,
) {
    require!(ROWS % 16 == 0 && KEYS % 16 == 0 && COLUMNS % 16 == 0);
    // A tile of a full layer lies in one page.
    require!(256 % KEYS == 0);
    // A tile has rows of one segment.
    require!(64 % ROWS == 0);
    require!(D % COLUMNS == 0 && THREADS == ROWS * 2 * (D / COLUMNS));
    let queries = shared::<KV>(ROWS * (D + 8));
    let keys = shared::<KV>(KEYS * (D + 8));
    // Of 8 bits: the codes of keys and values, which are widened to `keys` in turn.
    let mixed = shared::<KV>(if NARROW {
        2 * KEYS * ((D / 2 + if SCALED { D / 32 } else { 0 }).div_ceil(8) * 8)
    } else {
        KEYS * (D + 8)
    });
    let parts = shared::<f32>(D / COLUMNS * ROWS * KEYS);

    let heads = grid_dim();
    let head = block_idx();
    let tile = block_idx_y() * ROWS;
    let record = record_of(state, tile, 0);
    // Rows are the segment's: its own first row is 0.
    let first_row = row_of_record(record, tile, 0);
    let rows = record.y;
    if first_row >= rows {
        return;
    }
    let start = record.x;
    let first = first_visible(start + first_row, window);
    let last_row = (first_row + ROWS).min(rows) - 1;
    // The keys that any row sees. Of later rows it is no less than of earlier ones.
    let last = reach(start + last_row, record.z + last_row);
    let kv_row = heads / group * head_len(D);
    let kv_head = head / group * head_len(D);
    let k_head = k.offset(kv_head);
    let v_head = v.offset(kv_head);
    let k_own = k_stage.offset(record.z * kv_row + kv_head);
    let v_own = v_stage.offset(record.z * kv_row + kv_head);
    let stage_from = if staged == 1 { start } else { 0xffff_ffff };

    let mut at = first / KEYS * KEYS;
    let page = page_start(pages, record.w, at, window, max_pages, page_stride);
    let value_codes = mixed.offset(if NARROW { KEYS * head_len(D) } else { 0 });
    let weighed = if NARROW { keys } else { mixed };
    if NARROW {
        copy_padded_codes(mixed, k_head.offset(page), k_own, at, first, last, stage_from, kv_row, capacity);
    } else {
        copy_padded_tile(keys, k_head.offset(page), k_own, at, first, last, stage_from, kv_row, capacity);
    }
    cp_async_commit();
    if NARROW {
        copy_padded_codes(value_codes, v_head.offset(page), v_own, at, first, last, stage_from, kv_row, capacity);
    } else {
        copy_padded_tile(mixed, v_head.offset(page), v_own, at, first, last, stage_from, kv_row, capacity);
    }
    cp_async_commit();
    // Rows past the segment's end are copies of its last.
    for i in (thread_idx() * 4..ROWS * D).by(THREADS * 4) {
        let row = record.z + (first_row + i / D).min(rows - 1);
        let four = load::<F32x4>(q, (row * heads + head) * D + i % D);
        store(queries, i / D * (D + 8) + i % D, u32x2(pack_pair(four.x, four.y), pack_pair(four.z, four.w)));
    }

    // The warp's rows and columns, and of these the lane's: rows `upper` and `upper + 8`.
    let lane = lane_id();
    let team = warp_id() / (ROWS / 16);
    let tile_row = warp_id() % (ROWS / 16) * 16;
    let column = team * COLUMNS;
    let upper = first_row + tile_row + lane / 4;
    let upper_row = upper.min(rows - 1);
    let lower_row = (upper + 8).min(rows - 1);
    let upper_first = first_visible(start + upper_row, window);
    let lower_first = first_visible(start + lower_row, window);
    let upper_last = reach(start + upper_row, record.z + upper_row);
    let lower_last = reach(start + lower_row, record.z + lower_row);

    let mut upper_max = f32::NEG_INFINITY;
    let mut lower_max = f32::NEG_INFINITY;
    let mut upper_total = 0.0f32;
    let mut lower_total = 0.0f32;
    let mut sums = regs(F32x4::ZERO, COLUMNS / 8);
    while at <= last {
        let next_page = page_start(pages, record.w, (at + KEYS).min(last), window, max_pages, page_stride);
        cp_async_wait(1);
        barrier();
        if NARROW {
            widen_tile(widen, mixed, keys);
            barrier();
            if at + KEYS <= last {
                let next = k_head.offset(next_page);
                copy_padded_codes(mixed, next, k_own, at + KEYS, first, last, stage_from, kv_row, capacity);
            }
            cp_async_commit();
        }
        let mut scores = regs(F32x4::ZERO, KEYS / 8);
        #[unroll(2)]
        for depth in (column..column + COLUMNS).by(16) {
            let a = ldmatrix_x4(queries, (tile_row + lane % 16) * (D + 8) + depth + lane / 16 * 8);
            #[unroll]
            for n in 0..KEYS / 16 {
                let key = n * 16 + lane / 16 * 8 + lane % 8;
                let b = ldmatrix_x4(keys, key * (D + 8) + depth + lane / 8 % 2 * 8);
                scores[2 * n] = tensor_product(a, u32x2(b.x, b.y), scores[2 * n]);
                scores[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), scores[2 * n + 1]);
            }
        }
        if COLUMNS < D {
            #[unroll]
            for n in 0..KEYS / 8 {
                store(parts, (warp_id() * (KEYS / 8) + n) * 128 + lane * 4, scores[n]);
            }
        }
        if NARROW {
            cp_async_wait(1);
        }
        barrier();
        if NARROW {
            widen_tile(widen, value_codes, keys);
        } else {
            if at + KEYS <= last {
                let next = k_head.offset(next_page);
                copy_padded_tile(keys, next, k_own, at + KEYS, first, last, stage_from, kv_row, capacity);
            }
            // An empty group too: the waits count groups.
            cp_async_commit();
        }
        if COLUMNS < D {
            #[unroll]
            for n in 0..KEYS / 8 {
                let mut score = F32x4::ZERO;
                #[unroll]
                for other in 0..D / COLUMNS {
                    let warp = other * (ROWS / 16) + tile_row / 16;
                    let part = load::<F32x4>(parts, (warp * (KEYS / 8) + n) * 128 + lane * 4);
                    score = f32x4(score.x + part.x, score.y + part.y, score.z + part.z, score.w + part.w);
                }
                scores[n] = score;
            }
        }

        // Most tiles of a long context are seen by every row of the block.
        let is_seen_by_all = at + KEYS <= start + first_row + 1 && at >= first_visible(start + last_row, window);
        let mut upper_now = f32::NEG_INFINITY;
        let mut lower_now = f32::NEG_INFINITY;
        #[unroll]
        for n in 0..KEYS / 8 {
            let key = at + n * 8 + lane % 4 * 2;
            let mut seen = scores[n];
            if !is_seen_by_all {
                seen = f32x4(
                    masked(seen.x, key, upper_first, upper_last),
                    masked(seen.y, key + 1, upper_first, upper_last),
                    masked(seen.z, key, lower_first, lower_last),
                    masked(seen.w, key + 1, lower_first, lower_last),
                );
            }
            upper_now = upper_now.max(seen.x.max(seen.y));
            lower_now = lower_now.max(seen.z.max(seen.w));
            scores[n] = seen;
        }
        upper_now = row_max(upper_now, upper_max);
        lower_now = row_max(lower_now, lower_max);
        // A row that has seen nothing yet has no largest score: any number will do.
        let upper_base = if upper_now == f32::NEG_INFINITY { 0.0 } else { upper_now };
        let lower_base = if lower_now == f32::NEG_INFINITY { 0.0 } else { lower_now };
        let upper_factor = exp_fast(upper_max - upper_base);
        let lower_factor = exp_fast(lower_max - lower_base);
        upper_max = upper_now;
        lower_max = lower_now;
        upper_total = upper_total * upper_factor;
        lower_total = lower_total * lower_factor;
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
        #[unroll]
        for n in 0..COLUMNS / 8 {
            let sum = sums[n];
            sums[n] = f32x4(sum.x * upper_factor, sum.y * upper_factor, sum.z * lower_factor, sum.w * lower_factor);
        }

        if !NARROW {
            cp_async_wait(1);
        }
        barrier();
        if NARROW {
            if at + KEYS <= last {
                let next = v_head.offset(next_page);
                copy_padded_codes(value_codes, next, v_own, at + KEYS, first, last, stage_from, kv_row, capacity);
            }
            cp_async_commit();
        }
        #[unroll]
        for step in 0..KEYS / 16 {
            let near = scores[2 * step];
            let far = scores[2 * step + 1];
            let a = u32x4(
                pack_pair(near.x, near.y),
                pack_pair(near.z, near.w),
                pack_pair(far.x, far.y),
                pack_pair(far.z, far.w),
            );
            let key = step * 16 + lane % 16;
            #[unroll]
            for n in 0..COLUMNS / 16 {
                let b = ldmatrix_x4_trans(weighed, key * (D + 8) + column + n * 16 + lane / 16 * 8);
                sums[2 * n] = tensor_product(a, u32x2(b.x, b.y), sums[2 * n]);
                sums[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), sums[2 * n + 1]);
            }
        }
        if !NARROW {
            barrier();
            if at + KEYS <= last {
                let next = v_head.offset(next_page);
                copy_padded_tile(mixed, next, v_own, at + KEYS, first, last, stage_from, kv_row, capacity);
            }
            cp_async_commit();
        }
        at += KEYS;
    }

    upper_total = upper_total + shfl_xor(upper_total, 1);
    upper_total = upper_total + shfl_xor(upper_total, 2);
    lower_total = lower_total + shfl_xor(lower_total, 1);
    lower_total = lower_total + shfl_xor(lower_total, 2);
    // Of the chunk, from what needs no register until now.
    let row = block_idx_y() * ROWS + tile_row + lane / 4;
    let to = (row * heads + head) * D + column + lane % 4 * 2;
    #[unroll]
    for n in 0..COLUMNS / 8 {
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
    /// The largest tile that fits in a block's shared memory, with an output of F32, or of BF16 for the product that reads it.
    /// `None`: the cache is f32, or nothing fits. `ahead`: soft tokens see those of their picture that come after them.
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
            ROWS: rows,
            KEYS: keys,
            COLUMNS: columns,
            THREADS: rows * 2 * (self.head_dim / columns),
            BF: self.kv == KvType::BF16,
            ROUNDED: out == ElementType::BF16,
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KV: self.element(),
            O: out,
            widen: widen_slot(self.kv),
            reach: reach(ahead),
        }
        .build()?;
        Ok(Flash { instance, rows })
    }
}
