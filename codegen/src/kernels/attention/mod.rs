//! Attention over a cache of keys and values.
//!
//! Queries come as f32 rows [row][query head][value], normed and rotated, with the scale folded in; query head `h`
//! reads key-value head `h / G`. A cache is pages of [row][key-value head][value], position p at row p % rows of its
//! page, and holds the keys and values of the chunk's own rows already. A query at position p sees positions p -
//! window < x <= p. `state` has the rows' records.
//!
//! - `address.rs`: a row's record, and the page of a position.
//! - `view.rs`: what kernels take: views of memory, and configs of compile-time parameters.
//! - `address.rs`: a row's record, and the page of a position.
//! - `plain.rs`: the definition, one warp a row and head.
//! - `split.rs`: split-KV attention of decoded rows: the loop of a block over the keys of its split. `tensor.rs`,
//!   `codes.rs` and `floats.rs` are what it does with a tile of keys, by the cache's type; `shape.rs` says how many of
//!   everything.
//! - `decode.rs`, `combine.rs`: the splits of a row as one launch, and their merge as another.
//! - `step.rs`: both in one launch, with the norms, RoPE and the store that come before them (`prepare.rs`); `merge.rs`
//!   are its merges.
//! - `rows.rs`: the same for several rows, by blocks that take several splits each.
//! - `narrow.rs`: caches of 8 bits: how they are made, and copied.
//! - `flash.rs`: many rows, on tensor cores. `warpgroups.rs`: the same on Hopper, by warpgroups. `chunk.rs` is what
//!   both read.
//! - `keep.rs`: after a chunk, its last rows to the pages of a sliding layer.

pub mod address;
pub mod chunk;
pub mod codes;
pub mod combine;
pub mod decode;
pub mod flash;
pub mod floats;
pub mod keep;
pub mod merge;
pub mod narrow;
pub mod plain;
pub mod prepare;
pub mod rows;
mod shape;
pub mod split;
pub mod step;
pub mod tensor;
pub mod view;
pub mod warpgroups;

use gemma4c_dsl::ElementType;
use gemma4c_plan::cuda::KvType;

use super::kv_element;

/// The attention of one layer: what chooses instances, grids and the sizes of what passes between its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    pub head_dim: u32,
    pub kv_heads: u32,
    /// Query heads to a key-value head.
    pub group: u32,
    /// Positions that a query sees, its own among them; `None`: all.
    pub window: Option<u32>,
    /// Positions that the pages of a sequence hold at once: of a full layer, all there may be.
    pub capacity: u32,
    /// Type of the cache.
    pub kv: KvType,
    /// What a block may have of shared memory.
    pub shared_bytes: usize,
    /// Blocks that may be a cluster; 1 where there are no clusters.
    pub cluster: u32,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

impl Attention {
    /// Query heads.
    pub fn heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    /// Type of the tiles that are multiplied.
    pub fn element(&self) -> ElementType {
        kv_element(self.kv)
    }

    /// The launch argument `window`.
    pub fn window_scalar(&self) -> u32 {
        self.window.unwrap_or(u32::MAX)
    }

    /// Elements of the splits' `extrema`, for that many rows.
    pub fn extrema_len(&self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.heads()) * u64::from(self.splits())
    }

    /// Elements of the splits' `values`, for that many rows.
    pub fn values_len(&self, rows: u32) -> u64 {
        self.extrema_len(rows) * u64::from(self.head_dim)
    }
}

/// What a block may have of shared memory: on sm_90a, on sm_80, on sm_89 and sm_120a.
pub const SHARED_BYTES: [usize; 3] = [227 * 1024, 163 * 1024, 99 * 1024];
