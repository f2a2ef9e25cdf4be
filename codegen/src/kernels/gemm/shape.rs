//! How a product is spread over a GPU, and in how many slices K is cut.
//!
//! The slices decide bits and follow from the matrix alone, so that a plan gives the same answer on every GPU and for
//! every number of rows. Everything else is chosen for speed.

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, ElementType, Instance, InstanceError};

use super::decode::{decode_of, is_raw, is_scaled};
use super::tile::row_words;
use super::views::GemmTile;
use super::warpgroups::gemm_warpgroups;
use super::warps::{gemm, row_stride};
use crate::kernels::adapter;
use crate::kernels::matvec::Pairs;
use crate::kernels::matvec::formats::{format, side_none};
use crate::target::Target;

/// Values of K in a step.
pub const STEP: u32 = 128;
/// Slices of K, at most: as many blocks as every GPU with clusters allows in one.
const MOST_SLICES: u32 = 8;
/// Warps that keep a GPU's memory busy: K is cut until there are so many, each with 16 rows of the matrix.
const BUSY_WARPS: u32 = 1024;
/// Steps of a slice, at least: shorter ones spend more time on their sums than on their products.
const SLICE_STEPS: u32 = 4;
/// Warps of a block that multiply, each for itself, at most; and of one for sorted pairs.
const BLOCK_WARPS: u32 = 16;
const PAIR_WARPS: u32 = 8;
/// Blocks of theirs in a cluster, at most: more would leave SMs of each GPC without any.
const CLUSTER_OF_WARPS: u32 = 2;
/// Warps that an SM may have as well as one.
const FEW_WARPS: u32 = 4;
/// Bytes of shared memory that the codes of such a warp may take; of one for pairs, whose activations are as many bytes,
/// so that two of its blocks share an SM.
const CODE_BYTES_OF_WARP: u32 = 6 << 10;
const CODE_BYTES_OF_PAIRS: u32 = 4 << 10;
/// Bytes of shared memory that the activations of a block may take.
const X_BYTES: u32 = 124 << 10;
/// Rows of activations of a tile, at most.
pub const MOST_ROWS: u32 = 128;
/// The same of tiles of warpgroups.
const HEIGHTS: [u32; 4] = [32, 64, 96, 128];
/// Rows of a batch that warpgroups multiply, at least.
const WARPGROUP_ROWS: u32 = 9;
/// Steps of codes in flight, at most: activations come the same way, and wait behind them.
const MOST_STAGES: u32 = 4;
/// Registers of an SM, and what a lane of a warpgroup has beside its sums and operands, about.
const REGISTERS: u32 = 64 << 10;
const OTHER_REGISTERS: u32 = 48;
/// Clocks in which an SM decodes a step of 64 rows of a matrix to bf16 and to f16; they are added to those of its
/// products, which hardly overlap. Bytes that it gets in one from L2 and from memory.
const DECODING_CLOCKS: u32 = 240;
const HALVING_CLOCKS: u32 = 150;
const BYTES_A_CLOCK: u32 = 45;
const BYTES_A_CLOCK_OF_MEMORY: u32 = 18;
/// Clocks of a step where nothing else is in its way, of a block beside its steps, and of a row of its results.
const STEP_LATENCY: u32 = 500;
const BLOCK_LATENCY: u32 = 3000;
const ROW_LATENCY: u32 = 40;

/// The slices of a matrix of so many rows (of one expert, where there are several) with `k` values each.
pub fn slices(matrix_rows: u32, k: u32) -> u32 {
    let (warps, steps) = (matrix_rows.div_ceil(16), k.div_ceil(STEP));
    let mut slices = 1;
    while slices < MOST_SLICES && warps * slices < BUSY_WARPS && steps / (2 * slices) >= SLICE_STEPS {
        slices *= 2;
    }
    slices
}

