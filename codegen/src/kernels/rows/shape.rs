//! How a product of several rows is spread over a GPU. The lanes are those of one row, so nothing here changes a bit of any result.
//!
//! A rule, by what the kernels move and compute ([`Cycles`]).

use super::formats::TensorFormat;
use super::product::{Product, SumOrder};
use super::tiling::Tiles;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::shape::lanes;
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
    /// Lanes that share an output of one row: pieces of 16 bytes of a step.
    pub lanes: u32,
    /// Warps that multiply: half or a quarter as many.
    pub warps: u32,
    /// Warps that do nothing but copy, where there are mbarriers; else 0, and all copy.
    pub copiers: u32,
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
    Tiles(Tiles),
}

/// Warps of a block on CUDA cores: as many as leave a lane 128 registers.
const BLOCK_WARPS: u32 = 16;
/// Units on their way to a lane, with what lies beside them, take that many registers at most.
const AHEAD_REGISTERS: u32 = 48;
/// Rows of activations that a unit is multiplied by on CUDA cores, most first.
const CORE_TILES: [u32; 4] = [8, 4, 2, 1];
/// Rows of activations from which tensor cores are worth the tile of eight that they waste the rest of: where weights are bytes and activations come in panels, or there are many
/// weights; and elsewhere. On the H200, 4 rows of E4B Q8_0 gain 3 us of 24 in gate and up, as much in down, and lose 1 of 8 behind attention, whose rows are no panels; those of 12B Q4_0 gain 2 of 31 in gate and up and lose 2 of 13 in
/// queries, keys and values.
const FEWEST_TENSOR_ROWS: (u32, u32) = (3, 5);
/// Weights that are many.
const MANY_WEIGHTS: u64 = 100 << 20;
/// Warps that copy.
const COPYING_WARPS: u32 = 4;

/// Cycles of an SM: the constants of the rule.
struct Cycles {
    /// A byte of weights from memory, and of activations from L2.
    weights: f64,
    activations: f64,
    /// A product of 16 rows by 8 columns of weights, and what it takes to have a unit of 8 columns ready for it.
    product: f64,
    columns: f64,
    /// What else a step and the end of a tile take; at the end also each sum of a warp.
    step: f64,
    end: f64,
    sum: f64,
}

/// As they fit 47 shapes of five products of E4B Q8_0 and 12B Q4_0 on an H200, to 11 % each; but the cost of activations, which was measured row by row
/// (0.13) and is an estimate for panels.
const CYCLES: Cycles =
    Cycles { weights: 0.054, activations: 0.05, product: 2.8, columns: 9.4, step: 103.0, end: 1100.0, sum: 0.07 };

/// Registers of an SM.
const REGISTERS: u32 = 65536;

/// Sums that a lane may hold in a block of that many warps: registers that what else it needs leaves over.
fn most_sums(warps: u32) -> u32 {
    (REGISTERS / (warps * 32)).min(255).saturating_sub(96)
}

impl Cores {
    /// As many rows of activations as shared memory holds, and a block an SM.
    pub fn choose(product: &Product, lanes: u32, target: &Target) -> Cores {
        let (of, format) = (&product.one, format(product.one.dtype));
        let row_bytes = match (format.integer, of.unbounded) {
            (true, true) => of.k * 3 + of.k / 32 * 12,
            (true, false) => of.k + of.k / 32 * 8,
            (false, _) => of.k * 4,
        };
        let beside = 64 + format.dot.table_bytes();
        let fits = |tile: &u32| tile * (row_bytes + 4) + beside <= target.shared_bytes_per_block;
        let needed = product.rows.next_power_of_two();
        let tile = CORE_TILES.into_iter().filter(|tile| *tile <= needed).find(fits).unwrap_or(1);
        let weight_rows = 2;
        let lane_outputs = if of.geglu { 1 } else { 2 };
        let reach = (AHEAD_REGISTERS / format.words() / weight_rows).max(1);
        let steps = (of.k / format.unit).div_ceil(lanes);
        let loads = |depth: u32| steps.div_ceil(depth) * depth;
        let depth = (reach.div_ceil(2)..=reach).rev().min_by_key(|depth| loads(*depth)).unwrap_or(1);
        let tiles = of.outputs.div_ceil(32 / lanes * lane_outputs);
        // Blocks of the same outputs run side by side, so that all but the first find the weights in L2.
        let columns = (target.multiprocessors / product.rows.div_ceil(tile)).max(1);
        let blocks = tiles.div_ceil(BLOCK_WARPS).min(columns);
        Cores { lanes, weight_rows, depth, warps: BLOCK_WARPS, tile, blocks }
    }
}

