//! The matrix product of prefill: many rows of activations times repacked weights of any type, on bf16 tensor cores; here by warps (`mma.sync`).
//!
//! A block makes a tile of the result. Step by step along K it copies activations to shared memory asynchronously, decodes
//! weights there ([`decode`]), and multiplies: while one step is multiplied, the next one's activations and codes are on
//! their way, and its weights are decoded into the other half of the tile. Both operands are bf16, sums are f32.
//!
//! Every output is summed along K in the same order, whatever the tile and whoever its neighbours: a row's result does not
//! depend on the rows beside it, nor on which tile was chosen.
//!
//! On Hopper warpgroups multiply instead ([`warpgroups`] chooses): [`decoding`], [`team`] and [`fed`] decode weights on the way, [`wgmma`] and, for many rows, [`tiles`] read bf16 weights, a file's own or a copy. This one
//! is for other GPUs, for weights of f32 and for sizes that warpgroups do not take.
//!
//! Activations are bf16 on arrival, because only then can they be copied asynchronously; [`round_rows`] makes them of f32.

pub mod decode;
pub mod decoding;
pub mod fed;
pub mod fragments;
pub mod ring;
pub mod team;
pub mod tiles;
pub mod warpgroups;
pub mod wgmma;
pub mod widen;

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, ElementType, Instance, InstanceError};

use crate::kernels::attention::tensor::pack_pair;
use crate::kernels::matvec::formats::format;

/// Eight values of f32 rows to 16-bit floats, bf16 where BF, a thread. `width` is a multiple of 8.
#[kernel(block = 256)]
pub fn round_rows<const BF: bool, O: Float>(x: Input<f32>, state: Input<u32>, out: Output<O>, width: u32) {
    for at in ((block_idx() * 256 + thread_idx()) * 8..state[1u32] * width).by(grid_dim() * 2048) {
        let low = load::<F32x4>(x, at);
        let high = load::<F32x4>(x, at + 4);
        let packed = u32x4(
            pack_pair(low.x, low.y),
            pack_pair(low.z, low.w),
            pack_pair(high.x, high.y),
            pack_pair(high.z, high.w),
        );
        store(out, at, packed);
    }
}

/// Where this thread copies a tile's activations from. Rows past the end repeat the last one. With PAIRS the tile is of pairs of
/// a row and an expert, as they are sorted, and so many neighbouring ones share a row of x.
#[device]
pub fn aim_rows<const STEP: u32, const ROWS: u32, const THREADS: u32, const PAIRS: u32>(
    x_from: &mut Regs<u32>,
    order: Input<u32>,
    first_row: u32,
    end: u32,
    k: u32,
) {
    #[unroll]
    for i in 0..(ROWS * STEP / 8 + THREADS - 1) / THREADS {
        let at = thread_idx() + i * THREADS;
        let mut row = (first_row + at / (STEP / 8)).min(end - 1);
        if PAIRS > 0 {
            row = order[row] / PAIRS.max(1);
        }
        x_from[i] = row * k + at % (STEP / 8) * 8;
    }
}

/// Starts to copy STEP activations of each of the tile's rows, from `start` on.
#[device]
pub fn copy_activations<const STEP: u32, const ROWS: u32, const THREADS: u32>(
    tile: Shared<BF16>,
    x: Input<BF16>,
    x_from: &mut Regs<u32>,
    start: u32,
) {
    #[unroll]
    for i in 0..(ROWS * STEP / 8 + THREADS - 1) / THREADS {
        let at = thread_idx() + i * THREADS;
        if at < ROWS * STEP / 8 {
            cp_async16(tile, at / (STEP / 8) * (STEP + 8) + at % (STEP / 8) * 8, x, x_from[i] + start);
        }
    }
    cp_async_commit();
}

/// `out = x · Wᵀ`. Block `[m, n]` makes ROWS x COLUMNS values; WARPS_ACROSS of its warps share rows, and each makes ROW_TILES x
/// COLUMN_TILES tiles of 16 x 8. `k`, the values of a row, is a multiple of STEP.
///
/// With PAIRS the rows are pairs of a row and an expert, sorted by expert (`moe::group`): tile m is of group m, whose expert has
/// `outputs` rows of the weights; results lie as the pairs did before they were sorted.
#[kernel(block = THREADS, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn product<
    const UNIT: u32,
    const STEP: u32,
    const ROWS: u32,
    const COLUMNS: u32,
    const ROW_TILES: u32,
    const COLUMN_TILES: u32,
    const WARPS_ACROSS: u32,
    const THREADS: u32,
    const PAIRS: u32,
    O: Float,
