//! What a layer does with its per-layer input, for a decoded row, in one launch: the residual takes the feed-forward's
//! part, `gelu(gate · residual) * input`, and the projection of that.
//!
//! Both matrices are small, and as two launches they are nothing but the way in and out of a kernel. One cluster does both: its
//! blocks share the rows of each matrix out, and read each other's gated values from shared memory. The gate's weights are on their way
//! before the first activation is there, the projection's right behind it.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::lanes_sum;
use crate::kernels::matvec::parts::{
    Unit, UnitActivations, chunk_slots, dot_fine, fetch, inverse_rms_of_chunks, is_place, keep_codes, keep_fine,
    leave_chunks,
};
use crate::kernels::matvec::slots::{weighted, with_update};
use crate::kernels::quantise::{fine_codes, quantise4, quantise4_unbounded};
use crate::measured::{H200, Question};

/// The activations of a unit of `len` values, which lie as they come: int8 alone, and few enough that no bank conflict matters.
#[device]
pub fn in_order(unit: u32, len: u32, words: Shared<u32>, scales: Shared<U32x2>) -> UnitActivations {
    let low = load::<U32x4>(words, unit * (len / 4));
    let high = load::<U32x4>(words, unit * (len / 4) + if len == 32 { 4 } else { 0 });
    let scale = scales[unit * len / 32];
    UnitActivations { low, high, scale: f32::from_bits(scale.x), sum: scale.y as i32 }
}

/// `residual = x + norm(update)`, `out = projection · (gelu(gate · residual) * by)`, over K values and N of a layer's input.
///
/// A warp takes a row of the gate, GATE_DEPTH units of it a lane, in each of GATE_ROUNDS rounds; and 32 / LANES rows of the
/// projection, a unit a lane, in each of ROUNDS. The grid is `[1, PEERS, rows]`: a cluster for each row, whose `by` is `by_stride` values
/// behind that of the row before.
#[kernel(block = WARPS * 32, min_blocks = 1, cluster = PEERS, dependent, dynamic_shared, slots(
    gate_side(unit: u32, more: u32) -> U32x4,
    gate_dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn per_layer_step<
    const K: u32,
    const N: u32,
    const GATE_UNIT: u32,
    const GATE_ROUNDS: u32,
    const GATE_DEPTH: u32,
    const UNIT: u32,
    const LANES: u32,
    const JOINED: bool,
    const ROUNDS: u32,
    const PIECES: u32,
    const WARPS: u32,
    const PEERS: u32,
    const EPSILON: f32,
