//! How a product of several rows is spread over a GPU. The lanes are those of one row, so nothing here changes a bit of any result.
//!
//! A rule, by what the kernels move and compute. Its constants are estimates; what was measured of other shapes is in BENCHMARKS.md ("Tried").

use super::formats::TensorFormat;
use super::{Product, SumOrder};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::shape::LaunchShape;
use crate::target::Target;

/// The compile-time parameters of a [`rows_matvec`](super::cores::rows_matvec), and its grid along x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Lanes that share an output: those of one row.
    pub lanes: u32,
    /// Rows of weights that a lane works on at once.
    pub weight_rows: u32,
    /// Units of each that are on their way to a lane.
    pub depth: u32,
    pub warps: u32,
    /// Rows of activations that a block holds.
    pub tile: u32,
    pub blocks: u32,
}

/// The compile-time parameters of a [`rows_mma`](super::mma::rows_mma), and its grid along x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Lanes that share an output of one row: classes of units, four to a warp.
    pub lanes: u32,
    /// Rows of activations of a tile.
    pub tile: u32,
    /// Rows of weights of a tile.
    pub columns: u32,
    /// Stages of a warp's ring.
    pub stages: u32,
    /// The activations stay in shared memory.
    pub resident: bool,
    pub blocks: u32,
}

/// How a product of several rows is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Cores(Cores),
    Tensor(Tensor),
}

/// Warps of a block on CUDA cores: as many as leave a lane 128 registers.
const BLOCK_WARPS: u32 = 16;
/// Units on their way to a lane, with what lies beside them, take that many registers at most.
const AHEAD_REGISTERS: u32 = 48;
/// Rows of activations that a unit is multiplied by on CUDA cores, most first.
const CORE_TILES: [u32; 4] = [8, 4, 2, 1];
/// Rows of activations from which tensor cores are worth the tile of eight that they waste the rest of.
const FEWEST_TENSOR_ROWS: u32 = 5;
/// Sums that a lane holds at most.
const MOST_SUMS: u32 = 128;
/// Cycles in which an SM gets a byte of weights from memory and one of activations from L2, and adds a unit's product to one sum.
const CYCLES: (f64, f64, f64) = (0.054, 0.036, 0.026);

impl Cores {
    /// As many rows of activations as shared memory holds, and a block an SM.
    pub fn choose(product: &Product, one: LaunchShape, target: &Target) -> Cores {
        let (of, format) = (&product.one, format(product.one.dtype));
        let row_bytes = match (format.integer, of.unbounded) {
            (true, true) => of.k * 3 + of.k / 32 * 12,
            (true, false) => of.k + of.k / 32 * 8,
            (false, _) => of.k * 4,
        };
        let fits = |tile: &u32| tile * (row_bytes + 4) + 64 <= target.shared_bytes_per_block;
        let needed = product.rows.next_power_of_two();
        let tile = CORE_TILES.into_iter().filter(|tile| *tile <= needed).find(fits).unwrap_or(1);
        let weight_rows = 2;
        let lane_outputs = if of.geglu { 1 } else { 2 };
        let reach = (AHEAD_REGISTERS / (4 + format.side_words) / weight_rows).max(1);
        let steps = (of.k / format.unit).div_ceil(one.lanes);
        let loads = |depth: u32| steps.div_ceil(depth) * depth;
        let depth = (reach.div_ceil(2)..=reach).rev().min_by_key(|depth| loads(*depth)).unwrap_or(1);
        let tiles = of.outputs.div_ceil(32 / one.lanes * lane_outputs);
        // Blocks of the same outputs run side by side, so that all but the first find the weights in L2.
        let columns = (target.multiprocessors / product.rows.div_ceil(tile)).max(1);
        let blocks = tiles.div_ceil(BLOCK_WARPS).min(columns);
        Cores { lanes: one.lanes, weight_rows, depth, warps: BLOCK_WARPS, tile, blocks }
    }
}

