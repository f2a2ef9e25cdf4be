//! The router: which experts a row goes to, and how much of each it takes. All of it in f32: a rounded logit would
//! change the choice, and the error would grow from layer to layer.
//!
//! It is the first kernel of a mixture, so it can also end what comes before: the residual, and the norms of both
//! halves.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::choose::{choose_by_warps, choose_in_cluster, choose_in_last_block};
use super::entry::{
    add_update, keep_rows_of_thread, load_input_norms, load_kept_rows, write_mixture_inputs, writer_roles,
};
use super::logits::{load_router_norms, load_router_rows, multiply_rows, prefetch_router, stage_rows_of_router};
use super::routing::{
    BlockRows, MixtureInputs, RouterNorms, RouterRows, RouterShape, RouterShared, RouterSplit, RouterTile, Routing,
    writes_late,
};
use crate::kernels::NORM_EPSILON;
use crate::kernels::matvec::parts::chunk_slots;
use crate::kernels::outputs::{OutputForms, OutputRows, Outputs};

/// Warps of a block; each works on one expert at a time.
const BLOCK_WARPS: u32 = 8;
/// Warps of a block of a cluster, at most: as many as have whole chunks of a row to norm. Their experts' rows take most
/// of the registers.
const MOST_CLUSTER_WARPS: u32 = 11;
/// Rows of a block: as many as shared memory holds on every GPU, and no more.
const MOST_ROWS: u32 = 8;
const ROWS_BYTES: u32 = 96 << 10;
/// Rows of a block where there are many and shared memory holds them. Every block reads the whole matrix: with twice
/// the rows, half as often.
const MOST_OF_MANY: u32 = 16;
/// float4 vectors of an expert that a lane has in flight, of many rows and of decoded ones: of those all, up to the
/// limit.
const DEPTH_OF_MANY: u32 = 2;
const MOST_VECTORS_AHEAD: u32 = 24;
/// Experts that a warp multiplies many rows with at once, and the most rows: what it reads of the rows from shared
/// memory is multiplied by all of them.
const WARP_EXPERTS_OF_MANY: u32 = 4;
const WARP_EXPERTS_OF_MOST: u32 = 8;
/// Rows that a block norms at once, decoded ones and the most: as many as registers hold.
const MOST_NORMED_ROWS: u32 = 2;
const NORMED_ROWS_OF_MOST: u32 = 4;

/// The routing of each row: `router · (RMS norm of x * FACTOR * scale)`, the TOP largest logits (of equal ones the
/// lower expert), and the softmax over these. Block `[rows, b]` takes every `[blocks]`-th expert.
///
/// With BEGINS_MIXTURE attention's output is added to x first: the residual is `x + norm(update) * post`. The kernel
/// writes it, and the inputs of both halves of the mixture.
///
/// The matrix is a megabyte, which one SM would read too slowly. With SPLIT any number of blocks share the experts of
/// ROWS rows, and the last to end chooses; or they are a cluster, whose first block chooses. Without SPLIT a block has
/// all experts. Either way a block reads its part of the matrix once for all of its rows. A logit and a choice have the
/// same bits however many rows there are.
///
/// With PREFETCH_RECORD the number of rows is read before the wait: its writer has ended.
#[kernel(block = T.WARPS * 32, min_blocks = 1, dependent, waits_first, cluster = B.CLUSTER_SIZE,
    early(PREFETCH_RECORD, rows.state), dynamic_shared)]
pub fn route<
    const S: RouterShape,
    const T: RouterTile,
    const B: RouterSplit,
    const PREFETCH_RECORD: bool,
    const BEGINS_MIXTURE: bool,
    const FORMS: OutputForms,
