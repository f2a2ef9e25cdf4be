//! Attention for many rows on Hopper: the tensor cores' asynchronous products (wgmma) over tiles of keys and values that lie in shared memory as these read them.
//!
//! ```text
//! block: 64 or 128 rows of one key-value head, a row being a query and one of the heads that share the keys
//!
//! keys ──► cp.async ──► scores = queries · keysᵀ ──► online softmax in registers ──► sums += weights · values ◄── cp.async ◄── values
//! ```
//!
//! All query heads of a key-value head lie beside each other in the tile, so that what was copied serves them all: L2 would not keep up with fewer rows. A warpgroup has 64 rows, and sums up to
//! 256 values of a head. A wider head is shared out between two warpgroups: each multiplies its half of queries, keys and values, they add up their parts of the scores out of shared memory, and
//! weigh alike. For many rows both are of one block; for few, of two blocks of a cluster, so that twice as many SMs have work. Keys of a tile are copied while the tile before is weighed and
//! summed, values while their keys are multiplied.
//!
//! Queries and weights are rounded to the cache's 16-bit type; sums are f32. Tiles of keys start at multiples of their length, so that a row's sums are the same in every chunk
//! and beside any rows: a tile that a row does not see changes nothing of it. Caches of 8 bits and of f32 are left to [`flash`](super::flash) and [`plain`](super::plain).

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{SEGMENT_ROWS, page_start, record_of};
use super::flash::{masked, pack_pair, row_max, store_pair};
use super::plain::{first_visible, reach};

/// Values of a head that a warpgroup sums: 128 registers a thread.
const MOST_COLUMNS: u32 = 256;

/// Keys of a tile: 32 registers of scores a thread.
const TILE_KEYS: u32 = 64;

// A tile is of one record: of 64 rows of a chunk, and all query heads that share their keys.
const _: () = assert!(SEGMENT_ROWS == 64);

/// Starts to copy WIDTH values of the keys (or values) of KEYS positions from `at` on, to tiles of 64 columns, swizzled; `cache` is the page that holds them. Positions
/// outside `first..=last` are read as the nearest inside: a page may hold anything there. Those from `stage_from` on are in the stage.
#[device]
pub fn copy_swizzled_tile<const WIDTH: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
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
    // The thread's piece of every so many rows: 16 bytes.
    require!(THREADS * 8 / WIDTH == 4 || THREADS * 8 / WIDTH % 8 == 0);
    let at_once = THREADS * 8 / WIDTH;
    let row = thread_idx() / (WIDTH / 8);
    let column = thread_idx() % (WIDTH / 8);
    let to = tile.offset(column / 8 * (KEYS * 64) + row * 64);
    let place = (column % 8 ^ row % 8) * 8;
    let from = at.max(first);
    let start = from % capacity;
    let in_stage = at >= stage_from;
    let in_one_piece = in_stage || (stage_from - at >= KEYS && start + KEYS <= capacity);
    if at >= first && at + KEYS <= last + 1 && in_one_piece {
        let begin = if in_stage { at - stage_from } else { start };
        let source = if in_stage { stage } else { cache };
        let own = source.offset((begin + row) * kv_row + column * 8);
        #[unroll]
        for i in 0..KEYS * WIDTH / (THREADS * 8) {
            cp_async16(to, i * at_once * 64 + (place ^ i * at_once % 8 * 8), own, i * at_once * kv_row);
        }
    } else {
        #[unroll(1)]
        for i in 0..KEYS * WIDTH / (THREADS * 8) {
            let position = (at + row + i * at_once).max(first).min(last);
            let of_page = start + (position - from);
            let wrapped = if of_page < capacity { of_page } else { of_page - capacity };
            let staged = position >= stage_from;
            let source = if staged { stage } else { cache };
            let of_source = if staged { position - stage_from } else { wrapped };
            cp_async16(to, i * at_once * 64 + (place ^ i * at_once % 8 * 8), source, of_source * kv_row + column * 8);
        }
    }
}

