//! Attention for many rows on Hopper: the tensor cores' asynchronous products (wgmma) over tiles of keys and values in
//! the layout that they read.
//!
//! ```text
//! block: 64 or 128 rows of one key-value head, a row being a query and one of the heads that share the keys
//!
//! keys ──► cp.async ──► scores = queries · keysᵀ ──► online softmax in registers ──► sums += weights · values ◄──
//! cp.async ◄── values ```
//!
//! All query heads of a key-value head are neighbours in the tile, so that what was copied serves them all: L2 would
//! not keep up with fewer rows. A warpgroup has 64 rows, and sums up to 256 values of a head. A wider head is shared
//! out between two warpgroups: each multiplies its half of queries, keys and values, they add up their parts of the
//! scores out of shared memory, and weigh alike. For many rows both are of one block; for few, of two blocks of a
//! cluster, so that twice as many SMs have work. Keys of a tile are copied while the tile before is weighed and summed,
//! values while their keys are multiplied.
//!
//! Queries and weights are rounded to the cache's 16-bit type; sums are f32. Tiles of keys start at multiples of their
//! length, so that a row's sums are the same in every chunk and beside any rows: a tile that a row does not see changes
//! nothing of it. Caches of 8 bits and of f32 are left to [`flash`](super::flash) and [`plain`](super::plain).

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{SEGMENT_ROWS, first_visible, record_of};
use super::chunk::{RowLimits, RowSums, TileSource, base_of, chunk_of, keys_of, no_sums, row_sum, values_of};
use super::flash::{masked, row_max, store_pair};
use super::plain::reach;
use super::split::{head_at, page_of};
use super::tensor::pack_pair;
use super::view::{KvView, StageView};

/// Values of a head that a warpgroup sums: 128 registers a thread.
const MOST_COLUMNS: u32 = 256;

/// Keys of a tile: 32 registers of scores a thread.
const TILE_KEYS: u32 = 64;

// A tile is of one record: of 64 rows of a chunk, and all query heads that share their keys.
const _: () = assert!(SEGMENT_ROWS == 64);

/// The tile of a block.
#[config]
pub struct WarpgroupTile {
    /// Queries times the query heads that share keys.
    pub ROWS: u32,
    pub KEYS: u32,
    /// Values of a head that the block has, and that a warpgroup sums.
    pub WIDTH: u32,
    pub COLUMNS: u32,
    pub THREADS: u32,
}

/// A block's rows: of all rows of its segment, which are queries times the heads that share keys.
#[registers]
pub struct RowTile {
    /// The segment's first row in the chunk.
    pub chunk_row: u32,
    /// The first of the block's rows, and the one after its last.
    pub first: u32,
    pub end: u32,
    /// Query heads that share keys.
    pub group: u32,
    /// The first of the block's values of a head.
    pub column: u32,
}

/// Issues the copies of WIDTH values of the keys (or values) of KEYS positions from `at` on, to tiles of 64 columns,
/// swizzled. Positions that no row sees are read as the nearest that one does: a page may hold anything there.
#[device]
pub fn copy_swizzled_tile<const WIDTH: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    tile: Shared<KV>,
    source: TileSource<KV>,
    at: u32,
) {
    // The thread's 16 bytes of every so many rows.
    require!(THREADS * 8 / WIDTH == 4 || THREADS * 8 / WIDTH % 8 == 0);
    let at_once = THREADS * 8 / WIDTH;
    let row = thread_idx() / (WIDTH / 8);
    let column = thread_idx() % (WIDTH / 8);
    let to = tile.offset(column / 8 * (KEYS * 64) + row * 64);
    let place = (column % 8 ^ row % 8) * 8;
    let from = at.max(source.first);
    let start = from % source.capacity;
    let in_stage = at >= source.stage_from;
    let is_contiguous = in_stage || source.stage_from - at >= KEYS;
    if at >= source.first && at + KEYS <= source.last + 1 && is_contiguous {
        let begin = if in_stage { at - source.stage_from } else { start };
        let memory = if in_stage { source.stage } else { source.page };
        let own = memory.offset((begin + row) * source.row_len + column * 8);
        #[unroll]
        for i in 0..KEYS * WIDTH / (THREADS * 8) {
            cp_async16(to, i * at_once * 64 + (place ^ i * at_once % 8 * 8), own, i * at_once * source.row_len);
        }
    } else {
        #[unroll(1)]
        for i in 0..KEYS * WIDTH / (THREADS * 8) {
            let position = (at + row + i * at_once).max(source.first).min(source.last);
            let staged = position >= source.stage_from;
            let memory = if staged { source.stage } else { source.page };
            let of_memory = if staged { position - source.stage_from } else { start + (position - from) };
            let own = of_memory * source.row_len + column * 8;
            cp_async16(to, i * at_once * 64 + (place ^ i * at_once % 8 * 8), memory, own);
        }
    }
}

