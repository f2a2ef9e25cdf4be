//! Head norms of Q, K and V, RoPE of Q and K, and the store of K and V into the cache: one kernel.
//!
//! A warp takes a head of a row. Q and K are normed with their weights and rotated; V is normed without a weight and
//! not rotated. Layers that keep no K and V of their own have no KV heads here; layers whose V is their K pass the raw
//! K as V. Rotation pairs value i with i + DIM / 2, by `position * inverse_frequencies[i]`, the product rounded to f32.
//! A head that rotates in part has frequencies of nearly zero (a factor of 1e30 in the file), which leave values as
//! they are.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::attention::address::{page_start, record_of, row_of_page, row_of_record};
use super::attention::narrow::{head_len, narrow_slot, store_word, word_of};
use super::attention::view::{KvViewMut, Projections};
use super::kv_element;

/// Cosine (x) and sine (y), within 1.2e-7 for angles up to 2^24; the same bits everywhere, which the libraries' are
/// not. The angle is first brought to an eighth turn around zero: the product with the first part of pi / 2 is exact
/// there, and the two parts after it carry 48 more bits.
#[device]
pub fn cos_sin(angle: f32) -> F32x2 {
    let quarters = (angle * 0.63661975).round_ties_even();
    let mut rest = quarters.mul_add(-1.5707964, angle);
    rest = quarters.mul_add(4.371139e-8, rest);
    rest = quarters.mul_add(1.7151245e-15, rest);
    let square = rest * rest;
    // Taylor's series: at pi / 4 the first term left out is below half a unit in the last place.
    let mut odd = square.mul_add(2.7557319e-6, -1.984127e-4);
    odd = square.mul_add(odd, 8.333334e-3);
    odd = square.mul_add(odd, -0.16666667);
    let sine = (rest * square).mul_add(odd, rest);
    let mut even = square.mul_add(-2.755732e-7, 2.4801588e-5);
    even = square.mul_add(even, -1.3888889e-3);
    even = square.mul_add(even, 4.1666668e-2);
    even = square.mul_add(even, -0.5);
    let cosine = square.mul_add(even, 1.0);
    let quarter = round_to_i32(quarters) & 3;
    let x = if quarter & 1 == 0 { cosine } else { sine };
    let y = if quarter & 1 == 0 { sine } else { cosine };
    f32x2(if quarter == 1 || quarter == 2 { -x } else { x }, if quarter >= 2 { -y } else { y })
}

/// A sum of squares, and those of a pair.
#[device]
pub fn add_squares(sum: f32, low: f32, high: f32) -> f32 {
    sum + (low * low + high * high)
}

/// The factor of a head's RMS norm, from its lanes' sums of squares. A collective of the warp.
#[device]
pub fn head_factor(squares: f32, dim: u32, epsilon: f32) -> f32 {
    rsqrt(warp_sum(squares) / dim as f32 + epsilon)
}

/// A pair of values, turned by an angle with that cosine and sine.
#[device]
pub fn rotated(low: f32, high: f32, turn: F32x2) -> F32x2 {
    f32x2(low * turn.x - high * turn.y, high * turn.x + low * turn.y)
}

/// Stores the pair (i, i + DIM / 2) of a head, whose place in a page is `head`. A collective of the warp where NARROW.
#[device(slots(narrow(bits: u32) -> u32))]
pub fn store_head_pair<const DIM: u32, const NARROW: bool, KV: Float>(
    page: InOut<KV>,
    head: u32,
    i: u32,
    low: f32,
    high: f32,
) {
    let mut values = page.offset(head);
    if NARROW {
        store_word(values, DIM, i, word_of(narrow, low));
        store_word(values, DIM, i + DIM / 2, word_of(narrow, high));
    } else {
        values[i] = KV::from_f32(low);
        values[i + DIM / 2] = KV::from_f32(high);
    }
}

