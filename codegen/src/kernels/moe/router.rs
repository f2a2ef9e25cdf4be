//! The router: which experts a row goes to, and how much of each it takes. All of it in f32: a rounded logit would change
//! the choice, and the error would grow from layer to layer.
//!
//! It is the first kernel of a mixture, so it can also end what comes before: the residual, and the norms of both halves.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::choose::{choose, choose_together};
use super::entry::leave_rows;
use crate::kernels::NORM_EPSILON;
use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks, is_place, leave_chunks};
use crate::kernels::matvec::slots::{weighted, with_update};
use crate::kernels::outputs::Outputs;

/// Warps of a block; each works on one expert at a time.
const BLOCK_WARPS: u32 = 8;
/// Warps of a block of a cluster, at most: as many as have whole chunks of a row to norm. Their experts' rows take most of the registers.
const MOST_CLUSTER_WARPS: u32 = 11;
/// Rows of a block: as many as shared memory holds on every GPU, and no more.
const MOST_ROWS: u32 = 8;
const ROWS_BYTES: u32 = 96 << 10;
/// Rows of a block where there are many and shared memory holds them. Every block reads the whole matrix: with twice the rows, half as often.
const MOST_OF_MANY: u32 = 16;
/// float4 vectors of an expert that a lane has in flight, of many rows and of decoded ones: of those all, up to the limit.
const DEPTH_OF_MANY: u32 = 2;
const MOST_VECTORS_AHEAD: u32 = 24;
/// Experts that a warp multiplies many rows with at once, and the most rows: what it reads of the rows from shared memory serves all of them.
const EXPERTS_AT_ONCE: u32 = 4;
const EXPERTS_AT_ONCE_OF_MOST: u32 = 8;
/// Rows that a block norms at once, decoded ones and the most: as many as registers hold.
const MOST_TOGETHER: u32 = 2;
const TOGETHER_OF_MOST: u32 = 4;

/// `sum` plus four products.
#[device]
pub fn four_products(a: F32x4, b: F32x4, sum: f32) -> f32 {
    a.w.mul_add(b.w, a.z.mul_add(b.z, a.y.mul_add(b.y, a.x.mul_add(b.x, sum))))
}

