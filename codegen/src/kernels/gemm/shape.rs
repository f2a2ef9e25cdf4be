//! How a product is spread over a GPU, and in how many slices K is cut.
//!
//! The slices decide bits and follow from the matrix alone, so that a plan gives the same answer on every GPU and for
//! every number of rows. Everything else is chosen for speed.

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, ElementType, Instance, InstanceError};

use super::decode::{decode_of, is_scaled};
use super::tile::row_chunks;
use super::{GemmTile, gemm};
use crate::kernels::matvec::formats::{format, side_none};
use crate::target::Target;

/// Values of K in a step.
pub const STEP: u32 = 128;
/// Slices of K, at most: as many blocks as every GPU with clusters allows in one.
const MOST_SLICES: u32 = 8;
/// Warps that keep a GPU's memory busy: K is cut until there are so many, each with 16 rows of the matrix.
const BUSY_WARPS: u32 = 2048;
/// Steps of a slice, at least: shorter ones spend more time on their sums than on their products.
const SLICE_STEPS: u32 = 4;
/// Bytes of shared memory that a block's stages may take: three such blocks share an SM.
const BLOCK_BYTES: u32 = 56 << 10;
/// Rows of activations of a tile, at most.
pub const MOST_ROWS: u32 = 128;

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
}

/// The shape of a launch. No bit of any result depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of activations of a tile: a multiple of 8.
    pub rows: u32,
    /// Times 16 rows of the matrix that a warp multiplies.
    pub tiles: u32,
    /// Warps of a block that share a slice.
    pub across: u32,
    /// Slices of a block; the others are in the other blocks of its cluster.
    pub held: u32,
    /// Steps in shared memory, of activations and of codes.
    pub stages: u32,
}

impl Shape {
    /// Its words where a plan tells its reasons.
    pub fn describe(&self, slices: u32) -> String {
        let cluster = slices / self.held;
        let of_slices = match (slices, cluster) {
            (1, _) => String::new(),
            (_, 1) => format!(", K in {slices} slices"),
            _ => format!(", K in {slices} slices, clusters of {cluster}"),
        };
        format!("tiles of {} x {}{of_slices}", self.rows, 16 * self.tiles * self.across)
    }

    /// Bytes of a step in shared memory.
    fn shared_bytes_of_step(&self, dtype: DType) -> u32 {
        let unit = format(dtype).unit;
        let warps = self.held * self.across * self.tiles;
        self.held * self.rows * row_chunks(unit) * 16 + warps * (2048 / unit * 16 + 128)
    }

    /// Bytes of shared memory that a block takes.
    fn shared_bytes(&self, dtype: DType) -> u32 {
        let sums = self.held * self.across * self.tiles * self.rows / 8 * 32 * 16;
        (self.stages * self.shared_bytes_of_step(dtype)).max(sums)
    }
}

impl Gemm {
    /// Rows of the matrix, or of each expert's.
    pub fn matrix_rows(&self) -> u32 {
        if self.geglu { 2 * self.outputs } else { self.outputs }
    }

    /// Whether scales are copied as codes are: an f16 for each 32 values, in words of two.
    pub fn is_scaled(&self) -> bool {
        is_scaled(self.dtype) && self.k.is_multiple_of(64)
    }

    pub fn slices(&self) -> u32 {
        slices(self.matrix_rows(), self.k)
    }

    /// The shape for so many rows, where a cluster may have so many blocks: the lowest tile that holds them, with as many
    /// slices in a block as four warps can have.
    pub fn shape(&self, rows: u32, cluster: u32, target: &Target) -> Shape {
        let slices = self.slices();
        let fits = |shape: &Shape| shape.shared_bytes(self.dtype) <= target.shared_bytes_per_block - 1024;
        let shape = |height: u32| {
            let few = height <= 16;
            let tiles = if few { 1 } else { 2 };
            let wanted = if few { slices.min(4) } else { 1 };
            let held = wanted.max(slices / cluster.max(1));
            let across = (4 / held).max(1);
            Shape { rows: height, tiles, across, held, stages: 0 }
        };
        // As many bytes of codes in flight as keep the memory busy, whoever else is on the SM.
        let stages = |shape: Shape| {
            let of_step = shape.shared_bytes_of_step(self.dtype);
            let most = (BLOCK_BYTES / of_step).clamp(3, 8);
            (2..=most).rev().map(move |stages| Shape { stages, ..shape })
        };
        let heights = [128, 64, 32, 16, 8];
        let lowest = heights.iter().rev().copied().find(|height| *height >= rows).unwrap_or(MOST_ROWS);
        let all = heights.iter().filter(|height| **height <= lowest);
        let smallest = Shape { stages: 2, ..shape(8) };
        all.flat_map(|height| stages(shape(*height))).find(fits).unwrap_or(smallest)
    }

    /// Blocks for `rows` rows. Those that share weights come one after the other.
    pub fn grid(&self, shape: Shape, rows: u32) -> [u32; 3] {
        self.grid_of_tiles(shape, rows.div_ceil(shape.rows))
    }

    /// Blocks for at most so many groups of sorted rows.
    pub fn grid_of_tiles(&self, shape: Shape, tiles: u32) -> [u32; 3] {
        let columns = self.matrix_rows().div_ceil(16 * shape.tiles * shape.across);
        [tiles, columns * (self.slices() / shape.held), 1]
    }

    pub fn instance(&self, shape: Shape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        gemm::Chosen {
            T: GemmTile {
                UNIT: format.unit,
                SCALED: self.is_scaled(),
                WHOLE: self.k.is_multiple_of(STEP),
                ROWS: shape.rows,
                TILES: shape.tiles,
                ACROSS: shape.across,
                SLICES: self.slices(),
                HELD: shape.held,
                STAGES: shape.stages,
            },
            GEGLU: self.geglu,
            PAIRS: self.pairs,
            O: self.out,
            side: if self.is_scaled() { side_none::DEF } else { format.side },
            decode: vec![decode_of(self.dtype)],
            epilogue: self.epilogue.clone(),
        }
        .build()
    }
}
