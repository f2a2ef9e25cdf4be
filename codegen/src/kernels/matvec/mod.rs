//! The matrix-vector product of decode: one row of activations times repacked weights of any type.
//!
//! Its time is the weights' way from memory, so the kernel is a pipeline of 16-byte loads: each lane keeps ROWS x DEPTH units
//! on their way, and issues the next one as soon as it has used one, across the ends of rows. The grid is as large as the
//! GPU, not as the matrix: a warp goes on to its next rows without a pause. The activations lie in shared memory, int8 with
//! a scale for each 32 values, or f32 for float weights.
//!
//! Each row is summed in the same order, whatever the grid and however many rows of activations there are ([`rows`](crate::kernels::rows)). The order is made for
//! tensor cores, which can keep few sums for an output. A row is cut in four stretches of eight lanes each (STRETCHED). A lane of a stretch (of Q8_0, a pair of lanes) takes every
//! eighth block of 32 values (every fourth), one fused multiply-add a block. A tree adds the lanes of a stretch, and the stretches are added in order. A product that tensor cores do
//! not have, of float weights or of activations with fine codes, is not STRETCHED: all lanes take units in turn, and a tree adds them.
//!
//! One kernel serves all: a weight format ([`formats`]), a prologue (how activations arrive) and an epilogue ([`slots`]) are
//! device functions in its slots. Several matrices that share their input and their type are one matrix, stacked; with PAIRED
//! the upper half of the rows is joined to the lower, as gate and up are. How many of everything is [`shape`]'s choice.

pub mod formats;
pub mod parts;
pub mod prologue;
pub mod shape;
pub mod slots;

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use crate::kernels::NORM_EPSILON;
use crate::kernels::quantise::{fine_codes, quantise4, quantise4_unbounded};
use formats::format;
use parts::{
    Unit, UnitActivations, activations_at, chunk_slots, dot_fine, fetch, inverse_rms_of_chunks, keep_codes, keep_fine,
    part_at, plain_activations, second_part_at,
};
use prologue::{add_update, copy_norms, weigh};
use shape::{LaunchShape, ranked_shapes};
use slots::as_words;

/// Units of a stretch: whole steps of its lanes, of at most four stretches. The last may be shorter or empty. A row that is not STRETCHED is one.
#[device]
pub fn stretch_units<const K: u32, const UNIT: u32, const STRETCHED: bool>() -> u32 {
    if STRETCHED { (K / UNIT).div_ceil(32) * 8 } else { K / UNIT }
}

/// Units from one step of a lane to the next.
#[device]
pub fn step_units<const LANES: u32, const STRETCHED: bool>() -> u32 {
    if STRETCHED { 8 } else { LANES }
}

/// Whether all lanes have the same number of steps, a multiple of DEPTH: there is no end to mind.
#[device]
pub fn is_exact<const K: u32, const UNIT: u32, const LANES: u32, const DEPTH: u32, const STRETCHED: bool>() -> bool {
    let whole = !STRETCHED || K / UNIT == stretch_units() * (LANES / 8);
    whole && stretch_units() % (step_units() * DEPTH) == 0
}

/// The first unit of a lane in every row.
#[device]
pub fn first_unit<const K: u32, const UNIT: u32, const LANES: u32, const STRETCHED: bool>() -> u32 {
    let lane = lane_id() % LANES;
    if STRETCHED { lane / 8 * stretch_units() + lane % 8 } else { lane }
}

/// The unit of `codes` that row `r` of a lane's rows needs at `at`: out-of-range rows are clamped to the last row, and their results dropped.
#[device]
pub fn unit_of<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const DEPTH: u32,
    const STRETCHED: bool,
    const PAIRED: bool,
>(
    first: u32,
    r: u32,
    at: u32,
    rows: u32,
) -> u32 {
    let units = K / UNIT;
    let output = (first + if PAIRED { r / 2 } else { r }).min(rows - 1);
    let row = if PAIRED { output + r % 2 * rows } else { output };
    row * units + if is_exact() { at } else { at.min(units - 1) }
}

