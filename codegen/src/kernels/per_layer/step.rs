//! What a layer does with its per-layer input, for a decoded row, in one launch: the residual takes the feed-forward's
//! part, `gelu(gate · residual) * input`, and the projection of that.
//!
//! Both matrices are small: two launches would be hardly more than the start and the end of a kernel. One cluster does
//! both. Its blocks share out the rows of each matrix, and read each other's gated values through distributed shared
//! memory. The loads of the gate's weights are issued before those of the first activations, the projection's right
//! behind these.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::geglu::StridedRows;
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

/// What the model says.
#[config]
pub struct StepShape {
    /// Values of the residual.
    K: u32,
    /// Values of a layer's input.
    N: u32,
    EPSILON: f32,
}

/// The gate: a warp takes GATE_ROWS of its rows, each with GATE_DEPTH units of GATE_UNIT values to a lane.
#[config]
pub struct GateTile {
    GATE_UNIT: u32,
    GATE_ROWS: u32,
    GATE_DEPTH: u32,
}

/// The projection: LANES lanes take ROWS of its rows, each with a unit of UNIT values to a lane. JOINED lanes are pairs
/// that have the same sum.
#[config]
pub struct ProjectionTile {
    UNIT: u32,
    ROWS: u32,
    LANES: u32,
    JOINED: bool,
}

/// The cluster, and how many float4 vectors of the residual each of its threads holds.
#[config]
pub struct StepCluster {
    CLUSTER_SIZE: u32,
    WARPS: u32,
    PIECES: u32,
}

/// The residual, and the feed-forward's output, which it takes.
#[view]
pub struct ResidualRows {
    pub x: Input<f32>,
    pub update: Input<f32>,
}

/// The shared memory of a block.
#[view]
pub struct StepShared {
    /// The residual in int8: first digits, then the second and third of the groups that have fine codes, because the
    /// gate reads the residual itself.
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
    fine_sums: Shared<i32>,
    /// Sums of squares of the update.
    update_squares: Shared<f32>,
    /// The block's gated values.
    gated: Shared<f32>,
    /// Those of all blocks, in int8.
    words: Shared<u32>,
    scales: Shared<U32x2>,
}

/// The activations of a unit of `len` values, which are stored in order: int8 alone, and few enough that no bank
/// conflict matters.
#[device]
pub fn in_order(unit: u32, len: u32, words: Shared<u32>, scales: Shared<U32x2>) -> UnitActivations {
    let low = load::<U32x4>(words, unit * (len / 4));
    let high = load::<U32x4>(words, unit * (len / 4) + if len == 32 { 4 } else { 0 });
    let scale = scales[unit * len / 32];
    UnitActivations { low, high, scale: f32::from_bits(scale.x), sum: scale.y as i32 }
}

/// The row of the gate that is a warp's `r`-th.
#[device]
pub fn gate_row<const C: StepCluster>(r: u32) -> u32 {
    r * (C.CLUSTER_SIZE * C.WARPS) + cluster_rank() * C.WARPS + warp_id()
}

/// The row of the projection that is the `r`-th of a lane's.
#[device]
pub fn projection_row<const P: ProjectionTile>(r: u32) -> u32 {
    gate_row(r) * (32 / P.LANES) + lane_id() / P.LANES
}

/// Issues the loads of the gate's weights, of all units that a warp has.
#[device(slots(gate_side(unit: u32, more: u32) -> U32x4))]
pub fn prefetch_gate<const S: StepShape, const G: GateTile>(gate_codes: Weights<U32x4>, gate_ahead: &mut Regs<Unit>) {
    let units = S.K / G.GATE_UNIT;
    #[unroll]
    for r in 0u32..G.GATE_ROWS {
        #[unroll]
        for d in 0u32..G.GATE_DEPTH {
            let unit = gate_row(r).min(S.N - 1) * units + (lane_id() + d * 32).min(units - 1);
            gate_ahead[r * G.GATE_DEPTH + d] = fetch(gate_side, gate_codes, unit);
        }
    }
}