/// The routing of each row: `router · (RMS norm of x * FACTOR * scale)`, the TOP largest logits (of equal ones the lower
/// expert), and the softmax over these. Block `[rows, b]` takes every `[blocks]`-th expert.
///
/// Where the mixture ENTERS here, x is still to take what attention made: `x + norm(update) * post_norm`. That sum is left as
/// the residual, and both halves of the mixture get their inputs: it has one norm, with weights for each of them.
///
/// The matrix is a megabyte, which one SM would read too slowly: with SPLIT, ROWS rows have any number of
/// blocks, of which the last to finish chooses, and a word of `counter`; or a cluster of PEERS blocks, of which the first chooses. Without, a block takes ROWS rows with all experts. Either way it reads the matrix once for all of
/// them, and norms TOGETHER of them at a time. With KNOWN the number of rows is read before the wait: nobody writes it who may still run. In a cluster whose rows are normed at once, residual and inputs are left while the first block chooses. A logit and a choice have the same bits however many rows there are.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, waits_first, cluster = PEERS, early(KNOWN, state), dynamic_shared)]
pub fn route<
    const WIDTH: u32,
    const EXPERTS: u32,
    const TOP: u32,
    const WARPS: u32,
    const DEPTH: u32,
    const AT_ONCE: u32,
    const PIECES: u32,
    const ROWS: u32,
    const TOGETHER: u32,
    const SPLIT: bool,
    const PEERS: u32,
    const KNOWN: bool,
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
    require!(TOGETHER <= ROWS);
    // A block of a cluster has one expert for each of its warps.
    require!(PEERS >= 1 && (PEERS == 1 || SPLIT && AT_ONCE == 1 && PEERS * WARPS >= EXPERTS));
    // Without the norm's factor: it is the same for a row's values, so a logit takes it.
    let weighted_rows = shared::<f32>(ROWS * WIDTH);
    // Rows that are left later, and whether they are.
    let leaves_later = PEERS > 1 && TOGETHER == ROWS;
    let kept_rows = shared::<f32>(if PEERS > 1 && TOGETHER == ROWS { TOGETHER * PIECES * WARPS * 128 } else { 4 });
    // Sums of squares, one a chunk: of the update, and of each row after it.
    let slots = chunk_slots(WIDTH);
    let of_update = shared::<f32>(if ENTERS { TOGETHER * chunk_slots(WIDTH) } else { 4 });
    let of_rows = shared::<f32>(ROWS * chunk_slots(WIDTH));
    // Logits: those of the block, and in the end all, and their order.
    let found = shared::<f32>(if SPLIT { ROWS * EXPERTS } else { 1 });
    let keys = shared::<u32>(if SPLIT { ROWS * EXPERTS } else { 1 });
    let best = shared::<f32>(if SPLIT { ROWS * TOP } else { 1 });
    let first_row = block_idx() * ROWS;
    let vectors = WIDTH / 4;
    let first_expert = (block_idx_y() * WARPS + warp_id()) * AT_ONCE;

    // The first weights are on their way before the activations are there. A cluster lies in one GPC, whose way to memory they would fill: of those half, and the others behind the activations.
    let first_ahead = if PEERS > 1 { DEPTH / 2 } else { DEPTH };
    let mut ahead = regs(f32x4(0.0, 0.0, 0.0, 0.0), DEPTH * AT_ONCE);
    #[unroll]
    for d in 0u32..first_ahead {
        let at = (lane_id() + d * 32).min(vectors - 1);
        #[unroll]
        for e in 0..AT_ONCE {
            ahead[d * AT_ONCE + e] = load::<F32x4>(router, (first_expert + e).min(EXPERTS - 1) * WIDTH + at * 4);
        }
    }
    let mut scales = regs(F32x4::ZERO, PIECES);
    let mut posts = regs(F32x4::ZERO, if ENTERS { PIECES } else { 1 });
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * WARPS * 32;
        if is_place(place, vectors) {
            scales[p] = load::<F32x4>(scale, place * 4);
            if ENTERS {
                posts[p] = load::<F32x4>(post_norm, place * 4);
            }
        }
    }
    // Every block knows everything: three of them share out what is left behind, others than the first if there are so many. What they need for it is on its way, too.
    let last = grid_dim_y() - 1;
    let leaves_residual = ENTERS && block_idx_y() == last.min(3);
    let leaves_dense = ENTERS && block_idx_y() == last.min(1);
    let leaves_expert = ENTERS && block_idx_y() == last.min(2);
    let mut dense_norms = regs(F32x4::ZERO, if ENTERS { PIECES } else { 1 });
    let mut expert_norms = regs(F32x4::ZERO, if ENTERS { PIECES } else { 1 });
    if ENTERS && !leaves_later {
        #[unroll]
        for p in 0..PIECES {
            let from = (thread_idx() + p * WARPS * 32).min(vectors - 1) * 4;
            if leaves_dense {
                dense_norms[p] = load::<F32x4>(dense_norm, from);
            }
            if leaves_expert {
                expert_norms[p] = load::<F32x4>(expert_norm, from);
            }
        }
    }

    let mut rows = 0u32;
    if KNOWN {
        rows = state[1u32];
    }
    order_loads();
    grid_dependency_wait();
    if !KNOWN {
        rows = state[1u32];
    }
    let end = rows.min(first_row + ROWS);
    // The whole block leaves: there is no such row.
    if first_row >= end {
        grid_launch_dependents();
        return;
    }

    // The compiler should know where this is once.
    for done in (0u32..if leaves_later { 1 } else { end - first_row }).by(TOGETHER) {
        let start = first_row + done;
        // Rows past the end are the last one again.
        let mut held = regs(F32x4::ZERO, TOGETHER * PIECES);
        let mut updates = regs(F32x4::ZERO, if ENTERS { TOGETHER * PIECES } else { 1 });
        #[unroll]
        for t in 0..TOGETHER {
            let row = (start + t).min(end - 1);
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * WARPS * 32;
                if is_place(place, vectors) {
                    held[t * PIECES + p] = load::<F32x4>(x, row * WIDTH + place * 4);
                    if ENTERS {
                        updates[t * PIECES + p] = load::<F32x4>(update, row * WIDTH + place * 4);
                    }
                }
            }
        }
        if PEERS > 1 && done == 0 {
            order_loads();
            #[unroll]
            for d in first_ahead..DEPTH {
                let at = (lane_id() + d * 32).min(vectors - 1);
                ahead[d] = load::<F32x4>(router, first_expert.min(EXPERTS - 1) * WIDTH + at * 4);
            }
        }
        // The successor would fill the way to memory, too.
        grid_launch_dependents();
        // Places past the end hold zeros.
        if ENTERS {
            #[unroll]
            for t in 0..TOGETHER {
                let mut own = regs(F32x4::ZERO, PIECES);
                #[unroll]
                for p in 0..PIECES {
                    own[p] = updates[t * PIECES + p];
                }
                leave_chunks(&own, vectors, of_update.offset(t * slots));
            }
            barrier();
            #[unroll]
            for t in 0..TOGETHER {
                let factor = inverse_rms_of_chunks(of_update.offset(t * slots), WIDTH);
                #[unroll]
                for p in 0..PIECES {
                    let of = t * PIECES + p;
                    held[of] = with_update(held[of], weighted(updates[of], posts[p], 1.0), factor, 1.0);
                }
            }
        }
        // The squares are those of the values themselves, whatever cancelled in them.
        #[unroll]
        for t in 0..TOGETHER {
            let row = (start + t).min(end - 1) - first_row;
            let mut own = regs(F32x4::ZERO, PIECES);
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * WARPS * 32;
                own[p] = held[t * PIECES + p];
                if is_place(place, vectors) {
                    store(weighted_rows, row * WIDTH + place * 4, weighted(own[p], scales[p], 1.0));
                }
            }
            leave_chunks(&own, vectors, of_rows.offset(row * slots));
        }
        barrier();
        if ENTERS && !leaves_later {
            leave_rows(
                &held,
                &dense_norms,
                &expert_norms,
                of_rows,
                start,
                first_row,
                end,
                leaves_residual,
                leaves_dense,
                leaves_expert,
                residual,
                dense_out,
                dense_rounded,
                dense_xq,
                dense_xscale,
                dense_xsum,
                expert_out,
                expert_rounded,
                expert_xq,
                expert_xscale,
                expert_xsum,
            );
        }
        // Each thread keeps its own.
        if leaves_later {
            #[unroll]
            for of in 0..TOGETHER * PIECES {
                store(kept_rows, (of * WARPS * 32 + thread_idx()) * 4, held[of]);
            }
        }
    }

    let mut factors = regs(0.0f32, ROWS);
    #[unroll]
    for r in 0..ROWS {
        // Rows past the end repeat the last one.
        factors[r] = inverse_rms_of_chunks(of_rows.offset(r.min(end - first_row - 1) * slots), WIDTH) * FACTOR;
    }
    for expert in (first_expert..EXPERTS).by(grid_dim_y() * WARPS * AT_ONCE) {
        let mut sums = regs(0.0f32, ROWS * AT_ONCE);
        for start in (0..vectors).by(DEPTH * 32) {
            #[unroll]
            for d in 0..DEPTH {
                let at = start + lane_id() + d * 32;
                if at < vectors {
                    // Rows past the end repeat the last one, and nobody reads their sums.
                    #[unroll]
                    for r in 0..ROWS {
                        let four = load::<F32x4>(weighted_rows, r.min(end - first_row - 1) * WIDTH + at * 4);
                        #[unroll]
                        for e in 0..AT_ONCE {
                            let sum = sums[r * AT_ONCE + e];
                            sums[r * AT_ONCE + e] = four_products(ahead[d * AT_ONCE + e], four, sum);
                        }
                    }
                }
                let row_ends = start + DEPTH * 32 >= vectors;
                let next_expert = if row_ends { expert + grid_dim_y() * WARPS * AT_ONCE } else { expert };
                let next = if row_ends { lane_id() + d * 32 } else { at + DEPTH * 32 };
                if PEERS == 1 && next_expert < EXPERTS {
                    #[unroll]
                    for e in 0..AT_ONCE {
                        let row = (next_expert + e).min(EXPERTS - 1);
                        ahead[d * AT_ONCE + e] = load::<F32x4>(router, row * WIDTH + next.min(vectors - 1) * 4);
                    }
                }
            }
        }
        #[unroll]
        for r in 0..ROWS {
            #[unroll]
            for e in 0..AT_ONCE {
                let sum = warp_sum(sums[r * AT_ONCE + e]);
                if lane_id() == 0 && first_row + r < end && expert + e < EXPERTS {
                    logits[(first_row + r) * EXPERTS + expert + e] = sum * factors[r];
                    if PEERS > 1 {
                        found[r * EXPERTS + expert + e] = sum * factors[r];
                    }
                }
            }
        }
    }

    let places = (end - first_row) * EXPERTS;
    if PEERS > 1 {
        cluster_barrier();
        let chooses = cluster_rank() == 0;
        if chooses {
            #[unroll(1)]
            for place in (thread_idx()..places).by(WARPS * 32) {
                found[place] = load_peer::<f32>(found, place, place % EXPERTS / WARPS);
            }
        }
        // The others may go as soon as they have been read.
        cluster_arrive();
        if chooses {
            choose_together(first_row, end - first_row, ids, weights, found, keys, best);
        }
        if ENTERS && leaves_later {
            let mut kept = regs(F32x4::ZERO, TOGETHER * PIECES);
            #[unroll]
            for of in 0..TOGETHER * PIECES {
                kept[of] = load::<F32x4>(kept_rows, (of * WARPS * 32 + thread_idx()) * 4);
            }
            #[unroll]
            for p in 0..PIECES {
                let from = (thread_idx() + p * WARPS * 32).min(vectors - 1) * 4;
                if leaves_dense {
                    dense_norms[p] = load::<F32x4>(dense_norm, from);
                }
                if leaves_expert {
                    expert_norms[p] = load::<F32x4>(expert_norm, from);
                }
            }
            leave_rows(
                &kept,
                &dense_norms,
                &expert_norms,
                of_rows,
                first_row,
                first_row,
                end,
                leaves_residual,
                leaves_dense,
                leaves_expert,
                residual,
                dense_out,
                dense_rounded,
                dense_xq,
                dense_xscale,
                dense_xsum,
                expert_out,
                expert_rounded,
                expert_xq,
                expert_xscale,
                expert_xsum,
            );
        }
        cluster_wait();
    } else if SPLIT {
        if last_block_of(counter, block_idx(), grid_dim_y()) {
            for place in (thread_idx()..places).by(WARPS * 32) {
                found[place] = logits[first_row * EXPERTS + place];
            }
            choose_together(first_row, end - first_row, ids, weights, found, keys, best);
        }
    } else {
        barrier();
        for row in (first_row + warp_id()..end).by(WARPS) {
            choose(row, logits, ids, weights);
        }
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
    /// Whoever writes the number of rows has ended when it starts.
    pub known: bool,
    /// Blocks that may be a cluster.
    pub peers: u32,
}