/// The sum over the lanes of a row, for the first of them: a tree, or a tree for each stretch and then the stretches in order. JOINED lanes are pairs of which both have the same.
/// A collective of the warp.
#[device]
pub fn lanes_sum(value: f32, lanes: u32, joined: bool, stretched: bool) -> f32 {
    let mut sum = value;
    let mut mask = if stretched { lanes.min(8) / 2 } else { lanes / 2 };
    #[unroll]
    while mask > if joined { 1 } else { 0 } {
        sum = sum + shfl_xor(sum, mask);
        mask = mask / 2;
    }
    if stretched {
        let own = sum;
        #[unroll]
        for s in 1u32..lanes / 8 {
            sum = sum + shfl_xor(own, s * 8);
        }
        // A stretch that is not there counts as zero: a plain one is left of a negative one.
        sum = sum + 0.0;
    }
    sum
}

/// `out = W · x`. LANES lanes share a row, DEPTH units of it are on their way to a lane, for each of ROWS rows.
///
/// The prologue loads activations as float4 vectors, PIECES of them a thread at a time. With norms that is all of them: a
/// thread keeps its share in registers from the one load to the last use, so that a norm costs a sum over the block and no
/// second way to memory. `min_blocks = 1` lets ptxas use the whole register file;
/// otherwise it caps registers and serialises the loads.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    two_dots(first: Unit, second: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    ready(part: u32) -> U32x4,
    ready_group(group: u32) -> U32x2,
    input(at: u32) -> F32x4,
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4,
    scale(value: f32) -> f32,
    residual(value: F32x4, at: u32) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32,
    keep(four: F32x4, at: u32) -> F32x4
))]
pub fn matvec<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const LANES: u32,
    const ROWS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const PIECES: u32,
    const PAIRED: bool,
    const READY: bool,
    const RESIDUAL: bool,
    const BRANCHED: bool,
    const NORMED: bool,
    const FINE: bool,
    const STRETCHED: bool,
    const JOINED: bool,
    const SHARES_ROWS: bool,
    const SHARE: u32,
    const EPSILON: f32,