impl Tensor {
    /// The fastest by the rule of [`CYCLES`]; `None` where tensor cores cannot do it, or no shape fits the GPU.
    pub fn choose(product: &Product, lanes: u32, target: &Target) -> Option<Tensor> {
        let of = &product.one;
        let weights = TensorFormat::of(of.dtype)?;
        // Its kernels read units of 16 bytes.
        if format(of.dtype).side.thin {
            return None;
        }
        if product.is_fine() || product.is_prepared() && !product.rows.is_multiple_of(8) {
            return None;
        }
        if weights.parts == 2 && !product.is_joined() {
            return None;
        }
        let classes = lanes / weights.parts;
        let steps = (of.k / 32).div_ceil(classes);
        let mut best: Option<(f64, Tensor)> = None;
        let tiles = [8, 16, 32, 64].into_iter().filter(|tile| *tile <= product.rows.next_power_of_two().max(8));
        for (tile, columns) in tiles.flat_map(|tile| [16, 32, 64].map(|columns| (tile, columns))) {
            for warps in [lanes / 2, lanes / 4] {
                let copiers = if target.arch.has_tma() { COPYING_WARPS } else { 0 };
                // Bytes that are made of nibbles take registers beside the sums.
                let wide = weights.parts == 1 && columns > 32 && copiers > 0;
                if wide || classes / warps * columns * tile / 32 > most_sums(warps + copiers) {
                    continue;
                }
                let row_tiles = product.rows.div_ceil(tile);
                let all = of.outputs.div_ceil(if of.geglu { columns / 2 } else { columns });
                let blocks = all.min((target.multiprocessors / row_tiles).max(1));
                let shape =
                    |stages, resident| Tensor { lanes, warps, copiers, tile, columns, stages, resident, blocks };
                let fits = |shape: &Tensor| shape.shared_bytes(of.k, &weights) <= target.shared_bytes_per_block;
                let shapes =
                    [(6, true), (5, true), (4, true), (3, true), (6, false), (5, false), (4, false), (3, false)];
                let Some(shape) = shapes.map(|(stages, resident)| shape(stages, resident)).into_iter().find(fits)
                else {
                    continue;
                };
                let rounds = f64::from(all.div_ceil(blocks));
                // Fewer SMs have more of the memory's rate each, up to twice as much.
                let busy = f64::from(blocks * row_tiles) / f64::from(target.multiprocessors.max(1));
                let share = busy.clamp(0.5, 1.0);
                let bytes = f64::from(lanes * columns * (16 + 4 * weights.side_words()));
                let moved = if shape.resident { 0.0 } else { f64::from(classes * tile * 32) };
                let moving = (bytes * CYCLES.weights + moved * CYCLES.activations) * share;
                let column_tiles = f64::from(classes * (columns / 8));
                let products = column_tiles * (f64::from(tile) / 16.0);
                let computing = products * CYCLES.product + column_tiles * CYCLES.columns + CYCLES.step;
                // What a tile costs at its end: sums through shared memory, and waits.
                let end = CYCLES.end + f64::from(tile * columns * warps) * CYCLES.sum;
                let time = rounds * (f64::from(steps) * moving.max(computing) + end) * busy.max(1.0);
                if best.is_none_or(|(least, _)| time < least) {
                    best = Some((time, shape));
                }
            }
        }
        best.map(|(_, shape)| shape)
    }