impl Tensor {
    /// The fastest by the rule of [`CYCLES`]; `None` where tensor cores cannot do it, or no shape fits the GPU.
    pub fn choose(product: &Product, one: LaunchShape, target: &Target) -> Option<Tensor> {
        let of = &product.one;
        let weights = TensorFormat::of(of.dtype)?;
        if product.is_fine() {
            return None;
        }
        let unit = format(of.dtype).unit;
        let steps = (of.k / unit).div_ceil(one.lanes);
        let mut best: Option<(f64, Tensor)> = None;
        for tile in [8, 16, 32, 64].into_iter().filter(|tile| *tile <= product.rows.next_power_of_two().max(8)) {
            for columns in [8, 16, 32, 64].into_iter().filter(|columns| !of.geglu || *columns >= 16) {
                if columns * tile / 8 > MOST_SUMS {
                    continue;
                }
                let row_tiles = product.rows.div_ceil(tile);
                let tiles = of.outputs.div_ceil(if of.geglu { columns / 2 } else { columns });
                let blocks = tiles.min((target.multiprocessors / row_tiles).max(1));
                let shape = |stages, resident| Tensor { lanes: one.lanes, tile, columns, stages, resident, blocks };
                let fits = |shape: &Tensor| shape.shared_bytes(of.k, unit, &weights) <= target.shared_bytes_per_block;
                let shapes =
                    [(6, true), (5, true), (4, true), (3, true), (6, false), (5, false), (4, false), (3, false)];
                let Some(shape) = shapes.map(|(stages, resident)| shape(stages, resident)).into_iter().find(fits)
                else {
                    continue;
                };
                let rounds = f64::from(tiles.div_ceil(blocks));
                // Fewer SMs have more of the memory's rate each, up to twice as much.
                let busy = f64::from(blocks * row_tiles) / f64::from(target.multiprocessors.max(1));
                let share = busy.clamp(0.5, 1.0);
                let step_units = f64::from(one.lanes * columns);
                let bytes = step_units * f64::from(16 + 4 * weights.side_words());
                let moved = if shape.resident { 0.0 } else { f64::from(one.lanes * tile * unit) * 1.5 };
                let moving = (bytes * CYCLES.0 + moved * CYCLES.1) * share;
                let computing = step_units * f64::from(tile) * CYCLES.2 + 200.0 + f64::from(columns) * 8.0;
                // What a tile costs at its end: sums through shared memory, and barriers.
                let end = 400.0 + f64::from(tile * columns * one.lanes / 2) * 0.06;
                let time = rounds * (f64::from(steps) * moving.max(computing) + end) * busy.max(1.0);
                if best.is_none_or(|(least, _)| time < least) {
                    best = Some((time, shape));
                }
            }
        }
        best.map(|(_, shape)| shape)
    }

    /// Bytes of shared memory, as the kernel declares it.
    fn shared_bytes(&self, k: u32, unit: u32, weights: &TensorFormat) -> u32 {
        let Tensor { lanes, tile, columns, stages, resident, .. } = *self;
        let scaled = lanes / 4 * stages * (unit / 8);
        let shared_by = if weights.shares_sides(k / unit) { 2 } else { 1 };
        let ring = stages * columns * ((lanes + 1) * 16 + lanes * weights.side_words() * 4 / shared_by);
        let (x, groups) = match resident {
            true => (k * tile, k / 32 * tile),
            false => (lanes * stages * unit * tile, scaled * tile),
        };
        let sums = lanes / 2 * tile.min(16) * columns * 4;
        // Each of the arrays is aligned.
        ring + x + groups * if weights.sums() { 8 } else { 4 } + sums + tile * 4 + 1024
    }
}

impl Shape {
    /// `tensor cores, tiles of 16 rows and 32 outputs …`.
    pub fn describe(&self) -> String {
        match self {
            Shape::Cores(Cores { lanes, depth, warps, tile, blocks, .. }) => {
                let rows = if *tile == 1 { "1 row" } else { &format!("{tile} rows") };
                format!(
                    "CUDA cores, {rows} of activations a block, {lanes} lanes, {depth} ahead, {blocks} blocks of {warps} warps"
                )
            }
            Shape::Tensor(Tensor { lanes, tile, columns, stages, resident, blocks }) => {
                let activations = if *resident { "resident" } else { "streamed" };
                format!(
                    "tensor cores, tiles of {tile} rows by {columns} of weights, {lanes} classes of units, \
                     {stages} stages, activations {activations}, {blocks} blocks of {} warps",
                    lanes / 4
                )
            }
        }
    }
}

/// The shape of a product on a GPU, and the next best where there are two.
pub fn choose(product: &Product, target: &Target) -> (Shape, Option<Shape>) {
    let one = product.one.shape(target.multiprocessors);
    let one = if product.order == SumOrder::Matvec { one } else { LaunchShape { lanes: 32, ..one } };
    let cores = Shape::Cores(Cores::choose(product, one, target));
    match Tensor::choose(product, one, target).map(Shape::Tensor) {
        Some(tensor) if product.rows >= FEWEST_TENSOR_ROWS => (tensor, Some(cores)),
        tensor => (cores, tensor),
    }
}
