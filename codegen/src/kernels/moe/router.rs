//! The router: which experts a row goes to, and how much of each it takes. All of it in f32: a rounded logit would change
//! the choice, and the error would grow from layer to layer.
//!
//! It is the first kernel of a mixture, so it can also end what comes before: the residual, and the norms of both halves.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::NORM_EPSILON;
use crate::kernels::matvec::parts::{inverse_rms_of_warps, leave_squares, squares_of_pieces};
use crate::kernels::matvec::slots::{square_sum, weighted, with_update};
use crate::kernels::outputs::{Outputs, leave4};

/// Warps of a block; each works on one expert at a time.
const BLOCK_WARPS: u32 = 8;
/// Rows of a block where there are many: as many as shared memory holds on every GPU, and no more.
const MOST_ROWS: u32 = 8;
const ROWS_BYTES: u32 = 96 << 10;
/// float4 vectors of a row of the router that a lane has in flight: for one row all of them, up to the larger limit.
const VECTORS_AHEAD: u32 = 8;
const MOST_VECTORS_AHEAD: u32 = 24;

/// `sum` plus four products.
#[device]
pub fn four_products(a: F32x4, b: F32x4, sum: f32) -> f32 {
    a.w.mul_add(b.w, a.z.mul_add(b.z, a.y.mul_add(b.y, a.x.mul_add(b.x, sum))))
}

/// The routing of each row: `router · (RMS norm of x * FACTOR * scale)`, the TOP largest logits (of equal ones the lower
/// expert), and the softmax over these. Block `[b, rows]` takes every `[blocks]`-th expert.
///
/// Where the mixture ENTERS here, x is still to take what attention made: `x + norm(update) * post_norm`. That sum is left as
/// the residual, and both halves of the mixture get their inputs: it has one norm, with weights for each of them.
///
/// The matrix is a megabyte, which one SM would read too slowly: with SPLIT a row has any number of
/// blocks, of which the last to finish chooses, and a word of `counter`. Without, a block takes ROWS rows, so that it reads the matrix once for all of
/// them. A logit has the same bits either way.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared)]
pub fn route<
    const WIDTH: u32,
    const EXPERTS: u32,
    const TOP: u32,
    const WARPS: u32,
    const DEPTH: u32,
    const PIECES: u32,
    const ROWS: u32,
    const SPLIT: bool,
    const ENTERS: bool,
    const FLOATS: bool,
    const ROUNDED: bool,
    const QUANTISED: bool,
    const FACTOR: f32,
    const EPSILON: f32,