/// Issues the loads of the projection's weights.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn prefetch_projection<const S: StepShape, const P: ProjectionTile>(codes: Weights<U32x4>, ahead: &mut Regs<Unit>) {
    #[unroll]
    for r in 0u32..P.ROWS {
        let row = projection_row(r).min(S.K - 1);
        ahead[r] = fetch(side, codes, row * P.LANES + lane_id() % P.LANES);
    }
}

/// Adds the normed update to the residual, which the first block writes, and quantises it to shared memory. A
/// collective of the block, with a barrier at its end.
#[device]
pub fn quantise_residual<const S: StepShape, const C: StepCluster>(
    held: &Regs<F32x4>,
    updates: &Regs<F32x4>,
    posts: &Regs<F32x4>,
    of_row: u32,
    residual: Output<f32>,
    memory: StepShared,
) {
    leave_chunks(updates, S.K / 4, memory.update_squares);
    barrier();
    let factor = inverse_rms_of_chunks(memory.update_squares, S.K);
    #[unroll]
    for p in 0u32..C.PIECES {
        let place = thread_idx() + p * (C.WARPS * 32);
        let four = with_update(held[p], weighted(updates[p], posts[p], 1.0), factor, 1.0);
        let quantised = quantise4_unbounded(four);
        if warp_any(f32::from_bits(quantised.y) < 0.0) {
            let fine = fine_codes(four, quantised.x, f32::from_bits(quantised.w));
            if is_place(place, S.K / 4) {
                keep_fine(fine, place, place, memory.x_words, memory.fine_sums);
            }
        }
        if is_place(place, S.K / 4) {
            if cluster_rank() == 0 {
                store(residual, of_row * S.K + place * 4, four);
            }
            keep_codes(quantised, place, place, memory.x_words, memory.x_scales);
        }
    }
    barrier();
}

/// Multiplies the warp's rows of the gate by the residual, and stores `gelu(gate) * input` for them; `times` are the
/// inputs.
#[device(slots(gate_dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_gate<const S: StepShape, const G: GateTile, const C: StepCluster>(
    gate_ahead: &Regs<Unit>,
    times: &Regs<f32>,
    memory: StepShared,
) {
    let units = S.K / G.GATE_UNIT;
    #[unroll]
    for r in 0u32..G.GATE_ROWS {
        let row = gate_row(r);
        let mut sum = 0.0f32;
        #[unroll]
        for d in 0u32..G.GATE_DEPTH {
            let at = lane_id() + d * 32;
            let unit = at.min(units - 1);
            let mut x = in_order(unit, G.GATE_UNIT, memory.x_words, memory.x_scales);
            let is_fine = x.scale < 0.0;
            x.scale = x.scale.abs();
            let number = row.min(S.N - 1) * units + unit;
            let held = gate_ahead[r * G.GATE_DEPTH + d];
            let mut with = gate_dot(held, number, x, sum);
            if is_fine {
                let low = unit * (G.GATE_UNIT / 4);
                let high = low + if G.GATE_UNIT == 32 { 4 } else { 0 };
                let fine_sum = memory.fine_sums[unit * G.GATE_UNIT / 32];
                with = dot_fine(gate_dot, held, number, low, high, x.scale, fine_sum, with, memory.x_words);
            }
            if at < units {
                sum = with;
            }
        }
        sum = warp_sum(sum);
        if lane_id() == 0 && row < S.N {
            memory.gated[r * C.WARPS + warp_id()] = gelu(sum) * times[r];
        }
    }
}

