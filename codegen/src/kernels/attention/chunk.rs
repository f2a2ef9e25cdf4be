//! What the kernels of many rows share: where the keys of a tile of rows are, and which positions its rows see.

use gemma4c_dsl::prelude::*;

use super::split::{HeadView, page_of};
use super::view::StageView;

/// The keys and values of one key-value head, as a tile of rows of one segment reads them.
#[view]
pub struct ChunkView<KV: Float> {
    pub head: HeadView<KV>,
    /// The stage, from the segment's first row on.
    pub k_stage: Input<KV>,
    pub v_stage: Input<KV>,
    /// Positions from this one on are in the stage.
    pub stage_from: u32,
    /// The first and the last position that any row sees.
    pub first: u32,
    pub last: u32,
}

/// The keys (or the values) of a [`ChunkView`]: on a page, or in the stage.
#[view]
pub struct TileSource<KV: Float> {
    pub page: Input<KV>,
    pub stage: Input<KV>,
    pub stage_from: u32,
    pub first: u32,
    pub last: u32,
    pub row_len: u32,
    pub capacity: u32,
}

/// The first and the last position that a lane's two rows see.
#[registers]
pub struct RowLimits {
    pub upper_first: u32,
    pub upper_last: u32,
    pub lower_first: u32,
    pub lower_last: u32,
}

/// The online softmax of a lane's two rows: their largest scores, and the sums of weights relative to these.
#[registers]
pub struct RowSums {
    pub upper_max: f32,
    pub lower_max: f32,
    pub upper_total: f32,
    pub lower_total: f32,
}

/// What rows of a segment with that record read, of a head that begins at element `column` of the cache's rows; none of
/// them sees positions outside `first..=last`.
#[device]
pub fn chunk_of<KV: Float>(
    head: HeadView<KV>,
    stage: StageView<KV>,
    record: U32x4,
    column: u32,
    first: u32,
    last: u32,
) -> ChunkView<KV> {
    // A decoded row has no stage, and something else in this place of its record.
    let own = record.z.wrapping_mul(head.row_len).wrapping_add(column);
    ChunkView::<KV> {
        head,
        k_stage: stage.k.offset(own),
        v_stage: stage.v.offset(own),
        stage_from: if stage.is_used == 1 { record.x } else { 0xffff_ffff },
        first,
        last,
    }
}

/// The keys of positions on the page that starts at `page`.
#[device]
pub fn keys_of<KV: Float>(chunk: ChunkView<KV>, page: u64) -> TileSource<KV> {
    TileSource::<KV> {
        page: chunk.head.k.offset(page),
        stage: chunk.k_stage,
        stage_from: chunk.stage_from,
        first: chunk.first,
        last: chunk.last,
        row_len: chunk.head.row_len,
        capacity: chunk.head.capacity,
    }
}

/// The values of these.
#[device]
pub fn values_of<KV: Float>(chunk: ChunkView<KV>, page: u64) -> TileSource<KV> {
    TileSource::<KV> {
        page: chunk.head.v.offset(page),
        stage: chunk.v_stage,
        stage_from: chunk.stage_from,
        first: chunk.first,
        last: chunk.last,
        row_len: chunk.head.row_len,
        capacity: chunk.head.capacity,
    }
}

/// The page of a position, if it is not in the stage.
#[device]
pub fn page_at<KV: Float>(chunk: ChunkView<KV>, position: u32) -> u64 {
    if position >= chunk.stage_from { 0u64 } else { page_of(chunk.head, position) }
}

/// The key (or value) of a position.
#[device]
pub fn row_at<KV: Float>(source: TileSource<KV>, position: u32) -> Input<KV> {
    let in_stage = position >= source.stage_from;
    let row = if in_stage { position - source.stage_from } else { position % source.capacity };
    let memory = if in_stage { source.stage } else { source.page };
    memory.offset(row * source.row_len)
}

/// Nothing has been seen yet.
#[device]
pub fn no_sums() -> RowSums {
    RowSums { upper_max: f32::NEG_INFINITY, lower_max: f32::NEG_INFINITY, upper_total: 0.0, lower_total: 0.0 }
}

/// What a row's scores are relative to. A row that has seen nothing yet has no largest score: any number will do.
#[device]
pub fn base_of(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// The sum over the four lanes that share a row.
#[device]
pub fn row_sum(of_lane: f32) -> f32 {
    let pair = of_lane + shfl_xor(of_lane, 1);
    pair + shfl_xor(pair, 2)
}