>(
    router: Weights<f32>,
    scale: Weights<f32>,
    post_norm: Weights<f32>,
    dense_norm: Weights<f32>,
    expert_norm: Weights<f32>,
    x: Input<f32>,
    update: Input<f32>,
    state: Input<u32>,
    logits: InOut<f32>,
    counter: InOut<u32>,
    ids: Output<u32>,
    weights: Output<f32>,
    residual: Output<f32>,
    dense_out: Output<f32>,
    dense_rounded: Output<BF16>,
    dense_xq: Output<i8>,
    dense_xscale: Output<f32>,
    dense_xsum: Output<i32>,
    expert_out: Output<f32>,
    expert_rounded: Output<BF16>,
    expert_xq: Output<i8>,
    expert_xscale: Output<f32>,
    expert_xsum: Output<i32>,
) {
    require!(WIDTH % 4 == 0 && WIDTH <= PIECES * WARPS * 128 && TOP <= 32 && TOP <= EXPERTS);
    require!(!QUANTISED || WIDTH % 32 == 0);
    require!(ROWS <= WARPS && (ROWS == 1 || !SPLIT));
    // Without the norm's factor: it is the same for a row's values, so a logit takes it.
    let weighted_rows = shared::<f32>(ROWS * WIDTH);
    // Sums of squares, one a warp: of the update, and of each row after it.
    let of_update = shared::<f32>(if ENTERS { WARPS } else { 1 });
    let of_rows = shared::<f32>(ROWS * WARPS);
    let keys = shared::<u32>(if SPLIT { EXPERTS } else { 1 });
    let best = shared::<f32>(TOP);
    let first_row = block_idx_y() * ROWS;
    let vectors = WIDTH / 4;
    let first_expert = block_idx() * WARPS + warp_id();

    // The first weights are on their way before the activations are there.
    let mut ahead = regs(f32x4(0.0, 0.0, 0.0, 0.0), DEPTH);
    #[unroll]
    for d in 0..DEPTH {
        let at = (lane_id() + d * 32).min(vectors - 1);
        ahead[d] = load::<F32x4>(router, first_expert.min(EXPERTS - 1) * WIDTH + at * 4);
    }
    let mut scales = regs(F32x4::ZERO, PIECES);
    let mut posts = regs(F32x4::ZERO, if ENTERS { PIECES } else { 1 });
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * WARPS * 32;
        if place < vectors {
            scales[p] = load::<F32x4>(scale, place * 4);
            if ENTERS {
                posts[p] = load::<F32x4>(post_norm, place * 4);
            }
        }
    }

    grid_dependency_wait();
    grid_launch_dependents();
    let end = state[1u32].min(first_row + ROWS);
    // The whole block leaves: there is no such row.
    if first_row >= end {
        return;
    }

    for row in first_row..end {
        let mut held = regs(F32x4::ZERO, PIECES);
        let mut updates = regs(F32x4::ZERO, if ENTERS { PIECES } else { 1 });
        #[unroll]
        for p in 0..PIECES {
            let place = thread_idx() + p * WARPS * 32;
            if place < vectors {
                held[p] = load::<F32x4>(x, row * WIDTH + place * 4);
                if ENTERS {
                    updates[p] = load::<F32x4>(update, row * WIDTH + place * 4);
                }
            }
        }
        // Places past the end hold zeros.
        if ENTERS {
            leave_squares(squares_of_pieces(&updates, PIECES * WARPS * 32), of_update);
            barrier();
            let factor = inverse_rms_of_warps(of_update, WIDTH);
            #[unroll]
            for p in 0..PIECES {
                held[p] = with_update(held[p], weighted(updates[p], posts[p], 1.0), factor, 1.0);
            }
        }
        // The squares are those of the values themselves, whatever cancelled in them.
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0..PIECES {
            let place = thread_idx() + p * WARPS * 32;
            squares = squares + square_sum(held[p]);
            if place < vectors {
                store(weighted_rows, (row - first_row) * WIDTH + place * 4, weighted(held[p], scales[p], 1.0));
            }
        }
        leave_squares(squares, of_rows.offset((row - first_row) * WARPS));
        barrier();
        // Every block knows everything: three of them share out what is left behind.
        if ENTERS {
            let after = inverse_rms_of_warps(of_rows.offset((row - first_row) * WARPS), WIDTH);
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * WARPS * 32;
                let inside = place < vectors;
                let at = row * WIDTH + place * 4;
                let from = place.min(vectors - 1) * 4;
                if block_idx() == 0 && inside {
                    store(residual, at, held[p]);
                }
                if block_idx() == 1 % grid_dim() {
                    let four = weighted(held[p], load::<F32x4>(dense_norm, from), after);
                    leave4(four, at, inside, dense_out, dense_rounded, dense_xq, dense_xscale, dense_xsum);
                }
                if block_idx() == 2 % grid_dim() {
                    let four = weighted(held[p], load::<F32x4>(expert_norm, from), after);
                    leave4(four, at, inside, expert_out, expert_rounded, expert_xq, expert_xscale, expert_xsum);
                }
            }
        }
    }

    let mut factors = regs(0.0f32, ROWS);
    #[unroll]
    for r in 0..ROWS {
        // Rows past the end repeat the last one.
        factors[r] = inverse_rms_of_warps(of_rows.offset(r.min(end - first_row - 1) * WARPS), WIDTH) * FACTOR;
    }
    for expert in (first_expert..EXPERTS).by(grid_dim() * WARPS) {
        let mut sums = regs(0.0f32, ROWS);
        for start in (0..vectors).by(DEPTH * 32) {
            #[unroll]
            for d in 0..DEPTH {
                let at = start + lane_id() + d * 32;
                if at < vectors {
                    // Rows past the end repeat the last one, and nobody reads their sums.
                    #[unroll]
                    for r in 0..ROWS {
                        let four = load::<F32x4>(weighted_rows, r.min(end - first_row - 1) * WIDTH + at * 4);
                        sums[r] = four_products(ahead[d], four, sums[r]);
                    }
                }
                let row_ends = start + DEPTH * 32 >= vectors;
                let next_expert = if row_ends { expert + grid_dim() * WARPS } else { expert };
                let next = if row_ends { lane_id() + d * 32 } else { at + DEPTH * 32 };
                if next_expert < EXPERTS {
                    ahead[d] = load::<F32x4>(router, next_expert * WIDTH + next.min(vectors - 1) * 4);
                }
            }
        }
        #[unroll]
        for r in 0..ROWS {
            let sum = warp_sum(sums[r]);
            if lane_id() == 0 && first_row + r < end {
                logits[(first_row + r) * EXPERTS + expert] = sum * factors[r];
            }
        }
    }

    if SPLIT {
        if last_block_of(counter, block_idx_y(), grid_dim()) {
            choose_together(first_row, logits, ids, weights, keys, best);
        }
    } else {
        barrier();
        if first_row + warp_id() < end {
            choose(first_row + warp_id(), logits, ids, weights);
        }
    }
}