/// Reads the gated values of all blocks from their shared memory, and quantises them. A collective of the cluster, with
/// a barrier of the block at its end; `cluster_wait()` must follow before a block ends.
#[device]
pub fn collect_gated<const S: StepShape, const C: StepCluster>(memory: StepShared) {
    cluster_barrier();
    for start in (warp_id() * 32..S.N / 4).by(C.WARPS * 32) {
        let place = start + lane_id();
        let row = place.min(S.N / 4 - 1) * 4;
        let at = row / (C.CLUSTER_SIZE * C.WARPS) * C.WARPS + row % C.WARPS;
        let quantised = quantise4(load_peer::<F32x4>(memory.gated, at, row / C.WARPS % C.CLUSTER_SIZE));
        if place < S.N / 4 {
            keep_codes(quantised, place, place, memory.words, memory.scales);
        }
    }
    cluster_arrive();
    barrier();
}

/// Multiplies the warp's rows of the projection by the gated values.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_projection<const S: StepShape, const P: ProjectionTile>(
    ahead: &Regs<Unit>,
    memory: StepShared,
    of_row: u32,
    out: Output<f32>,
) {
    let lane_unit = lane_id() % P.LANES;
    let x_unit = in_order(lane_unit, P.UNIT, memory.words, memory.scales);
    #[unroll]
    for r in 0u32..P.ROWS {
        let row = projection_row(r);
        let sum = dot(ahead[r], row.min(S.K - 1) * P.LANES + lane_unit, x_unit, 0.0);
        let value = lanes_sum(sum, P.LANES, P.JOINED, true);
        if lane_unit == 0 && row < S.K {
            out[of_row * S.K + row] = value;
        }
    }
}

/// `residual = x + norm(update)`, `out = projection · (gelu(gate · residual) * by)`, over K values and N of a layer's
/// input.
///
/// The grid is `[1, CLUSTER_SIZE, rows]`: a cluster for each row. Its warps share out the rows of both matrices.
#[kernel(block = C.WARPS * 32, min_blocks = 1, cluster = C.CLUSTER_SIZE, dependent, dynamic_shared, slots(
    gate_side(unit: u32, more: u32) -> U32x4,
    gate_dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn per_layer_step<const S: StepShape, const G: GateTile, const P: ProjectionTile, const C: StepCluster>(
    gate_codes: Weights<U32x4>,
    codes: Weights<U32x4>,
    post_norm: Weights<f32>,
    rows: ResidualRows,
    by: StridedRows,
    residual: Output<f32>,
    out: Output<f32>,
) {
    require!(S.K % 32 == 0 && S.N % 32 == 0 && C.WARPS % 4 == 0 && S.N == P.LANES * P.UNIT && 32 % P.LANES == 0);
    require!(G.GATE_ROWS * C.CLUSTER_SIZE * C.WARPS >= S.N && G.GATE_DEPTH * 32 * G.GATE_UNIT >= S.K);
    require!(P.ROWS * C.CLUSTER_SIZE * C.WARPS * 32 >= S.K * P.LANES && C.PIECES * C.WARPS * 128 >= S.K);
    let x_words = shared::<u32>(3 * S.K / 4);
    let x_scales = shared::<U32x2>(S.K / 32);
    let fine_sums = shared::<i32>(S.K / 32);
    let gated = shared::<f32>(G.GATE_ROWS * C.WARPS);
    let words = shared::<u32>(S.N / 4);
    let scales = shared::<U32x2>(S.N / 32);
    let update_squares = shared::<f32>(chunk_slots(S.K));
    let memory = StepShared { x_words, x_scales, fine_sums, update_squares, gated, words, scales };

    let of_row = block_idx_z();
    let mut posts = regs(F32x4::ZERO, C.PIECES);
    #[unroll]
    for p in 0u32..C.PIECES {
        posts[p] = load::<F32x4>(post_norm, (thread_idx() + p * (C.WARPS * 32)).min(S.K / 4 - 1) * 4);
    }
    let mut gate_ahead = regs(Unit::ZERO, G.GATE_ROWS * G.GATE_DEPTH);
    prefetch_gate(gate_side, gate_codes, &mut gate_ahead);

    grid_launch_dependents();
    grid_dependency_wait();
    // What a gate is multiplied by is loaded with the residual: not when the gate has been computed.
    let mut times = regs(0.0f32, G.GATE_ROWS);
    #[unroll]
    for r in 0u32..G.GATE_ROWS {
        times[r] = by.values[of_row * by.stride + gate_row(r).min(S.N - 1)];
    }
    // The residual, in every block.
    let mut held = regs(F32x4::ZERO, C.PIECES);
    let mut updates = regs(F32x4::ZERO, C.PIECES);
    #[unroll]
    for p in 0u32..C.PIECES {
        let place = thread_idx() + p * (C.WARPS * 32);
        if is_place(place, S.K / 4) {
            held[p] = load::<F32x4>(rows.x, of_row * S.K + place * 4);
            updates[p] = load::<F32x4>(rows.update, of_row * S.K + place * 4);
        }
    }
    // The projection is last, and so are its weights: a cluster is in one GPC, whose memory path they would fill.
    order_loads();
    let mut ahead = regs(Unit::ZERO, P.ROWS);
    prefetch_projection(side, codes, &mut ahead);
    order_loads();
    quantise_residual(&held, &updates, &posts, of_row, residual, memory);
    multiply_gate(gate_dot, &gate_ahead, &times, memory);
    collect_gated(memory);
    multiply_projection(dot, &ahead, memory, of_row, out);
    // A block's shared memory must outlive its peers' reads.
    cluster_wait();
}