>(
    gate_codes: Weights<U32x4>,
    codes: Weights<U32x4>,
    post_norm: Weights<f32>,
    x: Input<f32>,
    update: Input<f32>,
    by: Input<f32>,
    residual: Output<f32>,
    out: Output<f32>,
    by_stride: u32,
) {
    require!(K % 32 == 0 && N % 32 == 0 && WARPS % 4 == 0 && N == LANES * UNIT && 32 % LANES == 0);
    require!(GATE_ROUNDS * PEERS * WARPS >= N && GATE_DEPTH * 32 * GATE_UNIT >= K);
    require!(ROUNDS * PEERS * WARPS * 32 >= K * LANES && PIECES * WARPS * 128 >= K);
    // First digits, then the second and third of the groups that have fine codes: the gate reads the residual itself.
    let x_words = shared::<u32>(3 * K / 4);
    let x_scales = shared::<U32x2>(K / 32);
    let fine_sums = shared::<i32>(K / 32);
    let gated = shared::<f32>(GATE_ROUNDS * WARPS);
    let words = shared::<u32>(N / 4);
    let scales = shared::<U32x2>(N / 32);
    let totals = shared::<f32>(chunk_slots(K));

    let of_row = block_idx_z();
    let gate_units = K / GATE_UNIT;
    let lane_unit = lane_id() % LANES;
    // The first of the block's rows, or groups of rows, in a round.
    let first = cluster_rank() * WARPS + warp_id();
    let mut posts = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        posts[p] = load::<F32x4>(post_norm, (thread_idx() + p * (WARPS * 32)).min(K / 4 - 1) * 4);
    }
    let mut gate_ahead = regs(Unit::ZERO, GATE_ROUNDS * GATE_DEPTH);
    #[unroll]
    for r in 0..GATE_ROUNDS {
        #[unroll]
        for d in 0..GATE_DEPTH {
            let row = (r * (PEERS * WARPS) + first).min(N - 1);
            let unit = row * gate_units + (lane_id() + d * 32).min(gate_units - 1);
            gate_ahead[r * GATE_DEPTH + d] = fetch(gate_side, gate_codes, unit);
        }
    }

    grid_launch_dependents();
    grid_dependency_wait();
    // What a gate is multiplied by is asked for with the residual, not when the gate is there.
    let mut times = regs(0.0f32, GATE_ROUNDS);
    #[unroll]
    for r in 0..GATE_ROUNDS {
        times[r] = by[of_row * by_stride + (r * (PEERS * WARPS) + first).min(N - 1)];
    }
    // The residual, in every block.
    let mut held = regs(F32x4::ZERO, PIECES);
    let mut updates = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * (WARPS * 32);
        if is_place(place, K / 4) {
            held[p] = load::<F32x4>(x, of_row * K + place * 4);
            updates[p] = load::<F32x4>(update, of_row * K + place * 4);
        }
    }
    // The projection is last, and so are its weights: the cluster lies in one GPC, whose way to memory they would fill.
    order_loads();
    let mut ahead = regs(Unit::ZERO, ROUNDS);
    #[unroll]
    for r in 0..ROUNDS {
        let row = ((r * (PEERS * WARPS) + first) * (32 / LANES) + lane_id() / LANES).min(K - 1);
        ahead[r] = fetch(side, codes, row * LANES + lane_unit);
    }
    order_loads();
    leave_chunks(&updates, K / 4, totals);
    barrier();
    let factor = inverse_rms_of_chunks(totals, K);
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * (WARPS * 32);
        let four = with_update(held[p], weighted(updates[p], posts[p], 1.0), factor, 1.0);
        let quantised = quantise4_unbounded(four);
        if warp_any(f32::from_bits(quantised.y) < 0.0) {
            let fine = fine_codes(four, quantised.x, f32::from_bits(quantised.w));
            if is_place(place, K / 4) {
                keep_fine(fine, place, place, x_words, fine_sums);
            }
        }
        if is_place(place, K / 4) {
            if cluster_rank() == 0 {
                store(residual, of_row * K + place * 4, four);
            }
            keep_codes(quantised, place, place, x_words, x_scales);
        }
    }
    barrier();

    #[unroll]
    for r in 0..GATE_ROUNDS {
        let row = r * (PEERS * WARPS) + first;
        let mut sum = 0.0f32;
        #[unroll]
        for d in 0..GATE_DEPTH {
            let at = lane_id() + d * 32;
            let unit = at.min(gate_units - 1);
            let mut x = in_order(unit, GATE_UNIT, x_words, x_scales);
            let is_fine = x.scale < 0.0;
            x.scale = x.scale.abs();
            let number = row.min(N - 1) * gate_units + unit;
            let held = gate_ahead[r * GATE_DEPTH + d];
            let mut with = gate_dot(held, number, x, sum);
            if is_fine {
                let low = unit * (GATE_UNIT / 4);
                let high = low + if GATE_UNIT == 32 { 4 } else { 0 };
                let fine_sum = fine_sums[unit * GATE_UNIT / 32];
                with = dot_fine(gate_dot, held, number, low, high, x.scale, fine_sum, with, x_words);
            }
            if at < gate_units {
                sum = with;
            }
        }
        sum = warp_sum(sum);
        if lane_id() == 0 && row < N {
            gated[r * WARPS + warp_id()] = gelu(sum) * times[r];
        }
    }
    cluster_barrier();
    for start in (warp_id() * 32..N / 4).by(WARPS * 32) {
        let place = start + lane_id();
        let row = place.min(N / 4 - 1) * 4;
        let four = load_peer::<F32x4>(gated, row / (PEERS * WARPS) * WARPS + row % WARPS, row / WARPS % PEERS);
        let quantised = quantise4(four);
        if place < N / 4 {
            keep_codes(quantised, place, place, words, scales);
        }
    }
    cluster_arrive();
    barrier();

    let x_unit = in_order(lane_unit, UNIT, words, scales);
    #[unroll]
    for r in 0..ROUNDS {
        let row = (r * (PEERS * WARPS) + first) * (32 / LANES) + lane_id() / LANES;
        let unit = row.min(K - 1) * LANES + lane_unit;
        let sum = dot(ahead[r], unit, x_unit, 0.0);
        let value = lanes_sum(sum, LANES, JOINED, true);
        if lane_unit == 0 && row < K {
            out[of_row * K + row] = value;
        }
    }
    // What the others still read must not go.
    cluster_wait();
}

