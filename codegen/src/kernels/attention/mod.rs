//! Attention over a cache of keys and values.
//!
//! Queries come as f32 rows [row][query head][value], normed and rotated, with the scale folded in; query head `h` reads
//! key-value head `h / G`. A cache is [capacity][key-value head][value], position p at row p % capacity, and holds the keys
//! and values of the chunk's own rows already. A query at position p sees positions p - window < x <= p. `state` is the
//! position of the chunk's first row and the number of its rows.
//!
//! - `plain.rs`: the definition, one warp a row and head.
//! - `decode.rs`, `combine.rs`: few rows, many keys: the keys are shared out among blocks, whose partial results are merged.
//!   `tensor.rs` and `floats.rs` are what a block does with a tile of keys, by the cache's type.
//! - `step.rs`: the same for one row in one launch, with the norms, RoPE and the store that come before it.
//! - `flash.rs`: many rows, on tensor cores.

pub mod combine;
pub mod decode;
pub mod flash;
pub mod floats;
pub mod plain;
pub mod step;
pub mod tensor;

use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::shapes::{MODELS, distinct};
use crate::arch::Arch;
use step::StepOut;

/// The attention of one layer: what chooses instances, grids and the sizes of what passes between its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    pub head_dim: u32,
    pub kv_heads: u32,
    /// Query heads to a key-value head.
    pub group: u32,
    /// Positions that a query sees, its own among them; `None`: all.
    pub window: Option<u32>,
    /// Rows of the cache.
    pub capacity: u32,
    /// Type of the cache's elements.
    pub kv: ElementType,
    /// What a block may have of shared memory.
    pub shared_bytes: usize,
    /// Blocks that may be a cluster; 1 where there are no clusters.
    pub cluster: u32,
}

impl Attention {
    /// Query heads.
    pub fn heads(&self) -> u32 {
        self.kv_heads * self.group
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

/// The instances that plans of the five models use. Windows and capacities are launch arguments: heads and the cache's type are
/// all that tells instances apart.
pub fn instances() -> Vec<(String, Instance)> {
    build_instances().expect("the models' shapes are whole tiles")
}

fn build_instances() -> Result<Vec<(String, Instance)>, InstanceError> {
    let types = [ElementType::F16, ElementType::BF16, ElementType::F32];
    let [largest, _, smallest] = SHARED_BYTES;
    let sized = |head_dim, group, kv, shared_bytes| Attention {
        head_dim,
        kv_heads: 1,
        group,
        window: None,
        capacity: 1,
        kv,
        shared_bytes,
        cluster: 1,
    };
    let layer = |head_dim, group, kv| sized(head_dim, group, kv, smallest);
    let mut found: Vec<(String, Instance)> = Vec::new();
    let layers = MODELS.iter().flat_map(|model| model.kinds().map(|(_, heads)| (heads.dim, model.group(heads))));
    for (head_dim, group) in distinct(layers.clone()) {
        for kv in types {
            found.push((format!("{group} heads of {head_dim}, {}", kv.name()), layer(head_dim, group, kv).decode()?));
        }
    }
    for (head_dim, group) in distinct(layers.clone()) {
        let label = format!("{group} heads of {head_dim}");
        for kv in types {
            found
                .push((format!("{label}, {}, int8", kv.name()), layer(head_dim, group, kv).step(true, StepOut::Int8)?));
        }
        let f16 = layer(head_dim, group, ElementType::F16);
        found.push((format!("{label}, F16, floats"), f16.step(true, StepOut::Floats)?));
        found.push((format!("{label}, F16, partials"), f16.step(true, StepOut::Partials)?));
        found.push((format!("{label}, F16, int8, cache of another layer"), f16.step(false, StepOut::Int8)?));
        let large = sized(head_dim, group, ElementType::F16, largest);
        if large.decode_shape() != f16.decode_shape() {
            let label = format!("{label}, one block a multiprocessor, F16, int8");
            found.push((label.clone(), large.step(true, StepOut::Int8)?));
            found.push((format!("{label}, cache of another layer"), large.step(false, StepOut::Int8)?));
        }
    }
    for model in MODELS {
        for (heads, window) in [(model.sliding, Some(model.window)), (model.global, None)] {
            let (group, cluster) = (model.group(heads), Arch::Sm90a.most_peers());
            let one = sized(heads.dim, group, ElementType::F16, largest);
            let layer = Attention { kv_heads: heads.kv, window, capacity: 32768, cluster, ..one };
            for (own, what) in [(true, ""), (false, ", cache of another layer")] {
                let label = format!("{group} heads of {}, F16, int8, clusters of {}{what}", heads.dim, layer.peers());
                if !found.iter().any(|(known, _)| *known == label) {
                    found.push((label, layer.step(own, StepOut::Int8)?));
                }
            }
        }
    }
    for head_dim in distinct(layers.map(|(head_dim, _)| head_dim)) {
        let label = format!("heads of {head_dim}");
        found.push((label.clone(), layer(head_dim, 1, ElementType::F16).combine()?));
        found.push((label.clone(), layer(head_dim, 1, ElementType::F16).combine_int8()?));
        for kv in types {
            found.push((format!("{label}, {}", kv.name()), layer(head_dim, 1, kv).plain()?));
            for limit in SHARED_BYTES {
                for out in [ElementType::F32, ElementType::BF16] {
                    let Some(flash) = sized(head_dim, 1, kv, limit).flash(out)? else { continue };
                    let label = format!("{label}, {}, {} rows to {}", kv.name(), flash.rows, out.name());
                    if !found.iter().any(|(known, _)| *known == label) {
                        found.push((label, flash.instance));
                    }
                }
            }
        }
    }
    Ok(found)
}