/// Blocks of the cluster, at most: each brings its own memory path.
pub const MOST_CLUSTER_BLOCKS: u32 = H200.fastest(Question::PerLayerBlocks);
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
    /// Blocks of the cluster.
    pub cluster_size: u32,
    pub epsilon: f32,
}

impl Step {
    /// Why there is no such kernel, if there is none.
    pub fn refusal(&self) -> Option<&'static str> {
        let lanes = self.inputs / format(self.projection).unit;
        match self {
            // Fewer are slower than two launches.
            _ if self.cluster_size < MOST_CLUSTER_BLOCKS => Some("the GPU has no clusters of 16"),
            _ if !format(self.gate).integer || !format(self.projection).integer => Some("its weights are floats"),
            Step { width, inputs, .. } if width % 32 > 0 || inputs % 32 > 0 => Some("its rows are not whole groups"),
            _ if format(self.gate).side.thin != format(self.projection).side.thin => {
                Some("its weights have units of 8 bytes and of 16")
            }
            _ if !(1..=32).contains(&lanes) || !lanes.is_power_of_two() => Some("a warp cannot share its rows out"),
            _ => None,
        }
    }

    pub fn grid(&self, rows: u32) -> [u32; 3] {
        [1, self.cluster_size, rows]
    }

    fn warps(&self) -> u32 {
        let of_one_piece = self.width.div_ceil(128).next_multiple_of(4);
        if of_one_piece <= MANY_WARPS { of_one_piece.max(BLOCK_WARPS) } else { BLOCK_WARPS }
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let (gate, projection) = (format(self.gate), format(self.projection));
        let lanes = self.inputs / projection.unit;
        let warps = self.cluster_size * self.warps();
        per_layer_step::Chosen {
            S: StepShape { K: self.width, N: self.inputs, EPSILON: self.epsilon },
            G: GateTile {
                GATE_UNIT: gate.unit,
                GATE_ROWS: self.inputs.div_ceil(warps),
                GATE_DEPTH: (self.width / gate.unit).div_ceil(32),
            },
            P: ProjectionTile {
                UNIT: projection.unit,
                ROWS: (self.width * lanes).div_ceil(warps * 32),
                LANES: lanes,
                JOINED: projection.joined,
            },
            C: StepCluster {
                CLUSTER_SIZE: self.cluster_size,
                WARPS: self.warps(),
                PIECES: self.width.div_ceil(self.warps() * 128),
            },
            gate_side: gate.side,
            gate_dot: gate.fine_dot,
            side: projection.side,
            dot: projection.lane_dot,
        }
        .build()
    }
}