>(
    codes: Weights<U32x4>,
    update_norm: Weights<f32>,
    branch_norm: Weights<f32>,
    post_norm: Weights<f32>,
    next_norm: Weights<f32>,
    out: Output<f32>,
    rows: u32,
) {
    require!(K % 32 == 0 && 32 % LANES == 0 && ROWS <= LANES);
    require!(!PAIRED || ROWS % 2 == 0);
    require!(!READY || INTEGER);
    require!(!BRANCHED || RESIDUAL);
    require!(!(RESIDUAL || NORMED) || K <= PIECES * WARPS * 128);
    // Lanes with fine codes go ways of their own, so they cannot be joined.
    require!(!FINE || INTEGER && !READY && !JOINED);
    require!(!SHARES_ROWS || JOINED && ROWS % 2 == 0);
    require!(SHARE % 32 == 0);
    require!(!STRETCHED || INTEGER && LANES % 8 == 0 && (LANES == 32 || K / UNIT <= LANES));
    // With FINE the second digits of all values, then the third ones, follow the first.
    let x_words = shared::<u32>(if FINE {
        3 * K / 4
    } else if INTEGER {
        K / 4
    } else {
        K
    });
    let x_scales = shared::<U32x2>(if INTEGER { K / 32 } else { 1 });
    let fine_sums = shared::<i32>(if FINE { K / 32 } else { 1 });
    // Of the post-norm, then those of the branches.
    let posts = shared::<f32>(if BRANCHED {
        3 * K
    } else if RESIDUAL {
        K
    } else {
        4
    });
    let nexts = shared::<f32>(if NORMED { K } else { 4 });
    // Sums of squares: of the branches one a warp, of the others one a chunk.
    let of_branches = shared::<F32x4>(if BRANCHED { WARPS } else { 1 });
    let of_updates = shared::<f32>(if RESIDUAL { chunk_slots(K) } else { 4 });
    let of_residual = shared::<f32>(if NORMED { chunk_slots(K) } else { 4 });
    let results = shared::<f32>(if SHARE > 0 { SHARE } else { 1 });
    let units = K / UNIT;

    let lane = lane_id() % LANES;
    let outputs = if PAIRED { ROWS / 2 } else { ROWS };
    let warp_outputs = 32 / LANES * outputs;
    // All warps share out all outputs; or a block takes SHARE neighbouring ones, so that whole int8 groups are its own.
    let first = if SHARE > 0 { block_idx() * SHARE } else { 0 };
    let end = if SHARE > 0 { (first + SHARE).min(rows) } else { rows };
    let own_warp = if SHARE > 0 { warp_id() } else { block_idx() * WARPS + warp_id() };
    let all_warps = if SHARE > 0 { WARPS } else { grid_dim() * WARPS };
    let mut base = first + own_warp * warp_outputs;
    let own = lane_id() / LANES * outputs;
    let start = first_unit();
    let stop = (start - start % step_units() + stretch_units()).min(units);
    let mut at = start;

    // The first weights are on their way before the activations are there.
    let mut ahead = regs(Unit::ZERO, ROWS * DEPTH);
    if base < end {
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0..ROWS {
                ahead[d * ROWS + r] = fetch(side, codes, unit_of(base + own, r, at + d * step_units(), rows));
            }
        }
    }

    // Those of the norms too.
    let threads = WARPS * 32;
    let places = K / 4;
    copy_norms(posts, nexts, update_norm, branch_norm, post_norm, next_norm);
    grid_launch_dependents();
    grid_dependency_wait();
    if READY {
        #[unroll(8)]
        for part in (thread_idx()..K / 16).by(threads) {
            store(x_words, part_at(part, units), ready(part));
        }
        #[unroll(4)]
        for group in (thread_idx()..K / 32).by(threads) {
            x_scales[group] = ready_group(group);
        }
    } else {
        // Whole warps, because to quantise is a collective: the lanes past the end repeat the last piece, which is not kept.
        for start in (0..places).by(PIECES * threads) {
            let mut held = regs(F32x4::ZERO, PIECES);
            #[unroll]
            for p in 0..PIECES {
                let place = start + thread_idx() + p * threads;
                held[p] = input(if places % (PIECES * threads) == 0 { place } else { place.min(places - 1) } * 4);
            }
            if RESIDUAL {
                let leaves = block_idx() == 0;
                add_update(update, branch, scale, residual, &mut held, 0, 0, 0, leaves, posts, of_branches, of_updates);
            }
            if NORMED {
                weigh(&mut held, nexts, of_residual);
            }
            #[unroll]
            for p in 0..PIECES {
                let place = start + thread_idx() + p * threads;
                let part = if INTEGER { place / 4 } else { place };
                let to = part_at(part, units);
                if INTEGER {
                    let four = if FINE { quantise4_unbounded(held[p]) } else { quantise4(held[p]) };
                    if place < places {
                        keep_codes(four, to + place % 4, place, x_words, x_scales);
                    }
                    if FINE && warp_any(f32::from_bits(four.y) < 0.0) {
                        let fine = fine_codes(held[p], four.x, f32::from_bits(four.w));
                        if place < places {
                            keep_fine(fine, to + place % 4, place, x_words, fine_sums);
                        }
                    }
                } else if place < places {
                    store(x_words, to, as_words(held[p]));
                }
            }
        }
    }
    barrier();
    let after = if NORMED { inverse_rms_of_chunks(of_residual, K) } else { 1.0 };

    let mut sums = regs(0.0f32, ROWS);
    while base < end {
        let row_ends = at - start + step_units() * DEPTH >= stretch_units();
        let next_at = if row_ends { start } else { at + step_units() * DEPTH };
        let next_base = if row_ends { base + all_warps * warp_outputs } else { base };
        #[unroll]
        for d in 0..DEPTH {
            // Without an end to mind, all places are one register and a constant.
            let unit = if is_exact() { at + d * step_units() } else { (at + d * step_units()).min(units - 1) };
            let group = if is_exact() { at * UNIT / 32 + d * (step_units() * UNIT / 32) } else { unit * UNIT / 32 };
            let mut x = activations_at(unit, group, units, x_words, x_scales);
            let is_fine = FINE && x.scale < 0.0;
            x.scale = x.scale.abs();
            if SHARES_ROWS {
                // A lane has the sums of every other row.
                let own_row = lane_id() % 2;
                #[unroll]
                for p in 0..ROWS / 2 {
                    let of_row = unit_of(base + own, p * 2 + own_row, at + d * step_units(), rows);
                    let first = ahead[d * ROWS + p * 2];
                    let total = two_dots(first, ahead[d * ROWS + p * 2 + 1], of_row, x, sums[p]);
                    if is_exact() || at + d * step_units() < stop {
                        sums[p] = total;
                    }
                }
                if next_base < end {
                    #[unroll]
                    for r in 0..ROWS {
                        let next = unit_of(next_base + own, r, next_at + d * step_units(), rows);
                        ahead[d * ROWS + r] = fetch(side, codes, next);
                    }
                }
            } else {
                #[unroll]
                for r in 0..ROWS {
                    let held = ahead[d * ROWS + r];
                    let of_row = unit_of(base + own, r, at + d * step_units(), rows);
                    let mut total = dot(held, of_row, x, sums[r]);
                    if is_fine {
                        let second = second_part_at(unit, units);
                        total =
                            dot_fine(dot, held, of_row, unit * 4, second, x.scale, fine_sums[group], total, x_words);
                    }
                    if is_exact() || at + d * step_units() < stop {
                        sums[r] = total;
                    }
                    if next_base < end {
                        let next = unit_of(next_base + own, r, next_at + d * step_units(), rows);
                        ahead[d * ROWS + r] = fetch(side, codes, next);
                    }
                }
            }
        }
        if row_ends {
            // Lane i keeps output i.
            let mut value = 0.0f32;
            let mut up = 0.0f32;
            if SHARES_ROWS {
                #[unroll]
                for p in 0..ROWS / 2 {
                    let sum = lanes_sum(sums[p], LANES, true, STRETCHED);
                    let other = shfl_xor(sum, 1);
                    if PAIRED && lane == p {
                        value = if lane % 2 == 0 { sum } else { other };
                        up = if lane % 2 == 0 { other } else { sum };
                    } else if !PAIRED && lane / 2 == p {
                        value = sum;
                    }
                    sums[p] = 0.0;
                }
            } else {
                #[unroll]
                for r in 0..ROWS {
                    let sum = lanes_sum(sums[r], LANES, JOINED, STRETCHED);
                    let output = if PAIRED { r / 2 } else { r };
                    if lane == output && PAIRED && r % 2 == 1 {
                        up = sum;
                    } else if lane == output {
                        value = sum;
                    }
                    sums[r] = 0.0;
                }
            }
            let row = base + own + lane;
            if lane < outputs && row < end {
                let result = epilogue(join(value * after, up * after), row);
                if SHARE > 0 {
                    results[row - first] = result;
                } else {
                    out[row] = result;
                }
            }
        }
        at = next_at;
        base = next_base;
    }
    if SHARE > 0 {
        barrier();
        // A warp takes a group: eight lanes four values each.
        for group in (warp_id()..(end - first) / 32).by(WARPS) {
            let place = group * 32 + lane_id() % 8 * 4;
            keep(load::<F32x4>(results, place), first + place);
        }
    }
}