/// A word that is larger where the float is. What is not a number has a place in that order too.
#[device]
pub fn order_key(x: f32) -> u32 {
    // A zero has one sign.
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { bits ^ 0xffffffff } else { bits | 0x80000000 }
}

/// [`choose`] by a whole block, in a quarter of its time: every expert counts those that come before it, and so knows its place.
#[device]
pub fn choose_together<const EXPERTS: u32, const TOP: u32, const WARPS: u32>(
    row: u32,
    logits: InOut<f32>,
    ids: Output<u32>,
    weights: Output<f32>,
    keys: Shared<u32>,
    best: Shared<f32>,
) {
    for expert in (thread_idx()..EXPERTS).by(WARPS * 32) {
        keys[expert] = order_key(logits[row * EXPERTS + expert]);
    }
    barrier();
    for expert in (thread_idx()..EXPERTS).by(WARPS * 32) {
        let own = keys[expert];
        let mut place = 0u32;
        #[unroll(8)]
        for other in 0..EXPERTS {
            if keys[other] > own || keys[other] == own && other < expert {
                place = place + 1;
            }
        }
        if place < TOP {
            ids[row * TOP + place] = expert;
            best[place] = logits[row * EXPERTS + expert];
        }
    }
    barrier();
    if warp_id() == 0 {
        let mut share = 0.0f32;
        if lane_id() < TOP {
            share = (best[lane_id()] - best[0u32]).exp();
        }
        let sum = warp_sum(share);
        if lane_id() < TOP {
            weights[row * TOP + lane_id()] = share / sum;
        }
    }
}

/// One warp picks the largest logits one after the other; lane j keeps the j-th.
#[device]
pub fn choose<const EXPERTS: u32, const TOP: u32>(
    row: u32,
    logits: InOut<f32>,
    ids: Output<u32>,
    weights: Output<f32>,
) {
    let mut own = regs(f32::NEG_INFINITY, (EXPERTS + 31) / 32);
    #[unroll]
    for i in 0..(EXPERTS + 31) / 32 {
        if lane_id() + i * 32 < EXPERTS {
            own[i] = logits[row * EXPERTS + lane_id() + i * 32];
        }
    }
    let mut largest = 0.0f32;
    let mut kept = 0.0f32;
    let mut kept_id = 0u32;
    for j in 0..TOP {
        let mut best = f32::NEG_INFINITY;
        let mut id = EXPERTS - 1;
        // From the back, so that the lower of two equals stays.
        #[unroll]
        for back in 0..(EXPERTS + 31) / 32 {
            let i = (EXPERTS + 31) / 32 - 1 - back;
            if own[i] >= best {
                best = own[i];
                id = lane_id() + i * 32;
            }
        }
        let winner = warp_max(best);
        // Logits that are not numbers equal nothing; whatever is chosen then must still be an expert.
        let chosen = warp_min(if best == winner { id } else { EXPERTS - 1 }).min(EXPERTS - 1);
        #[unroll]
        for i in 0..(EXPERTS + 31) / 32 {
            if lane_id() + i * 32 == chosen {
                own[i] = f32::NEG_INFINITY;
            }
        }
        if j == 0 {
            largest = winner;
        }
        if lane_id() == j {
            kept = winner;
            kept_id = chosen;
        }
    }
    let mut share = 0.0f32;
    if lane_id() < TOP {
        share = (kept - largest).exp();
    }
    let sum = warp_sum(share);
    if lane_id() < TOP {
        ids[row * TOP + lane_id()] = kept_id;
        weights[row * TOP + lane_id()] = share / sum;
    }
}