impl Router {
    pub fn new(width: u32, experts: u32, top: u32) -> Self {
        Self { width, experts, top, epsilon: NORM_EPSILON, enters: None, known: false, peers: 1 }
    }

    fn factor(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// Blocks of a cluster, of decoded rows: all of a tile, which then choose without a way through memory; or 1. A cluster lies in one GPC, so that those of many tiles would wait for each other:
    /// measured on an H200, four of 16 blocks gain and eight lose.
    fn split_peers(&self, rows: u32, multiprocessors: u32) -> u32 {
        let tiles = rows.div_ceil(self.split_rows(rows, multiprocessors));
        let blocks = self.cluster_blocks();
        if blocks <= self.peers && tiles * blocks <= multiprocessors / 2 { blocks } else { 1 }
    }

    /// Blocks that are a cluster, where there are clusters: an expert for each warp.
    pub fn cluster_blocks(&self) -> u32 {
        self.experts.div_ceil(self.cluster_warps())
    }

    fn cluster_warps(&self) -> u32 {
        let is_whole = |warps: &u32| self.width.is_multiple_of(128 * warps);
        (BLOCK_WARPS..=MOST_CLUSTER_WARPS).rev().find(is_whole).unwrap_or(BLOCK_WARPS)
    }

    /// Blocks for a tile of so many decoded rows: an expert for each warp.
    pub fn split_grid(&self, rows: u32, multiprocessors: u32) -> [u32; 3] {
        let blocks = match self.split_peers(rows, multiprocessors) {
            1 => self.split_blocks(),
            peers => peers,
        };
        [rows.div_ceil(self.split_rows(rows, multiprocessors)), blocks, 1]
    }

    /// For decoded rows, on a grid `[row tiles, blocks]`: of any number of blocks, unless they are clusters.
    pub fn split_instance(&self, rows: u32, multiprocessors: u32) -> Result<Instance, InstanceError> {
        self.fast(self.split_rows(rows, multiprocessors), true, self.split_peers(rows, multiprocessors))
    }

    /// Rows of a block where there are blocks for every few experts: a block has an SM to itself, so that there are no more of them than SMs.
    pub fn split_rows(&self, rows: u32, multiprocessors: u32) -> u32 {
        let all = (rows * self.split_blocks()).div_ceil(multiprocessors.max(1)).next_power_of_two();
        all.min(self.rows()).min(rows.next_power_of_two())
    }

    /// The most rows of a block, on every GPU.
    fn rows(&self) -> u32 {
        (ROWS_BYTES / (self.width * 4)).clamp(1, MOST_ROWS)
    }

    /// Rows of a block where there are many and a block may have so much shared memory: fewer of them, rather than SMs without any.
    pub fn many_rows(&self, rows: u32, multiprocessors: u32, shared_bytes: u32) -> u32 {
        // The sums of squares lie beside the rows, and a KiB is the driver's.
        let holds_most = shared_bytes >= MOST_OF_MANY * (self.width + self.width.div_ceil(512) * 4) * 4 + (2 << 10);
        let most = if holds_most { MOST_OF_MANY } else { self.rows() };
        rows.div_ceil(multiprocessors.max(1)).next_power_of_two().min(most)
    }

    /// For many rows, so many to a block, on a grid `[row tiles]`.
    pub fn instance(&self, rows: u32) -> Result<Instance, InstanceError> {
        self.fast(rows, false, 1)
    }

    /// `split`: the experts are shared out among blocks, `peers` of which are a cluster.
    fn fast(&self, rows: u32, split: bool, peers: u32) -> Result<Instance, InstanceError> {
        let vectors = self.width / 4;
        let warps = if peers > 1 { self.cluster_warps() } else { BLOCK_WARPS };
        let (at_once, depth, together) = match rows {
            _ if split => (1, MOST_VECTORS_AHEAD, MOST_TOGETHER),
            MOST_OF_MANY => (EXPERTS_AT_ONCE_OF_MOST, DEPTH_OF_MANY, TOGETHER_OF_MOST),
            _ => (EXPERTS_AT_ONCE, DEPTH_OF_MANY, 1),
        };
        let outputs = self.enters.unwrap_or(Outputs::NONE);
        route::Chosen {
            WIDTH: self.width,
            EXPERTS: self.experts,
            TOP: self.top,
            WARPS: warps,
            DEPTH: vectors.div_ceil(32).min(depth),
            AT_ONCE: at_once,
            PIECES: vectors.div_ceil(warps * 32),
            ROWS: rows,
            TOGETHER: rows.min(together),
            SPLIT: split,
            PEERS: peers,
            KNOWN: self.known,
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

    /// Blocks for a tile of decoded rows that are no cluster: an expert for each warp.
    pub fn split_blocks(&self) -> u32 {
        self.experts.div_ceil(BLOCK_WARPS)
    }
}