/// Blocks of the cluster, at most: each brings its own way to memory.
pub const MOST_PEERS: u32 = H200.fastest(Question::PerLayerBlocks);
/// Warps of a block; the norm before products of several rows has as many.
pub const BLOCK_WARPS: u32 = 16;
/// Warps of a block, at most, where each thread then holds one piece of the residual and not two.
const MANY_WARPS: u32 = 20;

/// Everything that decides an instance.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub gate: DType,
    pub projection: DType,
    /// Values of the residual.
    pub width: u32,
    /// Values of a layer's input.
    pub inputs: u32,
    /// Blocks that may be a cluster.
    pub peers: u32,
    pub epsilon: f32,
}

impl Step {
    /// Why there is no such kernel, if there is none.
    pub fn refusal(&self) -> Option<&'static str> {
        let lanes = self.inputs / format(self.projection).unit;
        match self {
            // Fewer are slower than two launches.
            _ if self.peers < MOST_PEERS => Some("the GPU has no clusters of 16"),
            _ if !format(self.gate).integer || !format(self.projection).integer => Some("its weights are floats"),
            Step { width, inputs, .. } if width % 32 > 0 || inputs % 32 > 0 => Some("its rows are not whole groups"),
            _ if !(1..=32).contains(&lanes) || !lanes.is_power_of_two() => Some("a warp cannot share its rows out"),
            _ => None,
        }
    }

    pub fn grid(&self, rows: u32) -> [u32; 3] {
        [1, self.peers, rows]
    }

    fn warps(&self) -> u32 {
        let of_one_piece = self.width.div_ceil(128).next_multiple_of(4);
        if of_one_piece <= MANY_WARPS { of_one_piece.max(BLOCK_WARPS) } else { BLOCK_WARPS }
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let (gate, projection) = (format(self.gate), format(self.projection));
        let lanes = self.inputs / projection.unit;
        let warps = self.peers * self.warps();
        per_layer_step::Chosen {
            K: self.width,
            N: self.inputs,
            GATE_UNIT: gate.unit,
            GATE_ROUNDS: self.inputs.div_ceil(warps),
            GATE_DEPTH: (self.width / gate.unit).div_ceil(32),
            UNIT: projection.unit,
            LANES: lanes,
            JOINED: projection.joined,
            ROUNDS: (self.width * lanes).div_ceil(warps * 32),
            PIECES: self.width.div_ceil(self.warps() * 128),
            WARPS: self.warps(),
            PEERS: self.peers,
            EPSILON: self.epsilon,
            gate_side: gate.side,
            gate_dot: gate.dot,
            side: projection.side,
            dot: projection.lane_dot,
        }
        .build()
    }
}