/// Norms, rotates and stores. Row r of the grid's second dimension is row r of a chunk, or has a record of its own; a
/// free row writes nothing, since its position may belong to another. `q_out` may be `q`.
#[kernel(block = WARPS * 32, dependent, slots(narrow(bits: u32) -> u32))]
pub fn heads<
    const DIM: u32,
    const Q_HEADS: u32,
    const KV_HEADS: u32,
    const WARPS: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    raw: Projections,
    state: Input<u32>,
    record_stride: u32,
    q_out: Output<f32>,
    kv: KvViewMut<KV>,
) {
    require!(DIM % 64 == 0);
    let head = block_idx() * WARPS + warp_id();
    let row = block_idx_y();
    let lane = lane_id();
    let is_q = head < Q_HEADS;
    let is_k = head >= Q_HEADS && head < Q_HEADS + KV_HEADS;
    let is_v = head >= Q_HEADS + KV_HEADS && head < Q_HEADS + 2 * KV_HEADS;

    // What does not wait for the product: weights (V has none) and frequencies.
    let weight = if is_q { raw.q_weight } else { raw.k_weight };
    let mut weight_low = regs(1.0f32, DIM / 64);
    let mut weight_high = regs(1.0f32, DIM / 64);
    let mut frequency = regs(0.0f32, DIM / 64);
    if is_q || is_k {
        #[unroll]
        for p in 0..DIM / 64 {
            let i = lane + 32 * p;
            weight_low[p] = weight[i];
            weight_high[p] = weight[i + DIM / 2];
            frequency[p] = raw.inverse_frequencies[i];
        }
    }

    grid_launch_dependents();
    grid_dependency_wait();
    // The head's number within its projection.
    let local = if is_q {
        head
    } else if is_k {
        head - Q_HEADS
    } else {
        head - Q_HEADS - KV_HEADS
    };
    let of_q = raw.q.offset(row * raw.q_stride + local * DIM);
    let of_k = raw.k.offset(row * raw.k_stride + local * DIM);
    let of_v = raw.v.offset(row * raw.v_stride + local * DIM);
    let source = if is_q {
        of_q
    } else if is_k {
        of_k
    } else {
        of_v
    };
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(record, row, record_stride);
    let position = record.x + of_record;
    let in_use = of_record < record.y && (is_q || is_k || is_v);
    let mut low = regs(0.0f32, DIM / 64);
    let mut high = regs(0.0f32, DIM / 64);
    let mut squares = 0.0f32;
    if in_use {
        #[unroll]
        for p in 0..DIM / 64 {
            low[p] = source[lane + 32 * p];
            high[p] = source[lane + 32 * p + DIM / 2];
            squares = add_squares(squares, low[p], high[p]);
        }
    }
    let factor = head_factor(squares, DIM, raw.epsilon);

    if in_use {
        let to_q = (row * Q_HEADS + local) * DIM;
        let to_cache = (row_of_page(position, row, kv.capacity) * KV_HEADS + local) * head_len(DIM);
        let page = if is_q {
            0u64
        } else {
            page_start(kv.pages, record.w, position, kv.capacity, kv.max_pages, kv.page_stride)
        };
        let k_page = kv.k.offset(page);
        let v_page = kv.v.offset(page);
        #[unroll]
        for p in 0..DIM / 64 {
            let i = lane + 32 * p;
            let x = low[p] * factor * weight_low[p];
            let y = high[p] * factor * weight_high[p];
            let turned = rotated(x, y, cos_sin(position as f32 * frequency[p]));
            if is_q {
                q_out[to_q + i] = turned.x;
                q_out[to_q + i + DIM / 2] = turned.y;
            }
            if is_k {
                store_head_pair(narrow, k_page, to_cache, i, turned.x, turned.y);
            }
            if is_v {
                store_head_pair(narrow, v_page, to_cache, i, x, y);
            }
        }
    }
}

/// Angle a position, for each pair of a head: `base^(-2 i / dim) / factor`, computed in f64. `factors` are the file's,
/// one a pair, or none.
pub fn inverse_frequencies(dim: u32, base: f64, factors: Option<&[f32]>) -> Vec<f32> {
    let factor = |i: usize| factors.and_then(|factors| factors.get(i)).map_or(1.0, |factor| f64::from(*factor));
    (0..dim as usize / 2).map(|i| (base.powf(-2.0 * i as f64 / f64::from(dim)) / factor(i)) as f32).collect()
}

/// Heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub dim: u32,
    pub q: u32,
    /// 0: the layer reads the cache of another.
    pub kv: u32,
    pub cache: KvType,
}

impl Heads {
    pub fn instance(self) -> Result<Instance, InstanceError> {
        heads::Chosen {
            DIM: self.dim,
            Q_HEADS: self.q,
            KV_HEADS: self.kv, // More blocks rather than larger ones: the few heads of a decoded row spread over the GPU.
            WARPS: 2,
            NARROW: self.cache.is_narrow(),
            SCALED: self.cache == KvType::Q8_0,
            KV: kv_element(self.cache),
            narrow: narrow_slot(self.cache),
        }
        .build()
    }

    /// Blocks for that many rows.
    pub fn grid(self, rows: u32) -> [u32; 3] {
        [(self.q + 2 * self.kv).div_ceil(2), rows, 1]
    }
}