/// A product: everything that decides its instance, but the shape of its launch.
#[derive(Clone, Debug)]
pub struct Gemm {
    pub dtype: DType,
    /// What weights and activations are multiplied as: bf16, or f16 where rows are scaled.
    pub operands: ElementType,
    /// Values of a row of the result.
    pub outputs: u32,
    /// Values of a row of activations: a multiple of 32.
    pub k: u32,
    /// The matrix holds gates, then what they gate.
    pub geglu: bool,
    /// Rows are pairs of a row and an expert, sorted by expert, of which so many neighbouring ones share a row of x. 0:
    /// they are rows.
    pub pairs: u32,
    /// What the result is stored as.
    pub out: ElementType,
    /// Applied in order to each value of the result, which is counted over all rows.
    pub epilogue: Vec<&'static DeviceDef>,
    /// What adapters add to the results.
    pub adapted: Option<Pairs>,
}

/// The shape of a launch. No bit of any result depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of activations of a tile: a multiple of 8.
    pub rows: u32,
    /// Warps of a block that share a slice, each with 16 rows of the matrix.
    pub across: u32,
    /// Slices of a block; the others are in the other blocks of its cluster.
    pub held: u32,
    /// Steps of codes in shared memory.
    pub stages: u32,
    /// Steps of activations there; by warps, of each part.
    pub x_stages: u32,
    /// Parts of the activations, by warps.
    pub x_parts: u32,
    /// Blocks of warpgroups that share an SM. 0: warps multiply, each for itself.
    pub resident: u32,
}

impl Shape {
    const BY_WARPS: Shape = Shape { rows: 8, across: 1, held: 1, stages: 2, x_stages: 1, x_parts: 1, resident: 0 };

    /// Its words where a plan tells its reasons.
    pub fn describe(&self, slices: u32) -> String {
        let cluster = slices / self.held;
        let of_slices = match (slices, cluster) {
            (1, _) => String::new(),
            (_, 1) => format!(", K in {slices} slices"),
            _ => format!(", K in {slices} slices, clusters of {cluster}"),
        };
        let by = if self.resident > 0 { " by warpgroups" } else { "" };
        format!("tiles of {} x {}{by}{of_slices}", self.rows, 16 * self.across)
    }

    /// Bytes of a step of codes and scales in shared memory.
    fn code_bytes_of_step(&self, dtype: DType) -> u32 {
        self.held * self.across * (16 * row_words(format(dtype).unit) * 4 + 128)
    }
}

impl Gemm {
    /// Rows of the matrix, or of each expert's.
    pub fn matrix_rows(&self) -> u32 {
        if self.geglu { 2 * self.outputs } else { self.outputs }
    }

    /// Whether scales are copied as codes are: an f16 for each 32 values, in words of two.
    pub fn is_scaled(&self) -> bool {
        is_scaled(self.dtype, self.k)
    }

    pub fn slices(&self) -> u32 {
        slices(self.matrix_rows(), self.k)
    }

    /// The shape for so many rows, where a cluster may have so many blocks.
    pub fn shape(&self, rows: u32, cluster: u32, target: &Target) -> Shape {
        let by_warpgroups = (rows >= WARPGROUP_ROWS).then(|| self.shape_by_warpgroups(rows, cluster, target)).flatten();
        by_warpgroups.unwrap_or_else(|| self.shape_by_warps(rows, cluster, target))
    }