/// log2(e): softmax is made of powers of two.
#[device]
pub fn log2_e() -> f32 {
    f32::from_bits(0x3fb8_aa3b)
}

/// The queries of the block's rows in the cache's type, swizzled. Rows past the end are copies of the last.
#[device]
pub fn load_swizzled_rows<const D: u32, const T: WarpgroupTile, const BF: bool, KV: Float>(
    queries: Shared<KV>,
    q: Input<f32>,
    tile: RowTile,
) {
    let heads = grid_dim() * tile.group;
    for i in (thread_idx() * 4..T.ROWS * T.WIDTH).by(T.THREADS * 4) {
        let row = i / T.WIDTH;
        let value = i % T.WIDTH;
        let of_all = (tile.first + row).min(tile.end - 1);
        let head = block_idx() * tile.group + of_all % tile.group;
        let from = ((tile.chunk_row + of_all / tile.group) * heads + head) * D + tile.column + value;
        let four = load::<F32x4>(q, from);
        let to = (value / 64 * T.ROWS + row) * 64 + (value % 64 / 8 ^ row % 8) * 8 + value % 8;
        store(queries, to, u32x2(pack_pair(four.x, four.y), pack_pair(four.z, four.w)));
    }
}

/// The warpgroup's part of the scores, for who has the other half of the head.
#[device]
pub fn store_halves<const KEYS: u32, const THREADS: u32>(parts: Shared<f32>, scores: &mut Regs<f32>) {
    #[unroll]
    for n in 0..KEYS / 8 {
        let four = f32x4(scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3]);
        store(parts, (n * THREADS + thread_idx()) * 4, four);
    }
}

/// Adds the other half's part: of the cluster's other block, or of the block's other warpgroup.
#[device]
pub fn add_halves<const D: u32, const T: WarpgroupTile>(parts: Shared<f32>, rank: u32, scores: &mut Regs<f32>) {
    #[unroll]
    for n in 0u32..T.KEYS / 8 {
        let other = if T.WIDTH < D {
            load_peer::<F32x4>(parts, (n * T.THREADS + thread_idx()) * 4, 1 - rank)
        } else {
            load::<F32x4>(parts, (n * T.THREADS + (thread_idx() ^ 128)) * 4)
        };
        scores[4 * n] = scores[4 * n] + other.x;
        scores[4 * n + 1] = scores[4 * n + 1] + other.y;
        scores[4 * n + 2] = scores[4 * n + 2] + other.z;
        scores[4 * n + 3] = scores[4 * n + 3] + other.w;
    }
}