    /// Bytes of shared memory, as the kernel declares it.
    fn shared_bytes(&self, k: u32, weights: &TensorFormat) -> u32 {
        let Tensor { lanes, warps, tile, columns, stages, resident, .. } = *self;
        let slots = lanes / weights.sharing(k / 32 * weights.parts);
        let ring = stages * (columns * (lanes + 1) * 16 + slots * (columns + 2) * weights.side_words() * 4);
        let groups = if resident { k / 32 * tile } else { lanes / weights.parts * stages * tile };
        let sums = warps * tile * (columns + 8) * 4;
        // Each of the arrays is aligned.
        ring + groups * (32 + if weights.sums() { 8 } else { 4 }) + sums + tile * 4 + 1024
    }
}

/// Rows from which a product is worth tensor cores that can do it.
fn fewest_tensor_rows(product: &Product) -> u32 {
    let of = &product.one;
    let bytes = TensorFormat::of(of.dtype).is_some_and(|weights| weights.parts == 2);
    let weights = u64::from(of.outputs) * u64::from(of.k) * if of.geglu { 2 } else { 1 };
    let few = product.order == SumOrder::Matvec && product.takes_panels() && (bytes || weights >= MANY_WEIGHTS);
    if few { FEWEST_TENSOR_ROWS.0 } else { FEWEST_TENSOR_ROWS.1 }
}

impl Shape {
    /// Whether it leaves that many joined outputs as int8, in panels.
    pub const fn can_leave_panels(&self, outputs: u32) -> bool {
        matches!(self, Shape::Tiles(tiles) if tiles.copiers > 0 && tiles.groups.is_multiple_of(4))
            && outputs.is_multiple_of(32)
    }

    /// Whether activations that are prepared for it lie in panels of eight rows.
    pub const fn takes_panels(&self) -> bool {
        matches!(self, Shape::Tensor(_) | Shape::Tiles(_))
    }

    /// `tensor cores, tiles of 16 rows and 32 outputs …`.
    pub fn describe(&self) -> String {
        match self {
            Shape::Cores(Cores { lanes, depth, warps, tile, blocks, .. }) => {
                let rows = if *tile == 1 { "1 row" } else { &format!("{tile} rows") };
                format!(
                    "CUDA cores, {rows} of activations a block, {lanes} lanes, {depth} ahead, {blocks} blocks of {warps} warps"
                )
            }
            Shape::Tiles(tiles) => tiles.describe(),
            Shape::Tensor(Tensor { lanes, warps, copiers, tile, columns, stages, resident, blocks }) => {
                let activations = if *resident { "resident" } else { "streamed" };
                format!(
                    "tensor cores, tiles of {tile} rows by {columns} of weights, steps of {} bytes, \
                     {stages} stages, activations {activations}, {blocks} blocks of {warps} warps{}",
                    lanes * 16,
                    if *copiers > 0 { format!(" and {copiers} that copy") } else { String::new() }
                )
            }
        }
    }
}

/// The shape of a product on a GPU, and the next best where there are two.
pub fn choose(product: &Product, target: &Target) -> (Shape, Option<Shape>) {
    let lanes = if product.order == SumOrder::Matvec { lanes(&product.one) } else { 32 };
    let cores = Shape::Cores(Cores::choose(product, lanes, target));
    let tensor = match product.order {
        SumOrder::Matvec => Tiles::choose(product, target).map(Shape::Tiles),
        SumOrder::GateUp | SumOrder::Down => Tensor::choose(product, lanes, target).map(Shape::Tensor),
    };
    match tensor {
        // Panels are for tensor cores alone.
        Some(tensor) if product.arrives_in_panels || product.leaves_panels => (tensor, None),
        Some(tensor) if product.rows >= fewest_tensor_rows(product) => (tensor, Some(cores)),
        tensor => (cores, tensor),
    }
}