/// The same product, plainly: a thread takes an output, activations are read where they are (int8 codes or f32 as words).
#[kernel(block = 64, slots(
    side(unit: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn matvec_plain<const K: u32, const UNIT: u32, const INTEGER: bool, const PAIRED: bool>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    out: Output<f32>,
    rows: u32,
) {
    let row = block_idx() * 64 + thread_idx();
    if row < rows {
        let words = if INTEGER { UNIT / 4 } else { UNIT };
        let mut value = 0.0f32;
        let mut up = 0.0f32;
        for i in 0..K / UNIT {
            let of_unit = plain_activations(i, words, x, xscale, xsum);
            let unit = row * (K / UNIT) + i;
            value = dot(fetch(side, codes, unit), unit, of_unit, value);
            if PAIRED {
                let unit = (rows + row) * (K / UNIT) + i;
                up = dot(fetch(side, codes, unit), unit, of_unit, up);
            }
        }
        out[row] = epilogue(join(value, up), row);
    }
}

/// How the activations arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prologue {
    /// Quantised by an earlier kernel: integer formats alone.
    Int8,
    /// f32; integer formats quantise them.
    Plain,
    /// The RMS norm of f32.
    Norm,
    /// A residual that is still to take a layer's normed part, and its scale if the product is `scaled`.
    Residual,
    /// The RMS norm of such a residual.
    ResidualNorm,
}

impl Prologue {
    pub fn adds_residual(self) -> bool {
        matches!(self, Self::Residual | Self::ResidualNorm)
    }

    fn is_normed(self) -> bool {
        matches!(self, Self::Norm | Self::ResidualNorm)
    }
}

/// A product: everything that decides its instance.
#[derive(Clone, Debug)]
pub struct Product {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Values of a row.
    pub k: u32,
    /// The matrix has two rows for each output: all the first ones, then all the second. They are joined by GeGLU.
    pub geglu: bool,
    pub prologue: Prologue,
    /// The residual of the prologue is multiplied by a weight of one element.
    pub scaled: bool,
    /// What it takes is the sum of two normed branches: the halves of a mixture.
    pub branches: bool,
    /// The residual of the prologue is left in memory: by one product of those that compute it.
    pub leaves_residual: bool,
    /// The activations are the residual itself or an embedding: no norm has damped massive channels. Integer formats quantise
    /// them with fine codes.
    pub unbounded: bool,
    /// The result is left as int8, by blocks that have whole groups of it.
    pub leaves_int8: bool,
    /// Of the prologue's norms.
    pub epsilon: f32,
    /// Applied in order to each output.
    pub epilogue: Vec<&'static DeviceDef>,
}