    /// The lowest tile that holds the rows. Of its blocks those that leave the busiest SM the fewest warps; of equal
    /// ones those that hold all of their activations, then those with the fewest in a cluster, then the largest: their
    /// activations are read least often.
    fn shape_by_warps(&self, rows: u32, cluster: u32, target: &Target) -> Shape {
        let slices = self.slices();
        let tables = decode_of(self.dtype, self.k, self.operands).table_bytes();
        let fits = |shape: &Shape| self.shared_bytes_by_warps(shape) + tables <= target.shared_bytes_per_block - 1024;
        let of = |height: u32, across: u32, held: u32| {
            let shape = Shape { rows: height, across, held, ..Shape::BY_WARPS };
            // As many bytes of codes in flight as keep the memory busy, whoever else is on the SM.
            let bytes = across * held * if self.pairs > 0 { CODE_BYTES_OF_PAIRS } else { CODE_BYTES_OF_WARP };
            let most = (bytes / shape.code_bytes_of_step(self.dtype)).clamp(3, 8);
            (2..=most).rev().flat_map(|stages| self.parts(Shape { stages, ..shape })).find(&fits)
        };
        let best_of = |height: u32| {
            let most = cluster.clamp(1, CLUSTER_OF_WARPS);
            let held_slices =
                [1, 2, 4, 8].into_iter().filter(|held| slices.is_multiple_of(*held) && slices / held <= most);
            let blocks = held_slices.flat_map(|held| (1..=BLOCK_WARPS / held).map(move |across| (held, across)));
            let usual = |(held, across): &(u32, u32)| self.pairs == 0 || held * across == PAIR_WARPS;
            let shapes = blocks.filter(usual).filter_map(|(held, across)| of(height, across, held));
            let busiest = |shape: &Shape| {
                let blocks: u32 = self.grid(*shape, rows).iter().product();
                let warps = blocks.div_ceil(target.multiprocessors) * shape.across * shape.held;
                (warps.max(FEW_WARPS), shape.x_parts, slices / shape.held, u32::MAX - shape.across)
            };
            // Pairs are many more blocks than SMs: each has as many slices as it can, so that none waits for a cluster.
            let of_pairs = |shape: &Shape| (0, 0, slices / shape.held, 0);
            shapes.min_by_key(|shape| if self.pairs > 0 { of_pairs(shape) } else { busiest(shape) })
        };
        let heights = [128, 64, 32, 16, 8];
        let lowest = heights.iter().rev().copied().find(|height| *height >= rows).unwrap_or(MOST_ROWS);
        let all = heights.into_iter().filter(|height| *height <= lowest);
        all.filter_map(best_of).next().unwrap_or(Shape { held: slices, ..Shape::BY_WARPS })
    }

    /// The shape with all activations of its slices in shared memory, if they are few, and with two parts of them.
    fn parts(&self, shape: Shape) -> Vec<Shape> {
        let steps = self.k.div_ceil(STEP).div_ceil(self.slices());
        let of_step = shape.held * shape.rows * STEP * 2;
        // Pairs wait for their first part: nothing of theirs is known before the launch.
        let x_bytes = if self.pairs > 0 { 0 } else { X_BYTES };
        let x_stages = (x_bytes / (2 * of_step)).max(shape.stages - 1);
        let two = Shape { x_stages, x_parts: 2, ..shape };
        let whole = Shape { x_stages: steps, x_parts: 1, ..shape };
        if steps * of_step <= x_bytes || steps <= x_stages { vec![whole, two] } else { vec![two] }
    }

    fn shared_bytes_by_warps(&self, shape: &Shape) -> u32 {
        let row = row_stride(shape.x_stages, is_raw(self.dtype, self.k));
        shape.x_parts * shape.held * shape.rows * row * 2 + shape.stages * shape.code_bytes_of_step(self.dtype)
    }

    /// Of tiles with a slice in a block the one whose blocks take the fewest clocks; `None` where there are no
    /// warpgroups, or no kernel of theirs.
    fn shape_by_warpgroups(&self, rows: u32, cluster: u32, target: &Target) -> Option<Shape> {
        let can = target.arch.has_wgmma() && format(self.dtype).unit >= 8 && self.pairs == 0;
        if !can || self.slices() > cluster {
            return None;
        }
        let of = |height: u32, x_stages: u32, across: u32, resident: u32| {
            let registers = height / 2 + 32 + OTHER_REGISTERS;
            let shape = Shape { rows: height, across, held: 1, stages: 0, x_stages, x_parts: 1, resident };
            let bytes = (target.shared_bytes_per_multiprocessor / resident - 1024).min(target.shared_bytes_per_block);
            let tables = decode_of(self.dtype, self.k, self.operands).table_bytes();
            let beside = x_stages * height * 256 + 1024 + tables;
            let stages = bytes.checked_sub(beside)? / shape.code_bytes_of_step(self.dtype);
            let fits = stages >= 3 && (across + 1) * 32 * resident * registers <= REGISTERS && across <= x_stages * 4;
            fits.then_some(Shape { stages: stages.min(MOST_STAGES), ..shape })
        };
        let best_of = |height: u32| {
            // Of equal ones that whose blocks read activations least often.
            let blocks = [16, 12, 8, 4].into_iter().flat_map(|across| (1..=4).map(move |resident| (across, resident)));
            let all = blocks.flat_map(|(across, resident)| [4, 3, 2].map(|x_stages| (x_stages, across, resident)));
            let shapes = all.filter_map(|(x_stages, across, resident)| of(height, x_stages, across, resident));
            shapes.map(|shape| (self.clocks(shape, rows, target), shape)).min_by_key(|(clocks, _)| *clocks)
        };
        let lowest = HEIGHTS.into_iter().find(|height| *height >= rows).unwrap_or(MOST_ROWS);
        let whole = best_of(lowest)?;
        // Lower ones decode a weight several times: they must promise much.
        let lower = HEIGHTS.into_iter().filter(|height| *height < lowest).filter_map(best_of);
        let best =
            lower.filter(|(clocks, _)| clocks * 4 < whole.0 * 3).chain([whole]).min_by_key(|(clocks, _)| *clocks);
        best.map(|(_, shape)| shape)
    }