>(
    codes: Weights<U32x4>,
    x: Input<BF16>,
    groups: Input<U32x4>,
    order: Input<u32>,
    state: Input<u32>,
    out: Output<O>,
    outputs: u32,
    k: u32,
) {
    require!(STEP % 32 == 0 && COLUMNS * STEP / 32 <= THREADS);
    require!(COLUMNS == WARPS_ACROSS * COLUMN_TILES * 8 && COLUMN_TILES % 2 == 0);
    require!(ROWS == THREADS / 32 / WARPS_ACROSS * ROW_TILES * 16);
    // Rows of a tile are 16 bytes longer than their content, so that eight of them lie in different banks.
    let x_tile = shared::<BF16>(2 * ROWS * (STEP + 8));
    let w_tile = shared::<BF16>(2 * COLUMNS * (STEP + 8));
    let group_units = 32 / UNIT;

    let mut end = state[1u32];
    let mut first_row = block_idx() * ROWS;
    let first_column = block_idx_y() * COLUMNS;
    let mut first_weight = 0u32;
    if PAIRS > 0 {
        end = 0;
        if block_idx() < groups[0u32].x {
            let group = groups[block_idx() + 1];
            first_row = group.x;
            end = group.y;
            first_weight = group.z * outputs;
        }
    }
    // The whole block leaves: there are no such rows.
    if first_row >= end {
        return;
    }
    let mut x_from = regs(0u32, (ROWS * STEP / 8 + THREADS - 1) / THREADS);
    aim_rows(&mut x_from, order, first_row, end, k);

    // A thread decodes one group of 32 weights a step: column `own_column` of the tile, group `own_group` of the step.
    let decodes = thread_idx() < COLUMNS * STEP / 32;
    let own_column = thread_idx() / (STEP / 32);
    let own_group = thread_idx() % (STEP / 32);
    let own_weight = first_weight + (first_column + own_column).min(outputs - 1);
    let own_unit = (own_weight * (k / 32) + own_group) * group_units;
    let own_place = own_column * (STEP + 8) + own_group * 32;
    let mut ahead = regs(U32x4::ZERO, 32 / UNIT);
    let mut beside = U32x4::ZERO;

    let warp_row = warp_id() / WARPS_ACROSS * ROW_TILES * 16;
    let warp_column = warp_id() % WARPS_ACROSS * COLUMN_TILES * 8;
    let mut sums = regs(F32x4::ZERO, ROW_TILES * COLUMN_TILES);

    // Turn 0 only brings the first step's operands; the last turn only multiplies.
    for turn in 0..k / STEP + 1 {
        cp_async_wait(0);
        barrier();
        let brings = turn < k / STEP;
        if brings {
            copy_activations(x_tile.offset(turn % 2 * ROWS * (STEP + 8)), x, &mut x_from, turn * STEP);
            if decodes {
                let unit = own_unit + turn * (STEP / 32) * group_units;
                #[unroll]
                for i in 0..group_units {
                    ahead[i] = load::<U32x4>(codes, unit + i);
                }
                beside = side(unit, 0);
            }
        }

        if turn > 0 {
            let x_step = x_tile.offset((turn + 1) % 2 * ROWS * (STEP + 8));
            let w_step = w_tile.offset((turn + 1) % 2 * COLUMNS * (STEP + 8));
            #[unroll]
            for start in (0..STEP).by(16) {
                let mut x_parts = regs(U32x4::ZERO, ROW_TILES);
                #[unroll]
                for m in 0..ROW_TILES {
                    let row = warp_row + m * 16 + lane_id() % 16;
                    x_parts[m] = ldmatrix_x4(x_step, row * (STEP + 8) + start + lane_id() / 16 * 8);
                }
                #[unroll]
                for n in (0..COLUMN_TILES).by(2) {
                    let column = warp_column + n * 8 + lane_id() / 16 * 8 + lane_id() % 8;
                    let w_parts = ldmatrix_x4(w_step, column * (STEP + 8) + start + lane_id() / 8 % 2 * 8);
                    #[unroll]
                    for m in 0..ROW_TILES {
                        let at = m * COLUMN_TILES + n;
                        sums[at] = mma_m16n8k16_bf16(x_parts[m], u32x2(w_parts.x, w_parts.y), sums[at]);
                        sums[at + 1] = mma_m16n8k16_bf16(x_parts[m], u32x2(w_parts.z, w_parts.w), sums[at + 1]);
                    }
                }
            }
        }

        if brings && decodes {
            let unit = own_unit + turn * (STEP / 32) * group_units;
            let place = turn % 2 * COLUMNS * (STEP + 8) + own_place;
            #[unroll]
            for i in 0..group_units {
                if UNIT == 4 {
                    let four = decode(ahead[i], beside, unit + i, 0);
                    store(w_tile, place + i * 4, u32x2(four.x, four.y));
                } else {
                    #[unroll]
                    for part in 0..UNIT / 8 {
                        store(w_tile, place + i * UNIT + part * 8, decode(ahead[i], beside, unit + i, part));
                    }
                }
            }
        }
    }

    #[unroll]
    for m in 0..ROW_TILES {
        #[unroll]
        for lower in 0u32..2 {
            let row = first_row + warp_row + m * 16 + lane_id() / 4 + lower * 8;
            let mut to = row;
            if PAIRS > 0 && row < end {
                to = order[row];
            }
            #[unroll]
            for n in 0..COLUMN_TILES {
                let four = sums[m * COLUMN_TILES + n];
                let column = first_column + warp_column + n * 8 + lane_id() % 4 * 2;
                let at = to * outputs + column;
                if row < end && column < outputs {
                    out[at] = O::from_f32(epilogue(if lower == 1 { four.z } else { four.x }, at));
                }
                if row < end && column + 1 < outputs {
                    out[at + 1] = O::from_f32(epilogue(if lower == 1 { four.w } else { four.y }, at + 1));
                }
            }
        }
    }
}