/// The scores of positions that a row does not see, in the tile at `at`, become minus infinity.
#[device]
pub fn mask_scores<const KEYS: u32>(scores: &mut Regs<f32>, at: u32, limits: RowLimits) {
    #[unroll]
    for n in 0..KEYS / 8 {
        let key = at + n * 8 + lane_id() % 4 * 2;
        scores[4 * n] = masked(scores[4 * n], key, limits.upper_first, limits.upper_last);
        scores[4 * n + 1] = masked(scores[4 * n + 1], key + 1, limits.upper_first, limits.upper_last);
        scores[4 * n + 2] = masked(scores[4 * n + 2], key, limits.lower_first, limits.lower_last);
        scores[4 * n + 3] = masked(scores[4 * n + 3], key + 1, limits.lower_first, limits.lower_last);
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

/// One step of the online softmax: the tile's weights relative to the largest score so far, which is kept times
/// log2(e), for powers of two. The result has what brings earlier sums of the two rows to that score.
#[device]
pub fn weigh_scores<const KEYS: u32, const BF: bool>(
    scores: &mut Regs<f32>,
    weights: &mut Regs<U32x4>,
    rows: &mut RowSums,
) -> F32x2 {
    let mut upper_now = f32::NEG_INFINITY;
    let mut lower_now = f32::NEG_INFINITY;
    #[unroll]
    for n in 0..KEYS / 8 {
        upper_now = upper_now.max(scores[4 * n].max(scores[4 * n + 1]));
        lower_now = lower_now.max(scores[4 * n + 2].max(scores[4 * n + 3]));
    }
    upper_now = row_max(upper_now * log2_e(), rows.upper_max);
    lower_now = row_max(lower_now * log2_e(), rows.lower_max);
    let upper_base = base_of(upper_now);
    let lower_base = base_of(lower_now);
    let upper_factor = exp2_flushed(rows.upper_max - upper_base);
    let lower_factor = exp2_flushed(rows.lower_max - lower_base);
    let mut upper_total = rows.upper_total * upper_factor;
    let mut lower_total = rows.lower_total * lower_factor;
    #[unroll]
    for step in 0..KEYS / 16 {
        let near = weights_of_four(scores, 8 * step, upper_base, lower_base);
        let far = weights_of_four(scores, 8 * step + 4, upper_base, lower_base);
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
    *rows = RowSums { upper_max: upper_now, lower_max: lower_now, upper_total, lower_total };
    f32x2(upper_factor, lower_factor)
}

/// The sums so far times their rows' factors. Behind the first tiles a larger score is rare.
#[device]
pub fn scale_rows<const COLUMNS: u32>(factors: F32x2, sums: &mut Regs<f32>) {
    if warp_any(factors.x != 1.0 || factors.y != 1.0) {
        #[unroll]
        for n in 0..COLUMNS / 8 {
            sums[4 * n] = sums[4 * n] * factors.x;
            sums[4 * n + 1] = sums[4 * n + 1] * factors.x;
            sums[4 * n + 2] = sums[4 * n + 2] * factors.y;
            sums[4 * n + 3] = sums[4 * n + 3] * factors.y;
        }
    }
}

/// Writes the lane's two rows, `upper` and `upper + 8`, of columns from `column` on.
#[device]
pub fn write_rows<const D: u32, const COLUMNS: u32, const ROUNDED: bool, O: Float>(
    out: Output<O>,
    sums: &mut Regs<f32>,
    rows: RowSums,
    tile: RowTile,
    upper: u32,
    column: u32,
) {
    let upper_share = 1.0 / row_sum(rows.upper_total);
    let lower_share = 1.0 / row_sum(rows.lower_total);
    let heads = grid_dim() * tile.group;
    #[unroll]
    for lower in 0u32..2 {
        let row = upper + lower * 8;
        if row < tile.end {
            let head = block_idx() * tile.group + row % tile.group;
            let share = if lower == 1 { lower_share } else { upper_share };
            let to = ((tile.chunk_row + row / tile.group) * heads + head) * D + column + lane_id() % 4 * 2;
            #[unroll]
            for n in 0..COLUMNS / 8 {
                let from = 4 * n + 2 * lower;
                store_pair(out, to + n * 8, sums[from] * share, sums[from + 1] * share);
            }
        }
    }
}

/// `out = softmax(q · kᵀ) · v` for ROWS rows of one key-value head. The grid is (key-value heads, D / WIDTH blocks for
/// each tile of rows): 64 rows of the chunk times the `group` query heads that share the keys are shared out among
/// tiles. Late tiles, which see most, come first. BF: the cache is bf16, else f16.
#[kernel(block = T.THREADS, min_blocks = 1, cluster = D / T.WIDTH, dynamic_shared,
    slots(reach(last: u32, row: u32) -> u32))]
pub fn attention_warpgroups<
    const D: u32,
    const T: WarpgroupTile,
    const BF: bool,
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
    // A tile of a full layer is in one page.
    require!(T.KEYS % 32 == 0 && 256 % T.KEYS == 0);
    require!(T.COLUMNS % 64 == 0 && T.COLUMNS <= 256 && (D == T.COLUMNS || D == 2 * T.COLUMNS));
    require!(T.WIDTH == T.COLUMNS || T.WIDTH == D);
    require!(T.ROWS % 64 == 0 && T.THREADS == T.ROWS * 2 * (T.WIDTH / T.COLUMNS) && T.THREADS <= 256);
    let queries = shared::<KV>(T.ROWS * T.WIDTH);
    let keys = shared::<KV>(T.KEYS * T.WIDTH);
    let values = shared::<KV>(T.KEYS * T.WIDTH);
    // Parts of scores for the other half. Between blocks two tiles of them: a block may be a tile ahead of one that
    // still reads.
    let parts = shared::<f32>(if D == T.COLUMNS { 4 } else { T.THREADS * T.KEYS / 2 * (D / T.WIDTH) });

    let number = (grid_dim_y() - 1 - block_idx_y()) / (D / T.WIDTH);
    let tiles = group.div_ceil(T.ROWS / 64);
    let record = record_of(state, number / tiles * 64, 0);
    let rows = record.y * group;
    let first_query_of_record = number / tiles * 64 - record.z;
    let first_row = first_query_of_record * group + number % tiles * T.ROWS;
    if first_row >= rows {
        return;
    }
    let end_row = rows.min((first_query_of_record + 64) * group).min(first_row + T.ROWS);
    let start = record.x;
    let first_query = first_row / group;
    let last_query = (end_row - 1) / group;
    let rank = if T.WIDTH < D { cluster_rank() } else { 0 };
    let tile = RowTile { chunk_row: record.z, first: first_row, end: end_row, group, column: rank * T.WIDTH };
    let column = block_idx() * D + tile.column;
    let head = head_at(kv, record.w, column, grid_dim() * D);
    let first = first_visible(start + first_query, kv.window);
    // Of later rows it is no less than of earlier ones.
    let last = reach(start + last_query, record.z + last_query);
    let chunk = chunk_of(head, stage, record, column, first, last);

    let mut at = chunk.first / T.KEYS * T.KEYS;
    let mut page = page_of(head, at);
    copy_swizzled_tile(keys, keys_of(chunk, page), at);
    cp_async_commit();
    load_swizzled_rows(queries, q, tile);

    // The warpgroup's half of the block's columns, in panels of 64, and of its rows the lane's: `upper` and `upper +
    // 8`.
    let panel = if T.COLUMNS < T.WIDTH { warp_id() / 4 * (T.COLUMNS / 64) } else { 0 };
    let row_warp = if T.COLUMNS < T.WIDTH { warp_id() % 4 } else { warp_id() };
    let own_queries = queries.offset(panel * (T.ROWS * 64) + row_warp / 4 * 4096);
    let own_keys = keys.offset(panel * (T.KEYS * 64));
    let own_values = values.offset(panel * (T.KEYS * 64));
    let upper = first_row + row_warp * 16 + lane_id() / 4;
    let upper_query = upper.min(end_row - 1) / group;
    let lower_query = (upper + 8).min(end_row - 1) / group;
    let limits = RowLimits {
        upper_first: first_visible(start + upper_query, kv.window),
        upper_last: reach(start + upper_query, record.z + upper_query),
        lower_first: first_visible(start + lower_query, kv.window),
        lower_last: reach(start + lower_query, record.z + lower_query),
    };
    let mut of_rows = no_sums();
    let mut sums = regs(0.0f32, T.COLUMNS / 2);
    while at <= chunk.last {
        // Everybody's copies of the keys have landed, and nobody reads values any more.
        cp_async_wait(0);
        fence_proxy_async();
        barrier();
        let mut scores = regs(0.0f32, T.KEYS / 2);
        wgmma_fence(&mut scores);
        #[unroll]
        for depth in (0u32..T.COLUMNS).by(16) {
            let left = own_queries.offset(depth / 64 * (T.ROWS * 64) + depth % 64);
            wgmma_b16(&mut scores, left, own_keys.offset(depth / 64 * (T.KEYS * 64) + depth % 64));
        }
        wgmma_commit();
        copy_swizzled_tile(values, values_of(chunk, page), at);
        cp_async_commit();
        wgmma_wait(0, &mut scores);
        let own_parts = parts.offset(at / T.KEYS % (D / T.WIDTH) * (T.THREADS * T.KEYS / 2));
        if D > T.COLUMNS {
            store_halves(own_parts, &mut scores);
        }
        // Nobody reads keys any more.
        if T.WIDTH < D {
            cluster_barrier();
        } else {
            barrier();
        }
        let next = at + T.KEYS;
        if next <= chunk.last {
            page = page_of(head, next);
            copy_swizzled_tile(keys, keys_of(chunk, page), next);
        }
        // An empty group too: the waits count groups.
        cp_async_commit();
        if D > T.COLUMNS {
            add_halves(own_parts, rank, &mut scores);
        }
        // Most tiles of a long context are seen by every row of the block.
        let is_seen_by_all = next <= start + first_query + 1 && at >= first_visible(start + last_query, kv.window);
        if !is_seen_by_all {
            mask_scores(&mut scores, at, limits);
        }
        let mut weights = regs(U32x4::ZERO, T.KEYS / 16);
        let factors = weigh_scores(&mut scores, &mut weights, &mut of_rows);
        scale_rows(factors, &mut sums);

        // Everybody's copies of the values have landed.
        cp_async_wait(1);
        fence_proxy_async();
        barrier();
        wgmma_fence(&mut sums);
        #[unroll]
        for step in 0u32..T.KEYS / 16 {
            let right = own_values.offset(step * 1024);
            wgmma_b16_held_across(&mut sums, weights[step], right, T.KEYS * 64);
        }
        wgmma_commit();
        wgmma_wait(0, &mut sums);
        at = next;
    }
    write_rows(out, &mut sums, of_rows, tile, upper, tile.column + panel * 64);
    if T.WIDTH < D {
        // The other block may still read this one's parts.
        cluster_barrier();
    }
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

    /// The kernel for such a block, with an output of F32, or of BF16 for the product that reads it. All blocks give
    /// the same bits. `ahead`: soft tokens see those of their picture that come after them.
    pub fn warpgroups(&self, block: Block, out: ElementType, ahead: bool) -> Result<Instance, InstanceError> {
        let columns = self.head_dim.min(MOST_COLUMNS);
        let width = self.head_dim / self.blocks_of_head(block);
        attention_warpgroups::Chosen {
            D: self.head_dim,
            T: WarpgroupTile {
                ROWS: self.block_rows(block),
                KEYS: TILE_KEYS,
                WIDTH: width,
                COLUMNS: columns,
                THREADS: self.block_rows(block) * 2 * (width / columns),
            },
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