    /// Clocks of a launch by warpgroups, about: what its busiest SM decodes, multiplies and reads.
    fn clocks(&self, shape: Shape, rows: u32, target: &Target) -> u32 {
        let blocks: u32 = self.grid(shape, rows).iter().product();
        let codes = shape.code_bytes_of_step(self.dtype);
        let decoding = if self.operands == ElementType::F16 { HALVING_CLOCKS } else { DECODING_CLOCKS };
        let computed = shape.across / 4 * (decoding + shape.rows * 4);
        let read = ((shape.rows * 256 + codes) / BYTES_A_CLOCK).max(codes / BYTES_A_CLOCK_OF_MEMORY);
        let steps = self.k.div_ceil(STEP).div_ceil(self.slices());
        let alone = BLOCK_LATENCY + shape.rows * ROW_LATENCY;
        let of = |together: u32| steps * (together * computed.max(read)).max(STEP_LATENCY) + alone;
        let wave = target.multiprocessors * shape.resident;
        let rest = (blocks % wave).div_ceil(target.multiprocessors);
        blocks / wave * of(shape.resident) + if rest > 0 { of(rest) } else { 0 }
    }

    /// Blocks for `rows` rows. Those that share weights come one after the other.
    pub fn grid(&self, shape: Shape, rows: u32) -> [u32; 3] {
        self.grid_of_tiles(shape, rows.div_ceil(shape.rows))
    }

    /// Blocks for at most so many groups of sorted rows.
    pub fn grid_of_tiles(&self, shape: Shape, tiles: u32) -> [u32; 3] {
        let columns = self.matrix_rows().div_ceil(16 * shape.across);
        [tiles, columns * (self.slices() / shape.held), 1]
    }

    pub fn instance(&self, shape: Shape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        let raw = is_raw(self.dtype, self.k);
        let side = if raw { side_none::DEF } else { format.side };
        let tile = GemmTile {
            UNIT: format.unit,
            BF: self.operands == ElementType::BF16,
            RAW: raw,
            SCALED: self.is_scaled(),
            WHOLE: self.k.is_multiple_of(STEP),
            ROWS: shape.rows,
            ACROSS: shape.across,
            SLICES: self.slices(),
            HELD: shape.held,
            STAGES: shape.stages,
            X_STAGES: shape.x_stages,
            X_PARTS: shape.x_parts,
            NEAR: raw && shape.resident == 0,
            RESIDENT: shape.resident,
            PAIRS: self.pairs,
        };
        let (decode, epilogue) = (vec![decode_of(self.dtype, self.k, self.operands)], self.epilogue.clone());
        let (geglu, operands, out) = (self.geglu, self.operands, self.out);
        let change = self.adapted.iter().map(adapter::change_of_rows).collect();
        match shape.resident {
            0 => gemm::Chosen { T: tile, GEGLU: geglu, H: operands, O: out, side, decode, change, epilogue }.build(),
            _ => gemm_warpgroups::Chosen { T: tile, GEGLU: geglu, H: operands, O: out, side, decode, change, epilogue }
                .build(),
        }
    }
}