/// Fours of activations on their way to a thread, where it need not hold all of them.
const MOST_PIECES: u32 = 5;

impl Product {
    pub fn new(dtype: DType, outputs: u32, k: u32, prologue: Prologue) -> Self {
        let epsilon = NORM_EPSILON;
        let (geglu, scaled, branches, leaves_residual) = (false, false, false, prologue.adds_residual());
        let unbounded = prologue == Prologue::Residual;
        let (epilogue, leaves_int8) = (Vec::new(), false);
        Self {
            dtype,
            outputs,
            k,
            geglu,
            prologue,
            scaled,
            branches,
            leaves_residual,
            unbounded,
            leaves_int8,
            epsilon,
            epilogue,
        }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> u64 {
        u64::from(self.outputs) * if self.geglu { 2 } else { 1 }
    }

    fn join(&self) -> Vec<&'static DeviceDef> {
        if self.geglu { vec![slots::geglu::DEF] } else { vec![] }
    }

    /// The shape for a GPU of that many SMs.
    pub fn shape(&self, multiprocessors: u32) -> LaunchShape {
        ranked_shapes(self, multiprocessors)[0].shape
    }

    /// Fours of activations that a thread holds at once: all of its own where there is a norm.
    pub fn pieces(&self, shape: LaunchShape) -> u32 {
        let own = (self.k / 4).div_ceil(shape.warps * 32);
        if self.prologue.adds_residual() || self.prologue.is_normed() { own } else { own.min(MOST_PIECES) }
    }

    /// Two lanes share a block of 32 values, and add their dots as integers.
    pub fn is_joined(&self) -> bool {
        format(self.dtype).joined && !self.unbounded
    }

    /// The order of its sums is the one that tensor cores can keep.
    pub fn is_stretched(&self) -> bool {
        format(self.dtype).integer && !self.unbounded
    }

    /// The fast kernel, launched on `[shape.blocks]`.
    pub fn instance(&self, shape: LaunchShape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        let (ready, residual) = (self.prologue == Prologue::Int8, self.prologue.adds_residual());
        let (normed, branches) = (self.prologue.is_normed(), residual && self.branches);
        matvec::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            LANES: shape.lanes,
            ROWS: shape.rows,
            DEPTH: shape.depth,
            WARPS: shape.warps,
            PIECES: self.pieces(shape),
            PAIRED: self.geglu,
            READY: ready,
            RESIDUAL: residual,
            BRANCHED: branches,
            NORMED: normed,
            FINE: self.unbounded && format.integer,
            STRETCHED: self.is_stretched(),
            JOINED: self.is_joined(),
            SHARES_ROWS: self.is_joined() && shape.rows.is_multiple_of(2),
            SHARE: shape.share,
            EPSILON: self.epsilon,
            side: format.side,
            dot: if self.is_joined() { format.lane_dot } else { format.dot },
            two_dots: format.two_dots,
            ready: if ready { slots::ready_codes::DEF } else { slots::no_part::DEF },
            ready_group: if ready { slots::ready_scale::DEF } else { slots::no_group::DEF },
            input: if ready { slots::no_four::DEF } else { slots::four_of::DEF },
            update: if residual { slots::four_of::DEF } else { slots::no_four::DEF },
            branch: if branches { slots::four_of::DEF } else { slots::no_four::DEF },
            scale: if residual && self.scaled { vec![slots::scaled_by::DEF] } else { vec![] },
            residual: if residual && self.leaves_residual { vec![slots::leave_residual::DEF] } else { vec![] },
            join: self.join(),
            epilogue: self.epilogue.clone(),
            keep: if self.leaves_int8 { vec![slots::leave_codes::DEF] } else { vec![] },
        }
        .build()
    }

    /// The plain kernel, launched on `[outputs.div_ceil(64)]`. It takes activations as they are, whatever the prologue.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        matvec_plain::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            PAIRED: self.geglu,
            side: format.side,
            dot: format.dot,
            join: self.join(),
            epilogue: self.epilogue.clone(),
        }
        .build()
    }
}