>(
    router: Weights<f32>,
    norms: RouterNorms,
    rows: RouterRows,
    routing: Routing,
    residual: Output<f32>,
    dense_out: OutputRows,
    expert_out: OutputRows,
) {
    require!(S.WIDTH % 4 == 0 && S.WIDTH <= T.PIECES * T.WARPS * 128 && S.TOP <= 32 && S.TOP <= S.EXPERTS);
    require!(!FORMS.QUANTISED || S.WIDTH % 32 == 0);
    require!(T.NORMED_ROWS <= T.ROWS);
    // A block of a cluster has one expert for each of its warps.
    require!(B.CLUSTER_SIZE >= 1);
    require!(B.CLUSTER_SIZE == 1 || B.SPLIT && T.WARP_EXPERTS == 1 && B.CLUSTER_SIZE * T.WARPS >= S.EXPERTS);
    let weighted_rows = shared::<f32>(T.ROWS * S.WIDTH);
    // As writes_late().
    let kept_rows = shared::<f32>(if B.CLUSTER_SIZE > 1 && T.NORMED_ROWS == T.ROWS {
        T.NORMED_ROWS * T.PIECES * T.WARPS * 128
    } else {
        4
    });
    let update_squares = shared::<f32>(if BEGINS_MIXTURE { T.NORMED_ROWS * chunk_slots(S.WIDTH) } else { 4 });
    let row_squares = shared::<f32>(T.ROWS * chunk_slots(S.WIDTH));
    let logits = shared::<f32>(if B.SPLIT { T.ROWS * S.EXPERTS } else { 1 });
    let keys = shared::<u32>(if B.SPLIT { T.ROWS * S.EXPERTS } else { 1 });
    let best = shared::<f32>(if B.SPLIT { T.ROWS * S.TOP } else { 1 });
    let memory = RouterShared { weighted_rows, kept_rows, update_squares, row_squares, logits, keys, best };
    let out = MixtureInputs { residual, dense: dense_out, expert: expert_out };

    let first_row = block_idx() * T.ROWS;
    // All of a cluster's first weights would fill the memory path of its one GPC: half of them are loaded behind the
    // activations.
    let first_vectors = if B.CLUSTER_SIZE > 1 { T.DEPTH / 2 } else { T.DEPTH };
    let mut ahead = regs(F32x4::ZERO, T.DEPTH * T.WARP_EXPERTS);
    prefetch_router(router, 0, first_vectors, &mut ahead);
    let mut scales = regs(F32x4::ZERO, T.PIECES);
    let mut posts = regs(F32x4::ZERO, if BEGINS_MIXTURE { T.PIECES } else { 1 });
    load_router_norms(norms, &mut scales, &mut posts);
    let roles = writer_roles();
    let mut dense_norms = regs(F32x4::ZERO, if BEGINS_MIXTURE { T.PIECES } else { 1 });
    let mut expert_norms = regs(F32x4::ZERO, if BEGINS_MIXTURE { T.PIECES } else { 1 });
    if BEGINS_MIXTURE && !writes_late() {
        load_input_norms(roles, norms, &mut dense_norms, &mut expert_norms);
    }

    let mut active = 0u32;
    if PREFETCH_RECORD {
        active = rows.state[1u32];
    }
    order_loads();
    grid_dependency_wait();
    if !PREFETCH_RECORD {
        active = rows.state[1u32];
    }
    let own = BlockRows { first: first_row, end: active.min(first_row + T.ROWS) };
    // The whole block returns: it has no rows.
    if own.first >= own.end {
        grid_launch_dependents();
        return;
    }

    // Rows that are written late take one turn: a constant, so that there is no loop.
    for done in (0u32..if writes_late() { 1 } else { own.end - own.first }).by(T.NORMED_ROWS) {
        let start = own.first + done;
        let mut held = regs(F32x4::ZERO, T.NORMED_ROWS * T.PIECES);
        let mut updates = regs(F32x4::ZERO, if BEGINS_MIXTURE { T.NORMED_ROWS * T.PIECES } else { 1 });
        load_router_rows(rows, start, own.end, &mut held, &mut updates);
        if B.CLUSTER_SIZE > 1 && done == 0 {
            order_loads();
            prefetch_router(router, first_vectors, T.DEPTH, &mut ahead);
        }
        // Behind the loads: the successor's would fill the memory path, too.
        grid_launch_dependents();
        if BEGINS_MIXTURE {
            add_update(&mut held, &updates, &posts, update_squares);
        }
        stage_rows_of_router(&held, &scales, start, own, memory);
        barrier();
        if BEGINS_MIXTURE && !writes_late() {
            write_mixture_inputs(&held, &dense_norms, &expert_norms, roles, start, own, row_squares, out);
        }
        if writes_late() {
            keep_rows_of_thread(&held, kept_rows);
        }
    }

    multiply_rows(router, &mut ahead, own, memory, routing.logits);
    if B.CLUSTER_SIZE > 1 {
        choose_in_cluster(own, memory, routing);
        if BEGINS_MIXTURE && writes_late() {
            let mut kept = regs(F32x4::ZERO, T.NORMED_ROWS * T.PIECES);
            load_kept_rows(&mut kept, kept_rows);
            load_input_norms(roles, norms, &mut dense_norms, &mut expert_norms);
            write_mixture_inputs(&kept, &dense_norms, &expert_norms, roles, own.first, own, row_squares, out);
        }
        cluster_wait();
    } else if B.SPLIT {
        choose_in_last_block(own, memory, routing);
    } else {
        choose_by_warps(own, routing);
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
    /// It begins the mixture, and writes the inputs of both halves in these forms.
    pub input_forms: Option<Outputs>,
    /// The writer of the number of rows has ended when it starts.
    pub prefetch_record: bool,
    /// Blocks that may be a cluster, at most.
    pub max_cluster: u32,
}

impl Router {
    pub fn new(width: u32, experts: u32, top: u32) -> Self {
        Self { width, experts, top, epsilon: NORM_EPSILON, input_forms: None, prefetch_record: false, max_cluster: 1 }
    }

    fn factor(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// Blocks of a cluster, of decoded rows: all of a tile, which then choose without global memory; or 1. A cluster is
    /// in one GPC, so that those of many tiles would wait for each other: measured on an H200, four of 16 blocks gain
    /// and eight lose.
    fn split_cluster(&self, rows: u32, multiprocessors: u32) -> u32 {
        let tiles = rows.div_ceil(self.split_rows(rows, multiprocessors));
        let blocks = self.cluster_blocks();
        if blocks <= self.max_cluster && tiles * blocks <= multiprocessors / 2 { blocks } else { 1 }
    }

    /// Blocks that are a cluster, where there are clusters: an expert for each warp.
    pub fn cluster_blocks(&self) -> u32 {
        self.experts.div_ceil(self.cluster_warps())
    }

    fn cluster_warps(&self) -> u32 {
        let is_whole = |warps: &u32| self.width.is_multiple_of(128 * warps);
        (BLOCK_WARPS..=MOST_CLUSTER_WARPS).rev().find(is_whole).unwrap_or(BLOCK_WARPS)
    }

    /// Blocks for a tile of so many decoded rows.
    pub fn split_grid(&self, rows: u32, multiprocessors: u32) -> [u32; 3] {
        let blocks = match self.split_cluster(rows, multiprocessors) {
            1 => self.split_blocks().div_ceil(self.split_experts(rows, multiprocessors)),
            cluster_size => cluster_size,
        };
        [rows.div_ceil(self.split_rows(rows, multiprocessors)), blocks, 1]
    }

    /// For decoded rows, on a grid `[row tiles, blocks]`: of any number of blocks, unless they are clusters.
    pub fn split_instance(&self, rows: u32, multiprocessors: u32) -> Result<Instance, InstanceError> {
        let cluster_size = self.split_cluster(rows, multiprocessors);
        let warp_experts = if cluster_size > 1 { 1 } else { self.split_experts(rows, multiprocessors) };
        self.fast(self.split_rows(rows, multiprocessors), Some(warp_experts), cluster_size)
    }

    /// Experts of a warp of decoded rows: two where blocks with one for each would not all run at once. Each of them
    /// norms its rows anew, which takes longer than its experts.
    fn split_experts(&self, rows: u32, multiprocessors: u32) -> u32 {
        let tiles = rows.div_ceil(self.split_rows(rows, multiprocessors));
        if tiles * self.split_blocks() > multiprocessors { 2 } else { 1 }
    }

    /// Rows of a block where there are blocks for every few experts: a block has an SM to itself, so that there are no
    /// more of them than SMs.
    pub fn split_rows(&self, rows: u32, multiprocessors: u32) -> u32 {
        let all = (rows * self.split_blocks()).div_ceil(multiprocessors.max(1)).next_power_of_two();
        all.min(self.rows()).min(rows.next_power_of_two())
    }

    /// The most rows of a block, on every GPU.
    fn rows(&self) -> u32 {
        (ROWS_BYTES / (self.width * 4)).clamp(1, MOST_ROWS)
    }

    /// Rows of a block where there are many and a block may have so much shared memory: fewer of them, rather than SMs
    /// without any.
    pub fn many_rows(&self, rows: u32, multiprocessors: u32, shared_bytes: u32) -> u32 {
        // The sums of squares are stored next to the rows, and a KiB is the driver's.
        let holds_most = shared_bytes >= MOST_OF_MANY * (self.width + self.width.div_ceil(512) * 4) * 4 + (2 << 10);
        let most = if holds_most { MOST_OF_MANY } else { self.rows() };
        rows.div_ceil(multiprocessors.max(1)).next_power_of_two().min(most)
    }

    /// For many rows, so many to a block, on a grid `[row tiles]`.
    pub fn instance(&self, rows: u32) -> Result<Instance, InstanceError> {
        self.fast(rows, None, 1)
    }

    /// `split`: the experts are shared out among blocks, so many to a warp; `cluster_size` blocks are a cluster.
    fn fast(&self, rows: u32, split: Option<u32>, cluster_size: u32) -> Result<Instance, InstanceError> {
        let vectors = self.width / 4;
        let warps = if cluster_size > 1 { self.cluster_warps() } else { BLOCK_WARPS };
        let (warp_experts, depth, normed_rows) = match rows {
            _ if split.is_some() => {
                let experts = split.unwrap_or(1);
                (experts, MOST_VECTORS_AHEAD / (experts * experts), MOST_NORMED_ROWS)
            }
            MOST_OF_MANY => (WARP_EXPERTS_OF_MOST, DEPTH_OF_MANY, NORMED_ROWS_OF_MOST),
            _ => (WARP_EXPERTS_OF_MANY, DEPTH_OF_MANY, 1),
        };
        let outputs = self.input_forms.unwrap_or(Outputs::NONE);
        route::Chosen {
            S: RouterShape {
                WIDTH: self.width,
                EXPERTS: self.experts,
                TOP: self.top,
                FACTOR: self.factor(),
                EPSILON: self.epsilon,
            },
            T: RouterTile {
                WARPS: warps,
                ROWS: rows,
                NORMED_ROWS: rows.min(normed_rows),
                PIECES: vectors.div_ceil(warps * 32),
                WARP_EXPERTS: warp_experts,
                DEPTH: vectors.div_ceil(32).min(depth),
            },
            B: RouterSplit { SPLIT: split.is_some(), CLUSTER_SIZE: cluster_size },
            PREFETCH_RECORD: self.prefetch_record,
            BEGINS_MIXTURE: self.input_forms.is_some(),
            FORMS: outputs.config(),
        }
        .build()
    }

    /// Blocks for a tile of decoded rows that are no cluster: an expert for each warp.
    pub fn split_blocks(&self) -> u32 {
        self.experts.div_ceil(BLOCK_WARPS)
    }
}