/// The same, plainly: a thread takes a row.
#[kernel(block = 32)]
pub fn route_plain<const WIDTH: u32, const EXPERTS: u32, const TOP: u32, const FACTOR: f32, const EPSILON: f32>(
    router: Weights<f32>,
    scale: Weights<f32>,
    x: Input<f32>,
    state: Input<u32>,
    logits: InOut<f32>,
    ids: InOut<u32>,
    weights: InOut<f32>,
) {
    let row = block_idx() * 32 + thread_idx();
    if row < state[1u32] {
        let mut energy = 0.0f32;
        for i in 0..WIDTH {
            energy = x[row * WIDTH + i].mul_add(x[row * WIDTH + i], energy);
        }
        let factor = rsqrt(energy / WIDTH as f32 + EPSILON) * FACTOR;
        for expert in 0..EXPERTS {
            let mut sum = 0.0f32;
            for i in 0..WIDTH {
                sum = router[expert * WIDTH + i].mul_add(x[row * WIDTH + i] * factor * scale[i], sum);
            }
            logits[row * EXPERTS + expert] = sum;
        }
        let mut total = 0.0f32;
        for j in 0..TOP {
            let mut best = EXPERTS;
            for expert in 0..EXPERTS {
                let mut taken = false;
                for i in 0..j {
                    taken = taken || ids[row * TOP + i] == expert;
                }
                if !taken && (best == EXPERTS || logits[row * EXPERTS + expert] > logits[row * EXPERTS + best]) {
                    best = expert;
                }
            }
            ids[row * TOP + j] = best;
            let share = (logits[row * EXPERTS + best] - logits[row * EXPERTS + ids[row * TOP]]).exp();
            weights[row * TOP + j] = share;
            total = total + share;
        }
        for j in 0..TOP {
            weights[row * TOP + j] = weights[row * TOP + j] / total;
        }
    }
}

/// A router: everything that decides its instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Values of a row.
    pub width: u32,
    pub experts: u32,
    /// Experts that a row goes to.
    pub top: u32,
    /// Of the norms.
    pub epsilon: f32,
    /// It ends attention, and leaves the inputs of both halves of the mixture in these forms.
    pub enters: Option<Outputs>,
}

impl Router {
    pub fn new(width: u32, experts: u32, top: u32) -> Self {
        Self { width, experts, top, epsilon: NORM_EPSILON, enters: None }
    }

    fn factor(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// For one row, on any grid `[blocks]`.
    pub fn split_instance(&self) -> Result<Instance, InstanceError> {
        self.fast(true)
    }

    /// Rows of a block where there are many.
    fn rows(&self) -> u32 {
        (ROWS_BYTES / (self.width * 4)).clamp(1, MOST_ROWS)
    }

    /// Blocks for `rows` rows of many.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        [1, rows.div_ceil(self.rows()), 1]
    }

    /// For any rows, on [`Router::grid`].
    pub fn instance(&self) -> Result<Instance, InstanceError> {
        self.fast(false)
    }

    fn fast(&self, split: bool) -> Result<Instance, InstanceError> {
        let vectors = self.width / 4;
        let most = if split { MOST_VECTORS_AHEAD } else { VECTORS_AHEAD };
        let outputs = self.enters.unwrap_or(Outputs::NONE);
        route::Chosen {
            WIDTH: self.width,
            EXPERTS: self.experts,
            TOP: self.top,
            WARPS: BLOCK_WARPS,
            DEPTH: vectors.div_ceil(32).min(most),
            PIECES: vectors.div_ceil(BLOCK_WARPS * 32),
            ROWS: if split { 1 } else { self.rows() },
            SPLIT: split,
            ENTERS: self.enters.is_some(),
            FLOATS: outputs.floats,
            ROUNDED: outputs.bf16,
            QUANTISED: outputs.int8,
            FACTOR: self.factor(),
            EPSILON: self.epsilon,
        }
        .build()
    }

    /// The plain kernel, on a grid `[rows.div_ceil(32)]`.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        route_plain::Chosen {
            WIDTH: self.width,
            EXPERTS: self.experts,
            TOP: self.top,
            FACTOR: self.factor(),
            EPSILON: self.epsilon,
        }
        .build()
    }

    /// Blocks for one row: an expert for each warp.
    pub fn split_blocks(&self) -> u32 {
        self.experts.div_ceil(BLOCK_WARPS)
    }
}