/// A block's part of the result, and its warps. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub rows: u32,
    pub columns: u32,
    pub warps_down: u32,
    pub warps_across: u32,
}

impl Tile {
    pub const ALL: [Self; 3] = [Self::SMALL, Self::MEDIUM, Self::LARGE];
    /// A handful of rows: a warp holds all of them.
    pub const SMALL: Self = Self { rows: 16, columns: 64, warps_down: 1, warps_across: 4 };
    pub const MEDIUM: Self = Self { rows: 64, columns: 64, warps_down: 2, warps_across: 2 };
    pub const LARGE: Self = Self { rows: 128, columns: 128, warps_down: 2, warps_across: 4 };
    /// Groups of pairs of an expert: lower than a large one, because an expert's last tile is rarely full.
    pub const GROUPED: Self = Self { rows: 64, columns: 128, warps_down: 2, warps_across: 4 };

    /// The tile for a product: the largest that leaves no SM without work.
    pub fn choose(rows: u32, outputs: u32, multiprocessors: u32) -> Self {
        match rows {
            0..=16 => Self::SMALL,
            _ if Self::LARGE.blocks(rows, outputs) >= multiprocessors => Self::LARGE,
            _ => Self::MEDIUM,
        }
    }

    /// The tile for products of pairs sorted by expert, of which there are so many on average for each: the lowest that holds
    /// them.
    pub fn for_groups(pairs: u32, experts: u32) -> Self {
        if pairs.div_ceil(experts.max(1)) <= Self::SMALL.rows { Self::SMALL } else { Self::GROUPED }
    }

    fn blocks(&self, rows: u32, outputs: u32) -> u32 {
        rows.div_ceil(self.rows) * outputs.div_ceil(self.columns)
    }

    fn threads(&self) -> u32 {
        self.warps_down * self.warps_across * 32
    }

    /// Blocks for `rows` rows. Those that share weights come one after the other.
    pub fn grid(&self, rows: u32, outputs: u32) -> [u32; 3] {
        [rows.div_ceil(self.rows), outputs.div_ceil(self.columns), 1]
    }
}

/// A product: everything that decides its instance. The number of outputs is a launch parameter, and so are the values of a
/// row: of those only the step is compiled in, so that all products of a model share few instances.
#[derive(Clone, Debug)]
pub struct Product {
    pub dtype: DType,
    /// Values of a row: a multiple of 32.
    pub k: u32,
    /// What the result is stored as.
    pub out: ElementType,
    /// Rows are pairs of a row and an expert, sorted by expert, of which so many neighbouring ones share a row of x. 0: they
    /// are rows.
    pub pairs: u32,
    /// Applied in order to each value of the result, which is counted over all rows.
    pub epilogue: Vec<&'static DeviceDef>,
}

impl Product {
    /// Values of a row that are multiplied at a time: as many as divide it. Below 32 the kernel refuses.
    fn step(&self) -> u32 {
        1 << self.k.trailing_zeros().min(6)
    }

    /// The fast kernel, launched on [`Tile::grid`].
    pub fn instance(&self, tile: Tile) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        product::Chosen {
            UNIT: format.unit,
            STEP: self.step(),
            ROWS: tile.rows,
            COLUMNS: tile.columns,
            ROW_TILES: tile.rows / tile.warps_down / 16,
            COLUMN_TILES: tile.columns / tile.warps_across / 8,
            WARPS_ACROSS: tile.warps_across,
            THREADS: tile.threads(),
            PAIRS: self.pairs,
            O: self.out,
            side: format.side,
            decode: vec![decode::decode(self.dtype)],
            epilogue: self.epilogue.clone(),
        }
        .build()
    }
}

/// Rows of f32 to a 16-bit float, on any grid.
pub fn round_rows_instance(to: ElementType) -> Result<Instance, InstanceError> {
    round_rows::Chosen { BF: to == ElementType::BF16, O: to }.build()
}
