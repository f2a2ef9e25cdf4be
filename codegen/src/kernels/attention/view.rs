//! What the kernels of attention take: memory and numbers that travel together as views, compile-time parameters as
//! configs.
//!
//! A launch gives a view field by field, so a kernel's own views have memory handles and numbers alone. Views of one
//! block's part of that, with shared memory among their fields, are made in the kernels: they are beside the functions
//! that take them.

use gemma4c_dsl::prelude::*;
use gemma4c_plan::cuda::KvType;

/// The cache of a layer, to be read: its pages and which position is where (`address.rs`).
#[view]
pub struct KvView<KV: Float> {
    /// `pages[slot][position / capacity % max_pages]`.
    pub pages: Weights<u32>,
    pub k: Input<KV>,
    pub v: Input<KV>,
    /// Positions that a query sees, its own among them; `u32::MAX` for a full layer.
    pub window: u32,
    /// Rows of a page.
    pub capacity: u32,
    /// Entries of a slot in the table.
    pub max_pages: u32,
    /// Elements from the start of a page to that of the next one.
    pub page_stride: u32,
}

/// The cache of a layer, to be read and written.
#[view]
pub struct KvViewMut<KV: Float> {
    pub pages: Weights<u32>,
    pub k: InOut<KV>,
    pub v: InOut<KV>,
    pub window: u32,
    /// 0: a stage, which has the rows of a chunk in their order.
    pub capacity: u32,
    pub max_pages: u32,
    pub page_stride: u32,
}

/// The keys and values of a chunk's own rows, of a layer whose pages do not hold them yet. Rows of one segment are in
/// the order of their positions.
#[view]
pub struct StageView<KV: Float> {
    pub k: Input<KV>,
    pub v: Input<KV>,
    /// 0: the cache holds the chunk's rows already.
    pub is_used: u32,
}

/// The projections of rows as the products wrote them, and what norms and rotates their heads. A layer without keys and
/// values of its own has no `k`, `v` and `k_weight`.
#[view]
pub struct Projections {
    pub q: Input<f32>,
    pub k: Input<f32>,
    pub v: Input<f32>,
    pub q_weight: Weights<f32>,
    pub k_weight: Weights<f32>,
    /// Angle a position of each pair of a head.
    pub inverse_frequencies: Weights<f32>,
    /// Elements from a row to the next one.
    pub q_stride: u32,
    pub k_stride: u32,
    pub v_stride: u32,
    pub epsilon: f32,
}

/// What splits pass to whoever merges them: of each query head the largest score and the sum of weights (`extrema`),
/// and the weighted sum of values.
#[view]
pub struct PartialResults {
    pub extrema: InOut<F32x2>,
    pub values: InOut<f32>,
    /// How many blocks have arrived at a merge. Zero before and after a launch.
    pub counters: InOut<u32>,
}

/// The heads of a layer.
#[config]
pub struct AttentionShape {
    /// Values of a head.
    pub D: u32,
    /// Query heads to a key-value head.
    pub GROUP: u32,
}

/// How a cache holds keys and values.
#[config]
pub struct CacheFormat {
    /// In 16 bits or 8: tensor cores multiply them.
    pub TENSOR: bool,
    /// In bf16; else, of 16 bits, in f16.
    pub BF: bool,
    /// In 8 bits (`narrow.rs`).
    pub NARROW: bool,
    /// In 8 bits with scales.
    pub SCALED: bool,
}

impl CacheFormat {
    pub fn of(kv: KvType) -> Self {
        let (tensor, bf) = (kv != KvType::F32, kv == KvType::BF16);
        Self { TENSOR: tensor, BF: bf, NARROW: kv.is_narrow(), SCALED: kv == KvType::Q8_0 }
    }
}

/// How a block of a split-KV kernel works (`split.rs`).
#[config]
pub struct DecodeTile {
    /// Keys of a tile.
    pub KEYS: u32,
    pub THREADS: u32,
    /// Elements in 16 bytes.
    pub VECTOR: u32,
    /// Eights of query heads: products that a fragment of keys or values takes part in.
    pub SETS: u32,
    /// Slices of a head's values whose scores are summed apart. Warps beyond that share out the keys of a tile.
    pub SLICES: u32,
    /// Blocks that an SM is to hold at once.
    pub RESIDENT: u32,
}

/// Which tiles of keys and values are in flight while a block multiplies one (`split.rs`).
#[config]
pub struct Pipeline {
    /// Tiles for which there is shared memory: one or two.
    pub TILES: u32,
    /// A tile is issued as one group of copies, while the one before is multiplied. Else its keys and its values are
    /// issued as soon as those that they replace have been used.
    pub WHOLE_TILES: bool,
    /// The block goes on with another split, whose first tile is issued before the last one of this split is
    /// multiplied.
    pub CHAINED: bool,
    /// Scores do not take the place of the queries, and who makes a new key and value puts them into the first tile: no
    /// barrier between queries and scores.
    pub SEPARATE_SCORES: bool,
}