/// log2(e): softmax is made of powers of two.
#[device]
pub fn log2_e() -> f32 {
    f32::from_bits(0x3fb8_aa3b)
}

/// `out = softmax(q · kᵀ) · v` for ROWS rows of one key-value head. The grid is (key-value heads, D / WIDTH blocks for each tile of rows): 64 rows of the chunk times the `group` query heads that
/// share the keys are shared out among tiles. A block has WIDTH values of a head, a warpgroup COLUMNS of them. Late tiles, which see most, come first. `window` is `u32::MAX` for a full layer. With `staged` the chunk's own rows are in the stage. BF: the
/// cache is bf16, else f16.
#[kernel(block = THREADS, min_blocks = 1, cluster = D / WIDTH, dynamic_shared, slots(reach(last: u32, row: u32) -> u32))]
pub fn attention_warpgroups<
    const D: u32,
    const KEYS: u32,
    const WIDTH: u32,
    const COLUMNS: u32,
    const ROWS: u32,
    const THREADS: u32,
    const BF: bool,
    const ROUNDED: bool,
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
    // A tile of a full layer lies in one page.
    require!(KEYS % 32 == 0 && 256 % KEYS == 0);
    require!(COLUMNS % 64 == 0 && COLUMNS <= 256 && (D == COLUMNS || D == 2 * COLUMNS));
    require!(WIDTH == COLUMNS || WIDTH == D);
    require!(ROWS % 64 == 0 && THREADS == ROWS * 2 * (WIDTH / COLUMNS) && THREADS <= 256);
    let queries = shared::<KV>(ROWS * WIDTH);
    let keys = shared::<KV>(KEYS * WIDTH);
    let values = shared::<KV>(KEYS * WIDTH);
    // Parts of scores for the other half. Between blocks two tiles of them: a block may be a tile ahead of one that still reads.
    let parts = shared::<f32>(if D == COLUMNS { 4 } else { THREADS * KEYS / 2 * (D / WIDTH) });

    let heads = grid_dim() * group;
    let tile = (grid_dim_y() - 1 - block_idx_y()) / (D / WIDTH);
    let tiles = group.div_ceil(ROWS / 64);
    let record = record_of(state, tile / tiles * 64, 0);
    // Rows of the tile, and of all, are a query of the segment and a head.
    let rows = record.y * group;
    let first_query_of_record = tile / tiles * 64 - record.z;
    let first_row = first_query_of_record * group + tile % tiles * ROWS;
    if first_row >= rows {
        return;
    }
    let end_row = rows.min((first_query_of_record + 64) * group).min(first_row + ROWS);
    let start = record.x;
    let first_query = first_row / group;
    let last_query = (end_row - 1) / group;
    let first = first_visible(start + first_query, window);
    // The keys that any row sees. Of later rows it is no less than of earlier ones.
    let last = reach(start + last_query, record.z + last_query);
    let rank = if WIDTH < D { cluster_rank() } else { 0 };
    let kv_row = grid_dim() * D;
    let column = block_idx() * D + rank * WIDTH;
    let k_head = k.offset(column);
    let v_head = v.offset(column);
    let k_own = k_stage.offset(record.z * kv_row + column);
    let v_own = v_stage.offset(record.z * kv_row + column);
    let stage_from = if staged == 1 { start } else { 0xffff_ffff };

    let mut at = first / KEYS * KEYS;
    let mut page = page_start(pages, record.w, at, window, max_pages, page_stride);
    copy_swizzled_tile(keys, k_head.offset(page), k_own, at, first, last, stage_from, kv_row, capacity);
    cp_async_commit();
    // Rows past the end are copies of the last.
    for i in (thread_idx() * 4..ROWS * WIDTH).by(THREADS * 4) {
        let row = i / WIDTH;
        let value = i % WIDTH;
        let of_all = (first_row + row).min(end_row - 1);
        let head = block_idx() * group + of_all % group;
        let four = load::<F32x4>(q, ((record.z + of_all / group) * heads + head) * D + rank * WIDTH + value);
        let to = (value / 64 * ROWS + row) * 64 + (value % 64 / 8 ^ row % 8) * 8 + value % 8;
        store(queries, to, u32x2(pack_pair(four.x, four.y), pack_pair(four.z, four.w)));
    }

    // The warpgroup's half of the block's columns, in panels of 64, and of its rows the lane's: `upper` and `upper + 8`.
    let lane = lane_id();
    let panel = if COLUMNS < WIDTH { warp_id() / 4 * (COLUMNS / 64) } else { 0 };
    let row_warp = if COLUMNS < WIDTH { warp_id() % 4 } else { warp_id() };
    let own_queries = queries.offset(panel * (ROWS * 64) + row_warp / 4 * 4096);
    let own_keys = keys.offset(panel * (KEYS * 64));
    let own_values = values.offset(panel * (KEYS * 64));
    let upper = first_row + row_warp * 16 + lane / 4;
    let upper_query = upper.min(end_row - 1) / group;
    let lower_query = (upper + 8).min(end_row - 1) / group;
    let upper_first = first_visible(start + upper_query, window);
    let lower_first = first_visible(start + lower_query, window);
    let upper_last = reach(start + upper_query, record.z + upper_query);
    let lower_last = reach(start + lower_query, record.z + lower_query);

    // Largest scores are kept times log2(e), for powers of two.
    let mut upper_max = f32::NEG_INFINITY;
    let mut lower_max = f32::NEG_INFINITY;
    let mut upper_total = 0.0f32;
    let mut lower_total = 0.0f32;
    let mut sums = regs(0.0f32, COLUMNS / 2);
    while at <= last {
        // Everybody's copies of the keys have landed, and nobody reads values any more.
        cp_async_wait(0);
        fence_proxy_async();
        barrier();
        let mut scores = regs(0.0f32, KEYS / 2);
        wgmma_fence(&mut scores);
        #[unroll]
        for depth in (0..COLUMNS).by(16) {
            let left = own_queries.offset(depth / 64 * (ROWS * 64) + depth % 64);
            wgmma_b16(&mut scores, left, own_keys.offset(depth / 64 * (KEYS * 64) + depth % 64));
        }
        wgmma_commit();
        copy_swizzled_tile(values, v_head.offset(page), v_own, at, first, last, stage_from, kv_row, capacity);
        cp_async_commit();
        wgmma_wait(0, &mut scores);
        // Nobody reads keys any more.
        let own_parts = parts.offset(at / KEYS % (D / WIDTH) * (THREADS * KEYS / 2));
        if D > COLUMNS {
            #[unroll]
            for n in 0..KEYS / 8 {
                let four = f32x4(scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3]);
                store(own_parts, (n * THREADS + thread_idx()) * 4, four);
            }
        }
        if WIDTH < D {
            cluster_barrier();
        } else {
            barrier();
        }
        if at + KEYS <= last {
            page = page_start(pages, record.w, at + KEYS, window, max_pages, page_stride);
            let next = k_head.offset(page);
            copy_swizzled_tile(keys, next, k_own, at + KEYS, first, last, stage_from, kv_row, capacity);
        }
        // An empty group too: the waits count groups.
        cp_async_commit();
        if D > COLUMNS {
            #[unroll]
            for n in 0..KEYS / 8 {
                let other = if WIDTH < D {
                    load_peer::<F32x4>(own_parts, (n * THREADS + thread_idx()) * 4, 1 - rank)
                } else {
                    load::<F32x4>(own_parts, (n * THREADS + (thread_idx() ^ 128)) * 4)
                };
                scores[4 * n] = scores[4 * n] + other.x;
                scores[4 * n + 1] = scores[4 * n + 1] + other.y;
                scores[4 * n + 2] = scores[4 * n + 2] + other.z;
                scores[4 * n + 3] = scores[4 * n + 3] + other.w;
            }
        }

        // Most tiles of a long context are seen by every row of the block.
        let is_seen_by_all = at + KEYS <= start + first_query + 1 && at >= first_visible(start + last_query, window);
        if !is_seen_by_all {
            #[unroll]
            for n in 0..KEYS / 8 {
                let key = at + n * 8 + lane % 4 * 2;
                scores[4 * n] = masked(scores[4 * n], key, upper_first, upper_last);
                scores[4 * n + 1] = masked(scores[4 * n + 1], key + 1, upper_first, upper_last);
                scores[4 * n + 2] = masked(scores[4 * n + 2], key, lower_first, lower_last);
                scores[4 * n + 3] = masked(scores[4 * n + 3], key + 1, lower_first, lower_last);
            }
        }
        let mut upper_now = f32::NEG_INFINITY;
        let mut lower_now = f32::NEG_INFINITY;
        #[unroll]
        for n in 0..KEYS / 8 {
            upper_now = upper_now.max(scores[4 * n].max(scores[4 * n + 1]));
            lower_now = lower_now.max(scores[4 * n + 2].max(scores[4 * n + 3]));
        }
        upper_now = row_max(upper_now * log2_e(), upper_max);
        lower_now = row_max(lower_now * log2_e(), lower_max);
        // A row that has seen nothing yet has no largest score: any number will do.
        let upper_base = if upper_now == f32::NEG_INFINITY { 0.0 } else { upper_now };
        let lower_base = if lower_now == f32::NEG_INFINITY { 0.0 } else { lower_now };
        let upper_factor = exp2_flushed(upper_max - upper_base);
        let lower_factor = exp2_flushed(lower_max - lower_base);
        upper_max = upper_now;
        lower_max = lower_now;
        upper_total = upper_total * upper_factor;
        lower_total = lower_total * lower_factor;
        let mut weights = regs(U32x4::ZERO, KEYS / 16);
        #[unroll]
        for step in 0..KEYS / 16 {
            let near = weights_of_four(&mut scores, 8 * step, upper_base, lower_base);
            let far = weights_of_four(&mut scores, 8 * step + 4, upper_base, lower_base);
            upper_total = upper_total + (near.x + near.y);
            lower_total = lower_total + (near.z + near.w);
            upper_total = upper_total + (far.x + far.y);
            lower_total = lower_total + (far.z + far.w);
            weights[step] = u32x4(
                pack_pair(near.x, near.y),
                pack_pair(near.z, near.w),
                pack_pair(far.x, far.y),
                pack_pair(far.z, far.w),
            );
        }
        // Behind the first tiles a larger score is rare.
        if warp_any(upper_factor != 1.0 || lower_factor != 1.0) {
            #[unroll]
            for n in 0..COLUMNS / 8 {
                sums[4 * n] = sums[4 * n] * upper_factor;
                sums[4 * n + 1] = sums[4 * n + 1] * upper_factor;
                sums[4 * n + 2] = sums[4 * n + 2] * lower_factor;
                sums[4 * n + 3] = sums[4 * n + 3] * lower_factor;
            }
        }

        // Everybody's copies of the values have landed.
        cp_async_wait(1);
        fence_proxy_async();
        barrier();
        wgmma_fence(&mut sums);
        #[unroll]
        for step in 0..KEYS / 16 {
            let right = own_values.offset(step * 1024);
            wgmma_b16_held_across(&mut sums, weights[step], right, KEYS * 64);
        }
        wgmma_commit();
        wgmma_wait(0, &mut sums);
        at += KEYS;
    }

    upper_total = upper_total + shfl_xor(upper_total, 1);
    upper_total = upper_total + shfl_xor(upper_total, 2);
    lower_total = lower_total + shfl_xor(lower_total, 1);
    lower_total = lower_total + shfl_xor(lower_total, 2);
    let upper_share = 1.0 / upper_total;
    let lower_share = 1.0 / lower_total;
    #[unroll]
    for lower in 0u32..2 {
        let row = upper + lower * 8;
        if row < end_row {
            let head = block_idx() * group + row % group;
            let share = if lower == 1 { lower_share } else { upper_share };
            let to = ((record.z + row / group) * heads + head) * D + rank * WIDTH + panel * 64 + lane % 4 * 2;
            #[unroll]
            for n in 0..COLUMNS / 8 {
                let from = 4 * n + 2 * lower;
                store_pair(out, to + n * 8, sums[from] * share, sums[from + 1] * share);
            }
        }
    }
    if WIDTH < D {
        // The other block may still read this one's parts.
        cluster_barrier();
    }
}

