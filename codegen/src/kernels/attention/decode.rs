//! Split-KV attention for a few rows: the keys of one row are shared out among many blocks (`split.rs`), and
//! `combine.rs` merges their partial results.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::Attention;
use super::address::{record_of, row_of_record};
use super::narrow::operands_slot;
use super::split::{SplitMemory, attend_alone, copy_first, head_of, pages_of, require_tiles, seen_from};
use super::tensor::clear_weights;
use super::view::{AttentionShape, CacheFormat, DecodeTile, KvView, Pipeline};

/// One split of one row's attention: for each query head the largest score and the sum of weights (`extrema`) and the
/// weighted sum of values (`values`), by [row][query head][split]. A split without a visible position has a sum of zero
/// and no values. The grid is (key-value heads, splits, rows).
#[kernel(block = T.THREADS, min_blocks = T.RESIDENT, dependent, dynamic_shared, slots(
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_decode<
    const S: AttentionShape,
    const C: CacheFormat,
    const T: DecodeTile,
    const P: Pipeline,
    KV: Float,
>(
    q: Input<f32>,
    kv: KvView<KV>,
    state: Input<u32>,
    extrema: Output<F32x2>,
    values: Output<f32>,
    segment: u32,
    record_stride: u32,
) {
    require_tiles();
    let work = shared::<f32>(if C.TENSOR && T.SLICES * (T.KEYS + 8) > S.D + 8 {
        S.GROUP * T.SLICES * (T.KEYS + 8)
    } else {
        S.GROUP * (S.D + 8)
    });
    let even = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { T.KEYS * (S.D + 8) });
    let odd = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { T.KEYS * (S.D + 8) });
    let weights = shared::<KV>(if C.TENSOR { T.SETS * 16 * (T.KEYS + 8) } else { 1 });
    let scores = shared::<f32>(if C.TENSOR { 1 } else { S.GROUP * T.KEYS });
    let largest = shared::<f32>(S.GROUP);
    let totals = shared::<f32>(S.GROUP);
    let factors = shared::<f32>(S.GROUP);
    let block = SplitMemory::<KV> {
        queries: work,
        scores: if C.TENSOR { work } else { scores },
        sums: work,
        even,
        odd,
        // The cache holds all that the row sees.
        new_key: even,
        new_value: odd,
        weights,
        largest,
        totals,
        factors,
    };
    grid_dependency_wait();
    grid_launch_dependents();

    let splits = grid_dim_y();
    let row = block_idx_z();
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(record, row, record_stride);
    if of_record >= record.y {
        return;
    }
    let position = record.x + of_record;
    let row_head = (row * grid_dim() + block_idx()) * S.GROUP;
    let slot = row_head * splits + block_idx_y();
    let seen = seen_from(position, position + 1, kv.window, segment, splits);
    let at = seen.first + block_idx_y() * segment;
    if at > position {
        if thread_idx() < S.GROUP {
            extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let head = head_of(kv, record.w, block_idx(), grid_dim());
    copy_first(block, head, pages_of(head, at), at, seen);
    for i in (thread_idx() * 4..S.GROUP * S.D).by(T.THREADS * 4) {
        store(work, i / S.D * (S.D + 8) + i % S.D, load::<F32x4>(q, row_head * S.D + i));
    }
    if C.TENSOR && !C.NARROW {
        clear_weights(weights);
    }
    attend_alone(operands, block, head, seen, at);
    for i in (thread_idx() * 4..S.GROUP * S.D).by(T.THREADS * 4) {
        let sums = load::<F32x4>(work, i / S.D * (S.D + 8) + i % S.D);
        store(values, (slot + i / S.D * splits) * S.D + i % S.D, sums);
    }
    if thread_idx() < S.GROUP {
        extrema[slot + thread_idx() * splits] = f32x2(largest[thread_idx()], totals[thread_idx()]);
    }
}

impl Attention {
    pub fn decode(&self) -> Result<Instance, InstanceError> {
        attention_decode::Chosen {
            S: self.attention_shape(),
            C: CacheFormat::of(self.kv),
            T: self.decode_shape(),
            P: Pipeline::of_split(self.kv, false),
            KV: self.element(),
            operands: operands_slot(self.kv),
        }
        .build()
    }

    pub fn decode_grid(&self, rows: u32) -> [u32; 3] {
        [self.kv_heads, self.splits(), rows]
    }
}