/// The weights of four scores from `from` on, two of the upper and two of the lower row.
#[device]
pub fn weights_of_four(scores: &mut Regs<f32>, from: u32, upper_base: f32, lower_base: f32) -> F32x4 {
    f32x4(
        exp2_flushed(scores[from].mul_add(log2_e(), -upper_base)),
        exp2_flushed(scores[from + 1].mul_add(log2_e(), -upper_base)),
        exp2_flushed(scores[from + 2].mul_add(log2_e(), -lower_base)),
        exp2_flushed(scores[from + 3].mul_add(log2_e(), -lower_base)),
    )
}

/// The warpgroups of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// 64 rows, and 256 values of a head: a wider head is shared out between two blocks of a cluster.
    One,
    /// 128 rows, or 64 and both halves of a wider head.
    Two,
}

/// Why an attention is not made by warpgroups.
pub const NOT_HALVES: &str = "keys and values are not 16-bit floats";
pub const NO_HEADS: &str = "heads are not of 64, 128, 256 or 512 values";

impl Attention {
    /// Whether warpgroups can take this layer, where the GPU has them; or why not.
    pub fn fits_warpgroups(&self) -> Result<(), &'static str> {
        match self.kv {
            KvType::F16 | KvType::BF16 => {}
            _ => return Err(NOT_HALVES),
        }
        if matches!(self.head_dim, 64 | 128 | 256 | 512) { Ok(()) } else { Err(NO_HEADS) }
    }

    /// The kernel for such a block, with an output of F32, or of BF16 for the product that reads it. All blocks give the same bits. `ahead`: soft tokens see those
    /// of their picture that come after them.
    pub fn warpgroups(&self, block: Block, out: ElementType, ahead: bool) -> Result<Instance, InstanceError> {
        let columns = self.head_dim.min(MOST_COLUMNS);
        let width = self.head_dim / self.blocks_of_head(block);
        attention_warpgroups::Chosen {
            D: self.head_dim,
            KEYS: TILE_KEYS,
            WIDTH: width,
            COLUMNS: columns,
            ROWS: self.block_rows(block),
            THREADS: self.block_rows(block) * 2 * (width / columns),
            BF: self.kv == KvType::BF16,
            ROUNDED: out == ElementType::BF16,
            KV: self.element(),
            O: out,
            reach: reach(ahead),
        }
        .build()
    }

    /// Two warpgroups share what was copied; where blocks of one are no more than SMs, each has an SM for itself.
    pub fn block_for(&self, rows: u32) -> Block {
        let [x, y, _] = self.warpgroups_grid(Block::One, rows);
        if x * y <= self.multiprocessors { Block::One } else { Block::Two }
    }

    /// Rows of such a block.
    pub fn block_rows(&self, block: Block) -> u32 {
        match block {
            Block::Two if self.head_dim <= MOST_COLUMNS => 128,
            _ => 64,
        }
    }

    /// Blocks that share out a head.
    fn blocks_of_head(&self, block: Block) -> u32 {
        match block {
            Block::One => self.head_dim.div_ceil(MOST_COLUMNS),
            Block::Two => 1,
        }
    }

    /// Every 64 rows times the query heads of a key-value head are shared out among blocks.
    pub fn warpgroups_grid(&self, block: Block, rows: u32) -> [u32; 3] {
        let tiles = self.group.div_ceil(self.block_rows(block) / SEGMENT_ROWS);
        [self.kv_heads, rows.div_ceil(SEGMENT_ROWS) * tiles * self.blocks_of_head(block), 1]
    }
}
